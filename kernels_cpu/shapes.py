"""Tile shapes: what depends on the processor in how matrices are multiplied, none of which changes a bit of any result; and the file that
remembers them.

What is best depends on how fast a core multiplies beside how fast memory is read, so it is timed once per processor (models/tuning.py) and
kept beside the compiled kernels it was timed with. Light: no NumPy, no Numba.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrun.kernels_cpu import isa as isas
from localrun.kernels_cpu.activation_sizes import MANY, WIDE
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.library import cache_folder, image_path
from localrun.kernels_cpu.spec import KernelSpec

log = logging.getLogger(__name__)

NEVER = 1 << 20
"""As a number of rows: more than any pass has."""
WIDE_FROM = (5, 6, 7, NEVER)
MATRIX_FROM = (MANY, 13, 17, 21, 25, 29, 33, 49)
SHARES = (1, 2, 4)
QUARTERS = (4, 3, 2, 1)
MOST_ENTRIES = 500
"""A file with more is not ours."""


@dataclass(frozen=True)
class Shape:
    """Of matrices of one weight type.

    wide_from: how many rows of what is left, above 4, go into a tile of eight instead of one of four, where there are both;
    matrix_from: from how many rows on matrix instructions are used, where there are any;
    share: into how many parts a thread's even share of what is left of a matrix is cut. With 1 each reads the longest possible way
    through memory, but all wait for the slowest; processors with cores of different speed want more;
    quarters: of the threads, that multiply one row, where nobody has said how many: some processors' memory is busy before all cores are.
    """

    wide_from: int = WIDE
    matrix_from: int = 13
    share: int = 1
    quarters: int = 4

    @property
    def possible(self) -> bool:
        """Whether it is one of those that are ever chosen: a file may hold anything."""
        parts = self.share in SHARES and self.quarters in QUARTERS
        return self.wide_from in WIDE_FROM and self.matrix_from in MATRIX_FROM and parts

    def members(self, n_threads: int) -> int:
        """How many of the threads multiply one row."""
        return max(1, n_threads * self.quarters // 4)


DEFAULT = Shape()
"""What is used until something better is known: the best of a Sapphire Rapids' two cores, all types together."""


class ShapesFile:
    """The shapes known for a processor, an instruction set and a number of threads. Several processes may use one file at a time: it is
    replaced as a whole, and what two of them time at once is at worst timed again.
    """

    def __init__(self, root: Path, isa: Isa, n_threads: int, *, packed: bool) -> None:
        """root: of the kernel cache; packed: whether weights are repacked."""
        self.path = cache_folder(root, isa) / "shapes.json"
        self._root, self._isa = root, isa
        # Elsewhere the name would have to be asked of LLVM, and images that are kept by processor lie in a folder of their own anyway.
        cpu = repr(isas.processor()) if sys.platform == "linux" else platform.processor()
        self._about = {"cpu": hashlib.sha256(cpu.encode()).hexdigest()[:16], "threads": n_threads, "packed": packed}

    def read(self, types: Iterable[str]) -> dict[str, Shape]:
        """What is known of these weight types, with the kernels as they are now."""
        found = {}
        entries = self._entries()
        for name in types:
            key = self._key(name)
            for entry in entries:
                if all(entry.get(k) == v for k, v in key.items()):
                    found[name] = _shape(entry)
        return found

    def write(self, shapes: Mapping[str, Shape]) -> None:
        """Adds to the file, in place of what it held of the same types. A file that cannot be written is only a warning: nothing is lost
        but the time to do it again."""
        fresh = [{**self._key(name), **dataclasses.asdict(shape)} for name, shape in shapes.items()]
        same = [{**self._about, "type": name} for name in shapes]
        kept = [entry for entry in self._entries() if not any(all(entry.get(k) == v for k, v in key.items()) for key in same)]
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"shapes": [*kept, *fresh][-MOST_ENTRIES:]}, indent=1), encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            log.warning("%s: tile shapes cannot be kept: %s", self.path, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _key(self, type_name: str) -> dict[str, Any]:
        kernel = image_path(self._root, self._isa, KernelSpec("matmul", "matmul", (type_name,))).name
        return {**self._about, "type": type_name, "kernel": kernel}

    def _entries(self) -> list[dict[str, Any]]:
        """What the file holds, of any processor; nothing, with a warning, of a file that nobody here has written."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("%s: tile shapes cannot be read: %s", self.path, error)
            return []
        try:
            entries = json.loads(text)["shapes"]
            if not isinstance(entries, list) or len(entries) > MOST_ENTRIES or not all(_shape(entry).possible for entry in entries):
                raise ValueError("it holds no shapes")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is damaged and not used; tile shapes are timed anew: %s", self.path, error)
            return []
        return entries


def _shape(entry: Mapping[str, Any]) -> Shape:
    """Raises KeyError, TypeError."""
    return Shape(entry["wide_from"], entry["matrix_from"], entry["share"], entry["quarters"])
