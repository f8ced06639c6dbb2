"""A real card, through CuPy: the only file that imports it.

Kernels are compiled by NVRTC for the card at hand and kept as cubins in our own cache. Work goes to one stream that is not the default
one. Launches that come with a key are captured as a CUDA graph the second time they are asked for (the first time they run as they are, so
that nothing is compiled or loaded inside a capture) and replayed from then on: launching one by one from Python would cost more than the
kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_gpu.device import Device, DeviceError, DeviceMemoryError, Launch
from localrun.kernels_gpu.source import Kernel, fingerprint, source

OPTIONS = ("-std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
LEAST_CAPABILITY = 61
"""6.1, the first with dp4a."""
LEAST_DRIVER = 12000
"""CUDA 12.0, which cupy-cuda12x is built for."""
MOST_GRAPHS = 64


def find(cache_dir: Path, graphs: bool = True) -> tuple[list[Device], str]:
    """The cards of this machine, most free memory first, or none and one line that says why. Raises nothing."""
    try:
        import cupy
    except ImportError as error:
        missing = getattr(error, "name", None) == "cupy"
        return [], "CuPy is not installed (pip install localrun[gpu])" if missing else f"CuPy cannot be imported: {_line(error)}"
    try:
        driver = int(cupy.cuda.runtime.driverGetVersion())
        if not driver:
            return [], "there is no NVIDIA driver"
        if driver < LEAST_DRIVER:
            return [], f"the NVIDIA driver is too old: it knows CUDA {driver // 1000}.{driver % 1000 // 10}, 12.0 is needed"
        count = int(cupy.cuda.runtime.getDeviceCount())
        able = [i for i in range(count) if int(cupy.cuda.Device(i).compute_capability) >= LEAST_CAPABILITY]
        if not able:
            return [], "there is no NVIDIA card" if not count else "the NVIDIA card is too old: compute capability 6.1 is needed"
        cards: list[Device] = [Card(cupy, i, cache_dir, graphs) for i in able]
    except Exception as error:  # CuPy's errors have no common base, and a driver fails in many ways; none of them may stop a load
        return [], f"CUDA cannot be used: {_line(error)}"
    return sorted(cards, key=lambda card: -card.free_bytes()), ""


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


class Card:
    """kernels_gpu.device.Device over CuPy."""

    def __init__(self, cupy: Any, number: int, cache_dir: Path, graphs: bool = True) -> None:
        self._cupy = cupy
        self._device = cupy.cuda.Device(number)
        self._cache = cache_dir / "cubins"
        self._graphs = graphs
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            properties = cupy.cuda.runtime.getDeviceProperties(number)
            self._capability = str(self._device.compute_capability)
        self.name = f"{properties['name'].decode()} (card {number})"
        self._held: list[Any] = []
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._seen: dict[Hashable, Any] = {}

    def free_bytes(self) -> int:
        with self._device:
            return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def allocate(self, nbytes: int) -> int:
        # Not from CuPy's pool: what is given back shall be the system's again.
        try:
            with self._device:
                memory = self._cupy.cuda.Memory(max(nbytes, 1))
                self._cupy.cuda.runtime.memsetAsync(memory.ptr, 0, max(nbytes, 1), self._stream.ptr)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{self.name}: {_line(error)}") from error
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise self._as_ours(error) from error
        self._held.append(memory)
        return int(memory.ptr)

    def _as_ours(self, error: Exception) -> DeviceError:
        line = f"{self.name}: {_line(error)}"
        return DeviceMemoryError(line) if "OutOfMemory" in line or "MemoryAllocation" in line else DeviceError(line)

    def release(self) -> None:
        with self._device:
            self._stream.synchronize()
        self._seen.clear()
        self._held.clear()

    def host_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        memory = self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(data)
        runtime = self._cupy.cuda.runtime
        with self._device:
            try:
                runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
            except runtime.CUDARuntimeError as error:
                raise self._as_ours(error) from error

    def download(self, address: int, out: NDArray[np.uint8]) -> None:
        runtime = self._cupy.cuda.runtime
        with self._device:
            try:
                runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr)
                self._stream.synchronize()
            except runtime.CUDARuntimeError as error:
                raise self._as_ours(error) from error

    def copy(self, source: int, target: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        with self._device:
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, self._stream.ptr)

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        missing = sorted({kernel for kernel in kernels if kernel.symbol not in self._functions}, key=lambda kernel: kernel.symbol)
        if not missing:
            return
        with self._device:
            try:
                module = self._cupy.cuda.function.Module()
                module.load(self._cubin(source(missing, "card")))
            except Exception as error:  # NVRTC's and the driver's errors have no common base
                raise DeviceError(f"{self.name}: kernels cannot be compiled: {_line(error)}") from error
            self._modules.append(module)
            for kernel in missing:
                self._functions[kernel.symbol] = module.get_function(kernel.symbol)

    def _cubin(self, text: str) -> bytes:
        from cupy_backends.cuda.libs import nvrtc as compiler

        version = ".".join(map(str, compiler.getVersion()))
        target = self._cache / f"{fingerprint(text, self._capability, version, *OPTIONS)}.cubin"
        if target.exists():
            return target.read_bytes()
        program = compiler.createProgram(text, "localrun.cu", (), ())
        try:
            compiler.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{self._capability}"))
            made = bytes(compiler.getCUBIN(program))
        except compiler.NVRTCError as error:
            raise DeviceError(f"{_line(error)}: {str(compiler.getProgramLog(program))[:500]}") from error
        finally:
            compiler.destroyProgram(program)
        self._cache.mkdir(parents=True, exist_ok=True)
        written = target.with_suffix(f".{id(self)}.part")
        written.write_bytes(made)
        written.replace(target)
        return made

    def _launch(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            function = self._functions[launch.kernel.symbol]
            function(launch.grid, (launch.kernel.threads, 1, 1), (np.int64(launch.args), np.int64(launch.head)), 0, self._stream)

    def run(self, launches: Sequence[Launch], key: Hashable | None = None) -> None:
        runtime = self._cupy.cuda.runtime
        with self._device, self._stream:
            try:
                if key is None or not self._graphs or key not in self._seen:
                    self._launch(launches)
                    if key is not None and len(self._seen) < MOST_GRAPHS:
                        self._seen[key] = None
                    return
                if self._seen[key] is None:
                    self._stream.begin_capture()
                    try:
                        self._launch(launches)
                    finally:
                        graph = self._stream.end_capture()
                    self._seen[key] = graph
                self._seen[key].launch(self._stream)
            except runtime.CUDARuntimeError as error:
                raise self._as_ours(error) from error
