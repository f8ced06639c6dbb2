"""docs/api.md, made from the routes, the bodies and the options: what each endpoint takes, field by field.

`python -m localrun.api.reference` prints it; a test fails when the file is not what this makes.
"""

from __future__ import annotations

import sys
from typing import Any

from localrun.api.fields import Body, use_of
from localrun.api.options import OPTIONS
from localrun.api.routes import ROUTES, Route

INTRODUCTION = """# The API

Made from the code by `python -m localrun.api.reference > docs/api.md`; do not edit.

localrun speaks Ollama's native API (`/api/...`, newline-delimited JSON) and OpenAI's (`/v1/...`, server-sent events). For each field of a
request body this page says what becomes of it:

- **honoured**: it does what its sentence says.
- **accepted**: its type is checked, and it changes no answer here; the sentence says why.
- **refused**: it is not implemented. null, and the values given as harmless, pass; anything else is answered with status 400 and the
  field's name.

A field that is not listed is answered with status 400 and its name as well: nothing that a client asks for is ignored. null means absent.
Nothing depends on the request's content type. The daemon serves the same as an OpenAPI document at `/openapi.json`, and to try at `/docs`.

## Where answers differ from Ollama's, on purpose

- Options of a wrong type, out of range or unknown are status 400, with the option's name.
- Stop strings of a request add to the model's own; they do not replace them.
- Nothing is dropped silently. A prompt that does not fit loses its oldest messages on `/api`, which the reply's `messages_dropped` and
  `prompt_tokens_dropped` and the headers `x-localrun-messages-dropped` and `x-localrun-prompt-tokens-dropped` say; it is an error on `/v1`,
  and wherever `"overflow": "error"` or `"truncate": false` asks for one.
- With `"overflow": "shift"` a full window loses its middle and the answer goes on; `window_tokens_dropped` says how much was lost.
  `"sinks"` does the same without a pause, for endless answers: what will stay is read ahead while the answer goes on.
- `keep_alive` takes numbers in quotes.
- Final objects carry `seed`, `cached_prompt_eval_count`, `queue_duration` and `first_token_duration` too; on `/v1`, `usage` has
  `prompt_tokens_details.cached_tokens`, and the reply `seed`.
- Texts that lost their end before they became vectors are named by index in `truncated`; on `/v1/embeddings` nothing is cut unless
  `"truncate": true` asks for it. `/api/embeddings` gives vectors as the model does, the other two of length 1.
- `tool_choice` (required, a function, allowed tools; Anthropic's any and tool) is enforced by a grammar of the model's own form of a call,
  so the arguments satisfy the tool's schema. Where the model calls freely, `tool_call_problems` beside the answer says which arguments
  break a schema, and why what looked like a call came as text.
- Thinking can have a budget in tokens: `thinking_budget` (`reasoning.max_tokens`, Anthropic's `thinking.budget_tokens`). When it is used
  up, the model's own end mark is put in place of what would have come. Where a model's template has no notion of levels, an effort is a
  budget: minimal 128, low 512, medium 2048, high 8192, max none. `thinking_eval_count` and `reasoning_tokens` say how much was thinking.
- `near_miss` beside an answer says where a long prompt stopped agreeing with one that is cached, when much of it was read again for that.
- `size` of `/api/ps` is weights and the KV cache as far as it is used (`kv_bytes_in_use`); `kv_bytes` is what the cache may grow to.
  Models with recurrent state say the same of that (`state_bytes`, `state_bytes_in_use`), and how many snapshots of it are kept.
  `engine` there says how the model's engine stands.
- Errors within a stream are sent: as a last line `{"error": "..."}` on `/api`, as an event with an `error` object before `[DONE]` on `/v1`.

## Evaluation harnesses

`/v1/completions` answers `echo` with `logprobs`, token ids and lists of prompts, which is what lm-evaluation-harness's backend
`local-completions` asks for (`pip install "lm-eval[api]" transformers`; run here on a multiple-choice task of our own). TOKENIZER is the
model's tokenizer as Hugging Face has it, a name or a folder: the harness cuts context and continuation apart by tokens.

    lm_eval --model local-completions --tasks YOUR_TASK \\
        --model_args model=smollm2,base_url=http://localhost:11434/v1/completions,tokenizer=TOKENIZER,num_concurrent=4

## Errors

`/api`: `{"error": "text"}`. `/v1`: `{"error": {"message", "type", "param", "code"}}`. Every reply has an `x-request-id`, which the
log shows too.

| status | when |
|---|---|
| 400 | the request is wrong: JSON, a field, an option, a prompt that does not fit, something that is not supported |
| 401, 403 | an API key is needed (`LOCALRUN_API_KEYS`); the Host or Origin header is not one that may call (`LOCALRUN_ORIGINS`) |
| 404 | no such model, blob or path |
| 405 | the path knows other methods |
| 408, 413, 431 | the body came too slowly, or is too large; too many headers |
| 499 | the client went before the answer (in the log only) |
| 500 | the model file is damaged, the model could not be loaded, its process died |
| 502 | a download failed |
| 504 | the request took longer than its `timeout` |
| 503 | too many requests wait, or the server is ending; `retry-after` says when to come again |

"""


