"""F32, F16, BF16: a value is a float; a block is one value.

F32    IEEE single    F16   IEEE half    BF16   the upper 16 bits of an IEEE single
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats.codes import Bytes


def values_f32(packed: Bytes) -> NDArray[np.float32]:
    return packed.view("<f4").astype(np.float32)


def values_f16(packed: Bytes) -> NDArray[np.float32]:
    return packed.view("<f2").astype(np.float32)


def values_bf16(packed: Bytes) -> NDArray[np.float32]:
    return (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
