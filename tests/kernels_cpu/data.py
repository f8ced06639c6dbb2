"""Random weights of every tensor type, as the file has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import reference
from localrun.kernels_cpu.formats import FORMATS


def random_rows(rng: np.random.Generator, type_id: int, rows: int, n: int) -> NDArray[np.uint8]:
    """Random bytes whose float16 and other scales are finite and of moderate size: the exponents' top bits are cleared."""
    form = FORMATS[type_id]
    if type_id in reference.FLOATS:
        values = rng.normal(0, 1, (rows, n)).astype(np.float32)
        if form.name == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8).reshape(rows, form.row_bytes(n))
        return values.astype(np.float16 if form.name == "F16" else np.float32).view(np.uint8).reshape(rows, form.row_bytes(n))
    blocks = rng.integers(0, 256, (rows * n // form.block, form.block_bytes), np.uint8)
    halves = {
        "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
        "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
    }.get(form.name, (0,))  # fmt: skip
    for at in halves:
        blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | 0x20
    if form.name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 130, len(blocks))
    if form.name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x20
    return blocks.reshape(rows, form.row_bytes(n))
