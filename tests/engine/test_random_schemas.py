"""A thousand schemas made at random, on a model of pure noise: what comes always parses and always validates, and tokens that must come are
not asked of the model. (Ours is the generator of schemas; the judge is jsonschema-rs, which knows nothing of how the text was made.)"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, cast

import jsonschema_rs
import numpy as np
import pytest

from localrun.engine.grammar import GrammarCompiler
from localrun.errors import Unsupported
from tests.fakes import BYTES, FakeTokenizer

SCHEMAS = 1000
AT_A_TIME = 100
WORDS = ("name", "age", "x", "a b", "ключ", 'quo"te', "back\\slash", "items", "$ref", "한")
PATTERNS = ("^[a-z]{1,6}$", "^\\d{3}-\\d{2}$", "^(yes|no)+$", "[A-F]", "^\\w+$")
FORMATS = ("uuid", "ipv4")
"""Those of which the shape is all: 31 February, leap seconds and the longest mail address are beyond a grammar."""
Schema = dict[str, Any]


def schema(draw: random.Random, depth: int = 3) -> Schema:
    """Any, no deeper than this."""
    kinds: list[Callable[[random.Random, int], Schema]] = [text, text, whole, number, flag, nothing, choice, constant]
    if depth:
        kinds += [record, record, row, row, either]
    return draw.choice(kinds)(draw, depth)


def text(draw: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "string"}
    match draw.randrange(5):
        case 0:
            made["pattern"] = draw.choice(PATTERNS)
        case 1:
            made["format"] = draw.choice(FORMATS)
        case 2:
            made["minLength"] = draw.randrange(4)
            made["maxLength"] = made["minLength"] + draw.randrange(6)
        case 3:
            made["maxLength"] = draw.randrange(9)
    return made


def whole(draw: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "integer"}
    if draw.random() < 0.6:
        made[draw.choice(["minimum", "exclusiveMinimum"])] = draw.randrange(-200, 200)
    if draw.random() < 0.6:
        made[draw.choice(["maximum", "exclusiveMaximum"])] = draw.randrange(210, 5000)
    if draw.random() < 0.2:
        made["multipleOf"] = draw.choice([2, 5, 10])
    return made


def number(draw: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "number"}
    if draw.random() < 0.5:
        made["minimum"] = round(draw.uniform(-50, 50), 2)
    if draw.random() < 0.5:
        made["maximum"] = round(draw.uniform(60, 500), 2)
    return made


def flag(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", ["boolean", "null"]])}


def nothing(draw: random.Random, depth: int) -> Schema:
    return {"type": "null"}


def choice(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.sample(["a", "ä\n", "", 1, 2.5, None, True, [1], {"k": "v"}], draw.randint(1, 4))}


def constant(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice(["fixed", 7, None, [1, 2], {"a": [True]}])}


def record(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(0, 4))
    made: Schema = {"type": "object", "properties": {name: schema(draw, depth - 1) for name in names}}
    made["required"] = [name for name in names if draw.random() < 0.6]
    made["additionalProperties"] = draw.choice([False, False, False, schema(draw, 0)])
    return made


def row(draw: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "array", "items": schema(draw, depth - 1), "maxItems": draw.randint(1, 4)}
    if draw.random() < 0.5:
        made["minItems"] = draw.randint(0, made["maxItems"])
    if draw.random() < 0.2:
        made["prefixItems"] = [schema(draw, depth - 1) for _ in range(draw.randint(1, made["maxItems"]))]
    return made


def either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


class Noise:
    """A model that says anything, and would rather close what it has opened: else texts and lists without a bound would not end."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
        self.compiler, self.tokenizer = compiler, tokenizer
        self.liking = np.zeros(tokenizer.n_vocab)
        self.liking[[ord(character) for character in '"}]']] = 4.0
        self.liking[128:BYTES] = -9.0
        self.liking[ord("\\")] = -9.0

    def answer(self, wanted: Schema, seed: int) -> tuple[str, int, int]:
        """The text, how many tokens it has, and how many of them were asked of the model. Raises Unsupported."""
        constraint = self.compiler.compile(wanted)
        noise = np.random.default_rng(seed)
        said: list[int] = []
        asked = 0
        while not constraint.complete:
            assert len(said) < 4000, "no end in sight"
            allowed = constraint.allowed()
            scores = np.where(allowed, noise.normal(size=len(allowed)) * 2 + self.liking, -np.inf)
            token = int(np.argmax(scores))
            asked += 1
            if token in self.tokenizer.eog_ids:
                break
            for one in [token, None]:
                following = [one] if one is not None else constraint.forced()
                for chosen in following:
                    constraint.accept(chosen)
                    said.append(chosen)
        return self.tokenizer.decode(said).decode("utf-8"), len(said), asked


def bounded(digits: str) -> float:
    """1e999 is a number in JSON, and too large for the judge's floats."""
    return max(-1e308, min(1e308, float(digits)))


@pytest.fixture(scope="module")
def noise() -> Noise:
    tokenizer = FakeTokenizer()
    return Noise(GrammarCompiler(cast(Any, tokenizer), tokenizer.n_vocab), tokenizer)


@pytest.mark.parametrize("first", range(0, SCHEMAS, AT_A_TIME))
def test_what_comes_parses_and_validates(noise: Noise, first: int) -> None:
    tokens = asked = refused = 0
    for seed in range(first, first + AT_A_TIME):
        wanted = {**schema(random.Random(seed)), "$schema": "https://json-schema.org/draft/2020-12/schema"}
        try:
            said, n, n_asked = noise.answer(wanted, seed)
        except Unsupported as error:
            refused += 1
            assert "is not supported" in str(error) or "asks for what" in str(error)
            continue
        value = json.loads(said, parse_float=bounded)
        jsonschema_rs.Draft202012Validator(wanted, validate_formats=True).validate(value)
        tokens, asked = tokens + n, asked + n_asked
    assert refused < AT_A_TIME / 20, f"{refused} of {AT_A_TIME} are refused"
    assert asked < 0.9 * tokens, "tokens that must come are asked of the model"
