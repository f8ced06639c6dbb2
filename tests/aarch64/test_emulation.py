"""The kernels for NEON, run: an emulated 64-bit ARM machine runs tests of kernels, and whole models, to the bits that they give here.

Emulation shows wrong instructions and wrong results; not the order in which the cores of a real machine see memory, nor speed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.aarch64 import machine
from tests.conftest import ROOT

TIMEOUT_S = 900
pytestmark = [
    pytest.mark.skipif(bool(machine.missing()), reason=f"no 64-bit ARM machine is emulated: {machine.missing()}"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]

TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4", "F16")
"""With kernels of their own for every number of tokens."""
MODELS = ("llama-k/q4_K/q8_0", "gemma2/q8_0/f16", "gpt-oss/mxfp4/q4_0", "falcon-h1/q8_0/f16")
"""NAME/VARIANT/KV TYPE: K-quants; windows and soft caps; sinks and experts; a state beside attention."""


def emulated(work: Path, *arguments: str, cpu: str = machine.CPU) -> str:
    """What a Python program says there; fails with its last lines when it does not end well."""
    with machine.start(arguments, work, cpu) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        last = "\n".join(output.splitlines()[-60:])
        assert process.returncode == 0, f"the emulated program ended with status {process.returncode}:\n{last}"
    return output


@pytest.mark.parametrize(("cpu", "found"), [("neoverse-n1", "neon generic"), ("cortex-a72", "generic")])
def test_dot_products_are_noticed(cpu: str, found: str, tmp_path: Path) -> None:
    """Two processors of which only the first has SDOT."""
    asked = "from localrun.kernels_cpu import isa; print(*isa.available())"
    assert emulated(tmp_path, "-c", asked, cpu=cpu).strip() == found


def test_kernels_keep_the_contract(tmp_path: Path) -> None:
    """The matmuls' own tests there: any number of tokens, packed or not, and the quantization of activations, bit for bit as in NumPy."""
    wanted = [f"test_matmul_keeps_the_contract[neon-{name}]" for name in TYPES] + ["test_quantized_activations[neon]"]
    tests = [f"tests/kernels_cpu/test_matmul.py::{name}" for name in wanted]
    plugins = ["-p", "tests.aarch64.inside", "-p", "no:cacheprovider"]
    output = emulated(tmp_path, "-m", "pytest", "-q", *plugins, f"--basetemp={tmp_path / 'there'}", *tests)
    assert f"{len(wanted)} passed" in output.splitlines()[-1]


def test_models_give_the_same_bits(tmp_path: Path, shared: Path) -> None:
    """Prompts whole and cut, single tokens, a neighbour in the batch: attention, the cache, norms, activations, experts, a state."""
    arguments = ["-m", "tests.aarch64.forward", str(shared / "arch")]
    with machine.start([*arguments, str(tmp_path / "there.npz"), *MODELS], tmp_path) as process:
        subprocess.run([sys.executable, *arguments, str(tmp_path / "here.npz"), *MODELS], cwd=ROOT, check=True, timeout=TIMEOUT_S)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output[-5000:]
    with np.load(tmp_path / "here.npz") as here, np.load(tmp_path / "there.npz") as there:
        assert set(here.files) == set(there.files) == set(MODELS)
        for case in MODELS:
            np.testing.assert_array_equal(there[case].view(np.uint32), here[case].view(np.uint32), err_msg=case)
