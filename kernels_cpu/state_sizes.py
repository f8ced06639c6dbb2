"""Bytes of recurrent state, for those who plan memory without loading kernels. What lies in them is the kernels' matter."""

from __future__ import annotations

CONV_CHANNELS = 128
"""Of a part of conv.py's kernels."""
SCAN_CHANNELS = 64
"""Of a part of ssm.selective_scan."""


def conv_bytes(channels: int, kept: int) -> int:
    """Of `kept` earlier inputs of each channel."""
    return -(-channels // CONV_CHANNELS) * CONV_CHANNELS * kept * 4


def scan_bytes(channels: int, n_state: int) -> int:
    """Of Mamba's scan."""
    return -(-channels // SCAN_CHANNELS) * SCAN_CHANNELS * n_state * 4


def matrix_bytes(channels: int, n: int) -> int:
    """Of n numbers for each channel of heads that are whole vectors: Mamba 2, delta nets, RWKV."""
    return channels * n * 4
