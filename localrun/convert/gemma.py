"""Gemma, Gemma 2 and Gemma 3 (its text part) checkpoints. Norms are stored as what is to be added to 1; in GGUF files 1 is added."""

from __future__ import annotations

import math

from localrun.convert.config import Config
from localrun.convert.decoder import LAYER, add_rope, add_tensors, decoder, head_size, rope_values
from localrun.convert.plan import Copied, Plan
from localrun.convert.safetensors import Safetensors

_ACTIVATION = ("gelu_pytorch_tanh", "gelu")
"""The first configurations say gelu and mean its approximation by tanh, as the model's authors corrected later."""
_FOUR_NORMS = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
PATTERN = 6
"""In Gemma 3 every sixth layer attends to everything."""
LOCAL_BASE = 10_000.0
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _take(name: str, source: str) -> Copied:
    return Copied(name, source, plus=1.0 if name.endswith("norm.weight") else 0.0)


def plan_gemma(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = decoder(c, "gemma", activation=_ACTIVATION)
    add_rope(made, c)
    add_tensors(made, c, tensors, take=_take)
    return made


def plan_gemma2(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = decoder(c, "gemma2", activation=_ACTIVATION)
    _check_query_scale(c, "gemma2")
    caps = {"attn_logit_softcapping": c.float("attn_logit_softcapping", above=0)}
    caps["final_logit_softcapping"] = c.float("final_logit_softcapping", above=0)
    made.add("float32", **caps)
    made.add("uint32", attention__sliding_window=c.int("sliding_window", minimum=1))
    _check_layers(c, 2)
    add_rope(made, c)
    add_tensors(made, c, tensors, take=_take, layer=_FOUR_NORMS)
    return made


def plan_gemma3(c: Config, tensors: Safetensors) -> Plan:
    """Of a checkpoint with a vision tower, the text part. Raises ModelFileError."""
    c = _with_defaults(c.part("text_config") if c.has("text_config") else c)
    made = decoder(c, "gemma3", activation=_ACTIVATION)
    _check_query_scale(c, "gemma3")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        c.refuse(name, "soft-capping is no part of Gemma 3 as supported")
    made.add("uint32", attention__sliding_window=c.int("sliding_window", minimum=1))
    _check_layers(c, PATTERN)
    values = rope_values(c)
    # transformers 5 has an object for each kind of layer
    local = values.part("sliding_attention")
    add_rope(made, c, default_base=1_000_000.0, values=values.part("full_attention") if values.has("full_attention") else values)
    base = local.float("rope_theta", None, above=0) or c.float("rope_local_base_freq", LOCAL_BASE, above=0)
    if base != LOCAL_BASE:
        made.add("float32", rope__freq_base_swa=base)
    add_tensors(made, c, tensors, take=_take, layer=_FOUR_NORMS | _HEAD_NORMS)
    return made


def _with_defaults(c: Config) -> Config:
    """Configurations of text parts leave out what equals the defaults of transformers' Gemma3TextConfig."""
    defaults = {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    return Config(c.path, defaults | {name: value for name, value in c.values.items() if value is not None})


def _check_query_scale(c: Config, architecture: str) -> None:
    """The format has no key for the scale of queries: it is 1 / sqrt(head size), and sqrt(heads / width) in the 27B models."""
    large = c.int("num_hidden_layers") == _LAYERS_OF_27B[architecture]
    wanted = c.int("hidden_size") / c.int("num_attention_heads") if large else head_size(c)
    found = c.float("query_pre_attn_scalar", wanted, above=0)
    if not math.isclose(found, wanted):
        raise c.error("query_pre_attn_scalar", f"is {found:g}, and GGUF files of {architecture} imply {wanted:g}")


def _check_layers(c: Config, pattern: int) -> None:
    """Every `pattern`-th layer attends to everything, the others to the window."""
    stated = c.int("sliding_window_pattern", pattern) if c.has("sliding_window_pattern") else c.int("_sliding_window_pattern", pattern)
    n = c.int("num_hidden_layers")
    expected = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n)]
    if stated != pattern or c.values.get("layer_types", expected) != expected:
        raise c.error("layer_types", f"differ from the format's: every layer but each {pattern}th attends to the window")
