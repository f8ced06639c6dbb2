"""What a model will take and give on this machine, from its header alone: memory by part, the longest context that fits, tokens a second.

Arithmetic only: facts, sizes and a measured bandwidth go in, a plan comes out. The layouts are those of kernels_cpu.sizes; what the
runner's process takes beside them was measured (see the constants).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from localrun.errors import BadRequest
from localrun.kernels_cpu.sizes import BLOCK, KV_TYPES, fits, layer_block_bytes
from localrun.models.split import split
from localrun.store.facts import Facts

MAX_BATCH = 512
"""Rows of a forward pass, as a runner is loaded with."""
PROCESS_BYTES = 60_000_000
"""An interpreter, NumPy and compiled kernels. Measured with Python 3.11: 43 MB after the imports, 17 MB more when loaded."""
BASELINE_BYTES = 43_000_000
"""The part of PROCESS_BYTES that is there before a model is."""
BYTES_PER_TOKEN = 400
"""Of the vocabulary: in the tokenizer, in the table of pieces, in lists of strings. Measured on vocabularies of 49,152 to 262,144."""
BYTES_PER_MERGE = 190
LEAST_CONTEXT = 512
"""A model that has not room for so many tokens is of no use."""
SPARE_PACKED = 1 << 30
"""What must stay free beside repacked weights; with less, they are read where they lie in the file."""
LOGIT_ROWS = 8


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes."""

    facts: Facts
    num_ctx: int
    users: int
    kv_type: str
    available: int
    """Memory that was free when the plan was made."""
    packed: bool
    """Whether the weights are repacked; else they are read as they lie in the file, which is slower."""
    weights: int
    """Packed, or the file's pages."""
    embedding: int
    """The table in the file, beside packed weights that hold it too."""
    kv: int
    """For `users` contexts of `num_ctx` tokens."""
    state: int
    """Of recurrent layers: two slots for each user, one for the sequence and one for a snapshot that the next turn starts from."""
    scratch: int
    tokenizer: int
    process: int
    kv_per_1000: dict[str, int] = field(default_factory=dict)
    """By KV type; types that the model's heads have no room for are missing."""
    max_ctx: int = 0
    """Longest context that fits for each of `users`, at most the model's own; 0: not even a short one."""
    tokens_per_second: float = 0.0
    """At most, for one user with a short context: the speed of memory; 0: not known."""

    @property
    def total(self) -> int:
        return self.weights + self.embedding + self.kv + self.state + self.scratch + self.tokenizer + self.process

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    def to_json(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "architecture": facts.architecture,
            "title": facts.title,
            "parameters": facts.parameters,
            "quantization": {
                "name": facts.quantization,
                "words": in_words(facts.quantization),
                "bits_per_weight": round(facts.bits_per_weight, 2),
            },
            "size": facts.file_bytes,
            "context_length": facts.context_length,
            "num_ctx": self.num_ctx,
            "users": self.users,
            "kv_cache_type": self.kv_type,
            "memory": {
                "weights": self.weights, "embedding": self.embedding, "kv": self.kv, "state": self.state, "scratch": self.scratch,
                "tokenizer": self.tokenizer, "process": self.process, "total": self.total, "available": self.available,
            },
            "packed": self.packed,
            "kv_per_1000_tokens": self.kv_per_1000,
            "fits": self.fits,
            "max_ctx": self.max_ctx,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "unsupported": facts.unsupported,
        }  # fmt: skip


