"""Qwen2 and Qwen3 checkpoints: LLaMA's names, rotation of halves as in GGUF; Qwen2 has biases, Qwen3 norms of query and key heads."""

from __future__ import annotations

from functools import partial

from localrun.convert.config import Config
from localrun.convert.decoder import LAYER, add_rope, add_tensors, decoder, note_window
from localrun.convert.plan import Plan
from localrun.convert.safetensors import Safetensors

_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def _plan(c: Config, tensors: Safetensors, *, architecture: str) -> Plan:
    made = decoder(c, architecture)
    add_rope(made, c)
    add_tensors(made, c, tensors, layer=LAYER | _NORMS if architecture == "qwen3" else LAYER)
    note_window(made, c, applies=c.bool("use_sliding_window", False))
    return made


plan_qwen2 = partial(_plan, architecture="qwen2")
plan_qwen3 = partial(_plan, architecture="qwen3")
