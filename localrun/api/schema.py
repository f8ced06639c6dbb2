"""Request bodies of Ollama's native endpoints. A sentence for each field; see fields.py for what the three words mean."""

from __future__ import annotations

from typing import Any

from localrun.api.fields import Body, accepted, honoured, refused
from localrun.messages import Overflow

KeepAlive = int | float | str
Format = str | dict[str, Any]


class FunctionCall(Body):
    """What an assistant message called."""

    index: int = accepted(0, "The call's place in its message; the order of the list is what counts.")
    name: str = honoured(..., "The tool's name.")
    arguments: dict[str, Any] = honoured(..., "The arguments, as an object.")


class ToolCallIn(Body):
    """A call in the history."""

    id: str = honoured("", "Ties the call to its result.")
    type: str = accepted("function", "Only functions exist.")
    function: FunctionCall = honoured(..., "What was called.")


class ChatMessage(Body):
    """One turn of the conversation."""

    role: str = honoured(..., "system, user, assistant or tool; other roles reach the model's template as they are.")
    content: str = honoured("", "The text.")
    thinking: str | None = honoured(None, "What an assistant thought before it answered; templates that show it get it.")
    images: list[str] = honoured([], "Pictures (PNG, JPEG, ...) in base64, for models that see; they stand before the text.")
    tool_calls: list[ToolCallIn] | None = honoured(None, "Calls that an assistant message made.")
    tool_name: str | None = honoured(None, "Of a tool message: the tool that answered.")
    tool_call_id: str | None = honoured(None, "Of a tool message: the call it answers.")


class Inference(Body):
    """What /api/generate and /api/chat have in common."""

    model: str = honoured("", "Name of the model, as `localrun list` prints it.")
    stream: bool = honoured(True, "Send the answer as it comes, one JSON object a line; false: one object at the end.")
    format: Format | None = honoured(None, '"json", or a JSON schema that the answer must satisfy.')
    keep_alive: KeepAlive | None = honoured(None, "How long the model stays loaded: seconds or a duration; below 0: for ever.")
    options: dict[str, Any] = honoured({}, "Sampling and limits; see the table of options.")
    think: bool | str | None = honoured(None, 'Whether, or how hard, the model thinks: true, false, "low", "medium", "high" or "max".')
    thinking_budget: int | None = honoured(
        None, "localrun's own: most tokens of thinking, after which it is ended and the answer comes; by itself, think's level says.", ge=0
    )
    timeout: float | None = honoured(None, "localrun's own: seconds after which the request ends with an error (504).", gt=0)
    truncate: bool | None = honoured(None, "false: a prompt that does not fit is an error; else the oldest messages are dropped.")
    shift: bool | None = honoured(None, "true: go on in a window that moves when the context is full; else the answer ends.")
    logprobs: bool = honoured(False, "Report the log-probability of each token of the answer.")
    top_logprobs: int | None = honoured(None, "How many of the likeliest tokens to report beside each; 0 to 20.")
    debug_render_only: bool = honoured(False, "Answer with the rendered prompt and generate nothing.", alias="_debug_render_only")
    overflow: Overflow | None = honoured(None, "localrun's own: what happens to a prompt that does not fit; wins over truncate and shift.")
    priority: int = honoured(0, "localrun's own: lower goes first; each level counts as much as 30 seconds of waiting.")
    load_progress: bool = honoured(False, "localrun's own: while the model loads, a stream has lines with `status`, `total`...")


class GenerateBody(Inference):
    """POST /api/generate: one prompt, one answer. Without a prompt: load the model, or unload it when keep_alive is 0."""

    prompt: str = honoured("", "What to answer.")
    suffix: str = honoured("", "Text after the answer; the model fills in the middle.")
    system: str | None = honoured(None, "System message in place of the model's own.")
    template: str | None = honoured(None, "Chat template, in Jinja or Go's language, in place of the model's own.")
    context: list[int] = honoured([], "Tokens that the final object of an earlier answer carried; they come before the prompt.")
    raw: bool = honoured(False, "The prompt goes to the model as it is, without any template.")
    images: list[str] = honoured([], "Pictures (PNG, JPEG, ...) in base64, for models that see; they stand before the prompt.")
    width: int | None = refused("Size of a picture to make: no model here draws.")
    height: int | None = refused("Size of a picture to make: no model here draws.")
    steps: int | None = refused("Steps of making a picture: no model here draws.")


class ChatBody(Inference):
    """POST /api/chat: a conversation, and its next message. Without messages: load the model, or unload it when keep_alive is 0."""

    messages: list[ChatMessage] = honoured([], "The conversation so far.")
    tools: list[dict[str, Any]] = honoured([], "Functions that the model may call.")


