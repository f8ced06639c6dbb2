"""All the kernels that the tests of single kernels run are compiled once, in one go: one by one would take a minute."""

from __future__ import annotations

import pytest

from localrun.kernels_cpu.sizes import KV_TYPES
from localrun.kernels_gpu.emulator import compiler
from localrun.kernels_gpu.layout import CARD_TYPES
from localrun.kernels_gpu.source import ROUTE_THREADS, WARP_ROWS_THREADS, Kernel
from tests.kernels_gpu.running import Card


@pytest.fixture(scope="session", autouse=True)
def _kernels(_session_environment: None) -> None:
    if compiler() is None:
        return
    kernels = [Kernel("route", (), ROUTE_THREADS), Kernel("attention_merge", (32,)), Kernel("attention_merge", (64,))]
    for card_type in CARD_TYPES.values():
        if card_type.is_float:
            kernels += [Kernel("floats", (card_type.struct, n), WARP_ROWS_THREADS) for n in (1, 2, 4, 8)]
        else:
            kernels += [Kernel("matvec", (card_type.struct, n, 1 if n == 8 else 2), WARP_ROWS_THREADS) for n in (1, 2, 4, 8)]
            kernels += [Kernel("tiles", (card_type.struct,)), Kernel("values", (card_type.struct,), WARP_ROWS_THREADS)]
    plain = "norm norm_add norm_heads rotate gated_limited xielu add scale clamp scale_by_position sort gather combine"
    kernels += [Kernel(name) for name in plain.split()]
    kernels += [Kernel("gated", (act,)) for act in ("silu", "gelu_tanh", "relu")]
    kernels += [Kernel("activated", (act,)) for act in ("silu", "gelu_tanh", "relu", "relu_squared")]
    for kv_type in KV_TYPES:
        kernels += [Kernel("rope_kv", (f"cache_{kv_type}", *dims)) for dims in ((64, 32), (32, 64))]
        kernels += [Kernel("attention", (f"cache_{kv_type}", *params)) for params in ((32, 32, 0, 0), (64, 32, 0, 0), (32, 64, 1, 1))]
    Card().device.prepare(kernels)
