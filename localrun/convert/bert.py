"""BERT and Nomic BERT checkpoints: encoders that give vectors, and BERT with a head that gives a score (cross-encoders)."""

from __future__ import annotations

from localrun.convert.config import Config
from localrun.convert.plan import Copied, Plan, add_sizes, plan_tensors
from localrun.convert.safetensors import Safetensors

BERT_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_BERT_HEAD = {"pooler.dense": "cls", "classifier": "cls.output"}
BERT_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_NOMIC_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
}
_NOMIC_LAYER = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
RANK = 4
"""pooling_type of a model that scores."""


def plan_bert(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = Plan("bert")
    c.str("hidden_act", "gelu", choices=("gelu",))
    c.str("position_embedding_type", "absolute", choices=("absolute",))
    made.add("uint32", attention__head_count_kv=add_sizes(made, c))
    made.add("float32", attention__layer_norm_epsilon=c.float("layer_norm_eps", 1e-12, above=0))
    made.add("bool", attention__causal=False)
    made.keys["tokenizer.ggml.token_type_count"] = ("uint32", c.int("type_vocab_size", 2, minimum=1))
    scores = "classifier.weight" in tensors.tensors
    if scores:
        if tensors.tensors["classifier.weight"].shape[:1] != (1,):
            raise tensors.fail("classifier.weight", "has several labels; cross-encoders with one score are supported")
        made.add("uint32", pooling_type=RANK)
    skip = r"embeddings\.position_ids|cls\..*" + ("" if scores else r"|pooler\..*")
    plan_tensors(made, tensors, ("bert.",), BERT_TOP | (_BERT_HEAD if scores else {}), "encoder.layer.", BERT_LAYER, Copied, skip)
    return made


def plan_nomic(c: Config, tensors: Safetensors) -> Plan:
    """Raises ModelFileError."""
    made = Plan("nomic-bert")
    c.refuse("num_experts", "mixtures of experts are not supported")
    c.refuse("prenorm", "norms before the layers are not supported")
    c.refuse("use_rms_norm", "it is not supported")
    c.str("activation_function", choices=("swiglu",))
    if c.float("rotary_emb_fraction", 1.0) != 1.0 or c.bool("rotary_emb_interleaved", False):
        raise c.error("rotary_emb_fraction", "rotations other than of whole heads by halves are not supported")
    heads, width = c.int("n_head", minimum=1), c.int("n_embd", minimum=1)
    made.add(
        "uint32",
        vocab_size=c.int("vocab_size", minimum=1),
        context_length=c.int("max_trained_positions", None) or c.int("n_positions", minimum=1),
        embedding_length=width,
        block_count=c.int("n_layer", minimum=1),
        feed_forward_length=c.int("n_inner", minimum=1),
        attention__head_count=heads,
        attention__head_count_kv=heads,
        rope__dimension_count=width // heads,
    )
    made.add("float32", attention__layer_norm_epsilon=c.float("layer_norm_epsilon", above=0))
    made.add("float32", rope__freq_base=c.float("rotary_emb_base", 10_000.0, above=0))
    made.add("bool", attention__causal=False)
    made.keys["tokenizer.ggml.token_type_count"] = ("uint32", c.int("type_vocab_size", 2, minimum=1))
    plan_tensors(made, tensors, (), _NOMIC_TOP, "encoder.layers.", _NOMIC_LAYER, Copied, "")
    return made
