"""Ollama's `options`, and what else decides how an answer is sampled: one table, checked, merged, turned into `messages.Sampling`.

Precedence: the request, then the model's own parameters (Modelfile), then the dialect's defaults, then `messages.Sampling`'s. Stop
strings add up. Knows no dialect's body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localrun.api.fields import Use
from localrun.durations import parse_keep_alive
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Message, Sampling

Kind = Literal["integer", "float", "boolean", "string", "array"]


@dataclass(frozen=True)
class Option:
    """One key of `options`."""

    kind: Kind
    use: Use
    text: str
    low: float | None = None
    high: float | None = None
    harmless: tuple[Any, ...] = ()
    """Of a refused option: the values that ask for nothing."""
    choices: tuple[str, ...] = ()
    """Of a string: all that it can be; empty: anything."""


_NO_SUCH_PLACE = "Where the model lies changes no answer; layers go where there is room."

OPTIONS: dict[str, Option] = {
    "num_ctx": Option("integer", "honoured", "Most tokens, prompt and answer together; 0: as many as fit.", low=0),
    "num_predict": Option("integer", "honoured", "Most tokens of the answer; below 0: until it ends or the context is full.", low=-2),
    "num_thread": Option(
        "integer", "honoured", "Threads of the model; another number than it runs with loads it anew. 0: physical cores.", low=0, high=1024
    ),
    "num_thread_batch": Option(
        "integer", "honoured", "Threads for prompts and for several answers at once, where they shall not be as many as num_thread; "
        "another number than the model runs with loads it anew. 0: as many.", low=0, high=1024,
    ),
    "num_gpu": Option(
        "integer", "honoured", "Layers to put on NVIDIA cards, the first ones; -1: as many as fit. Changes no answer; loads the model anew "
        "if it runs with another number and there is a card.", low=-1, high=100_000,
    ),
    "gpu_layers": Option("integer", "honoured", "Another name of num_gpu, which goes first.", low=-1, high=100_000),
    "seed": Option(
        "integer", "honoured", "Makes the answer repeatable; below 0: one is drawn. The one used is reported.", low=-(2**63), high=2**63 - 1
    ),
    "temperature": Option("float", "honoured", "How flat the choice among tokens is; 0 always takes the likeliest.", low=0),
    "top_k": Option("integer", "honoured", "Only the k likeliest tokens are candidates; 0 or less: all.", low=-(2**31), high=2**31 - 1),
    "top_p": Option("float", "honoured", "Only the likeliest tokens that together reach this probability are candidates.", low=0, high=1),
    "min_p": Option("float", "honoured", "Tokens less likely than this share of the likeliest one are out.", low=0, high=1),
    "typical_p": Option("float", "honoured", "Locally typical sampling; 1: off.", low=0, high=1),
    "repeat_last_n": Option("integer", "honoured", "How many of the latest tokens the penalties look at; 0: none, -1: all.", low=-1),
    "repeat_penalty": Option("float", "honoured", "Divides the score of tokens seen lately; 1: off.", low=0),
    "presence_penalty": Option("float", "honoured", "Subtracted once from the score of tokens seen lately."),
    "frequency_penalty": Option("float", "honoured", "Subtracted from the score of tokens seen lately, once for each time."),
    "stop": Option("array", "honoured", "Strings that end the answer and are not part of it; they add to the model's own."),
    "top_n_sigma": Option("float", "honoured", "Only tokens within so many standard deviations of the best score are candidates; 0: off."),
    "xtc_probability": Option("float", "honoured", "How often all but the last of the likely tokens are left out; 0: off.", low=0, high=1),
    "xtc_threshold": Option("float", "honoured", "From which probability on a token is one of those.", low=0, high=1),
    "dry_multiplier": Option("float", "honoured", "How strongly a token is held down that would lengthen a repetition; 0: off.", low=0),
    "dry_base": Option("float", "honoured", "By what the penalty grows with each token of the repetition.", low=0),
    "dry_allowed_length": Option("integer", "honoured", "Repetitions up to this length are free.", low=0),
    "dry_penalty_last_n": Option("integer", "honoured", "How many of the latest tokens are looked at; 0: none, -1: all.", low=-1),
    "dry_sequence_breakers": Option("array", "honoured", "Texts over which no repetition reaches."),
    "mirostat": Option(
        "integer", "honoured", "Mirostat, version 1 or 2, in place of the other choices of candidates; 0: off.", low=0, high=2
    ),
    "mirostat_tau": Option("float", "honoured", "The surprise that Mirostat aims at.", low=0),
    "mirostat_eta": Option("float", "honoured", "How fast Mirostat learns.", low=0),
    "ignore_eos": Option("boolean", "honoured", "The end of the turn is never chosen: the answer ends at a limit or a stop string."),
    "banned_strings": Option("array", "honoured", "Texts that do not come in the answer."),
    "draft_num_predict": Option(
        "integer",
        "honoured",
        "Most tokens guessed ahead; below 0: as many as pay. Never changes an answer. Models with recurrent state get no guesses.",
        low=-1,
    ),
    "draft": Option(
        "string", "honoured", "A smaller model here, with the same vocabulary, that guesses ahead; another than it runs with loads it anew."
    ),
    "num_beams": Option(
        "integer",
        "honoured",
        "Above 1: beam search with so many beginnings at a time, for the likeliest answer; sampling options have no part in it.",
        low=1,
        high=32,
    ),
    "length_penalty": Option(
        "float", "honoured", "Of beam search: answers are compared by log-probability / length ** length_penalty; more favours long ones."
    ),
    "session": Option(
        "boolean", "honoured", "Keep the conversation's K/V on disk and take them from there: after a restart it is not read again."
    ),
    "kv_cache_type": Option(
        "string",
        "honoured",
        "How K and V are kept: f16, bf16, q8_0 or q4_0; another type than the model runs with loads it anew.",
        choices=("f16", "bf16", "q8_0", "q4_0"),
    ),
    "draft_rule": Option(
        "string",
        "honoured",
        "When a guess is kept. exact: when it is the token that would have come, so that guesses never change an answer; ratio: with "
        "probability p/q, after which answers are distributed alike, but are others.",
        choices=("exact", "ratio"),
    ),
    "adapter_scale": Option("float", "honoured", "Factor of what the model's adapters change; 0: nothing. Default 1."),
    "num_keep": Option("integer", "accepted", "Without effect: whole messages are dropped, and system messages stay."),
    "num_batch": Option("integer", "accepted", "Without effect: the engine sizes its passes, and no result depends on it."),
    "main_gpu": Option("integer", "accepted", _NO_SUCH_PLACE),
    "low_vram": Option("boolean", "accepted", _NO_SUCH_PLACE),
    "numa": Option("boolean", "accepted", _NO_SUCH_PLACE),
    "use_mmap": Option("boolean", "accepted", "Without effect: files are always mapped; the numbers do not depend on it."),
    "use_mlock": Option("boolean", "accepted", "Without effect on answers: pages are left to the system."),
    "logits_all": Option("boolean", "accepted", "Without effect: asks for logits that no reply carries."),
    "tfs_z": Option("float", "refused", "Tail-free sampling.", harmless=(1.0,)),
    "penalize_newline": Option("boolean", "refused", "Keeping line breaks out of the penalties.", harmless=(True,)),
    "f16_kv": Option("boolean", "refused", "The older name of kv_cache_type.", harmless=(True,)),
    "vocab_only": Option("boolean", "refused", "Loading no weights.", harmless=(False,)),
    "embedding_only": Option("boolean", "refused", "Loading a model for embeddings only.", harmless=(False,)),
}

_TYPE_NAMES = {"integer": "integer", "float": "float32", "boolean": "boolean", "string": "string", "array": "array"}


@dataclass(frozen=True)
class ModelDefaults:
    """What a stored model brings to every request for it."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its Modelfile's parameters."""
    system: str | None = None
    template: str | None = None
    """Its Modelfile's Jinja source, which replaces the file's own."""
    messages: tuple[Message, ...] = ()
    capabilities: frozenset[str] = frozenset({"completion"})
    fill: Callable[[str, str], str] | None = None
    """Makes the prompt of a text before and a text after, where it can fill in the middle."""
    num_ctx: int = 0
    """The daemon's setting; 0: none."""
    adapters: tuple[str, ...] = ()
    """Files of its LoRA adapters."""


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The honoured options among `given`, of the right type and in range; null means absent.

    Raises BadRequest for a wrong type, a value out of range and a name nobody knows, Unsupported for what would change the answer and is
    not implemented. Whole floats pass as integers (JSON writers of other languages send 40.0).
    """
    result: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        option = OPTIONS.get(name)
        if option is None:
            raise BadRequest(f'unknown option "{name}"; known are {", ".join(sorted(OPTIONS))}', param="options")
        value = _typed(name, option, value)
        if option.use == "refused" and value not in option.harmless:
            raise Unsupported(f'option "{name}" is not supported', param="options")
        if option.use == "honoured":
            result[name] = value
    return result


def model_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The honoured ones among a stored model's parameters. What is unknown, refused or malformed there is left out: a model published
    for another program must still answer, and whoever asks did not write it (the store checks Modelfiles when a model is made)."""
    result: dict[str, Any] = {}
    for name, value in params.items():
        try:
            result.update(checked_options({name: value}))
        except LocalrunError:
            continue
    return result


