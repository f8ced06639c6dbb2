"""How a tensor's bytes lie on a card: cut into planes that aligned loads fit, see cuda/weights.cuh.

Types with a struct of their own keep their bits; all others are expanded, when they are loaded, to int8 codes with integer scales and
float32 factors: nine bits a value. That is half of what float16 would take, and keeps the results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import reference
from localrun.kernels_cpu.formats import BY_NAME, FORMATS
from localrun.kernels_cpu.formats.codes import Bytes, Codes
from localrun.kernels_cpu.sizes import PACKINGS

PLANES = 4

Cut = tuple[tuple[int, int] | None, ...]

_CUTS: dict[str, Cut] = {
    "F32": ((0, 4),),
    "F16": ((0, 2),),
    "BF16": ((0, 2),),
    "Q4_K": ((0, 144),),
    "Q5_K": ((0, 176),),
    "Q6_K": ((0, 128), (128, 192), (192, 208), (208, 210)),
    "Q4_0": ((2, 18), None, (0, 2)),
    "Q4_1": ((4, 20), None, (0, 4)),
    "Q5_0": ((6, 22), (2, 6), (0, 2)),
    "Q5_1": ((8, 24), (4, 8), (0, 4)),
    "Q8_0": ((2, 34), (0, 2)),
}
"""Which bytes of a block go into which plane."""


@dataclass(frozen=True)
class CardType:
    """A tensor type on the card.

    struct: in cuda/weights.cuh or, for floats, matmul.cuh; block: values of what the kernels call a block; plane_bytes: of each plane, by
    block; planes: blocks as the file has them (uint8 (B, block_bytes)) to one array a plane.
    """

    struct: str
    kind: str
    block: int
    plane_bytes: tuple[int, ...]
    planes: Callable[[Bytes], list[NDArray[np.uint8]]]

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    def nbytes(self, values: int) -> int:
        """Bytes of so many values."""
        return values // self.block * sum(self.plane_bytes)


def _cutter(cut: Cut) -> Callable[[Bytes], list[NDArray[np.uint8]]]:
    def planes(blocks: Bytes) -> list[NDArray[np.uint8]]:
        return [np.ascontiguousarray(blocks[:, c[0] : c[1]]) if c else np.zeros((0,), np.uint8) for c in cut]

    return planes


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _expand_256(unpack: Callable[[Bytes], Codes]) -> Callable[[Bytes], list[NDArray[np.uint8]]]:
    def sixteen(scales: NDArray[np.int16]) -> NDArray[np.uint8]:
        return _bytes(np.repeat(scales, 16 // scales.shape[1], axis=1).astype(np.int8))

    def planes(blocks: Bytes) -> list[NDArray[np.uint8]]:
        w = unpack(blocks)
        less = np.zeros_like(w.d) if w.dmin is None else w.dmin
        minima = np.zeros(0, np.uint8) if w.minima is None else sixteen(w.minima)
        return [_bytes(w.codes), sixteen(w.scales), minima, _bytes(np.stack([w.d, less], axis=1))]

    return planes


def _expand_32(unpack: Callable[[Bytes], Codes]) -> Callable[[Bytes], list[NDArray[np.uint8]]]:
    def planes(blocks: Bytes) -> list[NDArray[np.uint8]]:
        w = unpack(blocks)
        return [_bytes(w.codes.reshape(-1, 32)), _bytes(np.repeat(w.d, max(1, w.codes.shape[1] // 32)))]

    return planes


def _card_type(name: str) -> CardType:
    form = BY_NAME[name]
    kind = PACKINGS[form.id].kind
    if name in _CUTS:
        sizes = tuple(c[1] - c[0] if c else 0 for c in _CUTS[name])
        return CardType(name, kind, form.block, sizes, _cutter(_CUTS[name]))
    unpack = reference.UNPACK[form.id]
    probe = unpack(np.zeros((1, form.block_bytes), np.uint8))
    if kind == "256":
        with_min = probe.minima is not None
        sizes = (256, 16, 16 if with_min else 0, 8)
        return CardType(f"Expanded256<{str(with_min).lower()}>", kind, 256, sizes, _expand_256(unpack))
    halves = probe.codes.shape[1] == 16
    return CardType(f"Expanded32<{str(halves).lower()}>", kind, 32, (32, 8 if halves else 4), _expand_32(unpack))


CARD_TYPES: dict[str, CardType] = {FORMATS[number].name: _card_type(FORMATS[number].name) for number in PACKINGS}
"""By type name: every type that matmuls take."""
