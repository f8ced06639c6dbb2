"""Asking memory for what will be read soon.

Weights are read once a pass, front to back, and are fetched in two steps: far ahead into the second-level cache, which can wait for
three times as many lines at once as the first-level one, and from there before their use. Lines are asked for one by one between the
multiplications: a processor that has no place left to wait in for one more line stops working ahead, and with twenty asked for at once it
does. Where a block's quants and scales lie apart, a line is asked for when the same line of an earlier block is read.

One thread, Q4_K from memory, a block of 256 values of 16 rows: 141 ns with bursts 4 KiB and 640 bytes ahead, 121 so; against eight tokens
235 and 146 (of which 130 are multiplications; with one step only, or both at the same distance, 185).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

FAR = 14 << 10
"""Bytes, about, between what is read and what is fetched into the second-level cache."""
NEAR = 4736
"""The same for the first-level cache."""
FIRST_LINES = FAR // 64
"""What a stream begins with: nothing before it asked for these."""

_i32 = ir.IntType(32)


def _asker(level: int, *, write: bool = False) -> Any:
    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def ask(typingctx: Any, address: Any, lines: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            byte = ir.IntType(8).as_pointer()
            fnty = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
            function = cgutils.get_or_insert_function(builder.module, fnty, "llvm.prefetch.p0")
            use, locality, data = ir.Constant(_i32, int(write)), ir.Constant(_i32, 3 if level == 1 else 1), ir.Constant(_i32, 1)
            for line in range(lines.literal_value):
                at = builder.inttoptr(builder.add(args[0], ir.Constant(args[0].type, 64 * line)), byte)
                builder.call(function, [at, use, locality, data])
            return context.get_dummy_value()

        return types.void(types.int64, lines), codegen

    purpose = ", to write to them" if write else ""
    ask.__doc__ = f"""Asks for `lines` (a compile-time constant) cache lines from `address` on, into the cache of level {level}{purpose}.

    Any address is allowed.
    """
    return ask


prefetch = _asker(1)
prefetch_far = _asker(2)
prefetch_to_write = _asker(1, write=True)


def distances(block: int) -> tuple[int, int]:
    """FAR and NEAR in whole blocks of that many bytes: the same line of a later block lies so far behind a line."""
    return max(1, round(FAR / block)) * block, max(1, round(NEAR / block)) * block


@numba.njit
def fetch_both(far: int, near: int) -> None:
    """Asks for one line far ahead and one near."""
    prefetch_far(far, 1)
    prefetch(near, 1)


def fetcher(block: int) -> Any:
    """The compiled function (address): asks for two lines of later blocks (of `block` bytes) that lie as the line at `address` does in its,
    which is read now.
    """
    far, near = distances(block)

    @numba.njit
    def fetch(address: int) -> None:
        fetch_both(address + far, address + near)

    return fetch


def split_fetcher(quants: int, scales: int) -> Any:
    """The compiled function (quants now, scales now, where the group's quants end, blocks in a row) -> (address far ahead, address near).

    For groups in which all blocks' quants lie before all their scales: asks for the scales, and says where the quants of later blocks lie,
    in this group or in the next one; whoever multiplies asks for these line by line.
    """
    far, near = distances(quants)

    @numba.njit
    def ahead(w: int, u: int, end: int, n: int) -> Any:
        gap = n * scales + 63 & -64
        fetch_both(u + n * quants + gap, u + 512)
        distant = w + far
        close = w + near
        if distant >= end:
            distant += gap
        if close >= end:
            close += gap
        return distant, close

    return ahead
