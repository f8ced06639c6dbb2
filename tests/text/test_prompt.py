"""From requests to prompts: templates tried in their forms, one BOS, what is dropped and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest, ContextOverflow, TemplateError
from localrun.messages import Generate, Message, ToolCall
from localrun.text.prompt import Prompt, build_prompt
from localrun.text.template import FALLBACK, ChatTemplate
from localrun.text.tokenizer import Tokenizer
from tests.text.vocabularies import bpe, tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), bpe(("tokenizer.ggml.add_bos_token", "bool", True)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), bpe())


def said(*turns: str) -> list[Message]:
    """Messages from "role:content"."""
    return [Message(role=turn.split(":", 1)[0], content=turn.split(":", 1)[1]) for turn in turns]


def prompt(tok: Tokenizer, template: str | ChatTemplate = CHATML, n_ctx: int = 1000, **request: Any) -> Prompt:
    chat = ChatTemplate(template, bos_token="<s>", eos_token="</s>") if isinstance(template, str) else template
    return build_prompt(Generate(request_id="r", **request), tok, chat, n_ctx)


# ---- messages, prompts, tokens ----


def test_messages_through_the_template(tok: Tokenizer) -> None:
    built = prompt(tok, messages=said("system:be kind", "user:hello"))
    assert built.text == "<system>be kind</s><user>hello</s><assistant>"
    assert built.tokens == [0, *tok.encode(built.text, add_special=False)]
    assert (built.dropped_messages, built.dropped_tokens) == (0, 0)


def test_a_prompt_is_a_users_turn(tok: Tokenizer) -> None:
    assert prompt(tok, prompt="hello", system="x").text == "<system>x</s><user>hello</s><assistant>"
    assert prompt(tok, prompt="hello").text == "<user>hello</s><assistant>"


def test_a_raw_prompt_goes_as_it_is(tok: Tokenizer) -> None:
    built = prompt(tok, prompt="hello<|user|>", raw=True)
    assert built.text == "hello<|user|>"
    assert built.tokens == [0, *tok.encode("hello", add_special=False), 2]


def test_a_base_model_continues_the_prompt(tok: Tokenizer) -> None:
    base = ChatTemplate(FALLBACK, fallback=True)
    assert prompt(tok, base, prompt="Once ").text == "Once "
    assert prompt(tok, base, prompt="Once", system="You write.").text == "You write.\n\nOnce"


def test_a_requests_own_template(tok: Tokenizer) -> None:
    assert prompt(tok, prompt="hello", template="[{{ bos_token }}{{ messages[0].content }}]").text == "[<s>hello]"


def test_token_prompts(tok: Tokenizer) -> None:
    built = prompt(tok, prompt_tokens=[5, 6], context=[7])
    assert built.tokens == [7, 5, 6]
    with pytest.raises(BadRequest, match="vocabulary"):
        prompt(tok, prompt_tokens=[tok.n_vocab])
    with pytest.raises(BadRequest, match="vocabulary"):
        prompt(tok, prompt="a", context=[-1])


@pytest.mark.parametrize("request_fields", [{}, {"prompt": "a", "prompt_tokens": [1]}, {"messages": [], "prompt": "a"}])
def test_exactly_one_of_three(tok: Tokenizer, request_fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="exactly one"):
        prompt(tok, **request_fields)


def test_an_answer_is_gone_on_with(tok: Tokenizer) -> None:
    built = prompt(tok, messages=said("user:hello", "assistant:The answer "))
    assert built.text == "<user>hello</s><assistant>The answer"
    kept = prompt(tok, messages=said("user:hello", "assistant:a"), template_kwargs={"add_generation_prompt": True})
    assert kept.text == "<user>hello</s><assistant>a</s><assistant>"


# ---- BOS ----


def test_one_bos_whoever_writes_it(tok: Tokenizer, plain: Tokenizer) -> None:
    writes = "{{ bos_token }}" + CHATML
    for vocabulary, template, first in ((tok, CHATML, [0]), (tok, writes, [0]), (plain, writes, [0]), (plain, CHATML, [])):
        tokens = prompt(vocabulary, template, prompt="hello").tokens
        assert tokens[: tokens.count(0)] == first


def test_no_eos_behind_a_prompt(tmp_path: Path) -> None:
    adds = tokenizer(tmp_path, bpe(("tokenizer.ggml.add_eos_token", "bool", True)))
    assert prompt(adds, prompt="hello", raw=True).tokens == adds.encode("hello", add_special=False)


def test_context_goes_in_front_without_a_second_bos(tok: Tokenizer) -> None:
    first = prompt(tok, "{{ bos_token }}" + CHATML, prompt="hello")
    again = prompt(tok, "{{ bos_token }}" + CHATML, prompt="world", context=first.tokens)
    assert again.tokens[: len(first.tokens)] == first.tokens
    assert again.tokens.count(0) == 1
    assert again.text == first.text + "<s><user>world</s><assistant>"


# ---- templates that are particular ----


def test_thinking_reaches_the_template(tok: Tokenizer) -> None:
    shows = "{{ enable_thinking is defined }} {{ enable_thinking }} {{ reasoning_effort }}"
    assert prompt(tok, shows, prompt="a").text == "False  "
    assert prompt(tok, shows, prompt="a", think=False).text == "True False "
    assert prompt(tok, shows, prompt="a", think="high").text == "True True high"
    assert prompt(tok, shows, prompt="a", think=True, template_kwargs={"enable_thinking": "mine"}).text == "True mine "


CALL = [ToolCall(id="c1", name="add", arguments={"a": 1})]


def test_arguments_are_objects_where_they_parse(tok: Tokenizer) -> None:
    shows = "{{ messages[0].tool_calls[0].function.arguments is mapping }}"
    for arguments in ({"a": 1}, '{"a": 1}'):
        calls = [ToolCall(id="c", name="f", arguments=arguments)]
        assert prompt(tok, shows, messages=[Message(role="assistant", tool_calls=calls)]).text == "True"
    calls = [ToolCall(id="c", name="f", arguments="not json")]
    assert prompt(tok, shows, messages=[Message(role="assistant", tool_calls=calls)]).text == "False"


def test_arguments_are_text_for_templates_that_need_it(tok: Tokenizer) -> None:
    joins = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert prompt(tok, joins, messages=[Message(role="assistant", tool_calls=CALL)]).text == 'add {"a": 1}'


def test_tools_are_undefined_for_templates_that_need_it(tok: Tokenizer) -> None:
    old = "{% if tools is defined %}{{ tools|length }}{% endif %}{{ messages[0].content }}"
    assert prompt(tok, old, prompt="hello").text == "hello"
    assert prompt(tok, old, messages=said("user:x"), tools=[{}, {}]).text == "2x"


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_neighbours_are_joined_for_templates_that_need_it(tok: Tokenizer) -> None:
    assert prompt(tok, ALTERNATE, messages=said("user:a", "user:b")).text == "<user>a\n\nb"


def test_the_system_message_joins_the_first_users_for_templates_that_need_it(tok: Tokenizer) -> None:
    assert prompt(tok, ALTERNATE, messages=said("system:be", "user:a", "assistant:b", "user:c")).text == "<user>be\n\na<assistant>b<user>c"


def test_the_first_complaint_is_the_one_that_is_told(tok: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="does not accept these messages: never"):
        prompt(tok, "{{ raise_exception('never') }}", messages=said("system:x", "user:a", "user:b"))


def test_ids_as_mistral_wants_them(tok: Tokenizer) -> None:
    insists = (
        "{% for m in messages %}{% for id in [m.tool_call_id or m.tool_calls[0].id] %}{% if id|length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ id }};{% endfor %}{% endfor %}"
    )
    for call_id in ("call_ab12cd34", "abcdefghi"):
        calls = [ToolCall(id=call_id, name="add", arguments={})]
        messages = [Message(role="assistant", tool_calls=calls), Message(role="tool", content="3", tool_call_id=call_id)]
        first, second, _ = prompt(tok, insists, messages=messages).text.split(";")
        assert first == second and (first == call_id) == (len(call_id) == 9)


def test_what_a_tool_said(tok: Tokenizer) -> None:
    shows = "{% for m in messages %}{{ m.name }}/{{ m.tool_call_id }}/{{ m.content }};{% endfor %}"
    message = Message(role="tool", content="3", tool_name="add", tool_call_id="c1")
    assert prompt(tok, shows, messages=[message]).text == "add/c1/3;"


# ---- what does not fit ----


def test_too_long_is_refused_with_both_numbers(tok: Tokenizer) -> None:
    whole = len(prompt(tok, messages=said("user:hello")).tokens)
    assert prompt(tok, n_ctx=whole + 1, messages=said("user:hello")).dropped_tokens == 0
    assert prompt(tok, n_ctx=whole, messages=said("user:hello"), max_tokens=0).dropped_tokens == 0
    with pytest.raises(ContextOverflow) as caught:
        prompt(tok, n_ctx=whole, messages=said("user:hello"))
    assert (caught.value.needed, caught.value.available) == (whole, whole - 1)


@pytest.mark.parametrize("how", [{"prompt_tokens": [5] * 20}, {"prompt": "x" * 20, "raw": True}, {"prompt": "x" * 40}])
@pytest.mark.parametrize("overflow", ["error", "truncate_oldest"])
def test_a_prompt_alone_cannot_be_shortened(tok: Tokenizer, how: dict[str, Any], overflow: str) -> None:
    with pytest.raises(ContextOverflow):
        prompt(tok, n_ctx=20, overflow=overflow, **how)


def test_the_oldest_go_first_by_whole_turns(tok: Tokenizer) -> None:
    turns = said("system:s", "user:" + "a" * 50, "assistant:" + "b" * 50, "tool:" + "c" * 50, "user:d", "assistant:e", "user:f")
    whole = prompt(tok, messages=turns)
    built = prompt(tok, n_ctx=100, messages=turns, overflow="truncate_oldest")
    assert built.text == "<system>s</s><user>d</s><assistant>e</s><user>f</s><assistant>"
    assert built.dropped_messages == 3
    assert built.dropped_tokens == len(whole.tokens) - len(built.tokens)


def test_system_and_last_message_stay_or_all_is_refused(tok: Tokenizer) -> None:
    turns = said("system:" + "s" * 200, "user:a", "assistant:b", "user:c")
    with pytest.raises(ContextOverflow) as caught:
        prompt(tok, n_ctx=100, messages=turns, overflow="truncate_oldest")
    assert caught.value.needed == len(prompt(tok, messages=said("system:" + "s" * 200, "user:c")).tokens)


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(st.tuples(ROLES, st.integers(0, 40)), min_size=1, max_size=12), st.integers(5, 300))
def test_dropping_keeps_as_much_as_fits(tok: Tokenizer, turns: list[tuple[str, int]], n_ctx: int) -> None:
    messages = [Message(role=role, content=chr(ord("A") + i) * length) for i, (role, length) in enumerate(turns)]
    template_kwargs = {"add_generation_prompt": True}
    try:
        built = prompt(tok, n_ctx=n_ctx, messages=messages, overflow="truncate_oldest", template_kwargs=template_kwargs)
    except ContextOverflow as error:
        assert error.needed > error.available == n_ctx - 1
        return
    assert len(built.tokens) <= n_ctx - 1
    kept = [m for m in messages if m.content and m.content in built.text]
    assert messages[-1] in kept or not messages[-1].content
    assert all(m in kept for m in messages if m.role == "system" and m.content)
    if built.dropped_messages:
        whole = prompt(tok, n_ctx=10_000, messages=messages, template_kwargs=template_kwargs)
        assert built.dropped_tokens == len(whole.tokens) - len(built.tokens) > 0
