"""Every other kernel of the card's own source, emulated, beside the CPU's kernel of the same name on the same arguments: to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import head, sizes
from localrun.kernels_cpu.activation_sizes import META, SUPER
from localrun.kernels_cpu.attention_sizes import scratch_bytes
from localrun.kernels_cpu.routing import GATES
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_gpu.source import ROUTE_THREADS, Kernel
from tests.kernels_cpu.running import aligned, call
from tests.kernels_gpu.running import Card, bits, needs_compiler, room

pytestmark = needs_compiler
Array = NDArray[Any]
GRID = tuple[int, int, int]


def rows(rng: np.random.Generator, tokens: int, n: int, scale: float = 1.0) -> Array:
    """float32 rows with room up to a multiple of 16, the rest 0."""
    x = np.zeros((tokens, room(n)), np.float32)
    x[:, :n] = rng.normal(0, scale, (tokens, n))
    return x


def vector(rng: np.random.Generator, n: int) -> Array:
    """float32 values with room up to a multiple of 16."""
    values: Array = rows(rng, 1, n)[0]
    return values


def both(
    spec: KernelSpec, kernel: Kernel, grid: GRID, args: Sequence[Any], chunks: int, words: dict[int, Any], *, further: Sequence[int] = (),
    ignored: Sequence[Array] = (), table: Array | None = None, then: tuple[KernelSpec, int, Kernel, GRID] | None = None, seed: int = 1,
) -> list[Array]:
    """Runs both kernels on copies of the arrays among the arguments (and header words) and compares what is then in all of them.

    further: arguments that only the card's kernel has; ignored: arrays that need not be alike; table: every row's block table; then:
    another kernel of either side to run on the same arguments. Returns the arrays as the card left them.
    """
    arrays = list({id(a): a for a in (*args, *words.values()) if isinstance(a, np.ndarray)}.values())
    hosts = [aligned(array.nbytes) for array in arrays]
    for array, memory in zip(arrays, hosts):
        memory[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    card = Card(seed)
    cards = [card.put(array) for array in arrays]

    def placed(values: Iterable[Any], addresses: list[int]) -> list[int]:
        number = {id(array): i for i, array in enumerate(arrays)}
        return [addresses[number[id(value)]] if isinstance(value, np.ndarray) else int(value) for value in values]

    on_host, on_card = [memory.ctypes.data for memory in hosts], cards
    header = np.zeros(head.SIZE // 8, np.int64)
    header[[offset // 8 for offset in words]] = placed(words.values(), on_host)
    card_words = dict(zip(words, placed(words.values(), on_card)))
    if table is not None:
        pointers = np.full(words[head.TOKENS], table.ctypes.data, np.int64)
        header[head.TABLES // 8] = pointers.ctypes.data
        card_words[head.TABLES] = card.put(np.full(words[head.TOKENS], card.put(table), np.int64))
    call("generic", spec, placed(args, on_host), chunks, header)
    card.call(kernel, grid, [*placed(args, on_card), *further], card_words)
    if then:
        call("generic", then[0], placed(args, on_host), then[1], header)
        card.call(then[2], then[3], placed(args, on_card), card_words)
    results = [card.get(address, array) for address, array in zip(cards, arrays)]
    for array, memory, got in zip(arrays, hosts, results):
        if not any(array is other for other in ignored):
            expected = memory.view(array.dtype).reshape(array.shape)
            assert np.array_equal(got, expected), f"array of {array.shape}: {int((got != expected).sum())} differ"
    return results


def forms(tokens: int, n: int) -> list[Any]:
    """Readers of every kind a row of n values can have."""
    readers: list[Any] = [0] * 8
    if n % 256 == 0:
        readers[0:2] = [np.zeros((tokens, n // 256 * SUPER), np.uint8), n // 256 * SUPER]
    if n % 32 == 0:
        stride = -(-((n + 63) // 64 * 64 + n // 32 * META) // 64) * 64
        readers[2:4] = [np.zeros((tokens, stride), np.uint8), stride]
    readers[4:6] = [np.zeros((tokens, room(n)), np.float32), room(n) * 4]
    return readers


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("n", [5, 96, 512, 8448])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm(kind: int, n: int, with_bias: bool) -> None:
    rng = np.random.default_rng(n + kind)
    x = rows(rng, 3, n)
    scratch = np.zeros_like(x)
    bias = vector(rng, n) if with_bias else 0
    args = [x, x.strides[0], n, vector(rng, n), bits(1e-5), kind, bias, scratch, x.strides[0], *forms(3, n), 0]
    both(KernelSpec("elementwise", "norm"), Kernel("norm"), (4, 1, 1), args, 3, {head.TOKENS: 3}, ignored=[scratch])


def test_norm_of_chosen_rows() -> None:
    rng = np.random.default_rng(0)
    x, scratch = rows(rng, 5, 256), np.zeros((5, 256), np.float32)
    args = [x, 1024, 256, vector(rng, 256), bits(1e-6), 1, 0, scratch, 1024, *forms(2, 256), head.OUTPUT_ROWS]
    words = {head.TOKENS: 5, head.OUTPUTS: 2, head.OUTPUT_ROWS: np.array([4, 1], np.int32)}
    both(KernelSpec("elementwise", "norm"), Kernel("norm"), (2, 1, 1), args, 2, words, ignored=[scratch])


def test_norm_add() -> None:
    rng = np.random.default_rng(1)
    x, y = rows(rng, 3, 200), rows(rng, 3, 200)
    args = [y, y.strides[0], 200, vector(rng, 200), bits(1e-6), x, x.strides[0]]
    both(KernelSpec("elementwise", "norm_add"), Kernel("norm_add"), (3, 1, 1), args, 3, {head.TOKENS: 3})


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize(("n_heads", "dim"), [(3, 64), (5, 20), (1, 200)])
@pytest.mark.parametrize("seed", [1, 2])
def test_norm_heads(kind: int, n_heads: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(dim)
    x = rows(rng, 2, n_heads * dim)
    args = [x, x.strides[0], n_heads, dim, vector(rng, n_heads * dim), 4 * dim, vector(rng, n_heads * dim), bits(1e-6), kind]
    both(KernelSpec("heads", "norm_heads"), Kernel("norm_heads"), (2, 1, 1), args, 2, {head.TOKENS: 2}, further=[1], seed=seed)


@pytest.mark.parametrize("halves", [0, 1])
def test_rotate(halves: int) -> None:
    rng = np.random.default_rng(2)
    x, table = rows(rng, 3, 4 * 48), rng.normal(0, 1, (9, 40)).astype(np.float32)
    args = [x, x.strides[0], 4, 4 * 48, 40, head.ROPE, halves]
    words = {head.TOKENS: 3, head.POSITIONS: np.array([8, 0, 5], np.int32), head.ROPE: table}
    both(KernelSpec("heads", "rotate"), Kernel("rotate"), (3, 1, 1), args, 3, words)


def test_values_of_rows() -> None:
    """Operations value by value, in rows that no block of threads fits."""
    rng = np.random.default_rng(3)
    tokens, n = 3, 320
    grid = (-(-n // 256), tokens, 1)
    words: dict[int, Any] = {head.TOKENS: tokens}

    def fresh(scale: float = 1.0) -> Array:
        return rows(rng, tokens, n, scale)

    for act in ("silu", "gelu_tanh", "relu"):
        gate = fresh(3.0)
        args = [gate, fresh(), gate.strides[0], n, *forms(tokens, n)]
        both(KernelSpec("elementwise", "gated", (act,)), Kernel("gated", (act,)), grid, args, tokens, words, further=[1])
    for act in ("silu", "gelu_tanh", "relu", "relu_squared"):
        x = fresh(3.0)
        args = [x, x.strides[0], n, *forms(tokens, n)]
        both(KernelSpec("pointwise", "activated", (act,)), Kernel("activated", (act,)), grid, args, tokens, words, further=[1])
    gate = fresh(5.0)
    args = [gate, fresh(5.0), gate.strides[0], n, *forms(tokens, n), bits(7.0)]
    both(KernelSpec("experts", "gated_limited"), Kernel("gated_limited"), grid, args, tokens, words, further=[1])
    x = fresh(3.0)
    args = [x, x.strides[0], n, *forms(tokens, n), bits(0.8), bits(0.7), bits(0.5), bits(-1e-6)]
    both(KernelSpec("pointwise", "xielu"), Kernel("xielu"), grid, args, tokens, words, ignored=[x])
    gates: tuple[Any, ...] = (0, rows(rng, tokens, 1))
    for gate in gates:
        x, y = fresh(), fresh()
        args = [y, y.strides[0], x, x.strides[0], n, bits(0.22), gate, gate.strides[0] if isinstance(gate, np.ndarray) else 0]
        both(KernelSpec("pointwise", "add"), Kernel("add"), grid, args, tokens, words)
    x = fresh()
    both(KernelSpec("pointwise", "scale"), Kernel("scale"), grid, [x, x.strides[0], n, bits(0.3), vector(rng, n)], tokens, words)
    both(KernelSpec("pointwise", "clamp"), Kernel("clamp"), grid, [x, x.strides[0], n, bits(0.5)], tokens, words)
    words |= {head.POSITIONS: np.array([1, 0, 2], np.int32), head.ROPE: rng.normal(0, 1, 3).astype(np.float32)}
    both(KernelSpec("pointwise", "scale_by_position"), Kernel("scale_by_position"), grid, [x, x.strides[0], n, head.ROPE], tokens, words)


@pytest.mark.parametrize("gate", sorted(GATES))
@pytest.mark.parametrize(("n", "k", "groups"), [(8, 2, (1, 1)), (40, 6, (4, 2)), (300, 8, (1, 1))])
def test_experts_are_chosen_and_sorted(gate: str, n: int, k: int, groups: tuple[int, int]) -> None:
    rng = np.random.default_rng(n)
    tokens, pairs = 5, 5 * k
    scores = rows(rng, tokens, n)
    bias = vector(rng, n) * np.float32(0.01)
    scores[2, : n // 2] = scores[2, n // 2 : n // 2 * 2]  # equals
    asked = np.zeros_like(scores)
    choices, weights = np.zeros(pairs, np.int32), np.zeros(pairs, np.float32)
    args = [scores, scores.strides[0], n, k, GATES[gate], bias, 1, bits(2.5), *groups, choices, weights, asked, scores.strides[0]]
    words = {head.TOKENS: tokens}
    spec, kernel = KernelSpec("experts", "route"), Kernel("route", (), ROUTE_THREADS)
    results = both(spec, kernel, (tokens, 1, 1), args, tokens, words, ignored=[asked, scores])
    chosen = results[2]
    assert len({tuple(sorted(row)) for row in chosen.reshape(tokens, k)}) > 1
    order, places, starts, active = (np.zeros(size, np.int32) for size in (pairs, pairs, n + 1, n))
    n_active = np.zeros(1, np.int32)
    args = [chosen, n, k, order, places, starts, active, n_active]
    results = both(KernelSpec("experts", "sort"), Kernel("sort"), (1, 1, 1), args, 1, words)
    x = rows(rng, tokens, 96)
    scratch = np.zeros((pairs, 96), np.float32)
    args = [x, x.strides[0], 96, results[1], *forms(pairs, 96), k, weights, scratch, 96 * 4]
    both(KernelSpec("experts", "gather"), Kernel("gather"), (1, pairs, 1), args, pairs, words, ignored=[scratch])
    y, out = rows(rng, pairs, 96), rows(rng, tokens, 96)
    for add in (0, 1):
        args = [y, y.strides[0], 96, weights, results[2], k, out, out.strides[0], add, bits(0.7)]
        both(KernelSpec("experts", "combine"), Kernel("combine"), (1, tokens, 1), args, tokens, words)


# ---- the cache and attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", sizes.KV_TYPES)
@pytest.mark.parametrize(("dim", "dim_v", "normed", "halves"), [(64, 32, True, 1), (32, 64, False, 0)])
def test_rope_and_cache(kv_type: str, dim: int, dim_v: int, normed: bool, halves: int) -> None:
    rng = np.random.default_rng(dim)
    tokens, n_heads, n_kv = 3, 4, 2
    q, k, v = rows(rng, tokens, n_heads * dim), rows(rng, tokens, n_kv * dim), rows(rng, tokens, n_kv * dim_v)
    block_bytes = 64 + sizes.layer_block_bytes(n_kv, dim, dim_v, kv_type)
    pool, table = np.zeros(4 * block_bytes, np.uint8), np.array([2, 1, 3], np.int32)
    weights = [vector(rng, dim), vector(rng, dim)] if normed else [0, 0]
    args = [
        q, q.strides[0], k, k.strides[0], v, v.strides[0], n_heads, n_kv, *weights, bits(1e-6), dim // 2, head.ROPE, halves, 64, bits(0.3),
    ]  # fmt: skip
    words = {
        head.TOKENS: tokens, head.POSITIONS: np.array([15, 16, 40], np.int32), head.KV: pool, head.KV_BLOCK: block_bytes,
        head.ROPE: rng.normal(0, 1, (41, dim // 2)).astype(np.float32),
    }  # fmt: skip
    spec, kernel = KernelSpec("attention", "rope_kv", (kv_type, dim, dim_v)), Kernel("rope_kv", (f"cache_{kv_type}", dim, dim_v))
    pools = both(spec, kernel, (tokens, 1, 1), args, tokens, words, table=table)
    assert any(array.shape == pool.shape and array.any() for array in pools)


@pytest.mark.parametrize("kv_type", sizes.KV_TYPES)
@pytest.mark.parametrize(
    ("dim", "dim_v", "window", "cap", "with_sinks", "sloped"),
    [(32, 32, 0, 0.0, False, False), (64, 32, 100, 0.0, True, False), (32, 64, 0, 20.0, False, True)],
)
@pytest.mark.parametrize("split", [False, True])
def test_attention(kv_type: str, dim: int, dim_v: int, window: int, cap: float, with_sinks: bool, sloped: bool, split: bool) -> None:
    """Rows of two sequences over more than one part, tile by tile or in parts that are merged."""
    rng = np.random.default_rng(dim + window)
    n_heads, n_kv = 6, 2
    positions = np.array([1029, 700] if split else [1027, 1028, 1029, 63, 64], np.int32)
    tiles = np.array([[0, 1], [1, 1]] if split else [[0, 3], [3, 2]], np.int32)
    block_bytes = sizes.layer_block_bytes(n_kv, dim, dim_v, kv_type)
    pool = filled_pool(rng, 70, n_kv, dim, dim_v, kv_type, block_bytes)
    q = rows(rng, len(positions), n_heads * dim, 0.5)
    out = np.zeros((len(positions), room(n_heads * dim_v)), np.float32)
    parts = 3 if split else 1
    partial = np.zeros(2 * n_heads * parts * (64 + room(dim_v) * 4), np.uint8)
    scratch = np.zeros(scratch_bytes(dim, dim_v), np.uint8)
    args = [
        q, q.strides[0], n_heads, n_kv, out, out.strides[0], 0, window, bits(cap), scratch, 0, vector(rng, n_heads) if with_sinks else 0,
        vector(rng, n_heads) if sloped else 0,
    ]  # fmt: skip
    words = {
        head.TOKENS: len(positions), head.POSITIONS: positions, head.KV: pool, head.KV_BLOCK: block_bytes, head.TILES: tiles,
        head.N_TILES: 2, head.PARTS: parts, head.PARTIAL: partial,
    }  # fmt: skip
    table = rng.permutation(70).astype(np.int32)
    params = (kv_type, dim, dim_v, int(cap > 0), int(sloped))
    merge = (KernelSpec("attention", "attention_merge", (dim_v,)), 2 * n_kv, Kernel("attention_merge", (dim_v,)), (2, n_heads, 1))
    spec, kernel = KernelSpec("attention", "attention", params), Kernel("attention", (f"cache_{kv_type}", *params[1:]))
    results = both(
        spec, kernel, (3, n_kv, parts + 1), args, 2 * n_kv * parts, words, table=table, ignored=[scratch, partial],
        then=merge if split else None,
    )  # fmt: skip
    assert np.abs(results[1]).max() > 0.01


def filled_pool(rng: np.random.Generator, n_blocks: int, n_kv: int, dim: int, dim_v: int, kv_type: str, block_bytes: int) -> Array:
    """A pool whose every position holds something finite."""
    if kv_type == "f32":
        return rng.normal(0, 1, n_blocks * block_bytes // 4).astype(np.float32)
    if kv_type == "f16":
        return rng.normal(0, 1, n_blocks * block_bytes // 2).astype(np.float16)
    if kv_type == "bf16":
        return (rng.normal(0, 1, n_blocks * block_bytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pool = rng.integers(0, 256, (n_blocks, block_bytes), np.uint8)
    at = 0
    for n in (dim, dim_v):
        for _ in range(n_kv):
            size = sizes.head_bytes(kv_type, n)
            scales = n // sizes.GROUP * sizes.BLOCK
            halves = rng.uniform(0.001, 0.02, (n_blocks, scales)).astype(np.float16)
            pool[:, at + size - 2 * scales : at + size] = halves.view(np.uint8)
            at += size
    return pool.reshape(-1)
