"""The arithmetic of quantized weights in plain NumPy: slow, short, and right to the bit.

`dequantize` says what bytes mean. `matmul` is the contract that the SIMD kernels keep: the same integers, and the same float32 operations
in the same order, so that their results can be compared bit for bit whatever the instruction set, the tile and the batch.

    activations     int8, 256 at a time for types with blocks of 256, else 32 at a time (`quantize_q8`); float32 for F32, F16, BF16
    block of 256    S = sum over sub-blocks of scale * dot, M = sum over sub-blocks of minimum * sum(q): exact integers
                    acc = fma(S * d, dx, acc), or with minima acc = fma(fma(M, -dmin, S * d), dx, acc)
    other blocks    for each 32 values, or as many as have one d: acc = fma(dot * dx, d, acc);
                    then, with minima, acc = fma(-dmin, sum(q) * dx, acc)
    floats          p[k mod 4] = fma(x[k], w[k], p[k mod 4]) for all whole fours, the rest into p[0]; then (p[0] + p[1]) + (p[2] + p[3])

Blocks in ascending order, acc starting at 0; integers turn into float32 once, rounded to nearest even; fma rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.activation_sizes import FEWER_LEVELS, LEVELS, MOST_OF_16
from localrun.kernels_cpu.formats import BY_NAME, FORMATS, floats, fp4, iquants, kquants, legacy, ternary
from localrun.kernels_cpu.formats.codes import Bytes, Codes

Floats = NDArray[np.float32]

UNPACK: dict[int, Callable[[Bytes], Codes]] = {
    BY_NAME[name].id: unpack
    for name, unpack in {
        "Q4_0": legacy.unpack_q4_0,
        "Q4_1": legacy.unpack_q4_1,
        "Q5_0": legacy.unpack_q5_0,
        "Q5_1": legacy.unpack_q5_1,
        "Q8_0": legacy.unpack_q8_0,
        "Q2_K": kquants.unpack_q2_k,
        "Q3_K": kquants.unpack_q3_k,
        "Q4_K": kquants.unpack_q4_k,
        "Q5_K": kquants.unpack_q5_k,
        "Q6_K": kquants.unpack_q6_k,
        "Q8_K": kquants.unpack_q8_k,
        "IQ1_S": iquants.unpack_iq1_s,
        "IQ1_M": iquants.unpack_iq1_m,
        "IQ2_XXS": iquants.unpack_iq2_xxs,
        "IQ2_XS": iquants.unpack_iq2_xs,
        "IQ2_S": iquants.unpack_iq2_s,
        "IQ3_XXS": iquants.unpack_iq3_xxs,
        "IQ3_S": iquants.unpack_iq3_s,
        "IQ4_NL": iquants.unpack_iq4_nl,
        "IQ4_XS": iquants.unpack_iq4_xs,
        "TQ1_0": ternary.unpack_tq1_0,
        "TQ2_0": ternary.unpack_tq2_0,
        "Q1_0": ternary.unpack_q1_0,
        "Q2_0": ternary.unpack_q2_0,
        "MXFP4": fp4.unpack_mxfp4,
        "NVFP4": fp4.unpack_nvfp4,
    }.items()
}
"""By ggml type id: bytes of blocks (B, block_bytes) to their codes and scales."""

FLOATS: dict[int, Callable[[Bytes], Floats]] = {
    BY_NAME["F32"].id: floats.values_f32,
    BY_NAME["F16"].id: floats.values_f16,
    BY_NAME["BF16"].id: floats.values_bf16,
}

TINY = np.float32(1e-30)
"""Activations that are all smaller than this are zero."""


def dequantize(type_id: int, packed: Bytes, n: int) -> Floats:
    """Rows of weights as float32.

    packed: uint8 (rows, row bytes); n: values of a row. Returns float32 (rows, n), exactly what the format says.
    Raises ValueError for a type that has no values of its own (integers, Q8_1), or when n or the bytes of a row do not fit the type.
    """
    packed = _rows(type_id, packed, n)
    if not packed.size:
        return np.zeros((len(packed), n), np.float32)
    if type_id in FLOATS:
        return FLOATS[type_id](packed).reshape(len(packed), n)
    return _unpack(type_id, packed).values().reshape(len(packed), n)


def quantize_q8(x: Floats, block: int) -> tuple[NDArray[np.int8], Floats, NDArray[np.int32]]:
    """Activations as int8 with one scale for `block` successive values (32 or 256).

    x: float32 (tokens, n), n a multiple of block. Returns q int8 (tokens, n), d float32 (tokens, n / block) and the sums of q over each
    16 values, int32 (tokens, n / 16). With m = max |x| of a block and L levels: d = m / L, q = x * (L / m) rounded to the nearest
    integer, halves to even, each operation in float32; q and d are 0 where m < TINY. L is 127, and 63 in blocks of 256 where 127 would
    give sixteen successive values quants whose magnitudes add up to more than 1023.
    """
    tokens, n = x.shape
    blocks = np.ascontiguousarray(x, np.float32).reshape(tokens, n // block, block)
    largest = np.abs(blocks).max(axis=2, initial=0)
    q, d = _with_levels(blocks, largest, np.full(largest.shape, LEVELS, np.float32))
    if block == 256:
        flat = np.abs(q.astype(np.int32)).reshape(tokens, n // 256, 16, 16).sum(axis=3).max(axis=2, initial=0) > MOST_OF_16
        q, d = _with_levels(blocks, largest, np.where(flat, np.float32(FEWER_LEVELS), np.float32(LEVELS)))
    q = q.reshape(tokens, n)
    return q, d, q.reshape(tokens, n // 16, 16).sum(axis=2, dtype=np.int32)


def _with_levels(blocks: Floats, largest: Floats, levels: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Quants (tokens, blocks, values) and scales (tokens, blocks) for these largest magnitudes and numbers of levels (tokens, blocks)."""
    live = largest >= TINY
    inverse = np.where(live, levels / np.where(live, largest, np.float32(1)), np.float32(0))
    return np.rint(blocks * inverse[:, :, None]).astype(np.int8), np.where(live, largest / levels, np.float32(0))


