"""One row of a tensor, as the file has it, to float32: what embedding lookup needs. Bit for bit the reference dequantization."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.octets import OCTETS, baked
from localrun.kernels_cpu.simd import f16_from_bits, f32_from_bits, load_f16, load_f32, load_i32, load_u8, store_scalar

f = numba.float32


@numba.njit
def _six_bits(scales: int, j: int) -> Any:
    """Scale and min j of the eight that Q4_K and Q5_K keep in 12 bytes."""
    if j < 4:
        return load_u8(scales + j) & 63, load_u8(scales + j + 4) & 63
    high = load_u8(scales + j + 4)
    return (high & 15) | ((load_u8(scales + j - 4) >> 6) << 4), (high >> 4) | ((load_u8(scales + j) >> 6) << 4)


def _k4(five_bits: bool) -> Any:
    @numba.njit
    def block(s: int, out: int) -> None:
        d = load_f16(s)
        dmin = load_f16(s + 2)
        quants = s + (48 if five_bits else 16)
        for j in range(8):
            sc, m = _six_bits(s + 4, j)
            a = f(d * f(sc))
            b = f(dmin * f(m))
            for i in range(32):
                q = numba.int64(load_u8(quants + (j >> 1) * 32 + i))
                q = (q >> 4) if j & 1 else (q & 15)
                if five_bits:
                    q |= ((numba.int64(load_u8(s + 16 + i)) >> j) & 1) << 4
                store_scalar(out + (j * 32 + i) * 4, f(f(a * f(q)) - b))

    return block


@numba.njit
def _q6_k(s: int, out: int) -> None:
    d = load_f16(s + 208)
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                low = numba.int64(load_u8(s + half * 64 + (quarter & 1) * 32 + i))
                low = (low >> 4) if quarter >> 1 else (low & 15)
                high = (numba.int64(load_u8(s + 128 + half * 32 + i)) >> (2 * quarter)) & 3
                scale = numba.int8(load_u8(s + 192 + half * 8 + quarter * 2 + (i >> 4)))
                q = (low | (high << 4)) - 32
                store_scalar(out + (half * 128 + quarter * 32 + i) * 4, f(f(d * f(scale)) * f(q)))


def _legacy(type_name: str) -> Any:
    five_bits = type_name in ("Q5_0", "Q5_1")
    with_min = type_name in ("Q4_1", "Q5_1")
    header = 4 if with_min else 2
    quants = header + (4 if five_bits else 0)
    offset = 0 if with_min else (16 if five_bits else 8)

    @numba.njit
    def block(s: int, out: int) -> None:
        d = load_f16(s)
        m = f(0.0)
        bits = numba.int64(0)
        if with_min:
            m = load_f16(s + 2)
        if five_bits:
            bits = numba.int64(load_i32(s + header)) & 0xFFFFFFFF
        for k in range(32):
            q = numba.int64(load_u8(s + quants + (k & 15)))
            q = (q >> 4) if k >> 4 else (q & 15)
            q |= ((bits >> k) & 1) << 4
            value = f(d * f(q - offset))
            if with_min:
                value = f(value + m)
            store_scalar(out + k * 4, value)

    return block


@numba.njit
def _q8_0(s: int, out: int) -> None:
    d = load_f16(s)
    for k in range(32):
        store_scalar(out + k * 4, f(d * f(numba.int8(load_u8(s + 2 + k)))))


@numba.njit
def _f32(s: int, out: int) -> None:
    store_scalar(out, load_f32(s))


@numba.njit
def _f16(s: int, out: int) -> None:
    store_scalar(out, load_f16(s))


@numba.njit
def _bf16(s: int, out: int) -> None:
    bits = (numba.int64(load_u8(s)) | (numba.int64(load_u8(s + 1)) << 8)) << 16
    store_scalar(out, f32_from_bits(bits))


def _octets(type_name: str) -> Any:
    o = OCTETS[type_name]
    codes = baked(np.array(o.table, np.int8).tobytes())
    octet, d16, sub, brain, factor = o.octet, o.d16, o.sub, o.brain, o.factor
    subs = max(1, BY_NAME[type_name].block // sub)
    scaled, with_min = o.scale is not None, o.minimum is not None
    scale = o.scale if scaled else o.d16
    minimum, dmin16 = (o.minimum, o.dmin16) if with_min else (scale, o.d16)

    @numba.njit
    def block(s: int, out: int) -> None:
        for j in range(subs):
            bits = d16(s, j)
            d = f32_from_bits(bits << 16) if brain else f16_from_bits(bits)
            less = f(0.0)
            if scaled:
                d = f(f(d * f(factor)) * f(scale(s, j)))
            if with_min:
                less = f(f16_from_bits(dmin16(s, j)) * f(minimum(s, j)))
            for i in range(j * sub >> 3, (j + 1) * sub >> 3):
                word = octet(s, i)
                for k in range(8):
                    value = f(d * f(numba.int8(load_u8(codes() + ((word >> (8 * k)) & 15)))))
                    if with_min:
                        value = f(value - less)
                    store_scalar(out + (i * 8 + k) * 4, value)

    return block


def row_reader(type_name: str) -> Any:
    """A compiled function (row in the file, values, target float32) that expands one row."""
    fmt = BY_NAME[type_name]
    if type_name in OCTETS:
        block = _octets(type_name)
    elif type_name in ("Q4_K", "Q5_K"):
        block = _k4(type_name == "Q5_K")
    elif type_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        block = _legacy(type_name)
    else:
        block = {"Q6_K": _q6_k, "Q8_0": _q8_0, "F32": _f32, "F16": _f16, "BF16": _bf16}[type_name]
    values, size = fmt.block, fmt.block_bytes

    @numba.njit
    def read(source: int, n: int, out: int) -> None:
        for b in range(n // values):
            block(source + b * size, out + b * values * 4)

    return read
