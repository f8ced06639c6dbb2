"""How bodies are read: what passes, what is refused, and the one line that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.api.fields import Body, accepted, honoured, parse, refused, use_of
from localrun.api.openai_schema import ChatCompletionBody, CompletionBody
from localrun.api.routes import ROUTES
from localrun.api.schema import ChatBody, CreateBody, GenerateBody
from localrun.errors import BadRequest, Unsupported


class Inner(Body):
    """An object inside."""

    name: str = honoured(..., "A name.")
    count: int = honoured(1, "How many.", ge=1)


class Outer(Body):
    """An example."""

    text: str = honoured("", "Some text.")
    either: str | list[Inner] = honoured("", "One or the other.")
    inner: Inner | None = honoured(None, "An object.")
    label: str = accepted("", "A label.")
    n: int = refused("Several.", harmless=(1,))
    magic: Any = refused("Magic.", harmless=([], False))
    hidden: bool = honoured(False, "Hidden.", alias="_hidden")


def message(body: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(Outer, body if isinstance(body, bytes) else json.dumps(body).encode())
    return str(caught.value)


def test_what_is_sent_is_there() -> None:
    body = parse(Outer, b'{"text": "a", "either": [{"name": "x", "count": 2}], "_hidden": true, "label": "b"}')
    assert (body.text, body.hidden, body.label) == ("a", True, "b")
    assert isinstance(body.either, list) and body.either[0].count == 2


def test_null_is_absent() -> None:
    body = parse(Outer, b'{"text": null, "either": null, "inner": null, "label": null, "n": null, "magic": null}')
    assert body == Outer()
    assert message({"inner": {"name": None}}) == "inner.name is required"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "missing request body"),
        (b" \n", "missing request body"),
        (b"{", "the request body is not valid JSON: EOF while parsing an object at line 1 column 1"),
        (b'{"text": "\xff"}', "the request body is not valid JSON: invalid unicode code point at line 1 column 11"),
        (b"3", "the request body must be a JSON object"),
        (b"null", "the request body must be a JSON object"),
        ({"text": 1}, "text: should be a valid string"),
        ({"text": ["a"]}, "text: should be a valid string"),
        ({"either": 1}, "either: should be a valid string or should be a valid array"),
        ({"either": [{"name": "a"}, {}]}, "either[1].name is required"),
        ({"inner": {"name": "a", "count": "1"}}, "inner.count: should be a valid integer"),
        ({"inner": {"name": "a", "count": 1.5}}, "inner.count: should be a valid integer"),
        ({"inner": {"name": "a", "count": True}}, "inner.count: should be a valid integer"),
        ({"inner": {"name": "a", "count": 0}}, "inner.count: should be greater than or equal to 1"),
        ({"colour": "red"}, 'unknown field "colour"'),
        ({"inner": {"name": "a", "size": 1}}, 'unknown field "inner.size"'),
        ({"hidden": True}, 'unknown field "hidden"'),
        ({"n": 2}, '"n" is not supported (only 1 is)'),
        ({"n": True}, "n: should be a valid integer"),
        ({"magic": {"a": 1}}, '"magic" is not supported (only [], false is)'),
    ],
)
def test_what_is_wrong_is_said_in_one_line(body: Any, text: str) -> None:
    assert message(body) == text


def test_harmless_values_of_refused_fields_pass() -> None:
    harmless: dict[str, Any]
    for harmless in ({"n": 1}, {"magic": []}, {"magic": False}):
        parse(Outer, json.dumps(harmless).encode())


def test_the_error_names_the_field() -> None:
    for body, param in (({"inner": {}}, "inner"), ({"colour": 1}, "colour"), ({"n": 2}, "n")):
        with pytest.raises(BadRequest) as caught:
            parse(Outer, json.dumps(body).encode())
        assert caught.value.param == param
    with pytest.raises(Unsupported):
        parse(Outer, b'{"n": 2}')


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        parse(Outer, raw)
    except BadRequest as error:
        assert "\n" not in str(error)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([GenerateBody, ChatBody, CreateBody, ChatCompletionBody, CompletionBody]), st.data())
def test_any_value_in_any_field_is_read_or_refused(cls: type[Body], data: st.DataObject) -> None:
    names = [field.alias or name for name, field in cls.model_fields.items()]
    body = data.draw(st.dictionaries(st.sampled_from(names), _json, max_size=3))
    try:
        parse(cls, json.dumps(body).encode())
    except BadRequest as error:
        assert str(error)


def bodies() -> list[type[Body]]:
    """Every body of every route, and every object in one."""
    found: list[type[Body]] = []

    def visit(annotation: Any) -> None:
        for inner in getattr(annotation, "__args__", ()):
            visit(inner)
        if isinstance(annotation, type) and issubclass(annotation, Body) and annotation not in found:
            found.append(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)

    for route in ROUTES:
        visit(route.body)
    return found


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.__name__)
def test_every_field_says_what_becomes_of_it(body: type[Body]) -> None:
    assert body.__doc__
    for wire, use, text in use_of(body).values():
        assert use in ("honoured", "accepted", "refused"), wire
        assert text.endswith("."), f"{wire}: {text!r} is no sentence"
