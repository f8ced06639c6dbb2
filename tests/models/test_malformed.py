"""Files with one defect each: every one gets one line that names the file and the field, in little memory; the sound ones load.

The rule is the reference's own behaviour: what it rejects, aborts or crashes on is refused here. Where it accepts, so do we, but for
the files in STRICTER, each with its reason.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.models.params import Keys
from localrun.models.validate import check_hyperparameters, check_model, check_tokenizer_keys, vocabulary_size
from localrun.text.tokenizer import load_tokenizer

MEMORY = 16 << 20
"""Bytes that reading any of these files (35 kB each) may take at most."""

STRICTER = {
    "bool_value_2.gguf": "the specification calls any value but 0 and 1 invalid",
    "context_length_0.gguf": "a model trained on no position at all has no use, and num_ctx would be bounded by 0",
    "weight_nan.gguf": "every answer would be NaN; the reference refuses too when it is asked to check values",
    "weight_inf.gguf": "as weight_nan",
    "bos_out_of_range.gguf": "the reference puts in another token and says so in its log; a guess is not an answer",
}
"""Refused here, accepted by the reference."""

FIELD = {
    "bad_magic": "magic",
    "magic_swapped": "magic",
    "version_0": "version",
    "version_99": "version",
    "version_big_endian": "version",
    "empty_file": "",
    "only_magic": "version",
    "kv_truncated": "tokenizer.ggml.tokens[190]",
    "kv_truncated_at_value": "tensor count",
    "tensor_info_truncated": "tensor token_embd.weight",
    "data_missing": "tensor token_embd.weight",
    "n_kv_huge": "key count",
    "n_kv_negative": "key count",
    "n_tensors_huge": "tensor count",
    "n_tensors_negative": "tensor count",
    "n_tensors_zero": "tensor token_embd.weight",
    "empty_key": "key 4 of 21",
    "value_string_length_huge": "general.name",
    "value_string_length_past_end": "general.name",
    "array_length_huge": "tokenizer.ggml.tokens",
    "array_length_wraps": "tokenizer.ggml.scores",
    "kv_type_out_of_range": "x.y",
    "nested_array": "x.y",
    "nested_array_deep": "x.y",
    "duplicate_key": "general.name",
    "duplicate_hparam_key": "llama.block_count",
    "bool_value_2": "tokenizer.ggml.add_bos_token",
    "hparam_wrong_type_string": "llama.block_count",
    "hparam_wrong_type_float": "llama.embedding_length",
    "hparam_wrong_type_i32": "llama.block_count",
    "alignment_0": "general.alignment",
    "alignment_3": "general.alignment",
    "alignment_huge": "tensor data",
    "alignment_string": "general.alignment",
    "arch_missing": "general.architecture",
    "arch_unknown": "general.architecture",
    "arch_empty": "general.architecture",
    "embedding_length_missing": "llama.embedding_length",
    "rms_eps_missing": "llama.attention.layer_norm_rms_epsilon",
    "block_count_missing": "llama.block_count",
    "block_count_0": "llama.block_count",
    "block_count_2": "tensor blk.1.attn_norm.weight",
    "head_count_0": "llama.attention.head_count",
    "head_count_missing": "llama.attention.head_count",
    "head_count_3": "llama.attention.head_count",
    "head_count_kv_0": "llama.attention.head_count_kv",
    "rope_dim_odd": "llama.rope.dimension_count",
    "rope_dim_huge": "llama.rope.dimension_count",
    "embedding_length_huge": "llama.embedding_length",
    "context_length_0": "llama.context_length",
    "rms_eps_nan": "llama.attention.layer_norm_rms_epsilon",
    "rms_eps_negative": "llama.attention.layer_norm_rms_epsilon",
    "expert_used_gt_count": "llama.expert_used_count",
    "duplicate_tensor": "tensor output_norm.weight",
    "offset_out_of_file": "tensor blk.0.ffn_down.weight",
    "offset_unaligned": "tensor output_norm.weight",
    "offset_overlap": "tensor blk.0.attn_k.weight",
    "ne_overflow": "tensor output_norm.weight",
    "ne_overflow_bytes": "tensor output_norm.weight",
    "ne_zero": "tensor output_norm.weight",
    "ndim_0": "tensor output_norm.weight",
    "ndim_5": "tensor output_norm.weight",
    "ndim_huge": "tensor output_norm.weight",
    "tensor_type_200": "tensor blk.0.ffn_down.weight",
    "tensor_type_i32": "tensor blk.0.ffn_down.weight",
    "block_size_not_dividing": "tensor blk.0.ffn_down.weight",
    "block_size_not_dividing_q8": "tensor blk.0.attn_q.weight",
    "tensor_name_empty": "name of tensor 12 of 12",
    "extra_tensor": "tensor foo.bar",
    "missing_tensor": "tensor blk.0.ffn_down.weight",
    "missing_norm": "tensor output_norm.weight",
    "embedding_wrong_vocab": "tensor token_embd.weight",
    "weight_transposed": "tensor blk.0.ffn_down.weight",
    "norm_wrong_length": "tensor blk.0.attn_norm.weight",
    "weight_nan": "tensor blk.0.attn_q.weight",
    "weight_inf": "tensor blk.0.attn_q.weight",
    "tokens_missing": "tokenizer.ggml.tokens",
    "tokenizer_model_missing": "tokenizer.ggml.model",
    "tokens_wrong_type": "tokenizer.ggml.tokens",
    "token_type_short": "tokenizer.ggml.token_type",
    "scores_short": "tokenizer.ggml.scores",
    "tokens_duplicate": "tokenizer.ggml.tokens",
    "bos_out_of_range": "tokenizer.ggml.bos_token_id",
    "merges_missing": "tokenizer.ggml.merges",
    "merges_wrong_type": "tokenizer.ggml.merges",
    "pre_unknown": "tokenizer.ggml.pre",
    "tokens_truncated_count": "tokenizer.ggml.tokens[11]",
}
"""The field that the line must name, for every file that is refused."""


def check_llama(path: Path) -> None:
    """All that is checked before a llama-family file is used: the shared checks, with a family's own keys and table of tensors, and
    what the tokenizer finds."""
    with open_gguf(path) as gguf:
        if gguf.architecture != "llama":
            raise ModelFileError(gguf.path, "general.architecture", f"{gguf.architecture!r} is not supported")
        keys = Keys(gguf)
        check_hyperparameters(keys)
        check_tokenizer_keys(gguf, known_pre={"default", "gpt-2"})
        load_tokenizer(gguf)
        width, ffn, layers = keys.int("embedding_length"), keys.int("feed_forward_length", minimum=1), keys.int("block_count")
        keys.float("attention.layer_norm_rms_epsilon", above=0)
        heads = keys.int("attention.head_count")
        kv_width = width // heads * keys.int("attention.head_count_kv", heads)
        vocabulary = (width, vocabulary_size(gguf))
        expected: dict[str, tuple[int, ...]] = {"token_embd.weight": vocabulary, "output_norm.weight": (width,)}
        for i in range(layers):
            expected |= {
                f"blk.{i}.attn_norm.weight": (width,),
                f"blk.{i}.attn_q.weight": (width, width),
                f"blk.{i}.attn_k.weight": (width, kv_width),
                f"blk.{i}.attn_v.weight": (width, kv_width),
                f"blk.{i}.attn_output.weight": (width, width),
                f"blk.{i}.ffn_norm.weight": (width,),
                f"blk.{i}.ffn_gate.weight": (width, ffn),
                f"blk.{i}.ffn_up.weight": (width, ffn),
                f"blk.{i}.ffn_down.weight": (ffn, width),
            }
        check_model(gguf, expected, {"output.weight": vocabulary, "rope_freqs.weight": (width // heads // 2,)})


def table(shared: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((shared / "malformed" / "table.json").read_text("utf-8"))
    return rows


def is_refused(row: dict[str, Any]) -> bool:
    return not row["llama_cpp"].startswith("accepted") or row["file"] in STRICTER


def test_the_tables_name_every_file(shared: Path) -> None:
    files = {row["file"]: row for row in table(shared)}
    assert {name.removesuffix(".gguf") for name, row in files.items() if is_refused(row)} == set(FIELD)
    assert all(files[name]["llama_cpp"].startswith("accepted") for name in STRICTER)
    assert not any(row["valid"] and is_refused(row) for row in files.values())


@pytest.fixture(scope="session")
def folder(shared: Path) -> Path:
    return shared / "malformed"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FIELD)
def test_a_defect_gets_one_line(folder: Path, name: str) -> None:
    path = folder / f"{name}.gguf"
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            check_llama(path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert caught.value.field == FIELD[name]
    line = str(caught.value)
    assert line.startswith(f"{path}: {FIELD[name]}")
    assert len(line.splitlines()) == 1
    assert len(line) - len(str(path)) < 250


@pytest.mark.timeout(300)
def test_the_rest_loads(shared: Path) -> None:
    accepted = [row["file"] for row in table(shared) if not is_refused(row)]
    assert len(accepted) >= 17
    for name in accepted:
        check_llama(shared / "malformed" / name)


@pytest.fixture(scope="session", params=["valid_spm", "valid_bpe"])
def sound(folder: Path, request: pytest.FixtureRequest) -> bytes:
    return (folder / f"{request.param}.gguf").read_bytes()


HEADER = 7296
"""Bytes of these files before the tensor data; most random changes should fall here."""

_changes = st.lists(st.tuples(st.integers(0, HEADER) | st.integers(0, 34_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6)


@settings(max_examples=400)
@given(changes=_changes, length=st.none() | st.integers(0, 34_000))
def test_random_damage_raises_nothing_else(
    sound: bytes, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], length: int | None
) -> None:
    damaged = bytearray(sound)
    for at, new in changes:
        damaged[at : at + len(new)] = new
    path = tmp_path_factory.mktemp("d", numbered=True) / "m.gguf"
    path.write_bytes(damaged[:length])
    try:
        check_llama(path)
    except ModelFileError as e:
        assert len(str(e).splitlines()) == 1
    finally:
        path.unlink()
        path.parent.rmdir()


def test_every_single_byte_of_the_header_may_be_wrong(folder: Path, tmp_path: Path) -> None:
    """Every seventh set to 0xFF, one after the other: lengths, counts, types and dimensions all get their turn."""
    sound = (folder / "valid_bpe.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    refused = 0
    for at in range(0, HEADER, 7):
        damaged = bytearray(sound)
        damaged[at] = 0xFF
        path.write_bytes(damaged)
        try:
            check_llama(path)
        except ModelFileError:
            refused += 1
    assert refused > 200
