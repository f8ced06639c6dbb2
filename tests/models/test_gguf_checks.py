"""Typed keys, and the checks of tensors, vocabulary and values that every family shares."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localrun.models import validate
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.params import Keys
from tests.models.build import Builder, Tensor

Key = tuple[str | bytes, str, Any]
Open = Callable[..., GGUFFile]


@pytest.fixture
def make(tmp_path: Path) -> Open:
    def build(*keys: Key, tensors: list[Tensor] | None = None) -> GGUFFile:
        path = tmp_path / "m.gguf"
        path.write_bytes(Builder([("general.architecture", "string", "arch"), *keys], tensors or []).bytes())
        return open_gguf(path)

    return build


def refused(call: Callable[..., object], *args: Any, **options: Any) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        call(*args, **options)
    return caught.value


# ---- keys ----


def test_values_come_typed_and_prefixed(make: Open) -> None:
    keys = Keys(
        make(
            ("arch.n", "uint32", 7),
            ("arch.x", "float32", 0.5),
            ("arch.yes", "bool", True),
            ("arch.s", "string", "silu"),
            ("general.file_type", "uint32", 15),
            ("arch.signed", "array[int32]", [-1, 2]),
            ("arch.names", "array[string]", ["a"]),
            ("arch.scores", "array[float32]", [1.5]),
            ("arch.flags", "array[bool]", [True, False]),
        )
    )
    assert (keys.int("n"), keys.float("x"), keys.bool("yes"), keys.str("s"), keys.int("general.file_type")) == (7, 0.5, True, "silu", 15)
    assert keys.ints("signed", length=2) == [-1, 2]
    assert (keys.strings("names"), keys.floats("scores"), keys.bools("flags")) == (["a"], [1.5], [True, False])
    assert keys.has("n")
    assert not keys.has("m")


def test_defaults_hold_only_for_absent_keys(make: Open) -> None:
    keys = Keys(make(("arch.n", "uint32", 7)))
    assert keys.int("n", 3) == 7
    assert keys.int("m", 3, minimum=5) == 3
    assert (keys.float("m", None), keys.bool("m", False), keys.str("m", "x"), keys.ints("m", None)) == (None, False, "x", None)
    for read in (keys.int, keys.float, keys.bool, keys.str, keys.ints, keys.floats, keys.strings, keys.bools):
        error = refused(read, "m")
        assert (error.field, error.problem) == ("arch.m", "is missing; the model cannot run without it")


@pytest.mark.parametrize(
    ("kind", "content"),
    [("int32", 7), ("uint64", 7), ("uint8", 7), ("float32", 7.0), ("string", "7"), ("bool", True), ("array[uint32]", [7])],
)
def test_another_type_is_refused_even_with_a_default(make: Open, kind: str, content: Any) -> None:
    error = refused(Keys(make(("arch.n", kind, content))).int, "n", 5)
    assert error.field == "arch.n"
    assert error.problem == f"is of type {kind}, not uint32"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 2.5])
def test_floats_out_of_range(make: Open, value: float) -> None:
    assert refused(Keys(make(("arch.x", "float32", value))).float, "x", above=0, maximum=2).field == "arch.x"


def test_ranges_choices_and_lengths(make: Open) -> None:
    keys = Keys(make(("arch.n", "uint32", 7), ("arch.s", "string", "b\nc"), ("arch.a", "array[uint32]", [1, 2, 300])))
    assert refused(keys.int, "n", minimum=8).problem == "is 7, but must be at least 8"
    assert refused(keys.int, "n", maximum=6).problem == "is 7, but must be at most 6"
    assert keys.int("n", minimum=7, maximum=7) == 7
    assert refused(keys.str, "s", choices={"x", "a"}).problem == "is 'b\\nc', which is not supported (supported: a, x)"
    assert refused(keys.ints, "a", length=4).problem == "has 3 items, but 4 are needed"
    assert "not an array of string" in refused(keys.strings, "a").problem
    assert keys.per_layer("n", 3) == (7, 7, 7)
    assert keys.per_layer("a", 2) == (1, 2)
    assert keys.per_layer("absent", 2, 9) == (9, 9)
    assert refused(keys.per_layer, "absent", 2).field == "arch.absent"
    assert refused(keys.per_layer, "a", 4).problem == "has 3 items, but 4 layers need one each"
    assert refused(keys.per_layer, "a", 3, maximum=299).problem == "is 300, but must be at most 299"


def test_what_is_not_implemented_is_refused(make: Open) -> None:
    keys = Keys(make(("arch.on", "float32", 30.0), ("arch.off", "float32", 0.0), ("arch.no", "bool", False)))
    for name in ("off", "no", "absent"):
        keys.refuse(name, "soft-capping is not supported")
    assert str(refused(keys.refuse, "on", "soft-capping is not supported")).endswith("arch.on: is 30.0, soft-capping is not supported")


# ---- hyper-parameters ----

SOUND: dict[str, tuple[str, Any]] = {
    "block_count": ("uint32", 2),
    "embedding_length": ("uint32", 64),
    "context_length": ("uint32", 128),
    "attention.head_count": ("uint32", 4),
    "attention.head_count_kv": ("uint32", 2),
    "attention.layer_norm_rms_epsilon": ("float32", 1e-5),
    "rope.dimension_count": ("uint32", 16),
}


def hyperparameters(make: Open, **changes: tuple[str, Any] | None) -> None:
    values = SOUND | {name.replace("__", "."): change for name, change in changes.items()}
    validate.check_hyperparameters(Keys(make(*[(f"arch.{name}", *change) for name, change in values.items() if change is not None])))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention__head_count": ("array[int32]", [4, 2])},
        {"rope__dimension_count": ("uint32", 8)},
        {"rope__dimension_count": None, "attention__head_count_kv": None},
        {"attention__head_count": ("uint32", 6), "attention__key_length": ("uint32", 32)},
        {"expert_count": ("uint32", 8), "expert_used_count": ("uint32", 8)},
    ],
)
def test_sound_hyperparameters(make: Open, changes: dict[str, Any]) -> None:
    hyperparameters(make, **changes)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("block_count", ("uint32", 0)),
        ("block_count", ("uint32", 5000)),
        ("embedding_length", ("uint32", 1 << 30)),
        ("context_length", None),
        ("attention__head_count", ("uint32", 5)),
        ("attention__head_count", ("array[int32]", [4])),
        ("attention__head_count_kv", ("uint32", 3)),
        ("attention__key_length", ("uint32", 0)),
        ("rope__dimension_count", ("uint32", 18)),
        ("rope__dimension_count", ("uint32", 7)),
        ("attention__layer_norm_rms_epsilon", ("float32", 0.0)),
        ("expert_used_count", ("uint32", 2)),
    ],
)
def test_unsound_hyperparameters(make: Open, name: str, change: tuple[str, Any] | None) -> None:
    with pytest.raises(ModelFileError) as caught:
        hyperparameters(make, **{name: change})
    assert caught.value.field == "arch." + name.replace("__", ".")


# ---- tensors ----


def vector(name: str, *values: float) -> Tensor:
    return Tensor(name, (len(values),), validate.F32, struct.pack(f"<{len(values)}f", *values))


def matrix(name: str, kind: int = validate.F32, code: str = "f", value: float = 1.0) -> Tensor:
    return Tensor(name, (2, 3), kind, struct.pack(f"<6{code}", *[0] * 5, value))


EXPECTED: dict[str, tuple[int, ...]] = {"norm": (2,), "w": (2, 3)}


def test_tensors_as_expected(make: Open) -> None:
    validate.check_model(make(tensors=[vector("norm", 1, 2), matrix("w")]), EXPECTED, {"bias": (3,)})
    validate.check_model(make(tensors=[vector("norm", 1, 2), matrix("w"), vector("bias", 1, 2, 3)]), EXPECTED, {"bias": (3,)})
    validate.check_model(make(tensors=[Tensor("norm", (2, 1, 1), 0, bytes(8)), matrix("w", validate.F16, "e")]), EXPECTED)


@pytest.mark.parametrize(
    ("tensors", "field", "problem"),
    [
        ([vector("norm", 1, 2)], "tensor w", "is missing"),
        ([vector("norm", 1, 2), Tensor("w", (3, 2), 0, bytes(24))], "tensor w", "shape [3, 2], but [2, 3]"),
        ([vector("norm", 1, 2), Tensor("w", (2, 3), 26, bytes(24))], "tensor w", "is of type I32"),
        ([Tensor("norm", (2,), 1, bytes(4)), matrix("w")], "tensor norm", "is of type F16; supported here: F32"),
        ([vector("norm", 1, 2), matrix("w"), vector("x", 1), vector("y", 1)], "tensor x", "nor are 1 more"),
        ([vector("norm", 1, math.nan), matrix("w")], "tensor norm", "value 1 is NaN"),
        ([vector("norm", 1, 2), matrix("w", validate.F16, "e", math.inf)], "tensor w", "value 5 is NaN or infinite"),
        ([vector("norm", 1, 2), matrix("w", validate.BF16, "H", 0x7FC0)], "tensor w", "value 5 is NaN or infinite"),
        ([vector("norm", 1, 2), matrix("w"), vector("bias", 1)], "tensor bias", "shape [1], but [3]"),
    ],
)
def test_tensors_not_as_expected(make: Open, tensors: list[Tensor], field: str, problem: str) -> None:
    error = refused(validate.check_model, make(tensors=tensors), EXPECTED, {"bias": (3,)})
    assert error.field == field
    assert problem in error.problem


def test_types_that_have_no_kernel_are_named(make: Open) -> None:
    gguf = make(tensors=[vector("norm", 1, 2), matrix("w", validate.F16, "e")])
    error = refused(validate.check_model, gguf, EXPECTED, weight_types={validate.F32, 12})
    assert error.problem == "is of type F16; supported here: F32, Q4_K"


def test_large_float_matrices_are_not_read_but_vectors_always_are(make: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "FINITE_BUDGET", 20)
    validate.check_finite(make(tensors=[matrix("w", value=math.nan)]))
    gguf = make(tensors=[Tensor("w", (2, 3), validate.F16, struct.pack("<6e", *[math.nan] * 6)), matrix("v")])
    assert refused(validate.check_finite, gguf).field == "tensor w"
    assert refused(validate.check_finite, make(tensors=[matrix("w"), vector("n", *[math.nan] * 9)])).field == "tensor n"


# ---- vocabulary ----


def vocabulary(make: Open, **changes: tuple[str, Any] | None) -> GGUFFile:
    values: dict[str, tuple[str, Any] | None] = {
        "model": ("string", "gpt2"),
        "tokens": ("array[string]", ["a", "b", "ab"]),
        "merges": ("array[string]", ["a b"]),
    }
    return make(*[(f"tokenizer.ggml.{name}", *change) for name, change in (values | changes).items() if change is not None])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token_id": ("uint32", 2), "padding_token_id": ("uint32", validate.NO_TOKEN)},
        {"token_type": ("array[int32]", [1, 1, 42])},
        {"model": ("string", "llama"), "scores": ("array[float32]", [0, 0, 0]), "merges": None},
        {"pre": ("string", "known")},
    ],
)
def test_sound_vocabularies(make: Open, changes: dict[str, Any]) -> None:
    validate.check_tokenizer_keys(vocabulary(make, **changes), {"known"})


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("tokens", ("array[string]", []), "is empty"),
        ("merges", ("array[int32]", [0, 1]), "is of type array[int32], not an array of string"),
        ("merges", None, "is missing"),
        ("scores", ("array[float32]", [0.0]), "has 1 items"),
        ("token_type", ("array[uint32]", [1, 1]), "has 2 items"),
        ("model", ("string", "llama"), "is missing"),
        ("eos_token_id", ("uint32", 3), "is 3, but the vocabulary has 3 tokens"),
        ("eot_token_id", ("int32", -1), "is of type int32"),
        ("pre", ("string", "other"), "'other' is no pre-tokenizer"),
    ],
)
def test_unsound_vocabularies(make: Open, name: str, change: tuple[str, Any] | None, problem: str) -> None:
    error = refused(validate.check_tokenizer_keys, vocabulary(make, **{name: change}), {"known"})
    assert error.field == f"tokenizer.ggml.{'scores' if name == 'model' else name}"
    assert problem in error.problem
