"""Phi-3 and Phi-4-mini checkpoints: Q, K and V in one matrix, gate and up in one, as in GGUF; LongRoPE (Ding et al. 2024)."""

from __future__ import annotations

import math

import numpy as np

from localrun.convert.config import Config
from localrun.convert.decoder import LAYER, add_rope, add_tensors, decoder, head_size, note_window, rope_values
from localrun.convert.plan import Made, Plan
from localrun.convert.safetensors import Safetensors

FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


def plan(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = decoder(c, "phi3")
    values = rope_values(c)
    share = values.float("partial_rotary_factor", None, above=0) or c.float("partial_rotary_factor", 1.0, above=0)
    n_rot = int(share * head_size(c))
    made.add("uint32", rope__dimension_count=n_rot)
    kind = values.str("rope_type", None) or values.str("type", "default")
    if kind in ("longrope", "su"):
        made.add("float32", rope__freq_base=values.float("rope_theta", None, above=0) or c.float("rope_theta", 10_000.0, above=0))
        _add_longrope(made, c, values, n_rot)
    else:
        add_rope(made, c, n_rot=n_rot)
    own = {name: leaf for name, leaf in LAYER.items() if leaf not in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")}
    add_tensors(made, c, tensors, layer=own | FUSED)
    note_window(made, c)
    return made


def _add_longrope(made: Plan, c: Config, values: Config, n_rot: int) -> None:
    """Two sets of divisors of frequencies, and what cosines and sines grow by: sqrt(1 + ln(scale) / ln(original context))."""
    context: int = c.int("max_position_embeddings", minimum=1)
    original: int = values.int("original_max_position_embeddings", None, minimum=2) or c.int(
        "original_max_position_embeddings", context, minimum=2
    )
    scale = values.float("factor", None, above=0) or context / original
    grown = 1.0 if scale <= 1.0 else math.sqrt(1.0 + math.log(scale) / math.log(original))
    made.add("uint32", rope__scaling__original_context_length=original)
    made.add("float32", rope__scaling__attn_factor=values.float("attention_factor", grown, above=0))
    for length in ("long", "short"):
        values.refuse(f"{length}_mscale", "it is not supported")
        factors = np.array(values.floats(f"{length}_factor", n_rot // 2), np.float32)
        made.tensors.append(Made(f"rope_factors_{length}.weight", factors))
