"""The same source through NVIDIA's compiler, where there is one: it compiles for every generation, and decoding spills no register."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from localrun.kernels_gpu.layout import CARD_TYPES
from localrun.kernels_gpu.source import ROUTE_THREADS, WARP_ROWS_THREADS, Kernel, source

NVCC = shutil.which("nvcc")
GENERATIONS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90")
STATIC_SHARED = 48 << 10


def decode_kernels() -> list[Kernel]:
    structs = sorted({card_type.struct for card_type in CARD_TYPES.values() if not card_type.is_float})
    kernels = [Kernel("matvec", (s, n, 1 if n == 8 else 2), WARP_ROWS_THREADS) for s in structs for n in (1, 2, 4, 8)]
    kernels += [Kernel("floats", (s, n), WARP_ROWS_THREADS) for s in ("F32", "F16", "BF16") for n in (1, 8)]
    kernels += [Kernel("rope_kv", ("cache_f16", 128, 128)), Kernel("attention_merge", (128,))]
    kernels += [Kernel("attention", ("cache_f16", 128, 128, 0, 0)), Kernel("attention", ("cache_q8_0", 64, 64, 0, 0))]
    kernels += [Kernel(name) for name in ("norm", "norm_add", "norm_heads", "add", "sort", "gather", "combine")]
    kernels += [Kernel("gated", ("silu",)), Kernel("route", (), ROUTE_THREADS)]
    return [*kernels, Kernel("expert_matvec", ("Q4_K", 1, 2), WARP_ROWS_THREADS)]


def tile_kernels() -> list[Kernel]:
    return [Kernel("tiles", (name,)) for name in ("Q4_K", "Q6_K", "Q5_1", "Expanded256<true>")]


@pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_without_spilling(generation: str, tmp_path: Path) -> None:
    decode = decode_kernels()
    text = source([*decode, *tile_kernels()], "card")
    (tmp_path / "kernels.cu").write_text(text, encoding="utf-8")
    command = [str(NVCC), "-std=c++17", "-cubin", f"-arch={generation}", "-Xptxas", "-v", "--fmad=false", "-w", "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, str(tmp_path / "kernels.cu")], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for entry in done.stderr.split("Compiling entry function '")[1:]:
        name = entry.split("'")[0]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = re.search(r"Used (\d+) registers", entry)
        shared = re.search(r"(\d+) bytes smem", entry)
        assert spilled and used, entry[:300]
        found[name] = (int(used[1]), int(spilled[1]) + int(spilled[2]), int(shared[1]) if shared else 0)
    print(f"\n{generation}: registers, spilled bytes, shared bytes")  # noqa: T201
    for name, numbers in sorted(found.items()):
        print(f"  {name}: {numbers}")  # noqa: T201
    assert set(found) >= {kernel.symbol for kernel in decode}
    assert not {name: numbers for name, numbers in found.items() if numbers[1] and name in {kernel.symbol for kernel in decode}}
    assert all(numbers[2] <= STATIC_SHARED for numbers in found.values())
