"""Angles of rotary position embedding, as tables that kernels index by position.

RoFormer (Su et al. 2021); linear scaling (Chen et al. 2023), NTK-by-parts / YaRN (Peng et al. 2023), per-frequency factors of Llama 3.1 and
of Phi's LongRoPE as the file's rope_freqs tensors give them. Computed in float64, rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_POSITIONS = 64
"""Of which the first pass, that is the end of a load, has to wait: a thousand are 10 ms."""


@dataclass(frozen=True)
class Rope:
    """How angles depend on position.

    n_rot: dimensions that are rotated (even); base: of the geometric series of frequencies; scale: positions are multiplied by it (1 /
    factor of linear scaling); factors: divides each of the n_rot / 2 frequencies; yarn_*: 0 extrapolation factor switches YaRN off;
    magnitude: factor of cosines and sines.
    yarn_log_multiplier: the factor that YaRN's growth of the magnitude is divided by grows with it (DeepSeek-V2's mscale_all_dim).
    """

    n_rot: int
    base: float
    scale: float = 1.0
    factors: tuple[float, ...] | None = None
    yarn_ext_factor: float = 0.0
    yarn_original_context: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_log_multiplier: float = 0.0
    log_multiplier_is_both: bool = False
    """Numerator and denominator grow alike: no factor is left."""
    magnitude: float = 1.0

    @property
    def values(self) -> int:
        """float32 values of a position in the table."""
        return self.n_rot

    def table(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """(len(positions), n_rot): cosines, then sines."""
        angles, magnitude = self.angles(positions)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude

    def angles(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
        """(len(positions), n_rot / 2) angles, and the factor of their cosines and sines."""
        i = np.arange(self.n_rot // 2, dtype=np.float64)
        frequency = self.base ** (-2.0 * i / self.n_rot)
        if self.factors is not None:
            frequency = frequency / np.asarray(self.factors, np.float64)
        magnitude = self.magnitude
        stretched = frequency * self.scale
        if self.yarn_ext_factor:
            low, high = self._correction_range()
            ramp = np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
            mix = (1.0 - ramp) * self.yarn_ext_factor
            stretched = stretched * (1.0 - mix) + frequency * mix
            grown = 0.1 * math.log(1.0 / self.scale)
            if not self.yarn_log_multiplier:
                magnitude *= 1.0 + grown
            elif not self.log_multiplier_is_both:
                magnitude *= (1.0 + grown) / (1.0 + grown * self.yarn_log_multiplier)
        return positions[:, None] * stretched[None, :], magnitude

    def _correction_range(self) -> tuple[float, float]:
        """Dimensions between which YaRN goes from extrapolation to interpolation (paper, eq. 17 to 23)."""

        def dimension(rotations: float) -> float:
            return self.n_rot * math.log(self.yarn_original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(0.0, math.floor(dimension(self.yarn_beta_fast)))
        high = min(self.n_rot - 1.0, math.ceil(dimension(self.yarn_beta_slow)))
        return low, high


@dataclass(frozen=True)
class Temperature:
    """Factor of the queries that grows with the position: 1 + scale * ln(1 + floor((position + offset) / step)) (Llama 4's attention
    temperature).
    """

    scale: float
    step: int
    offset: int = 0

    @property
    def values(self) -> int:
        return 1

    def table(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """(len(positions), 1)."""
        return (1.0 + self.scale * np.log1p((positions + self.offset) // self.step))[:, None]


class AngleTable:
    """float32 [position][values of a position], grown as positions are asked for. Of a Rope: n_rot / 2 cosines, n_rot / 2 sines."""

    def __init__(self, of: Rope | Temperature) -> None:
        self.of = of
        self._table = np.zeros((0, of.values), np.float32)
        self._address = 0

    def address(self, positions: int) -> int:
        """Address of the table, valid for positions 0..positions-1 and until the next call."""
        self.rows(positions)
        return self._address

    def rows(self, positions: int) -> NDArray[np.float32]:
        """The table itself, for at least so many positions."""
        have = len(self._table)
        if positions > have:
            size = max(FIRST_POSITIONS, 2 * have, positions)
            fresh = self.of.table(np.arange(have, size, dtype=np.int64)).astype(np.float32)
            self._table = np.concatenate([self._table, fresh])
            self._address = self._table.ctypes.data
        return self._table
