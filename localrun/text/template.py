"""Chat templates: how a model wants a conversation written. The Jinja source is the model file's or that of the Modelfile derived from it.

Rendering is sandboxed and bounded (sandbox.py). This file knows which template holds and what it is given; what a request's messages look
like to it, and what to do when a template refuses them, is prompt.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypedDict

from localrun.errors import TemplateError
from localrun.models.gguf import GGUFFile
from localrun.text.gosyntax import is_go_template

if TYPE_CHECKING:
    import jinja2

    from localrun.text.sandbox import ChatEnvironment

__all__ = ["FALLBACK", "ChatTemplate", "TemplateError", "chat_template_for"]

FALLBACK = r"{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
"""For models without a template, which are base models: the contents as they are, with blank lines between. A lone prompt is continued."""

_GO_TEMPLATE = re.compile(r"\{\{-?\s*(\.[A-Z]|(if|range|with|else|end|define|template|block)\b|\$\w*\s*:=)")


class TokenTexts(TypedDict):
    """Texts of the special tokens that templates may write."""

    bos_token: str
    eos_token: str
    unk_token: str
    pad_token: str


class ChatTemplate:
    """A template and the tokens it may name. Immutable; safe to use from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        unk_token: str = "",
        pad_token: str = "",
        tool_source: str | None = None,
        fallback: bool = False,
    ) -> None:
        """source: Jinja. tool_source: what holds instead when tools are given. Raises TemplateError when either is no valid template."""
        self.source = source
        self.tool_source = tool_source
        self.fallback = fallback
        """True when the model came with no template and FALLBACK stands in."""
        self._tokens = TokenTexts(bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, pad_token=pad_token)
        _compiled(source)
        if tool_source is not None:
            _compiled(tool_source)

    @property
    def bos_token(self) -> str:
        return self._tokens["bos_token"]

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model. Raises TemplateError when it is no valid template."""
        return _of_source(source, self._tokens)

    @property
    def supports_tools(self) -> bool:
        """Whether the template looks at tools at all."""
        return self.tool_source is not None or "tools" in self.source

    @property
    def knows_levels(self) -> bool:
        """Whether the template tells the model how hard to think."""
        return "reasoning_effort" in self.source

    @property
    def supports_thinking(self) -> bool:
        """Whether the template knows of thinking that comes before an answer."""
        return any(mark in self.source for mark in ("<think>", "enable_thinking", "reasoning_content", "<|channel|>", "reasoning_effort"))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        define_absent: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        messages: dicts with "role" and "content" and what else templates read (tool_calls, reasoning_content, name, tool_call_id).
        now: the time that templates may write; the present when None. define_absent: `tools` and `documents` are None when there are
        none, as most templates are written for; otherwise they are undefined, as a few older ones need. variables: anything else the
        template reads, such as enable_thinking. Raises TemplateError: one line that says what the template said, or which bound it hit.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        given: dict[str, Any] = {**self._tokens, "add_generation_prompt": add_generation_prompt, "messages": messages}
        if tools is not None or define_absent:
            given["tools"] = tools
        if define_absent:
            given["documents"] = None
        return _render(source, given | variables, now or datetime.now())


def chat_template_for(gguf: GGUFFile, override: str | None) -> ChatTemplate:
    """The template that holds for an open model file.

    `override` (a Modelfile's TEMPLATE, Jinja or Go's language) if given; else the file's tokenizer.chat_template, with
    tokenizer.chat_template.tool_use when tools are given, if the file has that; else FALLBACK. Raises TemplateError when the one that
    holds is no valid template.
    """
    metadata = gguf.metadata
    tokens = TokenTexts(
        bos_token=_token_text(metadata, "bos"),
        eos_token=_token_text(metadata, "eos"),
        unk_token=_token_text(metadata, "unknown"),
        pad_token=_token_text(metadata, "padding"),
    )
    if override is not None and override.strip():
        return _of_source(override, tokens)
    source = metadata.get("tokenizer.chat_template")
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    if not isinstance(tool_source, str) or not tool_source.strip():
        tool_source = None
    if isinstance(source, str) and source.strip():
        return ChatTemplate(source, tool_source=tool_source, **tokens)
    return ChatTemplate(FALLBACK, fallback=True, **tokens)


def _of_source(source: str, tokens: TokenTexts) -> ChatTemplate:
    """A template from a Modelfile or a request, which may be in Go's language. Raises TemplateError."""
    if is_go_template(source):
        from localrun.text.gochat import GoChatTemplate

        return GoChatTemplate(source, **tokens)
    return ChatTemplate(source, **tokens)


def _token_text(metadata: Mapping[str, Any], name: str) -> str:
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(token, int) and isinstance(tokens, list) and 0 <= token < len(tokens):
        return str(tokens[token])
    return ""


# ---- Jinja, imported when first needed ----


@cache
def _environment() -> ChatEnvironment:
    from localrun.text.sandbox import ChatEnvironment

    return ChatEnvironment()


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Raises TemplateError. Compiling takes 10 to 100 ms, so it is done once for each source."""
    from jinja2 import TemplateSyntaxError

    from localrun.text.sandbox import LIMITS

    if len(source) > LIMITS.source:
        raise TemplateError(f"the chat template has {len(source):,} characters; at most {LIMITS.source:,} are accepted")
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        if _GO_TEMPLATE.search(source):
            raise TemplateError("the template is in Go's language ({{ .Prompt }}), which is not supported; write it in Jinja") from None
        raise TemplateError(f"the chat template is not valid: {_one_line(str(error.message))} (line {error.lineno})") from None
    except Exception as error:  # compiling runs code that depends on the template
        raise TemplateError(f"the chat template is not valid: {type(error).__name__}: {_one_line(str(error))}") from None


def _render(source: str, variables: dict[str, Any], now: datetime) -> str:
    import jinja2

    from localrun.text.sandbox import LimitExceeded

    template = _compiled(source)
    _environment().begin(now)
    try:
        return template.render(variables)
    except LimitExceeded as error:
        raise TemplateError(f"the model's chat template was stopped: {error}") from None
    except RecursionError:
        raise TemplateError("the model's chat template was stopped: it calls itself without end") from None
    except MemoryError:
        raise TemplateError("the model's chat template was stopped: it takes more memory than there is") from None
    except Exception as error:  # a template can raise whatever Python can
        failed = TemplateError(f"the model's chat template does not accept these messages: {_one_line(str(error))}")
        if type(error) is not jinja2.TemplateError:
            failed = TemplateError(f"the model's chat template failed on these messages: {type(error).__name__}: {_one_line(str(error))}")
        raise failed from error


def _one_line(text: str, limit: int = 500) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
