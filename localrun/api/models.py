"""What is said of models: the objects of /api/tags, /api/ps, /api/show and /v1/models. Pure functions of what the store and the GGUF
file say; opens no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localrun.durations import FOREVER
from localrun.messages import Inspected, Loaded
from localrun.store import StoredModel, modelfile_for
from localrun.store.facts import Facts
from localrun.store.parameters import to_texts

LONGEST_ARRAY = 5
"""Longer arrays of a file's metadata are shown empty unless the request is verbose: a vocabulary has 150,000 entries."""

_HIDDEN = ("tokenizer.chat_template", "general.name")


@dataclass(frozen=True)
class FileFacts:
    """What the daemon remembers of a GGUF file."""

    metadata: Mapping[str, Any]
    """Long arrays left out."""
    long_arrays: frozenset[str] = frozenset()
    parameter_count: int = 0
    chat_template: str | None = None
    """The file's own."""
    capabilities: tuple[str, ...] = ("completion",)
    """With the template that holds: completion or embedding, tools, thinking, insert, vision."""
    projector: Path | None = None
    """Where it has `vision`: the file with which it sees."""
    fill: Callable[[str, str], str] | None = None
    """Where it has `insert`: makes the prompt of a text before and a text after."""
    memory: Facts | None = None
    """What the model takes of memory, as far as the header tells."""
    tensors: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def details(stored: StoredModel) -> dict[str, Any]:
    """The `details` object that tags, ps and show share."""
    config = stored.config
    family = config.get("model_family", "")
    result = {
        "parent_model": "",
        "format": config.get("model_format", "gguf"),
        "family": family,
        "families": config.get("model_families") or [family],
        "parameter_size": config.get("model_type", ""),
        "quantization_level": config.get("file_type", ""),
    }
    for key in ("context_length", "embedding_length"):
        if key in config:
            result[key] = config[key]
    return result


def tags_entry(stored: StoredModel, can: Sequence[str]) -> dict[str, Any]:
    """One model of /api/tags."""
    return {
        "name": stored.name,
        "model": stored.name,
        "modified_at": timestamp(stored.modified_at),
        "size": stored.size,
        "digest": stored.digest,
        "details": details(stored),
        "capabilities": list(can),
    }


def ps_entry(stored: StoredModel, *, size: int, context_length: int, expires_at: float | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """One model of /api/ps. size: bytes of weights and of the KV cache as far as it is used; expires_at: Unix time, None: not while things
    are as they are."""
    return {
        "name": stored.name,
        "model": stored.name,
        "size": size,
        "digest": stored.digest,
        "details": details(stored),
        "expires_at": _expiry(expires_at),
        "size_vram": 0,
        "context_length": context_length,
        **extra,
    }


def kv_in_use(loaded: Loaded, inspected: Inspected | None) -> int:
    """Bytes of the KV cache that hold something: what requests hold, and what is kept for later ones. The rest of the pool is reserved, and
    takes memory only once it has been written to."""
    if inspected is None or not inspected.kv_blocks:
        return 0
    return loaded.kv_bytes // inspected.kv_blocks * (inspected.kv_blocks_held + inspected.kv_blocks_cached)


def state_in_use(loaded: Loaded, inspected: Inspected | None) -> int:
    """Bytes of recurrent state that hold something, as kv_in_use."""
    if inspected is None or not inspected.state_slots:
        return 0
    return loaded.state_bytes // inspected.state_slots * (inspected.state_slots_held + inspected.state_snapshots)


def ps_detail(loaded: Loaded, inspected: Inspected | None) -> dict[str, Any]:
    """What /api/ps says of a loaded model beside Ollama's fields. inspected None: its engine has not said yet how it stands."""
    detail: dict[str, Any] = {
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes": loaded.kv_bytes,
        "kv_bytes_in_use": kv_in_use(loaded, inspected),
        "kv_tokens": loaded.kv_tokens,
        **({"state_bytes": loaded.state_bytes, "state_bytes_in_use": state_in_use(loaded, inspected)} if loaded.state_bytes else {}),
        "num_thread": loaded.num_thread,
        "num_thread_batch": loaded.num_thread_batch,
        "isa": loaded.isa,
        "size_vram": loaded.gpu_bytes,
        "layers": loaded.n_layers,
        "gpu_layers": loaded.gpu_layers,
        "gpu_note": loaded.gpu_note,
    }
    if inspected is not None:
        detail["engine"] = {
            "running": inspected.running,
            "waiting": inspected.waiting,
            "kv_tokens_held": inspected.kv_blocks_held * inspected.block_tokens,
            "kv_tokens_cached": inspected.kv_blocks_cached * inspected.block_tokens,
            "kv_tokens_evicted": inspected.evicted_blocks * inspected.block_tokens,
            "preemptions": inspected.preemptions,
            "passes": inspected.passes,
            "tokens": inspected.rows,
            "busy_s": round(inspected.busy_s, 3),
            "near_misses": inspected.near_misses,
        }
        if inspected.state_slots:
            detail["engine"]["state_snapshots"] = inspected.state_snapshots
            detail["engine"]["state_snapshots_evicted"] = inspected.evicted_snapshots
    return detail


def show_reply(
    stored: StoredModel,
    facts: FileFacts,
    *,
    verbose: bool,
    system: str | None,
    template: str | None,
    arrays: Mapping[str, Any],
) -> dict[str, Any]:
    """/api/show. system, template: the request's, in place of the model's; arrays: the file's long ones, where verbose."""
    system = system if system is not None else stored.system
    shown_template = template if template is not None else stored.template if stored.template is not None else facts.chat_template or ""
    info = {key: value for key, value in facts.metadata.items() if key not in _HIDDEN}
    info["general.parameter_count"] = facts.parameter_count
    info.update({key: arrays.get(key, []) for key in sorted(facts.long_arrays)})
    reply: dict[str, Any] = {
        "license": "\n".join(stored.license),
        "modelfile": modelfile_for(replace(stored, system=system, template=template if template is not None else stored.template)),
        "parameters": parameter_lines(stored.params),
        "template": shown_template,
        "details": details(stored),
        "model_info": info,
        "capabilities": list(facts.capabilities),
        "modified_at": timestamp(stored.modified_at),
    }
    if system:
        reply["system"] = system
    if stored.messages:
        reply["messages"] = stored.messages
    if verbose:
        reply["tensors"] = list(facts.tensors)
    always = ("modelfile", "template", "model_info", "details", "capabilities")
    return {key: value for key, value in reply.items() if value or key in always}


def parameter_lines(params: Mapping[str, Any]) -> str:
    """Parameters as /api/show writes them: a line each, names padded to 30, lists one line for each member."""
    lines = []
    for name, value in params.items():
        values = value if isinstance(value, list) else [value]
        lines += [f'{name:<30} "{one}"' if isinstance(one, str) else f"{name:<30} {to_texts(one)[0]}" for one in values]
    return "\n".join(lines)


def openai_model(stored: StoredModel) -> dict[str, Any]:
    """One model of /v1/models."""
    return {"id": stored.name, "object": "model", "created": int(stored.modified_at.timestamp()), "owned_by": "library"}


def timestamp(moment: datetime) -> str:
    """RFC 3339."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _expiry(expires_at: float | None) -> str:
    """Ollama's clients want a time always: a model that stays for ever gets one 100 years ahead, as there."""
    if expires_at is None or expires_at == FOREVER:
        now = datetime.now(UTC)
        return timestamp(now.replace(year=now.year + 100, day=min(now.day, 28)))
    return timestamp(datetime.fromtimestamp(expires_at, UTC))
