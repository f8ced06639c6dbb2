"""LLaMA and Mistral checkpoints: LlamaForCausalLM, MistralForCausalLM.

Rows of queries and keys are reordered: Hugging Face rotates the two halves of a head against each other, GGUF's "llama" neighbouring pairs
(RoFormer's own way), so row i of a half becomes row 2 i or 2 i + 1 of its head.
"""

from __future__ import annotations

import re

from localrun.convert.config import Config
from localrun.convert.decoder import LAYER, add_rope, add_tensors, decoder, note_window
from localrun.convert.plan import Copied, Plan
from localrun.convert.safetensors import Safetensors

ARCHITECTURE = "llama"


def heads_of(name: str, n_heads: int, n_kv: int) -> int:
    """Of the GGUF tensor `name`: heads whose rows are reordered; 0 for all but queries and keys."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    return 0 if found is None else n_heads if found[1] == "q" else n_kv


def plan(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = decoder(c, ARCHITECTURE)
    c.refuse("pretraining_tp", "checkpoints cut for tensor parallelism are not supported", harmless=(1,))
    n_heads: int = c.int("num_attention_heads")
    n_kv: int = c.int("num_key_value_heads", n_heads)
    add_rope(made, c)
    add_tensors(made, c, tensors, layer=LAYER, take=lambda name, source: Copied(name, source, heads=heads_of(name, n_heads, n_kv)))
    note_window(made, c)
    return made
