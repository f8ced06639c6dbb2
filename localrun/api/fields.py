"""How a request body is declared, and how one is read.

Every field of a dialect says in its declaration what becomes of it: it is **honoured**, it is **accepted** (read, checked, and without
effect on the answer, for the reason its text gives), or it is **refused** (any value but a harmless one is answered with 400 and the
field's name). Names no dialect knows are refused too, so nothing that a client asks for is ignored. docs/api.md is made from the same
declarations. Knows pydantic; knows no field of any dialect.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from localrun.errors import BadRequest, Unsupported

Use = Literal["honoured", "accepted", "refused"]

_USE = "x-localrun-use"
_HARMLESS = "x-localrun-harmless"


def honoured(default: Any, text: str, *, alias: str | None = None, **limits: Any) -> Any:
    """A field that does what `text` says. `...` as default: required. `limits` are pydantic's (ge, le, min_length...)."""
    return Field(default, description=text, alias=alias, json_schema_extra={_USE: "honoured"}, **limits)


def accepted(default: Any, text: str, *, alias: str | None = None, **limits: Any) -> Any:
    """A field whose type is checked and which changes no answer here; `text` says why."""
    return Field(default, description=text, alias=alias, json_schema_extra={_USE: "accepted"}, **limits)


def refused(text: str, *, harmless: tuple[Any, ...] = (), alias: str | None = None) -> Any:
    """A field that is not implemented: null and the `harmless` values (which ask for nothing) pass, anything else is answered with 400."""
    return Field(None, description=text, alias=alias, json_schema_extra={_USE: "refused", _HARMLESS: list(harmless)})


class Body(BaseModel):
    """Base of every request body and of the objects inside one. null means absent, as in both dialects."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    refusals: ClassVar[dict[str, tuple[str, list[Any]]]] = {}
    """Of the refused fields: attribute name -> (name on the wire, harmless values)."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.refusals = {
            name: (field.alias or name, _extra(field)[_HARMLESS])
            for name, field in cls.model_fields.items()
            if _extra(field).get(_USE) == "refused"
        }

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _refuse(self) -> Body:
        for name, (wire, harmless) in self.refusals.items():
            if name in self.model_fields_set and not _is_one_of(getattr(self, name), harmless):
                allowed = " (only " + ", ".join(json.dumps(value) for value in harmless) + " is)" if harmless else ""
                raise Unsupported(f'"{wire}" is not supported{allowed}', param=wire)
        return self


def use_of(body: type[Body]) -> dict[str, tuple[str, Use, str]]:
    """Attribute name -> (name on the wire, what becomes of it, its sentence), in order of declaration."""
    return {name: (field.alias or name, _extra(field)[_USE], field.description or "") for name, field in body.model_fields.items()}


B = TypeVar("B", bound=Body)


def parse(body: type[B], raw: bytes) -> B:
    """The body as it was sent, checked.

    Raises BadRequest: nothing sent, no JSON, no object, a missing field, a field nobody knows, a value of the wrong type or out of
    range (the message names the place, as `messages[0].content`); Unsupported: a refused field.
    """
    if not raw.strip():
        raise BadRequest("missing request body")
    try:
        return body.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error, raw) from None


def _extra(field: Any) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _is_one_of(value: Any, harmless: list[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in harmless)


def _explain(error: ValidationError, raw: bytes) -> BadRequest:
    problems = error.errors(include_url=False)
    if problems[0]["type"] == "json_invalid":
        return BadRequest("the request body is not valid JSON: " + problems[0]["ctx"]["error"])
    document = from_json(raw)
    if not isinstance(document, dict):
        return BadRequest("the request body must be a JSON object")
    # A value that may have one of several types fails once for each of them. The type it was meant to have is the one it fits deepest;
    # where it fits none at all, say all of them.
    first = max(problems, key=lambda problem: len(_place(problem["loc"], document)))
    place = _place(first["loc"], document)
    texts: list[str] = []
    for problem in problems:
        text = _text(problem)
        if _place(problem["loc"], document) == place and text not in texts:
            texts.append(text)
    top = place.partition(".")[0].partition("[")[0] or None
    if first["type"] == "extra_forbidden":
        return BadRequest(f'unknown field "{place}"', param=top)
    if first["type"] == "missing":
        return BadRequest(f"{place} is required", param=top)
    return BadRequest(f"{place}: {' or '.join(texts)}", param=top)


def _text(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def _place(location: tuple[int | str, ...], document: Any) -> str:
    """`messages[0].content`: the steps that exist in the document, and the last one if it is a missing field. Names of the branches
    of a union, which pydantic puts in between, are left out."""
    place = ""
    value = document
    for position, step in enumerate(location):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            place += f"[{step}]"
            value = value[step]
        elif isinstance(step, str) and isinstance(value, dict) and (step in value or position == len(location) - 1):
            place += f".{step}" if place else step
            value = value.get(step)
    return place
