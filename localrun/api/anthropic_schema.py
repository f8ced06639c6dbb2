"""Request bodies of Anthropic's /v1/messages and /v1/messages/count_tokens. A sentence for each field; see fields.py for what the three
words mean."""

from __future__ import annotations

from typing import Any, Literal

from localrun.api.fields import Body, accepted, honoured, refused
from localrun.messages import Overflow

KeepAlive = int | float | str
BlockType = Literal[
    "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document", "search_result", "server_tool_use",
    "web_search_tool_result",
]  # fmt: skip


class ResultPart(Body):
    """One piece of a tool's result."""

    type: Literal["text", "image", "document", "search_result"] = honoured(..., "text; the others are not supported.")
    text: str = honoured("", "The text.")
    source: Any = refused("Pictures and documents.")
    cache_control: Any = accepted(None, "Without effect: every prefix is cached.")
    citations: Any = accepted(None, "Without effect: nothing is cited.")


class Block(Body):
    """One piece of a message."""

    type: BlockType = honoured(..., "text, tool_use, tool_result, thinking or redacted_thinking; the others are not supported.")
    text: str = honoured("", "Of text: the text.")
    id: str = honoured("", "Of tool_use: ties the call to its result.")
    name: str = honoured("", "Of tool_use: the tool's name.")
    input: dict[str, Any] = honoured({}, "Of tool_use: the arguments.")
    tool_use_id: str = honoured("", "Of tool_result: the call it answers.")
    content: str | list[ResultPart] = honoured("", "Of tool_result: what the tool said.")
    is_error: bool = honoured(False, "Of tool_result: the model is told that it is an error.")
    thinking: str = honoured("", "Of thinking: what the assistant thought.")
    signature: str = accepted("", "Without effect: thoughts are not signed here.")
    data: str = accepted("", "Without effect: nobody can read a redacted thought.")
    source: Any = refused("Pictures and documents.")
    cache_control: Any = accepted(None, "Without effect: every prefix is cached.")
    citations: Any = accepted(None, "Without effect: nothing is cited.")
    caller: Any = accepted(None, "Without effect: who asked for a call.")


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"] = honoured(..., "user or assistant.")
    content: str | list[Block] = honoured(..., "The text, or blocks.")


class SystemBlock(Body):
    """One piece of the system prompt."""

    type: Literal["text"] = accepted("text", "Only text exists.")
    text: str = honoured(..., "The text.")
    cache_control: Any = accepted(None, "Without effect: every prefix is cached.")
    citations: Any = accepted(None, "Without effect: nothing is cited.")


class ToolIn(Body):
    """A tool that the model may call."""

    name: str = honoured(..., "Its name.")
    description: str = honoured("", "What it does.")
    input_schema: dict[str, Any] = honoured({}, "JSON schema of its arguments.")
    type: str = honoured("custom", "custom; tools that Anthropic's servers run are not supported.")
    strict: bool = accepted(False, "Without effect: whether a call fits the schema is for the caller to check.")
    cache_control: Any = accepted(None, "Without effect: every prefix is cached.")
    defer_loading: bool = refused("Tools that are found by searching.", harmless=(False,))
    allowed_callers: Any = refused("Calls by other tools.", harmless=(["direct"],))
    input_examples: Any = refused("Examples of calls.", harmless=([],))
    eager_input_streaming: bool = accepted(False, "Without effect: a call is sent whole.")


class ToolChoice(Body):
    """Whether the model must call."""

    type: Literal["auto", "none", "any", "tool"] = honoured(..., "auto, none, any, or tool with a name.")
    name: str = honoured("", "The tool that must be called.")
    disable_parallel_tool_use: bool = honoured(False, "At most one call in an answer.")


class Thinking(Body):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"] = honoured(..., "enabled, disabled, or adaptive: as the model likes.")
    budget_tokens: int | None = honoured(None, "Most tokens of thinking, after which it is ended and the answer comes.", ge=0)
    display: str = accepted("", "Without effect: thoughts are sent as they are.")


class OutputConfig(Body):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = honoured(None, "How hard a thinking model thinks.")
    format: dict[str, Any] | None = honoured(None, "A JSON schema, as {type: json_schema, schema}, that the answer must satisfy.")
    task_budget: Any = refused("Budgets over several answers.")


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str = honoured("", "Name of the model.")
    messages: list[Turn] = honoured([], "The conversation so far.")
    system: str | list[SystemBlock] = honoured("", "The system prompt.")
    tools: list[ToolIn] = honoured([], "Tools that the model may call.")
    tool_choice: ToolChoice | None = honoured(None, "Whether it must.")
    thinking: Thinking | None = honoured(None, "Whether the model thinks first.")
    output_config: OutputConfig | None = honoured(None, "How the answer is made.")
    output_format: dict[str, Any] | None = honoured(None, "Older name of output_config.format.")
    keep_alive: KeepAlive | None = honoured(None, "localrun's own: how long the model stays loaded after the request.")
    context_management: Any = refused("Editing the conversation on the server.", harmless=({"edits": []}, {}))
    mcp_servers: Any = refused("Tools on other servers.", harmless=([],))
    cache_control: Any = accepted(None, "Without effect: every prefix is cached.")


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int = honoured(0, "Most tokens of the answer; required.")
    stream: bool = honoured(False, "Send the answer as server-sent events.")
    stop_sequences: list[str] = honoured([], "Strings that end the answer; they add to the model's own.")
    temperature: float | None = honoured(None, "0 always takes the likeliest token; 1 unless the model says otherwise.", ge=0, le=1)
    top_p: float | None = honoured(None, "Only the likeliest tokens that together reach this are candidates.", ge=0, le=1)
    top_k: int | None = honoured(None, "Only the k likeliest tokens are candidates.", ge=0)
    seed: int | None = honoured(None, "localrun's own: makes the answer repeatable.")
    num_ctx: int | None = honoured(None, "localrun's own: most tokens, prompt and answer together.")
    options: dict[str, Any] = honoured({}, "localrun's own: options as on /api; the fields of this body win.")
    timeout: float | None = honoured(None, "localrun's own: seconds after which the request ends with an error (504).", gt=0)
    overflow: Overflow = honoured("error", "localrun's own: what happens to a prompt that does not fit.")
    metadata: dict[str, Any] = accepted({}, "Without effect: names your user to a provider.")
    service_tier: str = accepted("auto", "Without effect: there is one tier.")
    inference_geo: str = accepted("", "Without effect: it runs here.")
    speed: str = accepted("", "Without effect: there is one speed.")
    container: Any = refused("Running code on a server.")
