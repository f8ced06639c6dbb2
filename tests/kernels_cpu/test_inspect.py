"""Reading machine code: loops and instruction counts; and that code for NEON, compiled anywhere, has the instructions it should."""

from __future__ import annotations

import platform
import re

import pytest

from localrun.kernels_cpu import inspect

ASSEMBLY = """
\t.globl\tkernel
kernel:
\tpushq\t%rbx
\tjle\t.LBB0_9
.LBB0_1:                                # a block
\tvpxor\t%xmm0, %xmm0, %xmm0
.LBB0_2:
\tvmovdqu64\t(%rax), %zmm1
\tvpdpbusd\t(%rcx){1to16}, %zmm1, %zmm0
\tvpdpbusd\t4(%rcx){1to16}, %zmm1, %zmm0
\taddq\t$64, %rax
\tjne\t.LBB0_2                        # until the block ends
\tvfmadd231ps\t%zmm0, %zmm2, %zmm3
\tjg\t.LBB0_1
.LBB0_9:
\tretq
"""


def test_loops_are_found_inner_ones_first() -> None:
    lines = ASSEMBLY.splitlines()
    found = inspect.loops(lines)
    assert [(lines[loop.first][:7], lines[loop.last].split()[0]) for loop in found] == [(".LBB0_2", "jne"), (".LBB0_1", "jg")]
    assert found[0] in found[1]
    assert found[1] not in found[0]


def test_counts_follow_from_the_multiplications_a_block_needs() -> None:
    """Q8_0: 32 values in 16 rows are 8 dot products of 64 bytes, so that the loop with two of them runs four times."""
    report = inspect.analyse(ASSEMBLY, "avx512", "Q8_0", 1)
    assert (report.steps, report.weights) == (4, 32)
    assert report.total == 4 * 5 + 3
    assert report.per_64_weights == 46


def test_code_without_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="no loop multiplies weights"):
        inspect.analyse("kernel:\n\tretq\n", "avx512", "Q8_0", 1)
    with pytest.raises(ValueError, match="generic has no instruction for dot products"):
        inspect.analyse(ASSEMBLY, "generic", "Q8_0", 1)


@pytest.mark.parametrize(
    ("name", "mnemonics", "times"),
    [("Q4_K", "sdot addp smull", 32), ("Q8_0", "sdot eor", 8), ("IQ4_XS", "sdot tbl", 16), ("F16", "fcvtl fmla", 1)],
)
def test_neon_has_its_instructions(name: str, mnemonics: str, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And the loop that multiplies runs as often as it must; nothing of it is kept in memory."""
    assert inspect.main([name, "--isa", "neon", "--all"]) == 0
    out = capsys.readouterr().out
    assert all(f"\t{mnemonic}" in out for mnemonic in mnemonics.split())
    assert f"It runs {times} time(s) for" in out
    assert inspect.main([name, "--isa", "neon"]) == 0
    assert "sp" not in re.findall(r"\[(\w+)", capsys.readouterr().out)
    assert f"{name}, neon, tile of 16 rows, 1 token(s)." in out
    assert "Instructions on 64 weights of each row: " in out


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 code is compiled on x86 only")
def test_prints_the_inner_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 weights each, AVX2 needs 16 rows * 64 / 32 = 32 multiplications a token, and a loop around them."""
    assert inspect.main(["Q4_0", "--isa", "avx2", "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("\tvpmaddubsw") == 64 // 2
    assert ".LBB" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("Instructions on 64 weights of each row: ")


def test_unusable_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["I32"]) == 2
    assert "I32 holds no weights" in capsys.readouterr().err
    assert inspect.main(["Q4_K", "--isa", "mmx"]) == 2
    assert "known are amx, avx512, avxvnni, avx2, neon, generic" in capsys.readouterr().err
