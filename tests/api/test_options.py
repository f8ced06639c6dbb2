"""Options: types, ranges, precedence, keep_alive."""

from __future__ import annotations

import math
from typing import Any

import pytest

from localrun.api.options import OPTIONS, ModelDefaults, checked_options, keep_alive_seconds, merged, model_options, sampling
from localrun.errors import BadRequest, Unsupported
from localrun.messages import Sampling
from localrun.store.parameters import KINDS


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"seed": None, "top_p": None}, {}),
        ({"main_gpu": 1, "use_mmap": False, "numa": True, "num_batch": 1}, {}),
        ({"num_gpu": 99, "gpu_layers": -1}, {"num_gpu": 99, "gpu_layers": -1}),
        ({"tfs_z": 1, "penalize_newline": True}, {}),
        (
            {"mirostat": 2, "ignore_eos": True, "dry_sequence_breakers": ["a"]},
            {"mirostat": 2, "ignore_eos": True, "dry_sequence_breakers": ["a"]},
        ),
        ({"stop": []}, {"stop": []}),
        ({"num_predict": -2}, {"num_predict": -2}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ],
)
def test_what_passes(given: dict[str, Any], kept: dict[str, Any]) -> None:
    found = checked_options(given)
    assert found == kept and {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in kept.items()}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_ctx": "1"}, 'option "num_ctx" must be of type integer'),
        ({"num_ctx": True}, 'option "num_ctx" must be of type integer'),
        ({"num_ctx": 0.5}, 'option "num_ctx" must be of type integer'),
        ({"temperature": "1"}, 'option "temperature" must be of type float32'),
        ({"temperature": False}, 'option "temperature" must be of type float32'),
        ({"stop": "a"}, 'option "stop" must be of type array'),
        ({"stop": ["a", 1]}, 'option "stop" must be of type array'),
        ({"numa": 0}, 'option "numa" must be of type boolean'),
        ({"temperature": -0.1}, 'option "temperature" must be 0 or more, got -0.1'),
        ({"num_ctx": -1}, 'option "num_ctx" must be 0 or more, got -1'),
        ({"min_p": 1.1}, 'option "min_p" must be from 0 to 1, got 1.1'),
        ({"repeat_last_n": -2}, 'option "repeat_last_n" must be -1 or more, got -2'),
        ({"seed": 2**64}, f'option "seed" must be from {-(2**63):g} to {2**63 - 1:g}, got {2**64}'),
        ({"penalize_newline": False}, 'option "penalize_newline" is not supported'),
    ],
)
def test_what_does_not(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        checked_options(given)
    assert str(caught.value) == text


def test_unknown_names_are_told_what_there_is() -> None:
    with pytest.raises(BadRequest, match=r'unknown option "top_n"; known are adapter_scale, banned_strings, .*xtc_threshold'):
        checked_options({"top_n": 1})


def test_what_others_wrote_into_a_model_stops_nobody() -> None:
    assert model_options({"temperature": 0.5, "tfs_z": 0.5, "num_gqa": 8, "top_k": "x", "stop": ["a"]}) == {
        "temperature": 0.5,
        "stop": ["a"],
    }
    with pytest.raises(Unsupported):
        checked_options({"tfs_z": 0.5})


def test_every_parameter_a_modelfile_may_have_is_an_option() -> None:
    assert set(KINDS) <= set(OPTIONS)


def test_precedence() -> None:
    model = ModelDefaults(name="m", params={"temperature": 0.1, "top_k": 3, "stop": ["m"], "num_ctx": 100}, num_ctx=77)
    found = merged({"temperature": 0.9, "stop": ["r", "m", ""]}, model, {"temperature": 1.0, "top_p": 1.0, "top_k": 9})
    assert found == {"temperature": 0.9, "top_p": 1.0, "top_k": 3, "stop": ["m", "r"], "num_ctx": 100}
    assert merged({"num_ctx": 5}, model)["num_ctx"] == 5
    assert merged({}, ModelDefaults(name="m", num_ctx=77))["num_ctx"] == 77
    assert merged({"num_ctx": 0}, ModelDefaults(name="m"))["num_ctx"] == 0


def test_sampling_takes_what_is_its_own() -> None:
    assert sampling({}) == Sampling()
    assert sampling({"seed": -1}).seed is None and sampling({"seed": 0}).seed == 0
    assert sampling({"dry_sequence_breakers": ["a"]}).dry_sequence_breakers == ("a",)
    assert sampling({"top_k": 3, "num_ctx": 9, "stop": ["a"]}, {5: 1.0}) == Sampling(top_k=3, logit_bias={5: 1.0})
    honoured = {name for name, option in OPTIONS.items() if option.use == "honoured"}
    assert honoured == (set(Sampling.__struct_fields__) - {"logit_bias"}) | {
        "num_ctx",
        "num_predict",
        "num_thread",
        "num_thread_batch",
        "num_gpu",
        "gpu_layers",
        "stop",
        "draft_num_predict",
        "draft",
        "draft_rule",
        "session",
        "num_beams",
        "length_penalty",
        "kv_cache_type",
        "adapter_scale",
    }


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (10, 10.0),
        (1.5, 1.5),
        (-1, math.inf),
        (-0.5, math.inf),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("-1m", math.inf),
        ("-1", math.inf),
        ("300", 300.0),
        ("0", 0.0),
        ("250ms", 0.25),
        (" 2s ", 2.0),
    ],
)
def test_keep_alive(value: Any, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 minutes", "m", "5x", "1e3", "--1", float("nan"), float("inf")])
def test_keep_alive_that_is_none(value: Any) -> None:
    with pytest.raises(BadRequest, match="keep_alive"):
        keep_alive_seconds(value)


@pytest.mark.parametrize("name", ["temperature", "num_ctx", "presence_penalty"])
def test_numbers_beyond_all_bounds(name: str) -> None:
    for value in (10**400, -(10**400), 2**63):
        with pytest.raises(BadRequest, match="too large a number"):
            checked_options({name: value})
