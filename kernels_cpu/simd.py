"""Vector values inside Numba functions.

A `Vec` is an LLVM vector held in registers (`f32x16`, `i32x16`, `u8x64` ...), a `Tile` is a fixed number of them. Inside `@njit` code
they add, multiply, shift and mask with Python's operators; the functions below load, store, convert and combine them. Every function is an
intrinsic: it becomes the LLVM instruction its docstring names, nothing is called at run time.

Addresses are plain integers (int64). Lanes are 32 bits wide and 16 to a vector whatever the machine: LLVM splits a vector into as many
registers as the instruction set needs. Only the integer dot products differ by instruction set; they are in `isa.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

_ELEMENT = {
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
}


class Vec(types.Type):
    """Type of a vector of `lanes` elements ('i8', 'i16', 'i32', 'f16', 'f32'); integers have no sign of their own."""

    def __init__(self, elem: str, lanes: int) -> None:
        self.elem = elem
        self.lanes = lanes
        super().__init__(name=f"{elem}x{lanes}")

    @property
    def llvm(self) -> ir.Type:
        return ir.VectorType(_ELEMENT[self.elem], self.lanes)


class Tile(types.Type):
    """Type of `count` vectors of one kind, e.g. one accumulator per token."""

    def __init__(self, vec: Vec, count: int) -> None:
        self.vec = vec
        self.count = count
        super().__init__(name=f"Tile({vec.name}, {count})")

    @property
    def llvm(self) -> ir.Type:
        return ir.ArrayType(self.vec.llvm, self.count)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


@register_model(Tile)
class _TileModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Tile) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


u8x64 = Vec("i8", 64)
i16x32 = Vec("i16", 32)
i16x16 = Vec("i16", 16)
i8x16 = Vec("i8", 16)
i8x32 = Vec("i8", 32)
i32x16 = Vec("i32", 16)
f16x16 = Vec("f16", 16)
f32x16 = Vec("f32", 16)

_i32 = ir.IntType(32)
_f32 = ir.FloatType()


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    """An integer address as an LLVM pointer."""
    return builder.inttoptr(address, to.as_pointer())


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    """Calls the LLVM intrinsic `name`."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """A vector with `value` in each lane."""
    vec = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vec, ir.Undefined), value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, ir.Constant(vec, ir.Undefined), ir.Constant(ir.VectorType(_i32, lanes), [0] * lanes))


def constant(vec: Vec, value: int | float) -> ir.Value:
    """A vector constant with one value in each lane."""
    return ir.Constant(vec.llvm, [value] * vec.lanes)


# ---- operators ----------------------------------------------------------------------------------------------------------------


def _as_vec(builder: ir.IRBuilder, ty: types.Type, value: ir.Value, vec: Vec) -> ir.Value:
    if isinstance(ty, Vec):
        return value
    if vec.elem.startswith("f"):
        scalar = builder.fptrunc(value, _f32) if value.type == ir.DoubleType() else value
    else:
        scalar = builder.trunc(value, _ELEMENT[vec.elem])
    return splat(builder, scalar, vec.lanes)


def _operator(op: Callable[..., Any], integer: str, real: str | None) -> None:
    """Teaches Numba `vec op vec` and `vec op scalar`."""

    class Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
            left, right = args
            if isinstance(left, Vec) and (left == right or isinstance(right, types.Integer | types.Float)):
                if left.elem.startswith("f") and (real is None or isinstance(right, types.Integer)):
                    return None
                if not left.elem.startswith("f") and isinstance(right, types.Float):
                    return None
                return signature(left, left, right)
            return None

    infer_global(op)(Template)

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        vec = sig.return_type
        right = _as_vec(builder, sig.args[1], args[1], vec)
        return getattr(builder, real if vec.elem.startswith("f") and real else integer)(args[0], right)

    lower_builtin(op, Vec, Vec)(lower)
    lower_builtin(op, Vec, types.Integer)(lower)
    lower_builtin(op, Vec, types.Float)(lower)


_operator(operator.add, "add", "fadd")
_operator(operator.sub, "sub", "fsub")
_operator(operator.mul, "mul", "fmul")
_operator(operator.truediv, "sdiv", "fdiv")
_operator(operator.and_, "and_", None)
_operator(operator.or_, "or_", None)
_operator(operator.xor, "xor", None)
_operator(operator.lshift, "shl", None)
_operator(operator.rshift, "lshr", None)


# ---- loads and stores ---------------------------------------------------------------------------------------------------------


def _loader(vec: Vec) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return builder.load(pointer(builder, args[0], vec.llvm), align=1)

        return vec(types.int64), codegen

    load.__doc__ = f"{vec.name} from memory, any alignment."
    return load


load_u8x64 = _loader(u8x64)
load_i8x16 = _loader(i8x16)
load_i8x32 = _loader(i8x32)
load_i16x16 = _loader(i16x16)
load_i16x32 = _loader(i16x32)
load_i32x16 = _loader(i32x16)
load_f16x16 = _loader(f16x16)
load_f32x16 = _loader(f32x16)


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes a vector to memory, any alignment."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[1], pointer(builder, args[0], args[1].type), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


def _scalar_loader(ty: Any, llvm: ir.Type) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return builder.load(pointer(builder, args[0], llvm), align=1)

        return ty(types.int64), codegen

    return load


load_i64 = _scalar_loader(types.int64, ir.IntType(64))
load_i32 = _scalar_loader(types.int32, _i32)
load_u8 = _scalar_loader(types.uint8, ir.IntType(8))
load_f32 = _scalar_loader(types.float32, _f32)


@intrinsic  # type: ignore[untyped-decorator]
def load_f16(typingctx: Any, address: Any) -> Any:
    """float32 of the half at `address`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.fpext(builder.load(pointer(builder, args[0], ir.HalfType()), align=1), _f32)

    return types.float32(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_scalar(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes an int8, int16, int32, int64 or float32 as it is typed."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[1], pointer(builder, args[0], args[1].type), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_bytes4(typingctx: Any, address: Any) -> Any:
    """u8x64 with the four bytes at `address` in each of its 16 groups of four."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        word = builder.load(pointer(builder, args[0], _i32), align=1)
        return builder.bitcast(splat(builder, word, 16), u8x64.llvm)

    return u8x64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_pair(typingctx: Any, address: Any) -> Any:
    """i16x32 with the two int16 at `address` in each of its 16 pairs."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        word = builder.load(pointer(builder, args[0], _i32), align=1)
        return builder.bitcast(splat(builder, word, 16), i16x32.llvm)

    return i16x32(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def splat_f32(typingctx: Any, value: Any) -> Any:
    """f32x16 of one float."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return splat(builder, args[0], 16)

    return f32x16(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def splat_i32(typingctx: Any, value: Any) -> Any:
    """i32x16 of one integer."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return splat(builder, args[0], 16)

    return i32x16(types.int32), codegen


# ---- conversions --------------------------------------------------------------------------------------------------------------


def _converter(source: Vec, target: Vec, op: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def convert(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return getattr(builder, op)(args[0], target.llvm)

        return target(source), codegen

    convert.__doc__ = f"{source.name} to {target.name} by LLVM's {op}."
    return convert


u8_to_i32 = _converter(i8x16, i32x16, "zext")
i8_to_i32 = _converter(i8x16, i32x16, "sext")
u8_to_i16 = _converter(i8x32, i16x32, "zext")
i8_to_i16 = _converter(i8x32, i16x32, "sext")
i16_to_i32 = _converter(i16x16, i32x16, "sext")
u16_to_i32 = _converter(i16x16, i32x16, "zext")
i32_to_i16 = _converter(i32x16, i16x16, "trunc")
i32_to_i8 = _converter(i32x16, i8x16, "trunc")
i32_to_f32 = _converter(i32x16, f32x16, "sitofp")
f16_to_f32 = _converter(f16x16, f32x16, "fpext")
f32_to_f16 = _converter(f32x16, f16x16, "fptrunc")
f32_to_i32 = _converter(f32x16, i32x16, "fptosi")
bits_f32 = _converter(i32x16, f32x16, "bitcast")
bits_i32 = _converter(f32x16, i32x16, "bitcast")
bytes_of = _converter(i32x16, u8x64, "bitcast")
words_of = _converter(u8x64, i32x16, "bitcast")
pairs_of = _converter(i32x16, i16x32, "bitcast")
words_of_pairs = _converter(i16x32, i32x16, "bitcast")


# ---- arithmetic ---------------------------------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; float32 vectors or scalars."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        name = "llvm.fma.v16f32" if isinstance(a, Vec) else "llvm.fma.f32"
        return call(builder, name, args[0].type, list(args))

    return a(a, a, a), codegen


def _binary(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def op(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return call(builder, f"{name}.v16f32", args[0].type, list(args))

        return f32x16(f32x16, f32x16), codegen

    op.__doc__ = f"{name} of two f32x16."
    return op


vmax = _binary("llvm.maxnum")
vmin = _binary("llvm.minnum")


def _unary(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def op(typingctx: Any, a: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return call(builder, f"{name}.v16f32", args[0].type, list(args))

        return f32x16(f32x16), codegen

    op.__doc__ = f"{name} of an f32x16."
    return op


vabs = _unary("llvm.fabs")
vround = _unary("llvm.rint")
"""To the nearest integer, ties to even."""
vsqrt = _unary("llvm.sqrt")


@intrinsic  # type: ignore[untyped-decorator]
def sar(typingctx: Any, value: Any, bits: Any) -> Any:
    """Arithmetic shift right of integer lanes."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.ashr(args[0], _as_vec(builder, bits, args[1], value))

    return value(value, bits), codegen


@intrinsic  # type: ignore[untyped-decorator]
def iabs(typingctx: Any, value: Any) -> Any:
    """Magnitudes of an i32x16."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return call(builder, "llvm.abs.v16i32", args[0].type, [args[0], ir.Constant(ir.IntType(1), 0)])

    return i32x16(i32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def lanes_below(typingctx: Any, count: Any) -> Any:
    """i32x16: -1 in the lanes whose number is below `count` (int64), 0 in the others."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        iota = ir.Constant(i32x16.llvm, list(range(16)))
        limit = splat(builder, builder.trunc(args[0], _i32), 16)
        return builder.sext(builder.icmp_signed("<", iota, limit), i32x16.llvm)

    return i32x16(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def where(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """Lanes of `a` where the mask (i32x16) is not 0, of `b` elsewhere."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.icmp_signed("!=", args[0], ir.Constant(i32x16.llvm, None)), args[1], args[2])

    return a(i32x16, a, a), codegen


def _halves(builder: ir.IRBuilder, value: ir.Value, lanes: int, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Folds a vector onto itself until one lane is left: a fixed order, so a fixed rounding."""
    while lanes > 1:
        lanes //= 2
        index = ir.VectorType(_i32, lanes)
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(lanes))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(lanes, 2 * lanes))))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(_i32, 0))


def _reducer(vec: Vec, scalar: Any, op: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def reduce(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            def combine(a: ir.Value, b: ir.Value) -> ir.Value:
                if op == "max":
                    return call(builder, f"llvm.maxnum.v{a.type.count}f32", a.type, [a, b])
                return getattr(builder, op)(a, b)

            return _halves(builder, args[0], vec.lanes, combine)

        return scalar(vec), codegen

    return reduce


sum_f32 = _reducer(f32x16, types.float32, "fadd")
max_f32 = _reducer(f32x16, types.float32, "max")
sum_i32 = _reducer(i32x16, types.int32, "add")


# ---- tiles --------------------------------------------------------------------------------------------------------------------


def _zero_tile(vec: Vec) -> Any:
    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def zeros(typingctx: Any, count: Any) -> Any:
        tile = Tile(vec, count.literal_value)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return ir.Constant(tile.llvm, None)

        return tile(count), codegen

    zeros.__doc__ = f"A tile of `count` (a compile-time constant) {vec.name}, all zero."
    return zeros


zeros_i32 = _zero_tile(i32x16)
zeros_f32 = _zero_tile(f32x16)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pick(typingctx: Any, tile: Any, index: Any) -> Any:
    """The vector of a tile at a compile-time index."""
    at = index.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.extract_value(args[0], at)

    return tile.vec(tile, index), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def put(typingctx: Any, tile: Any, index: Any, value: Any) -> Any:
    """The tile with `value` at a compile-time index."""
    at = index.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.insert_value(args[0], args[2], at)

    return tile(tile, index, tile.vec), codegen


def tile_map(builder: ir.IRBuilder, tile: Tile, each: Callable[[int], ir.Value]) -> ir.Value:
    """A tile whose vector number i is each(i), unrolled."""
    result: ir.Value = ir.Constant(tile.llvm, ir.Undefined)
    for i in range(tile.count):
        result = builder.insert_value(result, each(i), i)
    return result


@intrinsic  # type: ignore[untyped-decorator]
def tile_fma(typingctx: Any, acc: Any, a: Any, b: Any) -> Any:
    """acc + a * b, vector by vector, rounded once; `a` is a tile or one vector, `b` a tile or one vector."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def part(ty: Any, value: ir.Value, i: int) -> ir.Value:
            return builder.extract_value(value, i) if isinstance(ty, Tile) else value

        def each(i: int) -> ir.Value:
            c = builder.extract_value(args[0], i)
            return call(builder, "llvm.fma.v16f32", c.type, [part(a, args[1], i), part(b, args[2], i), c])

        return tile_map(builder, acc, each)

    return acc(acc, a, b), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_add(typingctx: Any, a: Any, b: Any) -> Any:
    """Sum of two tiles of integers."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return tile_map(builder, a, lambda i: builder.add(builder.extract_value(args[0], i), builder.extract_value(args[1], i)))

    return a(a, a), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_scale_add(typingctx: Any, acc: Any, a: Any, scale: Any) -> Any:
    """acc + a * scale in 32-bit integers; `scale` is one i32x16."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def each(i: int) -> ir.Value:
            return builder.add(builder.extract_value(args[0], i), builder.mul(builder.extract_value(args[1], i), args[2]))

        return tile_map(builder, acc, each)

    return acc(acc, a, i32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_to_f32(typingctx: Any, a: Any) -> Any:
    """A tile of i32x16 as floats."""
    out = Tile(f32x16, a.count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return tile_map(builder, out, lambda i: builder.sitofp(builder.extract_value(args[0], i), f32x16.llvm))

    return out(a), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_mul(typingctx: Any, a: Any, b: Any) -> Any:
    """Product of a float tile with a tile or one vector."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def each(i: int) -> ir.Value:
            right = builder.extract_value(args[1], i) if isinstance(b, Tile) else args[1]
            return builder.fmul(builder.extract_value(args[0], i), right)

        return tile_map(builder, a, each)

    return a(a, b), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_splat_f32(typingctx: Any, like: Any, address: Any, stride: Any) -> Any:
    """A tile, as many vectors as `like`, of the floats at address, address + stride, ... each in all lanes of its vector."""
    out = Tile(f32x16, like.count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def each(i: int) -> ir.Value:
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, i)))
            return splat(builder, builder.load(pointer(builder, at, _f32), align=1), 16)

        return tile_map(builder, out, each)

    return out(like, types.int64, types.int64), codegen


# ---- bits between integers and floats ------------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def f32_from_bits(typingctx: Any, value: Any) -> Any:
    """The float32 whose bits are the low half of an int64: how plan arguments carry floats."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(builder.trunc(args[0], _i32), _f32)

    return types.float32(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def f16_from_bits(typingctx: Any, value: Any) -> Any:
    """float32 of the half whose bits are the low 16 of an int64."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.fpext(builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType()), _f32)

    return types.float32(types.int64), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def shuffle(typingctx: Any, a: Any, b: Any, index: Any) -> Any:
    """Lanes of the two vectors `a` and `b` (numbered through) by a tuple of compile-time lane numbers."""
    order = [int(t.literal_value) for t in index.types]

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.shuffle_vector(args[0], args[1], ir.Constant(ir.VectorType(_i32, len(order)), order))

    return Vec(a.elem, len(order))(a, a, index), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_store(typingctx: Any, tile: Any, address: Any, stride: Any, count: Any, bias: Any, add: Any) -> Any:
    """Writes the first `count` (run-time) vectors of a float tile to address, address + stride, ...

    `bias` (one vector) is added to each, then, where `add` is not 0, what the memory held.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, base, step, n, extra, more = args
        adding = builder.icmp_signed("!=", more, ir.Constant(more.type, 0))
        for i in range(tile.count):
            with builder.if_then(builder.icmp_signed(">", n, ir.Constant(n.type, i))):
                at = pointer(builder, builder.add(base, builder.mul(step, ir.Constant(step.type, i))), f32x16.llvm)
                result = builder.fadd(builder.extract_value(value, i), extra)
                with builder.if_else(adding) as (yes, no):
                    with yes:
                        builder.store(builder.fadd(result, builder.load(at, align=1)), at, align=1)
                    with no:
                        builder.store(result, at, align=1)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64, types.int64, f32x16, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def keep_above(typingctx: Any, x: Any, limit: Any, value: Any) -> Any:
    """Lanes of `value` where x > limit (a scalar), 0 elsewhere; f32x16."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        above = builder.fcmp_ordered(">", args[0], splat(builder, args[1], 16))
        return builder.select(above, args[2], ir.Constant(f32x16.llvm, None))

    return f32x16(f32x16, types.float32, f32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_store_all(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Writes every vector of a tile to address, address + stride, ..."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        for i in range(tile.count):
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, i)))
            builder.store(builder.extract_value(args[0], i), pointer(builder, at, tile.vec.llvm), align=1)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_load(typingctx: Any, like: Any, address: Any, stride: Any) -> Any:
    """As many vectors as `like` has, from address, address + stride, ..."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def each(i: int) -> ir.Value:
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, i)))
            return builder.load(pointer(builder, at, like.vec.llvm), align=1)

        return tile_map(builder, like, each)

    return like(like, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_f16(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes a float32 as a half, rounded to nearest even."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(builder.fptrunc(args[1], ir.HalfType()), pointer(builder, args[0], ir.HalfType()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def zero_like(typingctx: Any, tile: Any) -> Any:
    """A tile of zeros of the same kind."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return ir.Constant(tile.llvm, None)

    return tile(tile), codegen
