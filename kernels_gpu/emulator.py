"""The host as a card: the kernels' own source compiled by the C++ compiler of this machine, each thread a fiber (cuda/emulate.h).

Slow, and right to the bit: what a whole model's layers give on a card can be seen without one. Blocks and threads run in an order drawn
anew for every launch, so what depends on it shows. `memory` bounds what can be allocated.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from localrun.kernels_gpu.device import DeviceError, DeviceMemoryError, Launch
from localrun.kernels_gpu.source import Kernel, fingerprint, source

FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w")
COMPILE_TIMEOUT_S = 800
ALIGNMENT = 256


def compiler() -> str | None:
    """Path of a C++ compiler of this machine."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


class Emulator:
    """kernels_gpu.device.Device on the host. Raises DeviceError without a C++ compiler."""

    def __init__(self, cache_dir: Path, memory: int = 1 << 30, seed: int = 1, name: str = "emulated card") -> None:
        self.name = name
        self.launches = 0
        self._memory = memory
        self._cache = cache_dir / "emulator"
        self._held: dict[int, NDArray[np.uint8]] = {}
        self._used = 0
        self._symbols: dict[str, int] = {}
        self._libraries: list[ctypes.CDLL] = []
        self._launch: dict[str, Callable[..., int]] = {}
        self._draws = np.random.default_rng(seed)
        found = compiler()
        if found is None:
            raise DeviceError("there is no C++ compiler to emulate a card with")
        self._compiler = found

    def free_bytes(self) -> int:
        return self._memory - self._used

    def allocate(self, nbytes: int) -> int:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if size > self.free_bytes():
            raise DeviceMemoryError(f"{self.name}: no memory for {nbytes} bytes, {self.free_bytes()} are free")
        whole = np.zeros(size + ALIGNMENT, np.uint8)
        address = -(-whole.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._held[address] = whole
        self._used += size
        return int(address)

    def release(self) -> None:
        self._held.clear()
        self._used = 0

    def host_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def _bounded(self, address: int, nbytes: int) -> None:
        """Copies are within what was allocated."""
        if not any(start <= address and address + nbytes <= start + len(held) - ALIGNMENT for start, held in self._held.items()):
            raise DeviceError(f"{self.name}: {nbytes} bytes at {address:#x} are not allocated")

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        self._bounded(address, data.nbytes)
        ctypes.memmove(address, np.ascontiguousarray(data).ctypes.data, data.nbytes)

    def download(self, address: int, out: NDArray[np.uint8]) -> None:
        self._bounded(address, out.nbytes)
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._bounded(source, nbytes)
        self._bounded(target, nbytes)
        ctypes.memmove(target, source, nbytes)

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        missing = sorted({kernel for kernel in kernels if kernel.symbol not in self._symbols}, key=lambda kernel: kernel.symbol)
        if not missing:
            return
        # Whatever is compiled of the same source lies in one folder: a library, and beside it the names of its kernels.
        folder = self._cache / fingerprint(source([], "host"), self._compiler, *FLAGS, _processor())
        known = {symbol: names for names in folder.glob("*.txt") for symbol in names.read_text(encoding="utf-8").split()}
        for kernel in missing:
            if kernel.symbol in known and kernel.symbol not in self._symbols:
                self._open(known[kernel.symbol].with_suffix(".so"), known[kernel.symbol])
        missing = [kernel for kernel in missing if kernel.symbol not in self._symbols]
        if missing:
            library = self._compiled(source(missing, "host"), folder)
            names = library.with_suffix(".txt")
            part = names.with_suffix(f".{os.getpid()}.part")  # another process may read it at any time
            part.write_text("\n".join(kernel.symbol for kernel in missing), encoding="utf-8")
            part.replace(names)
            self._open(library, names)

    def _open(self, path: Path, names: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.localrun_launch.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, *[ctypes.c_void_p] * 2, ctypes.c_uint32]
        self._libraries.append(library)
        for symbol in names.read_text(encoding="utf-8").split():
            self._symbols[symbol] = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0
            self._launch[symbol] = library.localrun_launch

    def _compiled(self, text: str, cache: Path) -> Path:
        target = cache / f"{fingerprint(text)}.so"
        if target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        # Processes that begin together want the same: one compiles it.
        with FileLock(target.with_suffix(".lock"), timeout=COMPILE_TIMEOUT_S), tempfile.TemporaryDirectory(dir=cache) as folder:
            if target.exists():
                return target
            written, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            written.write_text(text, encoding="utf-8")
            command = [self._compiler, *FLAGS, str(written), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
            if done.returncode:
                raise DeviceError(f"{self.name}: {Path(self._compiler).name} fails: {done.stderr.strip()[:2000]}")
            built.replace(target)
        return target

    def run(self, launches: Sequence[Launch], key: Hashable | None = None) -> None:
        for launch in launches:
            symbol = launch.kernel.symbol
            seed = int(self._draws.integers(1, 2**31))
            self.launches += 1
            if self._launch[symbol](self._symbols[symbol], *launch.grid, launch.kernel.threads, launch.args, launch.head, seed):
                raise DeviceError(f"{self.name}: threads of {symbol} wait for others that never come")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith("flags")), "")