def merged(request: Mapping[str, Any], model: ModelDefaults, dialect: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All options by name, each from the first that has it: request (checked already), model, dialect, settings."""
    own = model_options(model.params)
    result = {**(dialect or {}), **own, **request}
    stops = [*own.get("stop", []), *request.get("stop", [])]
    result["stop"] = list(dict.fromkeys(text for text in stops if text))
    if not result.get("num_ctx"):
        result["num_ctx"] = model.num_ctx
    return result


def adapters(options: Mapping[str, Any], model: ModelDefaults) -> dict[str, Any]:
    """The fields of `messages.Generate` that say which adapters act."""
    return {"adapters": list(model.adapters), "adapter_scale": options.get("adapter_scale", 1.0)}


def sampling(options: Mapping[str, Any], logit_bias: Mapping[int, float] | None = None) -> Sampling:
    """The part of merged options that the sampler obeys."""
    names = set(Sampling.__struct_fields__) & set(options)
    values = {name: options[name] for name in names if name != "seed"}
    seed = options.get("seed")
    if "dry_sequence_breakers" in values:
        values["dry_sequence_breakers"] = tuple(values["dry_sequence_breakers"])
    return Sampling(seed=seed if seed is not None and seed >= 0 else None, logit_bias=dict(logit_bias or {}), **values)


def _typed(name: str, option: Option, value: Any) -> Any:
    wrong = BadRequest(f'option "{name}" must be of type {_TYPE_NAMES[option.kind]}', param="options")
    if isinstance(value, int) and abs(value) >= 1 << 63 and (option.kind == "float" or option.high is None):
        raise BadRequest(f'option "{name}" is too large a number', param="options")
    match option.kind:
        case "boolean":
            if not isinstance(value, bool):
                raise wrong
            return value
        case "string":
            if not isinstance(value, str):
                raise wrong
            if option.choices and value not in option.choices:
                raise BadRequest(f'option "{name}" must be one of {", ".join(option.choices)}, got {value[:60]!r}', param="options")
            return value
        case "array":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise wrong
            return value
        case "integer":
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if not isinstance(value, int) or isinstance(value, bool):
                raise wrong
        case "float":
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise wrong
            value = float(value)
    if (option.low is not None and value < option.low) or (option.high is not None and value > option.high):
        raise BadRequest(f'option "{name}" must be {_range(option)}, got {value}', param="options")
    return value


def _range(option: Option) -> str:
    if option.high is None:
        return f"{option.low:g} or more"
    return f"from {option.low:g} to {option.high:g}"


def keep_alive_seconds(value: float | str | None) -> float | None:
    """How long a model stays loaded after its last request: seconds, or durations.FOREVER. None: not said.

    Unlike Ollama, numbers in quotes pass: many front-ends send them. Raises BadRequest.
    """
    if value is None:
        return None
    try:
        return parse_keep_alive(value)
    except ValueError as error:
        raise BadRequest(f"keep_alive: {error}", param="keep_alive") from None
