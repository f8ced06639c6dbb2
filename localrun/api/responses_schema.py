"""Request body of OpenAI's /v1/responses, stateless. A sentence for each field; see fields.py for what the three words mean."""

from __future__ import annotations

from typing import Any, Literal

from localrun.api.fields import Body, accepted, honoured, refused
from localrun.api.openai_schema import Effort, KeepAlive
from localrun.messages import Overflow

ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]


class ContentPart(Body):
    """One piece of a message, of a tool's output or of a thought."""

    type: Literal[
        "input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_image", "input_file", "input_audio"
    ] = honoured(..., "A kind of text; pictures, files and sound are not supported.")
    text: str = honoured("", "The text.")
    refusal: str = honoured("", "The text of a refusal.")
    annotations: Any = accepted(None, "Without effect: notes on an earlier answer.")
    logprobs: Any = accepted(None, "Without effect: log-probabilities of an earlier answer.")
    prompt_cache_breakpoint: Any = accepted(None, "Without effect: every prefix is cached.")
    image_url: Any = refused("Pictures: no model here sees.")
    file_id: Any = refused("Files.")
    file_data: Any = refused("Files.")
    file_url: Any = refused("Files.")
    filename: Any = refused("Files.")
    input_audio: Any = refused("Sound: no model here hears.")
    detail: Any = accepted(None, "Without effect: of a picture.")


class Item(Body):
    """One thing of the conversation: a message, a call, its output, or a thought."""

    type: ItemType = honoured("message", "message, function_call, function_call_output or reasoning; the others are not supported.")
    role: str = honoured("user", "Of a message: system, developer (the same), user or assistant.")
    content: str | list[ContentPart] = honoured("", "Of a message, its text; of reasoning, the thoughts.")
    call_id: str = honoured("", "Ties a call to its output.")
    name: str = honoured("", "Of a call: the tool's name.")
    arguments: str = honoured("{}", "Of a call: the arguments, as JSON text.")
    output: str | list[ContentPart] = honoured("", "What the tool said.")
    summary: list[ContentPart] = honoured([], "Of reasoning: the thoughts, where content has none.")
    id: str = accepted("", "Without effect: nothing is stored under it.")
    status: str = accepted("", "Without effect: of an earlier answer.")
    phase: str = accepted("", "Without effect: of an earlier answer.")
    encrypted_content: Any = accepted(None, "Without effect: nobody can read it.")
    namespace: Any = refused("Namespaces of tools.")
    caller: Any = accepted(None, "Without effect: who asked for a call.")


class ResponseTool(Body):
    """A tool that the model may call."""

    type: str = honoured(..., "function; tools that OpenAI's servers run are not supported.")
    name: str = honoured("", "Its name.")
    description: str = honoured("", "What it does.")
    parameters: dict[str, Any] = honoured({}, "JSON schema of its arguments.")
    strict: bool = honoured(False, "Repeated in the reply; whether a call fits the schema is for the caller to check.")
    defer_loading: bool = refused("Tools that are found by searching.", harmless=(False,))


class ResponseReasoning(Body):
    """How the model thinks."""

    effort: Effort | None = honoured(None, "Whether, or how hard, a thinking model thinks.")
    max_tokens: int | None = honoured(None, "Extra: most tokens of thinking, after which it is ended and the answer comes.", ge=0)
    summary: str | None = accepted(None, "Without effect: thoughts are sent as they are, as the summary.")
    generate_summary: str | None = accepted(None, "Older name of the field `summary`.")


class TextFormat(Body):
    """What the text looks like."""

    type: Literal["text", "json_object", "json_schema"] = honoured(..., "text, json_object or json_schema.")
    name: str = accepted("", "A label; without effect.")
    description: str = accepted("", "A label; without effect.")
    schema_: dict[str, Any] = honoured({}, "Of json_schema: what the text must satisfy.", alias="schema")
    strict: bool = accepted(False, "Without effect: the schema is always enforced.")


