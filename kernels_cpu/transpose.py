"""Words of sixteen rows turned so that those of one place lie side by side: what packing (pack.py) is made of.

A row gives W words, W vectors hold them all: vector i begins as rows i * 16 / W and following, one behind the other. Interleaving vector i
with vector i + W / 2 moves the highest bit of a word's vector number to the lowest of its lane, and the highest of its lane to the lowest
of its vector number; done four times, the four bits that say which row have become the lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from localrun.kernels_cpu.simd import Tile, Vec, i32x16, pointer, splat, u8x64

_i32 = ir.IntType(32)
_i64 = ir.IntType(64)


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, order: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, len(order)), list(order)))


def _joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Vectors of one length, a power of two of them, as one."""
    while len(parts) > 1:
        both = range(2 * parts[0].type.count)
        parts = [_shuffled(builder, a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def turned(typingctx: Any, source: Any, stride: Any, last: Any, words: Any, flip: Any) -> Any:
    """A tile of `words` i32x16: vector w has word w of sixteen rows, the first at `source`, the others `stride` bytes apart.

    words: 1, 2, 4, 8 or 16, known when compiling; flip: 32 bits, likewise, that every word is xored with. Rows behind number `last` (0 to
    15) are not read and give 0.
    """
    n: int = words.literal_value
    bits: int = flip.literal_value
    tile = Tile(i32x16, n)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        base, step, end = args[:3]
        form = ir.VectorType(_i32, n)
        rows = []
        for r in range(16):
            number = ir.Constant(_i64, r)
            there = builder.select(builder.icmp_signed("<", number, end), number, end)
            rows.append(builder.load(pointer(builder, builder.add(base, builder.mul(there, step)), form), align=1))
        each = 16 // n
        vectors = [_joined(builder, rows[i * each : (i + 1) * each]) for i in range(n)]
        low = [lane for i in range(8) for lane in (i, 16 + i)]
        high = [8 + lane for lane in low]
        for _ in range(4 if n > 1 else 0):
            pairs = zip(vectors[: n // 2], vectors[n // 2 :], strict=True)
            vectors = [_shuffled(builder, a, b, order) for a, b in pairs for order in (low, high)]
        iota = ir.Constant(i32x16.llvm, list(range(16)))
        known = builder.icmp_signed("<=", iota, splat(builder, builder.trunc(end, _i32), 16))
        mask = ir.Constant(i32x16.llvm, [bits] * 16)
        result: ir.Value = ir.Constant(tile.llvm, ir.Undefined)
        for i, vector in enumerate(vectors):
            value = builder.xor(vector, mask) if bits else vector
            result = builder.insert_value(result, builder.select(known, value, ir.Constant(i32x16.llvm, None)), i)
        return result

    return tile(types.int64, types.int64, types.int64, words, flip), codegen


def _ordering(doc: str, order: Sequence[int], elem: str) -> Any:
    """An intrinsic: i32x16 -> u8x64, the elements of that type ('i8', 'i16') in another order."""
    form = Vec(elem, len(order))

    @intrinsic  # type: ignore[untyped-decorator]
    def ordered(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            whole = builder.bitcast(args[0], form.llvm)
            return builder.bitcast(_shuffled(builder, whole, whole, order), u8x64.llvm)

        return u8x64(i32x16), codegen

    ordered.__doc__ = doc
    return ordered


bytes_apart = _ordering(
    "The first bytes of all words, then the second ones, and so on.", [4 * r + j for j in range(4) for r in range(16)], "i8"
)
byte_pairs = _ordering(
    "The first two bytes of all words, then the last two.", [4 * r + 2 * h + j for h in (0, 1) for r in range(16) for j in (0, 1)], "i8"
)
halves_apart = _ordering("The low halves of all words, then the high ones.", [2 * r + h for h in range(2) for r in range(16)], "i16")
