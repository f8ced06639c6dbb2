"""Go's template language against what Go itself wrote (gotemplate.json), and chat templates written in it."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import TemplateError
from localrun.text.gochat import GoChatTemplate
from localrun.text.gosyntax import is_go_template
from localrun.text.gotemplate import GoTemplate
from localrun.text.govalues import Record, functions, shown
from localrun.text.template import ChatTemplate

GOLDENS = json.loads(Path(__file__).with_name("gotemplate.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: case["template"][:40])
def test_as_go_does(case: dict[str, Any]) -> None:
    if case["output"] is not None:
        assert GoTemplate(case["template"]).execute(GOLDENS["data"]) == case["output"]
        return
    with pytest.raises(TemplateError, match=r"^line \d+: [^\n]+$"):
        GoTemplate(case["template"]).execute(GOLDENS["data"])


@given(st.text().filter(lambda text: "{{" not in text))
def test_text_without_actions_is_itself(text: str) -> None:
    assert GoTemplate(text).execute({}) == text


ACTIONS = st.text(alphabet='{}-.$|()"`:=, \nabSN1ifendrgwthl', max_size=40)
PIECES = ["{{", "}}", "{{- ", " -}}", "if .S", "else", "end", "range .L", "with", "define", '"x"', "template", "$x", ":=", "print", "|"]
KEYWORDS = st.lists(st.sampled_from(PIECES)).map("".join)


@given(ACTIONS | ACTIONS.map(lambda text: "{{" + text + "}}") | KEYWORDS)
def test_any_text_is_a_template_or_one_line(text: str) -> None:
    try:
        GoTemplate(text).execute({"S": "s", "L": [1]})
    except TemplateError as error:
        assert "\n" not in str(error) and str(error).startswith("line ")


# above 2^53 a float's text, an integer's, reads back as another kind of number
ATOMS = st.none() | st.booleans() | st.integers() | st.floats(-(2.0**53), 2.0**53) | st.text()


@given(st.recursive(ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_json_is_json(value: Any) -> None:
    text = GoTemplate("{{ json . }}").execute(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back(value: float) -> None:
    assert float(shown(value)) == value


@pytest.mark.parametrize(
    "source",
    [
        "{{ range 400000 }}{{ range 400000 }}{{ end }}{{ end }}",
        "{{ define `a` }}{{ template `a` . }}{{ end }}{{ template `a` . }}",
        "{{ define `a` }}{{ template `b` . }}{{ template `b` . }}{{ end }}"
        "{{ define `b` }}{{ range 100000 }}xxxxxxxxxxxxxxxx{{ end }}{{ end }}{{ range 100 }}{{ template `a` . }}{{ end }}",
        "{{ $x := `xxxxxxxxxxxxxxxx` }}{{ range 64 }}{{ $x = print $x $x }}{{ end }}",
        "{{ printf `%999999999d` 1 }}",
        "{{ if 1 }}" * 5000,
        "{{ " + "(" * 5000,
    ],
)  # fmt: skip
def test_bounds(source: str) -> None:
    with pytest.raises(TemplateError, match=r"^line 1: [^\n]+$"):
        GoTemplate(source).execute({})
    assert sys.getrecursionlimit() >= 1000


def test_structs_have_just_their_fields() -> None:
    record = Record({"A": 1}, {"a": 1})
    assert GoTemplate("{{ .A }}{{ if . }}y{{ end }}{{ . }}{{ json . }}").execute(record) == '1y{1}{"a":1}'
    with pytest.raises(TemplateError, match=r"^line 2: can't evaluate field B in a value that has A$"):
        GoTemplate("\n{{ .B }}").execute(record)


def test_dates_and_typescript() -> None:
    now = datetime(2026, 3, 1)
    assert GoTemplate("{{ currentDate }} {{ yesterdayDate }}").execute({}, now) == "2026-03-01 2026-02-28"
    convert = functions(now)["toTypeScriptType"][0]
    assert [convert({"type": kind}) for kind in ("string", "integer", "array", "object", "odd")] == [
        "string", "number", "any[]", "Record<string, any>", "any",
    ]  # fmt: skip
    assert convert({"type": ["string", "null"]}) == "string | null"
    assert convert({"anyOf": [{"type": "boolean"}, {"type": ["number", "null"]}]}) == "boolean | number | null"
    assert convert({}) == "any"


def test_go_is_told_from_jinja() -> None:
    for text in ("{{ .System }}", "{{- if .Messages }}x{{ end }}", "{{range $i, $m := .Messages}}{{end}}", "{{ $x := 1 }}",
                 '{{ template "x" }}'):  # fmt: skip
        assert is_go_template(text), text
    for text in ("", "plain", "{{ messages }}", "{% if x %}{{ .5 }}{% endif %}", "{{ bos_token }}{% for m in messages %}{% endfor %}",
                 "{{ end_of_turn }}", "{{- raise_exception('x') }}", "{{ iffy }}"):  # fmt: skip
        assert not is_go_template(text), text


# ---- chat -----------------------------------------------------------------------------------------------------------------------

TURNS = "{{ if .System }}<s>{{ .System }}</s>{{ end }}{{ if .Prompt }}<u>{{ .Prompt }}</u>{{ end }}<a>{{ .Response }}</a>\n"
CHAT = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "user" }}<u>{{ .Content }}</u>
{{- else if eq .Role "assistant" }}<a>{{ if .Thinking }}<think>{{ .Thinking }}</think>{{ end }}{{ .Content }}
{{- range .ToolCalls }}<call>{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}</call>{{ end }}
{{- if not $last }}</a>{{ end }}
{{- else if eq .Role "tool" }}<t {{ .ToolName }}>{{ .Content }}</t>
{{- else }}<s>{{ .Content }}
{{- if $.Tools }} tools:{{ range $.Tools }} {{ . }}{{ end }}{{ end }}</s>
{{- end }}
{{- if and $last (ne .Role "assistant") }}<a>{{ end }}
{{- end }}"""