class TextConfig(Body):
    """The text of the answer."""

    format: TextFormat | None = honoured(None, "What it looks like.")
    verbosity: Any = refused("Length by word.", harmless=("medium",))


class ResponseStreamOptions(Body):
    """Of a streamed reply."""

    include_obfuscation: bool = accepted(False, "Without effect: nothing is obfuscated on one's own machine.")


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str = honoured(..., "Name of the model.")
    input: str | list[Item] = honoured(..., "A user message, or the conversation so far.")
    instructions: str | None = honoured(None, "System message in front of the conversation, in place of the model's own.")
    max_output_tokens: int | None = honoured(None, "Most tokens of the answer.", ge=1)
    temperature: float | None = honoured(None, "0 always takes the likeliest token; 1 unless the model says otherwise.", ge=0, le=2)
    top_p: float | None = honoured(None, "Only the likeliest tokens that together reach this are candidates.", ge=0, le=1)
    tools: list[ResponseTool] = honoured([], "Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = honoured(None, "auto, none, required, or one function.")
    parallel_tool_calls: bool = honoured(True, "false: at most one call in an answer.")
    reasoning: ResponseReasoning | None = honoured(None, "How the model thinks.")
    text: TextConfig | None = honoured(None, "What the text looks like.")
    stream: bool = honoured(False, "Send the answer as server-sent events.")
    truncation: Literal["auto", "disabled"] = honoured("disabled", "auto: a prompt that does not fit loses its oldest messages.")
    include: list[str] = honoured(
        [], "message.output_text.logprobs adds log-probabilities; what else there is asks for nothing that exists here."
    )
    top_logprobs: int | None = honoured(None, "How many of the likeliest tokens to report beside each.", ge=0, le=20)
    metadata: dict[str, Any] = honoured({}, "Labels; they are repeated in the reply.")
    user: str | None = honoured(None, "Names your user; it is repeated in the reply.")
    # localrun's own
    seed: int | None = honoured(None, "Extra: makes the answer repeatable.")
    top_k: int | None = honoured(None, "Extra: only the k likeliest tokens are candidates.")
    min_p: float | None = honoured(None, "Extra: tokens less likely than this share of the likeliest one are out.")
    num_ctx: int | None = honoured(None, "Extra: most tokens, prompt and answer together.")
    keep_alive: KeepAlive | None = honoured(None, "Extra: how long the model stays loaded after the request.")
    options: dict[str, Any] = honoured({}, "Extra: options as on /api; the fields of this body win.")
    timeout: float | None = honoured(None, "Extra: seconds after which the request ends with an error (504).", gt=0)
    overflow: Overflow | None = honoured(None, "Extra: what happens to a prompt that does not fit; wins over truncation.")
    stream_options: ResponseStreamOptions | None = accepted(None, "Without effect: nothing is obfuscated.")
    service_tier: str = accepted("auto", "Without effect: there is one tier.")
    safety_identifier: str = accepted("", "Without effect: names your user to a provider.")
    prompt_cache_key: str = accepted("", "Without effect: every prefix is cached.")
    prompt_cache_retention: str = accepted("", "Without effect: every prefix is cached.")
    prompt_cache_options: dict[str, Any] = accepted({}, "Without effect: every prefix is cached.")
    client_metadata: dict[str, Any] = accepted({}, "Without effect: labels for a provider's records.")
    store: bool = refused("Keeping answers: send the whole conversation each time.", harmless=(False,))
    previous_response_id: Any = refused("Answers are not kept: send the whole conversation each time.")
    conversation: Any = refused("Conversations are not kept: send the whole one each time.")
    prompt: Any = refused("Prompts are not kept.")
    background: bool = refused("Answers that are fetched later.", harmless=(False,))
    context_management: Any = refused("Editing the conversation on the server.", harmless=([],))
    max_tool_calls: Any = refused("A bound on tools that run on a server.")
    moderation: Any = refused("Moderation.")