class TokenizeBody(Body):
    """POST /api/tokenize: a text as the model's tokens."""

    model: str = honoured(..., "Name of the model.")
    content: str = honoured(..., "The text.")
    add_special: bool = honoured(True, "Put the tokens around it that the model expects, such as the one that begins a text.")
    parse_special: bool = honoured(True, "Take the names of special tokens in the text for the tokens; false: for plain text.")
    keep_alive: KeepAlive | None = honoured(None, "How long the model stays loaded: seconds or a duration; below 0: for ever.")


class DetokenizeBody(Body):
    """POST /api/detokenize: tokens as text."""

    model: str = honoured(..., "Name of the model.")
    tokens: list[int] = honoured(..., "Token ids.")
    keep_alive: KeepAlive | None = honoured(None, "How long the model stays loaded: seconds or a duration; below 0: for ever.")


class ModelBody(Body):
    """DELETE /api/delete."""

    model: str = honoured("", "Name of the model.")
    name: str = honoured("", "Older name of the field `model`.")


class ShowBody(ModelBody):
    """POST /api/show."""

    verbose: bool = honoured(False, "Carry long arrays of the file's metadata and the list of its tensors too.")
    system: str | None = honoured(None, "Show the model as it would be with this system message.")
    template: str | None = honoured(None, "Show the model as it would be with this template.")
    options: dict[str, Any] = accepted({}, "Without effect: nothing that is shown depends on them.")


class PullBody(ModelBody):
    """POST /api/pull."""

    stream: bool = honoured(True, "Send progress, one JSON object a line; false: one object at the end.")
    insecure: bool = honoured(False, "Accept plain HTTP, for a name that begins with http://.")
    rate: str = honoured("", "localrun's own: bytes a second at most, as in 5M or 800k.")
    username: str = accepted("", "Without effect, as in Ollama.")
    password: str = accepted("", "Without effect, as in Ollama.")


class PushBody(ModelBody):
    """POST /api/push."""

    stream: bool = honoured(True, "Send progress, one JSON object a line; false: one object at the end.")
    insecure: bool = honoured(False, "Accept plain HTTP, for a name that begins with http://.")
    username: str = accepted("", "Without effect, as in Ollama.")
    password: str = accepted("", "Without effect, as in Ollama.")


class CopyBody(Body):
    """POST /api/copy."""

    source: str = honoured("", "Name of the model to copy.")
    destination: str = honoured("", "Name of the copy; the weights are shared.")


class CreateBody(ModelBody):
    """POST /api/create: a model from another one or from files sent before to /api/blobs."""

    from_: str = honoured("", "Name of the model to start from, or path on this machine: a GGUF file, a safetensors folder.", alias="from")
    files: dict[str, str] = honoured({}, "File name to digest of a blob sent before: a GGUF file, its parts, or a safetensors folder.")
    template: str | None = honoured(None, "Chat template, in Jinja or Go's language.")
    system: str | None = honoured(None, "System message.")
    license: str | list[str] = honoured([], "License text, or several.")
    parameters: dict[str, Any] = honoured({}, "Options that hold for every request unless it says otherwise.")
    messages: list[ChatMessage] = honoured([], "Messages that come before those of every conversation.")
    stream: bool = honoured(True, "Send progress, one JSON object a line; false: one object at the end.")
    adapters: dict[str, str] = honoured({}, "LoRA adapters, file name to digest of a blob sent before: GGUF files, or safetensors ones.")
    quantize: str = honoured("", "Type to make the weights of, q4_K_M for instance; they must be F32, F16 or BF16 before.")
    quantization: str = honoured("", "Older name of the field `quantize`.")
    renderer: str = refused("Ollama's built-in prompt renderers; the template decides here.", harmless=("",))
    parser: str = refused("Ollama's built-in output parsers; the template decides here.", harmless=("",))
    requires: str = accepted("", "Without effect: the least version of Ollama that a model needs.")
    draft_files: dict[str, str] = refused("Draft models.", harmless=({},))
    draft_quantize: str = refused("Draft models.", harmless=("",))
    remote_host: str = refused("Models on other machines.", harmless=("",))
    info: dict[str, Any] = refused("Metadata that replaces the file's own.", harmless=({},))
    insecure: bool = honoured(False, "Accept plain HTTP, where what to start from is pulled by a name that begins with http://.")
    modelfile: str = honoured("", "localrun's own: text of a Modelfile, in place of the fields above.")
    copy_: bool = honoured(False, "localrun's own: copy a GGUF file of this machine, rather than link to it.", alias="copy")
    folder: str = honoured("", "localrun's own: where relative paths in `modelfile` begin (clients on this machine).")
