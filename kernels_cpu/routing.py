"""Where a choice of experts lies that experts.py makes. Light: no NumPy, no Numba."""

from __future__ import annotations

GATES = {"softmax": 0, "sigmoid": 1, "softmax of chosen": 2}
"""How scores become weights."""


class Layout:
    """Offsets of a routing's arrays: int32 but for the weights, float32."""

    def __init__(self, pairs: int, n_experts: int) -> None:
        self.choices = 0
        self.weights = 4 * pairs
        self.order = 8 * pairs
        self.places = 12 * pairs
        self.starts = 16 * pairs
        self.active = self.starts + 4 * (n_experts + 1)
        self.n_active = self.active + 4 * n_experts
        self.nbytes = self.n_active + 4