def m(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([m("user", "hi")], "<u>hi</u><a>"),
        ([m("system", "be"), m("user", "hi")], "<s>be</s><u>hi</u><a>"),
        ([m("user", "a"), m("assistant", "b"), m("user", "c")], "<u>a</u><a>b</a>\n<u>c</u><a>"),
        ([m("system", "s"), m("user", "a"), m("assistant", "b"), m("system", "t"), m("user", "c")],
         "<s>s</s><u>a</u><a>b</a>\n<s>t</s><u>c</u><a>"),
        ([m("user", "a"), m("user", "b")], "<u>a\n\nb</u><a>"),
        ([m("user", "a"), m("assistant", "I beg")], "<u>a</u><a>I beg"),
        ([m("assistant", "first"), m("user", "a")], "<a>first</a>\n<u>a</u><a>"),
    ],
)  # fmt: skip
def test_a_template_for_one_turn(messages: list[dict[str, Any]], text: str) -> None:
    assert GoChatTemplate(TURNS).render(messages) == text


def test_the_answer_goes_to_the_end_where_the_template_forgot_it() -> None:
    template = GoChatTemplate("[{{ .Prompt }}] ")
    assert template.render([m("user", "a"), m("assistant", "b"), m("user", "c")]) == "[a] b[c] "


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ .Prompt }}{{ if .Response }}{{ .Response }}<end>{{ else }}ELSE{{ end }}<after>", "p"),
        ("{{ if .Prompt }}{{ .Prompt }}<a>{{ .Response }}<end>{{ end }}<after>", "p<a>"),
        ("{{ if .System }}x{{ else }}{{ .Prompt }}{{ .Response }}<end>{{ end }}<after>", "p"),
        ("{{ .Prompt }}{{ printf `%s` .Response }}<end>", "p"),
        ("{{ .Prompt }}{{ if .Response }}R{{ end }}<kept>{{ .Response }}<end>", "p<kept>"),
    ],
)
def test_the_prompt_ends_where_the_answer_begins(source: str, text: str) -> None:
    assert GoChatTemplate(source).render([m("user", "p")]) == text