def api_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Endpoints\n\n", _endpoints(), "\n"]
    done: set[type[Body]] = set()
    for route in ROUTES:
        if route.body is not None and route.body not in done:
            parts.append(_section(route))
            done |= {route.body, *inner_bodies(route.body)}
            parts.extend(_table(f"#### {inner.__name__}", inner) for inner in inner_bodies(route.body))
    parts.append(_options())
    return "".join(parts)


def inner_bodies(body: type[Body]) -> list[type[Body]]:
    """The objects that a body's fields may hold, in order, each once."""
    found: list[type[Body]] = []

    def visit(annotation: Any) -> None:
        for inner in getattr(annotation, "__args__", ()):
            visit(inner)
        if isinstance(annotation, type) and issubclass(annotation, Body) and annotation not in found and annotation is not body:
            found.append(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)

    for field in body.model_fields.values():
        visit(field.annotation)
    return found


def _endpoints() -> str:
    rows = ["| method | path | what it does |", "|---|---|---|"]
    rows += [f"| {route.method} | `{route.path}` | {route.summary} |" for route in ROUTES]
    return "\n".join(rows) + "\n"


def _section(route: Route) -> str:
    assert route.body is not None
    return _table(f"### {route.method} {route.path}", route.body)


def _table(title: str, body: type[Body]) -> str:
    rows = [title, "", "| field | type | default | | |", "|---|---|---|---|---|"]
    for name, (wire, use, text) in use_of(body).items():
        field = body.model_fields[name]
        default = "required" if field.is_required() else "" if field.default in (None, "", [], {}) else f"`{_plain(field.default)}`"
        harmless = body.refusals.get(name, ("", []))[1]
        also = f" Harmless: {', '.join(f'`{_plain(value)}`' for value in harmless)}." if harmless else ""
        rows.append(f"| `{wire}` | {_type(field.annotation)} | {default} | {use} | {text}{also} |")
    return "\n".join(rows) + "\n\n"


def _options() -> str:
    rows = ["## Options", "", "Keys of `options` on `/api`, and of PARAMETER in a Modelfile. The request's win over the model's.", ""]
    rows += ["| option | type | | |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        also = f" Harmless: {', '.join(f'`{_plain(value)}`' for value in option.harmless)}." if option.harmless else ""
        rows.append(f"| `{name}` | {option.kind} | {option.use} | {option.text}{also} |")
    return "\n".join(rows) + "\n"


def _plain(value: Any) -> str:
    import json

    return json.dumps(value)


def _type(annotation: Any) -> str:
    """A type as JSON's words have it."""
    simple = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "", Any: "any"}
    if annotation in simple:
        return simple[annotation]
    arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
    origin = getattr(annotation, "__origin__", None)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "object"
    if getattr(annotation, "__module__", "") == "typing" and str(annotation).startswith("typing.Literal"):
        return " or ".join(f"`{_plain(value)}`" for value in arguments)
    if arguments:
        return " or ".join(dict.fromkeys(text for one in arguments if (text := _type(one))))
    return str(annotation.__name__)


if __name__ == "__main__":
    sys.stdout.write(api_markdown())
