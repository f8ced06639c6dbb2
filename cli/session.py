"""A conversation as the terminal keeps it: the model, the messages so far, and what was set. Makes the bodies of requests; sends none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from localrun.cli.client import CliError, Json

# Kinds of the options a person can set by hand, as /api/chat takes them.
PARAMETERS: dict[str, type] = {
    "num_ctx": int,
    "num_predict": int,
    "num_keep": int,
    "num_batch": int,
    "num_thread": int,
    "num_thread_batch": int,
    "num_gpu": int,
    "gpu_layers": int,
    "top_k": int,
    "repeat_last_n": int,
    "seed": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "repeat_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "stop": list,
}


@dataclass
class Session:
    """What a chat holds."""

    model: str
    info: Json = field(default_factory=dict)
    """/api/show's answer for the model."""
    messages: list[Json] = field(default_factory=list)
    """This conversation's, without the system message and without those that the model itself begins with."""
    system: str | None = None
    """None: the model's own."""
    options: dict[str, Any] = field(default_factory=dict)
    format: str | None = None
    think: bool | str | None = None
    keep_alive: str | None = None

    @property
    def capabilities(self) -> list[str]:
        return list(self.info.get("capabilities") or [])

    def request(self, messages: list[Json] | None = None) -> Json:
        """Body for /api/chat. The daemon puts the model's own messages and system message in front."""
        turns = self.messages if messages is None else messages
        if self.system is not None and turns:
            turns = [{"role": "system", "content": self.system}, *turns]
        body: Json = {"model": self.model, "messages": turns}
        if self.options:
            body["options"] = self.options
        for key in ("format", "think", "keep_alive"):
            value = getattr(self, key)
            if value is not None:
                body[key] = value
        return body

    def asked(self, text: str) -> Json:
        """Body for the next answer to `text`; `text` is not part of the conversation yet."""
        return self.request([*self.messages, {"role": "user", "content": text}])

    def answered(self, text: str, content: str, thinking: str) -> None:
        """Both turns belong to the conversation now. An answer that was stopped counts as far as it went."""
        self.messages.append({"role": "user", "content": text})
        message = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if content or thinking:
            self.messages.append(message)

    def saved_as(self, name: str) -> Json:
        """Body for /api/create: this session as a model, with everything that was set and said."""
        body: Json = {"model": name, "from": self.model}
        if self.system is not None:
            body["system"] = self.system
        if self.options:
            body["parameters"] = self.options
        before = list(self.info.get("messages") or [])
        turns = [*before, *({"role": m["role"], "content": m["content"]} for m in self.messages)]
        if turns:
            body["messages"] = turns
        return body

    def set_parameter(self, name: str, values: list[str]) -> None:
        """Raises CliError for an unknown name or a value of the wrong kind."""
        kind = PARAMETERS.get(name)
        if kind is None:
            raise CliError(f"unknown parameter '{name}' (one of: {', '.join(sorted(PARAMETERS))})")
        if kind is list:
            self.options[name] = values
            return
        if len(values) != 1:
            raise CliError(f"parameter '{name}' takes one value")
        try:
            self.options[name] = kind(values[0])
        except ValueError:
            raise CliError(f"invalid value '{values[0]}' for {name}: {'a whole number' if kind is int else 'a number'} is needed") from None


def parse_think(text: str) -> bool | str:
    """The value of --think and of /set think. Raises CliError."""
    lowered = text.strip().lower()
    if lowered in ("", "true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    if lowered in ("low", "medium", "high", "max"):
        return lowered
    raise CliError(f"invalid think value '{text}' (must be true, false, low, medium, high or max)")