def test_a_template_for_conversations() -> None:
    template = GoChatTemplate(CHAT)
    properties = {"city": {"description": "d", "type": "string"}}
    parameters = {"properties": properties, "required": ["city"], "type": "object", "strict": True}
    tool = {"type": "function", "function": {"parameters": parameters, "description": "weather <now>", "name": "get"}}
    call = {"id": "1", "function": {"name": "get", "arguments": {"b": 1, "a": "é"}}}
    text = template.render(
        [m("system", "S"), m("user", "U"), m("assistant", "", tool_calls=[call], thinking="hm"), m("tool", "sun", tool_name="get"),
         m("tool", "rain"), m("assistant", "done"), m("user", "x")],
        tools=[tool],
    )  # fmt: skip
    assert text == (
        '<s>S tools: {"type":"function","function":{"name":"get","description":"weather \\u003cnow\\u003e","parameters":{"type":"object",'
        '"required":["city"],"properties":{"city":{"type":"string","description":"d"}},"strict":true}}}</s><u>U</u>'
        '<a><think>hm</think><call>{"name": "get", "arguments": {"b":1,"a":"é"}}</call></a><t get>sun</t><t >rain</t><a>done</a><u>x</u><a>'
    )
    assert template.supports_tools and template.supports_thinking and not GoChatTemplate(TURNS).supports_tools
    assert template.render([m("user", "U"), m("assistant", "go on")]) == "<u>U</u><a>go on"


def test_tools_can_be_walked_through() -> None:
    source = (
        "{{ range .Tools }}{{ .Function.Name }}:{{ range $n, $p := .Function.Parameters.Properties }} {{ $n }} {{ $p.Type }}"
        "{{ $p | toTypeScriptType }}{{ end }}{{ json .Function.Parameters.Required }}{{ end }}{{ range .Messages }}{{ end }}"
    )
    properties = {"z": {"type": ["string", "null"]}, "a": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    assert GoChatTemplate(source).render([m("user", "x")], tools=[tool]) == "f: a integernumber z [string null]string | null[]"


def test_thinking_and_suffix() -> None:
    source = (
        "{{ if .Suffix }}<pre>{{ .Prompt }}<suf>{{ .Suffix }}<mid>"
        "{{ else }}{{ .Think }}{{ .ThinkLevel }}{{ .IsThinkSet }}{{ .Prompt }}{{ end }}"
    )
    template = GoChatTemplate(source)
    assert template.render([m("user", "x")]) == "falsefalsex"
    assert template.render([m("user", "x")], enable_thinking=False) == "falsetruex"
    assert template.render([m("user", "x")], enable_thinking=True, reasoning_effort="high") == "truehightruex"
    assert template.supports_suffix and template.fill("a", "b") == "<pre>a<suf>b<mid>"
    with pytest.raises(TemplateError, match="no place for a suffix"):
        GoChatTemplate(TURNS).fill("a", "b")


def test_roles_that_a_turn_has_no_place_for() -> None:
    with pytest.raises(TemplateError, match="a message of role 'tool'"):
        GoChatTemplate(TURNS).render([m("user", "x"), m("tool", "y")])


def test_it_stands_where_a_jinja_template_does() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token="<b>").with_source(TURNS)
    assert isinstance(template, GoChatTemplate) and template.bos_token == "<b>"
    assert template.render([m("user", "hi")], tools=None, add_generation_prompt=True, define_absent=False) == "<u>hi</u><a>"
    back = template.with_source("{{ messages[0].content }}")
    assert not isinstance(back, GoChatTemplate) and back.render([m("user", "hi")]) == "hi"
    with pytest.raises(TemplateError, match=r"^line 2: "):
        template.with_source("{{ .System }}\n{{ if }}")