def kv_bytes(facts: Facts, kv_type: str, tokens: int) -> int:
    """Of whole blocks for `tokens` tokens of one sequence. Raises BadRequest when the heads cannot be kept in that type."""
    for _, _, dim, dim_v in facts.kv:
        if not fits(kv_type, dim, dim_v):
            raise BadRequest(f"kv_cache_type {kv_type} cannot hold this model's heads of {dim} and {dim_v} values", param="kv_cache_type")
    block = sum(n * layer_block_bytes(n_kv, dim, dim_v, kv_type) for n, n_kv, dim, dim_v in facts.kv)
    return -(-tokens // BLOCK) * block


def plan(facts: Facts, *, available: int, num_ctx: int = 0, users: int = 1, kv_type: str = "f16", bandwidth: float = 0.0) -> Plan:
    """num_ctx: 0 means the model's own; bandwidth: bytes a second that all threads together read, 0: not known.

    Raises BadRequest for a KV type that does not exist or cannot hold this model's heads, or numbers below 1.
    """
    if kv_type not in KV_TYPES:
        raise BadRequest(f"kv_cache_type {kv_type!r} is not one of {', '.join(KV_TYPES)}", param="kv_cache_type")
    if users < 1 or num_ctx < 0:
        raise BadRequest("users and num_ctx must be at least 1", param="users" if users < 1 else "num_ctx")
    if facts.context_length:
        num_ctx = min(num_ctx, facts.context_length)
    num_ctx = num_ctx or facts.context_length or 2048
    packed = available > facts.packed_bytes + SPARE_PACKED
    fixed = Plan(
        facts=facts,
        num_ctx=num_ctx,
        users=users,
        kv_type=kv_type,
        available=available,
        packed=packed,
        weights=facts.packed_bytes if packed else facts.tensor_bytes,
        embedding=facts.mapped_bytes if packed else 0,
        kv=0,
        state=2 * users * facts.state_bytes,
        scratch=facts.row_bytes * MAX_BATCH + LOGIT_ROWS * 4 * facts.vocabulary,
        tokenizer=BYTES_PER_TOKEN * facts.vocabulary + BYTES_PER_MERGE * facts.merges,
        process=PROCESS_BYTES,
    )
    per_block = kv_bytes(facts, kv_type, 1)
    free_blocks = max(0, available - fixed.total) // per_block if per_block else num_ctx
    longest = free_blocks // users * BLOCK
    per_1000 = {}
    for name in KV_TYPES:
        if all(fits(name, dim, dim_v) for _, _, dim, dim_v in facts.kv):
            per_1000[name] = kv_bytes(facts, name, BLOCK) * 1000 // BLOCK
    read = facts.read_bytes + kv_bytes(facts, kv_type, LEAST_CONTEXT) + facts.state_bytes
    return replace(
        fixed,
        kv=users * kv_bytes(facts, kv_type, num_ctx),
        kv_per_1000=per_1000,
        max_ctx=min(longest, facts.context_length or longest),
        tokens_per_second=bandwidth / read if read else 0.0,
    )


class CardMemory(NamedTuple):
    """A card and what is free on it, in bytes."""

    name: str
    free: int


def cards_plan(made: Plan, cards: Sequence[CardMemory], asked: int, usable: bool) -> dict[str, Any] | None:
    """About how many layers would go on cards; None: there are none. asked: as the option num_gpu; usable: whether CuPy is installed.

    An estimate: layers are taken for equally large, what comes after them for one more.
    """
    facts = made.facts
    n = sum(count for count, *_ in facts.kv)
    if not cards or not n:
        return None
    share, kv = facts.tensor_bytes // (n + 1), made.kv // n
    places = split([card.free for card in cards], [share + kv] * n, share, facts.row_bytes * MAX_BATCH, asked) if usable else ()
    return {
        "cards": [{"name": card.name, "free": card.free} for card in cards],
        "layers": min(len(places), n),
        "of": n,
        "size_vram": len(places) * share + min(len(places), n) * kv,
        "note": "" if usable else "CuPy is not installed (pip install localrun[gpu])",
    }


def shortfall(facts: Facts, available: int, kv_type: str = "f16") -> str:
    """Why this model cannot be loaded into so much memory, with the numbers; empty when it can."""
    least = plan(facts, available=available, num_ctx=LEAST_CONTEXT, kv_type=kv_type)
    # the file's pages can be given back at any time, so what must fit is the smaller of the two
    needed = least.total - least.weights - least.embedding + min(facts.tensor_bytes, least.weights + least.embedding)
    if needed <= available:
        return ""
    parts = (
        ("weights", least.weights),
        (f"KV cache of {least.num_ctx} tokens", least.kv),
        *([("recurrent state", least.state)] if least.state else []),
        ("scratch", least.scratch),
        ("tokenizer and process", least.tokenizer + least.process),
    )
    listed = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts)
    return (
        f"model requires more system memory ({_gigabytes(needed)}) than is available ({_gigabytes(available)}): {listed}; "
        "close other programs or models, or take a smaller quantization"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


_MIXES = {
    "XXS": "smallest mix",
    "XS": "very small mix",
    "S": "small mix: most layers alike",
    "M": "medium mix: the most sensitive layers in more bits",
    "L": "large mix: more of the sensitive layers in more bits",
    "XL": "largest mix",
}
_WHOLE = {
    "F32": "32-bit floats, as trained", "F16": "16-bit floats, not quantized", "BF16": "16-bit brain floats, not quantized",
    "MXFP4": "4-bit floats, 32 share a power of two", "MXFP4_MOE": "4-bit floats in the experts, 8 bits elsewhere",
    "NVFP4": "4-bit floats, 16 share an 8-bit scale",
}  # fmt: skip


def in_words(name: str) -> str:
    """A quantization's name in words: "Q4_K_M" is "4 bits, K-quant (...), medium mix ...". Empty for a name that says nothing."""
    upper = name.upper()
    if upper in _WHOLE:
        return _WHOLE[upper]
    found = re.fullmatch(r"(IQ|TQ|Q)(\d)_(K|0|1|NL|XXS|XS|S|M)(?:_(XXS|XS|S|M|L|XL))?", upper)
    if found is None:
        return ""
    family, bits, kind, mix = found.groups()
    if family == "TQ":
        return f"ternary: every weight is -1, 0 or 1 times a scale ({'1.7' if bits == '1' else '2.1'} bits)"
    words = [f"{bits} bits"] if bits != "1" else ["1 bit"]
    if family == "IQ":
        words.append("importance quant: weights in groups, from a codebook" if kind != "NL" else "importance quant: 16 uneven levels")
        mix = mix or (kind if kind != "NL" else None)
    elif kind == "K":
        words.append("K-quant: blocks of 256 with two levels of scales")
    else:
        words.append("blocks of 32 with a scale" + (" and a minimum" if kind == "1" else ""))
    if mix:
        words.append(_MIXES[mix])
    return ", ".join(words)
