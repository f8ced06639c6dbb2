"""What decoder checkpoints share: the keys of config.json that become GGUF's common ones, the names of LLaMA's tensors, rotations.

A family's file says what it has of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.convert.config import Config
from localrun.convert.plan import Copied, Made, Plan, Rule, add_sizes, plan_tensors
from localrun.convert.safetensors import Safetensors

TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# of checkpoints with a vision tower the text part is nested; the tower itself is left out
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
SKIP = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq|vision_tower\..*|multi_modal_projector\..*"


def head_size(c: Config) -> int:
    """Values of one head."""
    heads: int = c.int("num_attention_heads", minimum=1)
    width: int = c.int("hidden_size", minimum=1)
    if not c.has("head_dim") and width % heads:
        raise c.error("num_attention_heads", f"is {heads}, which does not divide hidden_size {width}")
    return int(c.int("head_dim", width // heads, minimum=1))


def decoder(c: Config, architecture: str, *, activation: Collection[str] = ("silu",)) -> Plan:
    """A plan with the keys that every decoder has. Raises ModelFileError."""
    plan = Plan(architecture)
    heads = add_sizes(plan, c)
    plan.add("uint32", attention__head_count_kv=c.int("num_key_value_heads", heads, minimum=1), rope__dimension_count=head_size(c))
    if c.has("head_dim"):
        plan.add("uint32", attention__key_length=head_size(c), attention__value_length=head_size(c))
    plan.add("float32", attention__layer_norm_rms_epsilon=c.float("rms_norm_eps", above=0))
    named = c.str("hidden_activation", None) or c.str("hidden_act", next(iter(activation)))
    if named not in activation:
        raise c.error("hidden_act", f"is {named}; a {architecture} model has {' or '.join(activation)}")
    for name in ("quantization_config", "compression_config"):
        c.refuse(name, "the checkpoint is quantized; start from the unquantized one")
    return plan


def add_tensors(
    plan: Plan, c: Config, tensors: Safetensors, *, take: Rule = Copied, layer: Mapping[str, str] = LAYER
) -> None:
    """Adds the checkpoint's tensors; the output matrix is left out where it is the embedding."""
    has_head = any(name.removeprefix("language_model.") == "lm_head.weight" for name in tensors.tensors)
    # transformers' default; Gemma's configurations leave it out
    tied = c.bool("tie_word_embeddings", not has_head)
    if not tied and not has_head:
        raise c.error("tie_word_embeddings", "is false, and the checkpoint has no lm_head.weight")

    def kept(name: str, source: str) -> Copied | None:
        return None if tied and name == "output.weight" else take(name, source)

    if any(name.startswith("vision_tower.") or ".vision_tower." in name for name in tensors.tensors):
        plan.notes.append("the vision tower is left out: pictures are not supported")
    plan_tensors(plan, tensors, PREFIXES, TOP, "layers.", layer, kept, SKIP)


# ---- rotation -----------------------------------------------------------------------------------------------------------------


def rope_values(c: Config) -> Config:
    """The object that describes the rotation: rope_parameters, as transformers 5 writes, or rope_scaling."""
    return c.part("rope_parameters") if c.has("rope_parameters") else c.part("rope_scaling")


def add_rope(plan: Plan, c: Config, *, default_base: float = 10_000.0, values: Config | None = None, n_rot: int | None = None) -> None:
    """Adds base and scaling of the rotation: none, linear (Chen et al. 2023), YaRN (Peng et al. 2023) or Llama 3's by frequency.

    values: the object that describes it, where it is not the usual one. Raises ModelFileError for kinds that are not supported.
    """
    values = rope_values(c) if values is None else values
    base = values.float("rope_theta", None, above=0) or c.float("rope_theta", default_base, above=0)
    plan.add("float32", rope__freq_base=base)
    kind = values.str("rope_type", None) or values.str("type", "default")
    if kind == "linear":
        plan.add("string", rope__scaling__type="linear")
        plan.add("float32", rope__scaling__factor=values.float("factor", above=0))
    elif kind == "yarn":
        _add_yarn(plan, c, values)
    elif kind == "llama3":
        plan.tensors.append(Made("rope_freqs.weight", llama3_factors(values, base, head_size(c) if n_rot is None else n_rot)))
    elif kind != "default":
        raise values.error("rope_type", f"is {kind}, a scaling of the rotation that is not supported (linear, yarn and llama3 are)")


def _add_yarn(plan: Plan, c: Config, values: Config) -> None:
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        values.refuse(name, "YaRN with a factor of its own is not supported")
    plan.add("string", rope__scaling__type="yarn")
    plan.add("float32", rope__scaling__factor=values.float("factor", above=0))
    original = values.int("original_max_position_embeddings", c.int("max_position_embeddings"), minimum=1)
    plan.add("uint32", rope__scaling__original_context_length=original)
    for name in ("beta_fast", "beta_slow"):
        if values.has(name):
            plan.add("float32", **{f"rope__scaling__yarn_{name}": values.float(name, above=0)})


def llama3_factors(values: Config, base: float, n_rot: int) -> NDArray[np.float32]:
    """What each frequency is divided by in Llama 3.1: high ones by 1, low ones by `factor`, those between by something between.

    (Meta's description of the model; "long" and "short" are wavelengths against the original context.) float32, (n_rot / 2,).
    """
    factor = values.float("factor", above=0)
    low, high = values.float("low_freq_factor", above=0), values.float("high_freq_factor", above=0)
    if high <= low:
        raise values.error("high_freq_factor", f"is {high:g}, and should be above low_freq_factor {low:g}")
    context = values.int("original_max_position_embeddings", minimum=1)
    made = []
    for i in range(0, n_rot, 2):
        wavelength = 2 * math.pi * base ** (i / n_rot)
        if wavelength < context / high:
            made.append(1.0)
        elif wavelength > context / low:
            made.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            made.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(made, np.float32)


def note_window(plan: Plan, c: Config, *, applies: bool = True) -> None:
    """Says so when the model attended to a window in training and the format's architecture attends to everything."""
    window: Any = c.int("sliding_window", 0)
    if applies and window and window < c.int("max_position_embeddings", minimum=1):
        plan.notes.append(f"the sliding window of {window} tokens is not applied: all of the context is attended to")