def matmul(type_id: int, packed: Bytes, x: Floats) -> Floats:
    """out[t, r] = sum over k of W[r, k] * x[t, k], by the contract above.

    packed: uint8 (rows, row bytes) of W; x: float32 (tokens, n). Returns float32 (tokens, rows). Raises ValueError as `dequantize` does.
    Source of the scheme, not of the order: ggml's integer dot products over int8 activations.
    """
    tokens, n = x.shape
    packed = _rows(type_id, packed, n)
    rows = len(packed)
    if not packed.size or not tokens:
        return np.zeros((tokens, rows), np.float32)
    if type_id in FLOATS:
        return _matmul_floats(dequantize(type_id, packed, n), np.ascontiguousarray(x, np.float32))
    w = _unpack(type_id, packed)
    superblock = FORMATS[type_id].block == 256
    length = w.codes.shape[1]
    run = length // w.scales.shape[1] if superblock else min(length, 32)  # values that one integer dot product goes over
    q, dx, _ = quantize_q8(x, 256 if superblock else 32)
    dots = _dots(w.codes.reshape(rows, n // run, run), q.reshape(tokens, n // run, run))  # (T, R, n / run)
    sums = q.reshape(tokens, 1, n // run, run).sum(axis=3, dtype=np.int64)  # (T, 1, n / run)
    acc = np.zeros((tokens, rows), np.float32)
    d = w.d.reshape(rows, n // length)
    dmin = None if w.dmin is None else w.dmin.reshape(rows, n // length)
    if superblock:
        scaled = _per_block(dots, w.scales, rows)
        offsets = None if w.minima is None else _per_block(sums, w.minima, rows)
        for b in range(n // 256):
            value = scaled[:, :, b] * d[:, b]
            if dmin is not None and offsets is not None:
                value = fma(offsets[:, :, b], -dmin[:, b], value)
            acc = fma(value, dx[:, b, None], acc)
        return acc
    for i in range(n // run):
        scale = dx[:, i * run // 32, None]
        acc = fma(dots[:, :, i].astype(np.float32) * scale, d[:, i * run // length], acc)
        if dmin is not None:
            acc = fma(-dmin[:, i * run // length], sums[:, :, i].astype(np.float32) * scale, acc)
    return acc


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c in float32, rounded once. Broadcasts.

    The product of two float32 is exact in float64. The sum is rounded there to odd (if inexact, to the neighbour whose last bit is 1),
    which keeps what the second rounding, to float32, needs to come out as if it had seen the exact sum (Boldo and Melquiond, 2008).
    """
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN come out as the instruction gives them
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = np.broadcast_to(c, product.shape).astype(np.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)  # total + error is the exact sum (Knuth's two-sum)
        even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
        odd = np.nextafter(total, np.copysign(np.inf, error))
        return np.where(even & (error != 0) & np.isfinite(error), odd, total).astype(np.float32)


def _rows(type_id: int, packed: Bytes, n: int) -> Bytes:
    form = FORMATS.get(type_id)
    if form is None or (type_id not in UNPACK and type_id not in FLOATS):
        raise ValueError(f"tensor type {form.name if form else type_id} holds no weights")
    if packed.ndim != 2 or packed.dtype != np.uint8 or packed.shape[1] != form.row_bytes(n):
        raise ValueError(f"rows of {n} {form.name} values are uint8 (rows, {form.row_bytes(n)}), not {packed.dtype} {packed.shape}")
    return np.ascontiguousarray(packed)


def _unpack(type_id: int, packed: Bytes) -> Codes:
    return UNPACK[type_id](packed.reshape(-1, FORMATS[type_id].block_bytes))


def _dots(w: NDArray[np.int8], q: NDArray[np.int8]) -> NDArray[np.int64]:
    """Integer dot products of runs: w (R, runs, L), q (T, runs, L) to (T, R, runs). In float64, where they are exact."""
    product = w.transpose(1, 0, 2).astype(np.float64) @ q.transpose(1, 2, 0).astype(np.float64)  # (runs, R, T)
    return product.transpose(2, 1, 0).astype(np.int64)


def _per_block(parts: NDArray[np.int64], factors: NDArray[np.int16], rows: int) -> Floats:
    """Sum over the sub-blocks of each block of part * factor: (T, R or 1, runs) and (R * blocks, J) to float32 (T, R, blocks)."""
    runs, j = parts.shape[2], factors.shape[1]
    weighted = (parts * factors.reshape(rows, runs)).reshape(len(parts), rows, runs // j, j)
    total: NDArray[np.int64] = weighted.sum(axis=3)
    return total.astype(np.float32)


def _matmul_floats(w: Floats, x: Floats) -> Floats:
    tokens, n = x.shape
    p = [np.zeros((tokens, len(w)), np.float32) for _ in range(4)]
    whole = n - n % 4
    for k in range(n):
        i = k % 4 if k < whole else 0
        p[i] = fma(x[:, k, None], w[:, k], p[i])
    total: Floats = (p[0] + p[1]) + (p[2] + p[3])
    return total
