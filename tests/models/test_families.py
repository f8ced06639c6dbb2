"""What families say of their files, without computing: every tensor is needed or known to be optional, nothing may be left over."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, open_gguf
from localrun.models.params import Keys
from localrun.models.registry import ARCHITECTURES, family_of
from tests.conformance.test_arch import KNOWN
from tests.conftest import REFERENCE

FILES = sorted(dict(reversed(KNOWN)).items())
"""The first variant that runs of each model of the conformance data."""

OPTIONAL = {
    "output.weight": "the embedding takes its place",
    "rope_freqs.weight": "frequencies as they are",
    "rope_factors_long.weight": "frequencies as they are",
    "rope_factors_short.weight": "frequencies as they are",
    "output.bias": "no bias",
    "exp_probs_b.bias": "no bias",
    "attn_q_norm.bias": "no part of the mathematics",
    "attn_k_norm.bias": "no part of the mathematics",
    "attn_sub_norm.bias": "no bias",
    "ssm_conv1d.bias": "no bias",
    "layer_output_scale.weight": "1",
    "token_types.weight": "tokens have no types",
    "cls.weight": "the head is one matrix",
    "cls.bias": "no bias",
    "cls.output.bias": "no bias",
}
"""Tensors without which a file is still a model, by the end of the name, and what then holds."""
BIASES = tuple(f"{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
NORM_BIASES = ("attn_norm.bias", "ffn_norm.bias", "output_norm.bias")
FIRST_NORM = {"modern-bert": ("blk.0.attn_norm.weight",)}
"""The first layer reads the normed embedding as it is."""
SHARED_KV = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
"""Of Gemma 4: layers that share have none, and where there is no attn_v it is attn_k."""


def opened(name: str, variant: str) -> GGUFFile:
    path = REFERENCE / "arch" / name / f"{variant}.gguf"
    if not path.exists():
        pytest.skip(f"conformance data not present ({path})")
    return open_gguf(path)


def may_lack(architecture: str, tensor: str) -> bool:
    part = tensor.split(".", 2)[2] if tensor.startswith("blk.") else tensor
    of_one = SHARED_KV if architecture == "gemma4" else ()
    return part in (*OPTIONAL, *BIASES, *NORM_BIASES, *of_one) or tensor in FIRST_NORM.get(architecture, ())


def one_layer_and_the_rest(gguf: GGUFFile) -> list[str]:
    """Names of the tensors outside layers, and of one layer of each kind."""
    kinds: dict[str, str] = {}
    for name in gguf.tensors:
        kinds.setdefault(name.split(".", 2)[2] if name.startswith("blk.") else name, name)
    return list(kinds.values())


@pytest.mark.parametrize(("name", "variant"), FILES)
def test_a_missing_tensor_is_named(name: str, variant: str) -> None:
    with opened(name, variant) as gguf:
        family = family_of(gguf)
        family.read(Keys(gguf), gguf)
        whole = dict(gguf.tensors)
        refused = 0
        for tensor in one_layer_and_the_rest(gguf):
            gguf.tensors = {other: info for other, info in whole.items() if other != tensor}
            try:
                family.read(Keys(gguf), gguf)
            except ModelFileError as error:
                refused += 1
                assert "\n" not in str(error)
            else:
                assert may_lack(gguf.architecture, tensor), f"{name} is accepted without {tensor}"
        gguf.tensors = whole
    assert refused > 3


@pytest.mark.parametrize(("name", "variant"), FILES)
def test_a_tensor_left_over_is_named(name: str, variant: str) -> None:
    with opened(name, variant) as gguf:
        family = family_of(gguf)
        some = next(iter(gguf.tensors.values()))
        surplus = TensorInfo("blk.0.surplus.weight", some.shape, some.type, some.offset, some.nbytes, some.file)
        gguf.tensors = {**gguf.tensors, surplus.name: surplus}
        with pytest.raises(ModelFileError, match=r"blk\.0\.surplus\.weight.* is no part of"):
            family.read(Keys(gguf), gguf)


@pytest.mark.parametrize(("name", "variant"), FILES)
def test_a_tensor_of_another_shape_is_named(name: str, variant: str) -> None:
    with opened(name, variant) as gguf:
        family = family_of(gguf)
        whole = dict(gguf.tensors)
        for tensor in one_layer_and_the_rest(gguf):
            info = whole[tensor]
            shape = (info.shape[0] + 32, *info.shape[1:])
            gguf.tensors = {**whole, tensor: TensorInfo(info.name, shape, info.type, info.offset, info.nbytes, info.file)}
            with pytest.raises(ModelFileError):
                family.read(Keys(gguf), gguf)


@pytest.mark.parametrize("key", ["pooling_type", "expert_count"])
def test_what_changes_the_mathematics_is_refused_by_name(key: str) -> None:
    with opened("qwen2", "f32") as gguf:
        gguf.metadata.put(f"qwen2.{key}", 4)
        gguf.value_types = {**gguf.value_types, f"qwen2.{key}": "uint32"}
        if key == "expert_count":
            gguf.metadata.put("qwen2.expert_used_count", 2)
            gguf.value_types["qwen2.expert_used_count"] = "uint32"
        with pytest.raises(ModelFileError, match=key):
            family_of(gguf).read(Keys(gguf), gguf)


@pytest.mark.parametrize("module", sorted(set(ARCHITECTURES.values())))
def test_a_family_says_what_it_is(module: str) -> None:
    """docs/models.md is made of these lines."""
    family = importlib.import_module(f"localrun.models.{module}")
    assert family.__doc__ and len(family.__doc__.split("\n\n")[0]) > 30
    assert len(Path(str(family.__file__)).read_text(encoding="utf-8").splitlines()) <= 220
