"""How many bytes weights and KV cache take in memory. Light on purpose (no NumPy, no Numba): whoever plans a load reads it.

What lies in those bytes is said in pack.py, octets.py and kv.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrun.kernels_cpu.formats import BY_NAME, Format

ROWS = 16
"""Rows of a group of packed weights."""


@dataclass(frozen=True)
class Packing:
    """How a tensor type is packed.

    kind: '256', '32' or 'f', also the activation that goes with it; block: values a step of the kernel takes;
    quants, scales: bytes per block and group of 16 rows, in two regions for kind '32', one after the other otherwise.
    """

    format: Format
    kind: str
    block: int
    quants: int
    scales: int

    def group_bytes(self, n: int) -> int:
        """Bytes of one group of 16 rows of n values, a multiple of 64."""
        size = n // self.block * (self.quants + self.scales)
        return (size + 63) // 64 * 64


PACKINGS: dict[int, Packing] = {
    p.format.id: p
    for p in (
        Packing(BY_NAME["F32"], "f", 1, 64, 0),
        Packing(BY_NAME["F16"], "f", 1, 32, 0),
        Packing(BY_NAME["BF16"], "f", 1, 32, 0),
        Packing(BY_NAME["Q4_0"], "32", 32, 256, 32),
        Packing(BY_NAME["Q4_1"], "32", 32, 256, 64),
        Packing(BY_NAME["Q5_0"], "32", 32, 320, 32),
        Packing(BY_NAME["Q5_1"], "32", 32, 320, 64),
        Packing(BY_NAME["Q8_0"], "32", 32, 512, 32),
        Packing(BY_NAME["Q4_K"], "256", 256, 2048, 320),
        Packing(BY_NAME["Q5_K"], "256", 256, 2560, 320),
        Packing(BY_NAME["Q6_K"], "256", 256, 3072, 320),
        # octets.py says where these numbers come from
        Packing(BY_NAME["Q2_K"], "256", 256, 1024, 576),
        Packing(BY_NAME["Q3_K"], "256", 256, 1536, 320),
        Packing(BY_NAME["TQ1_0"], "256", 256, 1024, 192),
        Packing(BY_NAME["TQ2_0"], "256", 256, 1024, 192),
        Packing(BY_NAME["IQ4_XS"], "256", 256, 2048, 192),
        Packing(BY_NAME["IQ2_XXS"], "256", 256, 1536, 192),
        Packing(BY_NAME["IQ2_XS"], "256", 256, 1536, 320),
        Packing(BY_NAME["IQ2_S"], "256", 256, 1536, 320),
        Packing(BY_NAME["IQ3_XXS"], "256", 256, 2048, 192),
        Packing(BY_NAME["IQ3_S"], "256", 256, 2048, 192),
        Packing(BY_NAME["IQ1_S"], "256", 256, 1536, 192),
        Packing(BY_NAME["IQ1_M"], "256", 256, 1536, 320),
        Packing(BY_NAME["IQ4_NL"], "32", 32, 256, 32),
        Packing(BY_NAME["MXFP4"], "32", 32, 256, 32),
        Packing(BY_NAME["NVFP4"], "32", 32, 256, 64),
        Packing(BY_NAME["Q1_0"], "32", 32, 256, 32),
        Packing(BY_NAME["Q2_0"], "32", 32, 256, 32),
    )
}
"""By ggml type id: the types the matmul kernels take."""


# ---- the KV cache ---------------------------------------------------------------------------------------------------------------

BLOCK = 16
"""Positions of a pool block."""
GROUP = 32
"""Values that share a scale."""
PLAIN = {"f32": 4, "f16": 2, "bf16": 2}
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0")


def room(n: int) -> int:
    """n rounded up to whole vectors of 16."""
    return (n + 15) // 16 * 16


def fits(kv_type: str, dim: int, dim_v: int) -> bool:
    """Whether heads of these sizes can be kept in that type."""
    return kv_type in PLAIN or (dim % GROUP == 0 and dim_v % GROUP == 0)


def head_bytes(kv_type: str, n: int) -> int:
    """Bytes of one head's keys (or values, n rounded up to 16) of one block."""
    if kv_type in PLAIN:
        return n * BLOCK * PLAIN[kv_type]
    return n * BLOCK // (1 if kv_type == "q8_0" else 2) + n // GROUP * BLOCK * 2


def layer_block_bytes(n_kv: int, dim: int, dim_v: int, kv_type: str) -> int:
    """Bytes one layer takes in a pool block, a multiple of 64."""
    size = n_kv * (head_bytes(kv_type, dim) + head_bytes(kv_type, room(dim_v)))
    return -(-size // 64) * 64
