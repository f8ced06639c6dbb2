"""Structured output: always of the form asked for, whatever the model would rather say; what cannot be promised is refused up front."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.engine.grammar import GrammarCompiler
from localrun.engine.llg import Vocabulary, _lib
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Sampling
from tests.engine.harness import Harness, Outcome
from tests.fakes import EOS, SPECIALS, FakeClock, FakeModel, FakeTokenizer, ScriptedModel

# Closes strings and lists sooner or later: a model of pure noise would go on for ever.
TENDENCIES = {ord('"'): 6.0, ord("}"): 6.0, ord("]"): 6.0, ord("\\"): -20.0, EOS: 6.0}

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def say(wanted: Any, model: FakeModel | None = None, **fields: Any) -> Outcome:
    harness = Harness(model, n_blocks=64)
    fields = {"logit_bias": TENDENCIES, "max_tokens": 600, "num_ctx": 900, **fields}
    outcome = harness.ask(fields.pop("prompt", "Answer: "), format=wanted, **fields)
    harness.run()
    return outcome


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_followed(seed: int, temperature: float) -> None:
    outcome = say(PERSON, FakeModel(max_batch=40 + seed), seed=seed, temperature=temperature)
    assert outcome.finished is not None
    assert outcome.finished.reason == "stop"
    value = json.loads(outcome.text)
    assert value.keys() == {"name", "age"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150


@pytest.mark.parametrize("seed", range(5))
def test_json_is_an_object(seed: int) -> None:
    outcome = say("json", seed=seed)
    assert outcome.finished is not None
    assert outcome.finished.reason == "stop"
    assert isinstance(json.loads(outcome.text), dict)


def test_regex() -> None:
    outcome = say({"regex": r"[a-f]{3}-\d{2,4}(x|yy)"})
    assert re.fullmatch(r"[a-f]{3}-\d{2,4}(x|yy)", outcome.text)


@pytest.mark.parametrize(
    "grammar",
    ['start: "yes" | "no" WORD\nWORD: /[a-z]{2,5}/', 'root ::= "yes" | "no" word\nword ::= [a-z] [a-z] [a-z]? [a-z]? [a-z]?'],
    ids=["lark", "gbnf"],
)
def test_grammars_in_both_notations(grammar: str) -> None:
    assert re.fullmatch(r"yes|no[a-z]{2,5}", say({"grammar": grammar}).text)


def test_forced_tokens_take_no_pass() -> None:
    """Names of required properties are not asked of the model."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a_rather_long_name": {"enum": [1, 2]}}, "required": ["a_rather_long_name"]}
    schema["additionalProperties"] = False
    forced = say(schema, draft_num_predict=0)
    asked = say(schema, draft_num_predict=0, logprobs=0)
    assert json.loads(forced.text).keys() == json.loads(asked.text).keys() == {"a_rather_long_name"}
    assert forced.finished is not None
    assert asked.finished is not None
    assert asked.finished.passes == asked.finished.completion_tokens
    assert forced.finished.passes < forced.finished.completion_tokens / 2
    items = [item for piece in asked.pieces for item in piece.logprobs]
    assert len(items) == asked.finished.completion_tokens, "with log-probabilities every token is asked for"


def test_the_end_needs_no_token_of_its_own() -> None:
    outcome = say({"regex": "abc"})
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.reason) == ("abc", "stop")
    assert bytes(outcome.answer) == b"abc"


def test_cut_off_by_length_is_said() -> None:
    outcome = say({"regex": "a{50}"}, max_tokens=7)
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.reason, outcome.finished.completion_tokens) == ("a" * 7, "length", 7)


def test_text_that_fits_is_left_as_the_model_says_it() -> None:
    text = '{\n  "name": "Ada 한",\n  "age": 36\n}'
    assert say(PERSON, ScriptedModel(text), temperature=0, logit_bias={}).text == text


def test_drafts_and_bans_keep_to_the_grammar() -> None:
    for wanted in ({"regex": "(abc|bca){13}[ab]"}, {"regex": "[abc]{40}"}):
        clock = FakeClock()
        model = FakeModel(clock=clock, cost=lambda rows, attended: 0.03 + 0.001 * rows)
        harness = Harness(model, clock=clock)
        drafted = harness.ask("x", format=wanted, seed=2)
        plain = harness.ask("x", format=wanted, seed=2, draft_num_predict=0)
        banned = harness.ask("x", format={"regex": "[abc]{40}"}, seed=2, banned_strings=["aab", "ccc"])
        harness.run()
        assert drafted.text == plain.text
        assert re.fullmatch("[abc]{40}", banned.text)
        assert "aab" not in banned.text
        assert "ccc" not in banned.text


def test_bans_that_leave_the_grammar_no_way_are_told() -> None:
    outcome = say({"regex": "abc"}, banned_strings=["b"])
    assert outcome.failed is not None
    assert "banned_strings" in outcome.failed.message


@pytest.mark.parametrize(
    ("wanted", "error", "named"),
    [
        ({"type": "array", "uniqueItems": True}, Unsupported, "uniqueItems"),
        ({"not": {"type": "string"}}, Unsupported, "not"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}, Unsupported, "colour"),
        ({"type": "string", "pattern": "(?=a)b"}, Unsupported, "look-around"),
        ({"type": "strin"}, BadRequest, "strin"),
        ({"$ref": "#/nowhere"}, BadRequest, "nowhere"),
        ({"regex": "a("}, BadRequest, "unclosed group"),
        ({"grammar": "start: missing"}, BadRequest, "missing"),
        ({"grammar": "root ::= ("}, BadRequest, "format"),
        ("yaml", BadRequest, "yaml"),
    ],
)
def test_what_cannot_be_promised_is_refused_up_front(wanted: Any, error: type[LocalrunError], named: str) -> None:
    harness = Harness()
    with pytest.raises(error) as caught:
        harness.ask("x", format=wanted)
    assert type(caught.value) is error
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "format"


