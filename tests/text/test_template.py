"""Chat templates: every recorded rendering, which template holds, and what stops a template that does not end."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.models.gguf import open_gguf
from localrun.text import sandbox
from localrun.text.sandbox import Limits
from localrun.text.template import FALLBACK, ChatTemplate, TemplateError, chat_template_for
from tests.conftest import REFERENCE
from tests.text.vocabularies import bpe, write

CHAT = REFERENCE / "chat"
NAMES = sorted(path.stem for path in (CHAT / "rendered").glob("*.json")) or ["absent"]
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(HELLO if messages is None else messages, **variables)


def error_of(source: str, **variables: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        render(source, **variables)
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---- recorded renderings ----


@pytest.mark.parametrize("name", NAMES)
def test_renderings(shared: Path, name: str) -> None:
    fixed = json.loads((CHAT / "conversations.json").read_text(encoding="utf-8"))
    now = datetime.fromisoformat(fixed["frozen_now"])
    recorded = json.loads((CHAT / "rendered" / f"{name}.json").read_text(encoding="utf-8"))
    with (CHAT / "templates" / recorded["template"]).open(encoding="utf-8", newline="") as file:
        template = ChatTemplate(file.read(), **fixed["special_tokens"])
    assert recorded["cases"]
    for case in recorded["cases"]:
        conversation = fixed["conversations"][case["conversation"]]
        how = {"add_generation_prompt": case["add_generation_prompt"], "now": now, **case.get("kwargs", {})}
        if "prompt" in case:
            assert template.render(conversation["messages"], tools=conversation.get("tools"), **how) == case["prompt"]
        else:
            with pytest.raises(TemplateError) as caught:
                template.render(conversation["messages"], tools=conversation.get("tools"), **how)
            cause = caught.value.__cause__
            assert f"{type(cause).__name__}: {cause}" == case["error"]
            assert "\n" not in str(caught.value)
        if "prompt_tools_undefined" in case:
            assert template.render(conversation["messages"], define_absent=False, **how) == case["prompt_tools_undefined"]


# ---- which template holds ----


def chosen(folder: Path, *keys: Any, override: str | None = None) -> ChatTemplate:
    with open_gguf(write(folder, bpe(*keys))) as gguf:
        return chat_template_for(gguf, override)


def test_the_files_template(tmp_path: Path) -> None:
    template = chosen(tmp_path, ("tokenizer.chat_template", "string", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"))
    assert template.render(HELLO) == "<s>hello</s>"
    assert not template.fallback


def test_an_override_holds_before_the_files(tmp_path: Path) -> None:
    template = chosen(tmp_path, ("tokenizer.chat_template", "string", "file"), override="{{ bos_token }}own")
    assert template.render(HELLO) == "<s>own"


def test_the_template_for_tools_holds_when_tools_are_given(tmp_path: Path) -> None:
    keys = [("tokenizer.chat_template", "string", "plain"), ("tokenizer.chat_template.tool_use", "string", "tools")]
    template = chosen(tmp_path, *keys)
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{}]) == "tools"
    assert template.supports_tools


@pytest.mark.parametrize("keys", [[], [("tokenizer.chat_template", "string", " \n")]])
def test_without_a_template_the_contents_stand_alone(tmp_path: Path, keys: list[Any]) -> None:
    template = chosen(tmp_path, *keys)
    assert template.fallback
    assert template.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b\n"}]) == "a\n\nb\n"
    assert template.source == FALLBACK


def test_what_a_template_is_for() -> None:
    assert not ChatTemplate("{{ messages }}").supports_tools
    assert ChatTemplate("{% if tools %}{% endif %}").supports_tools
    assert ChatTemplate("{% if enable_thinking %}{% endif %}").supports_thinking
    assert not ChatTemplate("{{ messages }}").supports_thinking


# ---- errors are one line ----


def test_a_template_that_is_none() -> None:
    with pytest.raises(TemplateError, match=r"not valid: .*\(line 2\)"):
        ChatTemplate("a\n{% if %}")


def test_a_go_template_is_called_one() -> None:
    with pytest.raises(TemplateError, match="Go's language"):
        ChatTemplate("{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}")


def test_what_a_template_refuses() -> None:
    line = error_of("{{ raise_exception('no\nsystem role') }}")
    assert line == "the model's chat template does not accept these messages: no system role"
    assert "UndefinedError" in error_of("{{ nothing.at_all }}")


# ---- the sandbox ----


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set x = namespace.__class__ %}{{ x.__subclasses__() }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ self._TemplateReference__context.environment }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    messages = [dict(HELLO[0])]
    try:
        text = render(source, messages)
    except TemplateError:
        text = ""
    assert "class" not in text and "object at" not in text and "Environment" not in text
    assert messages == HELLO


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LIMITS", Limits(steps=20_000, seconds=20.0, characters=100_000, number=10_000, source=5_000))


def growing(start: str, step: str, after: str = "") -> str:
    """A template that replaces s, at first `start`, by `step` sixty times."""
    return "{% set ns = namespace(s=" + start + ") %}{% for a in range(60) %}{% set ns.s = " + step + " %}{% endfor %}" + after


LOOP = "{% for a in range(500) %}{% for b in range(500) %}{% endfor %}{% endfor %}"


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("source", "bound"),
    [
        (LOOP, "loop steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "loop steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}", "calls itself"),
        ("{% for a in range(5000) %}{{ 'x' * 100 }}{% endfor %}", "characters"),
        (growing("'xx'", "ns.s + ns.s"), "characters"),
        (growing("'xx'", "ns.s ~ ns.s"), "characters"),
        ("{% set t = namespace(s='xx') %}{% for a in range(60) %}{% set t.s %}{{ t.s }}{{ t.s }}{% endset %}{% endfor %}", "characters"),
        (growing("'xx'", "ns.s.replace('x', ns.s)"), "characters"),
        (growing("'xx'", "ns.s|replace('x', ns.s)"), "characters"),
        (growing("'xx'", "ns.s.join(['', ns.s, ns.s])"), "characters"),
        (growing("'xx'", "[ns.s, ns.s]|join"), "characters"),
        (growing("'xx'", "'%s%s' % (ns.s, ns.s)"), "characters"),
        (growing("'xx'", "'%s%s'|format(ns.s, ns.s)"), "characters"),
        (growing("'xx'", "'{}{}'.format(ns.s, ns.s)"), "characters"),
        (growing("'x x'", "ns.s|wordwrap(1, wrapstring=ns.s)"), "characters"),
        (growing("'x\\ny'", "ns.s|indent(ns.s)"), "characters"),
        (growing("[1]", "[ns.s, ns.s]|sum(start=[])"), "items"),
        ("{% set ns = namespace(s=3) %}{% for a in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}", "size"),
        ("{{ '\t\t'.expandtabs(9000) }}", "size"),
        ("{{ 'x'.translate({120: 'yy'}) }}", "translate"),
        ("{{ '{:{}}'.format(1, 1000000) }}", "size"),
        (growing("[1]", "[ns.s, ns.s]", after="{{ ns.s }}"), "parts"),
        (growing("[1]", "[ns.s, ns.s]", after="{{ ns.s|tojson }}"), "parts"),
        (growing("[1]", "ns.s + ns.s"), "characters"),
        ("{{ 'a' * 1000000000 }}", "size"),
        ("{{ [0] * 1000000000 }}", "size"),
        ("{{ 9 ** 9999999 }}", "size"),
        ("{{ 'a'.ljust(1000000000) }}", "size"),
        ("{{ 'a'|center(1000000000) }}", "size"),
        ("{{ 'a\nb'|indent(1000000000) }}", "size"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (1000000000, 1) }}", "width"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ '%1000000000d'|format(1) }}", "width"),
        ("{{ messages|tojson(indent=100000000) }}", "size"),
    ],
)
def test_what_does_not_end_is_stopped(source: str, bound: str) -> None:
    line = error_of(source)
    assert "was stopped" in line and bound in line, line


def test_a_long_range_is_refused() -> None:
    assert "Range too big" in error_of("{% for x in range(100000000) %}{% endfor %}")


def test_the_clock_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LIMITS", Limits(seconds=0.0))
    assert "seconds" in error_of("{% for a in range(5000) %}{% endfor %}")


def test_a_template_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LIMITS", Limits(source=100))
    with pytest.raises(TemplateError, match="at most 100"):
        ChatTemplate("a" * 101)


@pytest.mark.usefixtures("small_limits")
def test_each_rendering_has_its_own_steps() -> None:
    template = ChatTemplate("{% for a in range(9000) %}{% endfor %}done")
    results: list[str] = []

    def run() -> None:
        results.extend(template.render(HELLO) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 20


def test_counting_cannot_be_reached_from_inside() -> None:
    assert render("{% set environment = 5 %}{% set step = 6 %}{% for x in messages %}{{ environment }}{{ step }}{% endfor %}") == "56"


def test_now() -> None:
    at = datetime(2024, 6, 15, 12)
    assert render("{{ strftime_now('%d %b %Y') }}", now=at) == "15 Jun 2024"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_generation_blocks_and_loop_controls() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, [*HELLO, *HELLO]) == "hello"


def test_tojson_escapes_nothing_but_json() -> None:
    assert render("{{ x|tojson }}", x={"a": "<é>&'\""}) == '{"a": "<é>&\'\\""}'
