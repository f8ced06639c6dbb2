"""Request bodies of OpenAI's /v1/chat/completions and /v1/completions, with the extras that localrun adds. A sentence for each field;
see fields.py for what the three words mean."""

from __future__ import annotations

from typing import Any, Literal

from localrun.api.fields import Body, accepted, honoured, refused
from localrun.messages import Overflow

KeepAlive = int | float | str
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class ImageUrl(Body):
    """A picture."""

    url: str = honoured(..., "A data: URL in base64; nothing is fetched from other machines.")
    detail: Literal["auto", "low", "high", "original"] = accepted("auto", "Without effect: a model sees every picture in its own size.")


class Part(Body):
    """One piece of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"] = honoured(
        ..., "text, refusal or image_url; the others are not supported."
    )
    text: str = honoured("", "The text of a text part.")
    refusal: str = honoured("", "The text of a refusal part.")
    image_url: ImageUrl | str | None = honoured(None, "The picture of an image_url part, for models that see.")
    input_audio: Any = refused("Sound: no model here hears.")
    file: Any = refused("Files.")
    prompt_cache_breakpoint: Any = accepted(None, "Without effect: every prefix is cached.")


class CalledFunction(Body):
    """What an assistant message called."""

    name: str = honoured(..., "The tool's name.")
    arguments: str | dict[str, Any] = honoured("{}", "The arguments, as the JSON text that the model wrote.")


class Call(Body):
    """A call in the history."""

    id: str = honoured("", "Ties the call to its result.")
    index: int = accepted(0, "The order of the list is what counts.")
    type: Literal["function"] = accepted("function", "Only functions exist.")
    function: CalledFunction = honoured(..., "What was called.")


class TurnMessage(Body):
    """One turn of the conversation."""

    role: str = honoured(..., "system, developer (the same), user, assistant or tool.")
    content: str | list[Part] = honoured("", "The text, or parts that are joined.")
    name: str = honoured("", "Of a tool message: the tool's name. Otherwise without effect.")
    tool_calls: list[Call] | None = honoured(None, "Calls that an assistant message made.")
    tool_call_id: str | None = honoured(None, "Of a tool message: the call it answers.")
    reasoning: str | None = honoured(None, "What an assistant thought before it answered.")
    reasoning_content: str | None = honoured(None, "Another name of the field `reasoning`.")
    refusal: str | None = honoured(None, "Text of a refusal, taken as the message's content when it has none.")
    audio: Any = refused("Sound: no model here speaks.")
    function_call: Any = refused("The form of tool_calls that OpenAI has given up.")
    annotations: Any = accepted(None, "Without effect: notes on an earlier answer.")


class StreamOptions(Body):
    """Of a streamed reply."""

    include_usage: bool = honoured(False, "Send a last chunk with the token counts.")
    include_obfuscation: bool = accepted(False, "Without effect: nothing is obfuscated on one's own machine.")


class Reasoning(Body):
    """Ollama's and OpenRouter's way to say reasoning_effort."""

    effort: Effort | None = honoured(None, "How hard a thinking model thinks.")
    max_tokens: int | None = honoured(None, "Another way to say thinking_budget.", ge=0)


class JsonSchema(Body):
    """Of response_format."""

    name: str = accepted("", "A label; without effect.")
    description: str = accepted("", "A label; without effect.")
    schema_: dict[str, Any] = honoured({}, "What the answer must satisfy.", alias="schema")
    strict: bool = accepted(False, "Without effect: the schema is always enforced.")


class ResponseFormat(Body):
    """What the answer looks like."""

    type: Literal["text", "json_object", "json_schema"] = honoured(..., "text, json_object or json_schema.")
    json_schema: JsonSchema | None = honoured(None, "Of the type json_schema: the schema.")


class Common(Body):
    """What chat and completions share."""

    model: str = honoured(..., "Name of the model.")
    stream: bool = honoured(False, "Send the answer as server-sent events.")
    stream_options: StreamOptions | None = honoured(None, "Of a streamed reply.")
    max_tokens: int | None = honoured(None, "Most tokens of the answer.", ge=0)
    n: int = honoured(1, "How many answers; with a seed, answer i uses seed + i.", ge=1, le=128)
    seed: int | None = honoured(None, "Makes the answer repeatable; the one used is reported.", ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = honoured(None, "String or strings that end the answer; they add to the model's own.")
    temperature: float | None = honoured(None, "0 always takes the likeliest token; 1 unless the model says otherwise.", ge=0, le=2)
    top_p: float | None = honoured(None, "Only the likeliest tokens that together reach this are candidates; 1 by default.", ge=0, le=1)
    frequency_penalty: float | None = honoured(None, "Subtracted from the score of tokens seen lately, once for each time.", ge=-2, le=2)
    presence_penalty: float | None = honoured(None, "Subtracted once from the score of tokens seen lately.", ge=-2, le=2)
    logit_bias: dict[str, float] = honoured({}, "Token id to what is added to its score, -100 to 100.")
    user: str = accepted("", "Without effect: names your user to a provider.")
    response_format: ResponseFormat | None = honoured(None, "What the answer looks like (on completions, an extra).")
    grammar: str | None = honoured(None, "Extra: a grammar in Lark's or llama.cpp's notation that the answer must follow.")
    regex: str | None = honoured(None, "Extra: a regular expression that the whole answer must match.")
    # localrun's own
    top_k: int | None = honoured(None, "Extra: only the k likeliest tokens are candidates.")
    min_p: float | None = honoured(None, "Extra: tokens less likely than this share of the likeliest one are out.")
    typical_p: float | None = honoured(None, "Extra: locally typical sampling.")
    repeat_penalty: float | None = honoured(None, "Extra: divides the score of tokens seen lately.")
    repeat_last_n: int | None = honoured(None, "Extra: how many of the latest tokens the penalties look at.")
    num_ctx: int | None = honoured(None, "Extra: most tokens, prompt and answer together.")
    num_thread: int | None = honoured(None, "Extra: threads of the model.")
    keep_alive: KeepAlive | None = honoured(None, "Extra: how long the model stays loaded after the request.")
    options: dict[str, Any] = honoured({}, "Extra: options as on /api; the fields of this body win.")
    overflow: Overflow = honoured("error", "Extra: what happens to a prompt that does not fit: error, truncate_oldest, shift or sinks.")
    timeout: float | None = honoured(None, "Extra: seconds after which the request ends with an error (504).", gt=0)
    priority: int = honoured(0, "Extra: lower goes first; each level counts as much as 30 seconds of waiting.")


class ChatCompletionBody(Common):
    """POST /v1/chat/completions."""

    messages: list[TurnMessage] = honoured(..., "The conversation so far.")
    max_completion_tokens: int | None = honoured(None, "Most tokens of the answer; wins over max_tokens.", ge=0)
    tools: list[dict[str, Any]] = honoured([], "Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = honoured(None, "auto, none, required, or one function.")
    parallel_tool_calls: bool = honoured(True, "false: at most one call in an answer.")
    reasoning_effort: Effort | None = honoured(None, "Whether, or how hard, a thinking model thinks.")
    reasoning: Reasoning | None = honoured(None, "Another way to say reasoning_effort.")
    logprobs: bool = honoured(False, "Report the log-probability of each token of the answer.")
    top_logprobs: int | None = honoured(None, "How many of the likeliest tokens to report beside each.", ge=0, le=20)
    thinking_budget: int | None = honoured(
        None, "Extra: most tokens of thinking, after which it is ended and the answer comes; by itself, reasoning_effort says.", ge=0
    )
    chat_template_kwargs: dict[str, Any] = honoured({}, "Extra: variables for the model's chat template.")
    metadata: dict[str, Any] = accepted({}, "Without effect: labels for a provider's records.")
    store: bool = refused("Keeping answers for later.", harmless=(False,))
    service_tier: str = accepted("auto", "Without effect: there is one tier.")
    safety_identifier: str = accepted("", "Without effect: names your user to a provider.")
    prompt_cache_key: str = accepted("", "Without effect: every prefix is cached.")
    prompt_cache_retention: str = accepted("", "Without effect: every prefix is cached.")
    prompt_cache_options: dict[str, Any] = accepted({}, "Without effect: every prefix is cached.")
    prediction: dict[str, Any] = accepted({}, "Without effect on the answer: a guess that may make it faster.")
    modalities: Any = refused("Anything but text.", harmless=(["text"],))
    audio: Any = refused("Sound: no model here speaks.")
    moderation: Any = refused("Moderation.")
    verbosity: Any = refused("Length by word.", harmless=("medium",))
    web_search_options: Any = refused("Searching the web.")
    functions: Any = refused("The form of tools that OpenAI has given up.", harmless=([],))
    function_call: Any = refused("The form of tool_choice that OpenAI has given up.", harmless=("none", "auto"))


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = honoured(..., "Text or token ids, or a list of either: one answer for each.")
    suffix: str | None = honoured(None, "Text after the answer; the model fills in the middle.")
    best_of: int | None = honoured(None, "How many answers are made; the `n` likeliest ones are sent. Not with stream.", ge=1, le=128)
    echo: bool = honoured(False, "Put the prompt in front of the answer.")
    logprobs: int | None = honoured(None, "How many of the likeliest tokens to report beside each.", ge=0, le=20)