def test_a_model_without_an_end_cannot_promise() -> None:
    harness = Harness()
    harness.parts.tokenizer.eog_ids = frozenset()
    with pytest.raises(Unsupported, match="no token that ends"):
        GrammarCompiler(harness.parts.tokenizer, harness.model.info.n_vocab).compile("json")


def test_one_request_s_grammar_is_not_another_s() -> None:
    harness = Harness(n_blocks=128)
    numbers = harness.ask("x", format={"regex": r"\d{30}"})
    letters = harness.ask("x", format={"regex": "[a-z]{30}"})
    free = harness.ask("x", max_tokens=30)
    harness.run()
    assert re.fullmatch(r"\d{30}", numbers.text)
    assert re.fullmatch("[a-z]{30}", letters.text)
    assert free.text == say(None, logit_bias={}, max_tokens=30, num_ctx=0, prompt="x").text


# ---- random schemas -------------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-50, 50), st.integers(0, 100)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.text('abc한"\\', max_size=5), st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=4, unique_by=repr
        ),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}$"}),
)


def _object(properties: dict[str, Any], n_required: int) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:n_required], "additionalProperties": False}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(_object, st.dictionaries(st.text("xyz_", min_size=1, max_size=4), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value obeys a schema of the kinds made above."""
    if "enum" in schema:
        return any(type(value) is type(v) and value == v for v in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            right = isinstance(value, str) and len(value) <= schema.get("maxLength", 99)
            return right and ("pattern" not in schema or re.fullmatch("[a-c]{1,4}", value) is not None)
        case "array":
            return isinstance(value, list) and len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= properties.keys()
        and all(fits(v, properties[k]) for k, v in value.items())
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas, st.integers(0, 1000))
def test_random_schemas_are_followed(schema: dict[str, Any], seed: int) -> None:
    harness = Harness(n_blocks=64)
    sampling = Sampling(seed=seed, logit_bias=TENDENCIES)
    outcome = harness.ask("x", format=schema, max_tokens=900, seed=sampling.seed, logit_bias=sampling.logit_bias)
    harness.run()
    assert outcome.finished is not None, outcome.failed
    assert outcome.finished.reason == "stop"
    assert fits(json.loads(outcome.text), schema), outcome.text


def test_masks_and_forced_tokens_are_those_of_the_python_classes() -> None:
    """Along a JSON text, token by token, and back again."""
    tokenizer = FakeTokenizer()
    n = tokenizer.n_vocab

    class Wrapped:
        eos_token_id, bos_token_id = min(tokenizer.eog_ids), tokenizer.bos_id
        special_token_ids = sorted(SPECIALS)
        tokens = [tokenizer.piece(token, special=True) for token in range(n)]  # noqa: RUF012

        def __call__(self, text: bytes) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=False)

    theirs = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()), eos_token=sorted(tokenizer.eog_ids))
    schema = llguidance.LLMatcher.grammar_from_json_schema(PERSON, defaults={"whitespace_pattern": r"[ \n\r\t]{0,40}"})
    matcher = llguidance.LLMatcher(theirs, schema, log_level=0)
    ours = GrammarCompiler(tokenizer, n).compile(PERSON)  # type: ignore[arg-type]
    bits = llguidance.numpy.allocate_token_bitmask(1, n)
    text = tokenizer.encode('{"name": "h\u00e9llo \ud55c", "age": 12}', add_special=False)
    for token in [*text, None]:
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        expected = np.unpackbits(bits[0].view(np.uint8), count=n, bitorder="little").view(np.bool_)
        assert ours.allowed().tolist() == expected.tolist()
        assert ours.forced() == list(matcher.compute_ff_tokens())
        if token is not None:
            ours.accept(token)
            matcher.consume_token(token)
    assert ours.complete and matcher.is_stopped()
    ours.take_back(3)
    assert ours.allowed()[text[-3]]


def test_nobody_waits_while_a_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run Python while the library works on it: streams are not held up."""
    rng = np.random.default_rng(1)
    pieces = [rng.integers(32, 127, size, np.uint8).tobytes() for size in rng.integers(2, 9, 60_000)]
    begun, done = threading.Event(), threading.Event()
    make = getattr(_lib(), "llg_new_tokenizer_v2")  # noqa: B009

    def watched(*arguments: Any) -> Any:
        begun.set()
        made = make(*arguments)
        done.set()
        return made

    monkeypatch.setattr(_lib(), "llg_new_tokenizer_v2", watched)
    turns, end = 0, time.monotonic() + 120
    while turns <= 5:  # how many turns others get is up to the system, too; none would if the interpreter were held
        assert time.monotonic() < end, turns
        begun.clear()
        done.clear()
        thread = threading.Thread(target=Vocabulary, args=(pieces, [], [0], lambda text: []))
        thread.start()
        assert begun.wait(120)
        turns = 0
        while not done.wait(0.001):
            turns += 1
        thread.join()
