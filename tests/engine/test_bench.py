"""What `localrun bench` measures and how it says it: on a model without weights, and once on a real file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from localrun.engine.bench import Driver, FileFacts, Loading, Result, Trial, main, natural, parser, row, shares, trials_of
from localrun.engine.machine import Machine, Yardstick
from localrun.kernels_cpu import isa
from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.shapes import DEFAULT, Shape
from localrun.models.gguf import open_gguf
from localrun.models.load import RecordedModel
from localrun.models.model import BLOCK_TOKENS
from tests.fakes import FakeModel

FACTS = FileFacts("m.gguf", "llama 1M Q8_0", size=900, n_params=1000, read_per_token=800, macs_per_token=500, macs_of_output=256)
MACHINE = Machine("generic", 1, read_bytes_s=1e6, multiply_adds_s=1e6)


@pytest.mark.parametrize(
    ("test", "name", "tokens"),
    [
        (Trial(512, 0, 0), "pp512", 512),
        (Trial(0, 128, 0), "tg128", 128),
        (Trial(0, 64, 4096, 8), "tg64 x8 @ d4096", 512),
    ],
)
def test_names_are_those_of_llama_bench(test: Trial, name: str, tokens: int) -> None:
    assert (test.name, test.tokens) == (name, tokens)


def test_every_combination_is_a_test() -> None:
    options = parser().parse_args(["-p", "0,16", "-n", "8", "-d", "0,32", "-np", "1,2", "m.gguf"])
    assert [test.name for test in trials_of(options)] == ["pp16", "tg8", "tg8 x2", "pp16 @ d32", "tg8 @ d32", "tg8 x2 @ d32"]


def test_lists_of_numbers() -> None:
    assert natural("0,512") == [0, 512]
    for wrong in ("", "a", "1,-2"):
        with pytest.raises(Exception, match=r"list of numbers|below 0"):
            natural(wrong)


class Watched(FakeModel):
    """Remembers what it was fed: (start, tokens, outputs) of each span of each pass."""

    def forward(self, spans):  # type: ignore[no-untyped-def]
        self.seen = [*getattr(self, "seen", []), [(span.start, len(span.tokens), span.outputs.tolist()) for span in spans]]
        return super().forward(spans)


def test_a_prompt_goes_in_pieces_and_asks_for_its_last_logits_only() -> None:
    model = Watched(max_batch=16)
    Driver(model, 64, 1).run(Trial(40, 0, 0))
    assert model.seen == [[(0, 16, [])], [(16, 16, [])], [(32, 8, [7])]]


def test_context_is_filled_once_and_written_over() -> None:
    model = Watched(max_batch=16)
    driver = Driver(model, 64, 2)
    test = Trial(0, 2, 20, 2)
    driver.run(test)
    filling = [[(0, 16, [])], [(16, 4, [3])]] * 2
    step = [[(20, 1, [0]), (20, 1, [0])], [(21, 1, [0]), (21, 1, [0])]]
    assert model.seen == filling + step
    driver.run(test)
    assert model.seen == filling + step + step


def test_shares_by_hand() -> None:
    model = FakeModel()
    kv = model.info.kv_bytes_per_block / BLOCK_TOKENS
    # 100 tokens a second, each reading 800 bytes of weights and the keys and values of 10 + 4/2 positions
    assert shares(FACTS, model, Result(Trial(0, 4, 10), [100.0]), MACHINE) == {"read_share": pytest.approx(100 * (800 + 12 * kv) / 1e6)}
    # two sequences share the weights: 50 passes a second
    assert shares(FACTS, model, Result(Trial(0, 4, 0, 2), [100.0]), MACHINE) == {"read_share": pytest.approx(50 * (800 + 2 * 2 * kv) / 1e6)}
    # the output matrix works for one token of the prompt
    assert shares(FACTS, model, Result(Trial(64, 0, 0), [1000.0]), MACHINE) == {"peak_share": pytest.approx(1000 * (500 + 4) / 1e6)}


def test_a_row_has_the_fields_of_llama_bench() -> None:
    found = row(FACTS, FakeModel(), "f16", Result(Trial(0, 10, 0), [5.0, 20.0]), Loading(3.0, 1.0), MACHINE)
    assert (found["avg_ts"], found["samples_ts"], found["samples_ns"]) == (12.5, [5.0, 20.0], [2_000_000_000, 500_000_000])
    assert (found["avg_ns"], found["n_gen"], found["load_s"], found["compile_s"]) == (1_250_000_000, 10, 2.0, 1.0)
    assert found["stddev_ts"] == pytest.approx(10.6066, rel=1e-4)


def test_compiling_is_told_apart_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 14.0, 20.0])
    monkeypatch.setattr("localrun.engine.bench.time.perf_counter", lambda: next(clock))
    loading = Loading()
    for stage, done in (("compiling kernels", 0), ("compiling kernels", 1), ("compiling kernels", 2), ("packing weights", 1)):
        loading.heard(stage, done, 2)
    assert loading.compile_s == 4.0


def test_a_real_file_end_to_end(shared: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = shared / "arch" / "llama" / "q4_0.gguf"
    words = ["-p", "24", "-n", "4", "-np", "1,2", "-r", "2", "-t", "1", "-b", "16", "--no-machine"]
    words += ["--cache-dir", os.environ["LOCALRUN_CACHE"]]
    assert main([*words, "-o", "json", str(file)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [found["test"] for found in rows] == ["pp24", "tg4", "tg4 x2"]
    assert all(len(found["samples_ts"]) == 2 and min(found["samples_ts"]) > 0 for found in rows)
    assert {found["model_type"] for found in rows} == {"llama 0M Q4_0"}
    assert (rows[0]["n_threads"], rows[0]["n_threads_batch"]) == (1, 1)
    assert rows[0]["shapes"]["Q4_0"] == dataclasses.asdict(DEFAULT), "there is too little of it to be timed"


def test_shapes_are_timed_on_demand_only(shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Shape(matrix_from=25)
    tuned: list[bool] = []

    def tune(self: RecordedModel, seconds: float, *, again: bool = False) -> bool:
        tuned.append(again)
        self._use({"Q4_0": found})
        return len(tuned) < 2

    monkeypatch.setattr(RecordedModel, "tune", tune)
    words = ["-p", "0", "-n", "1", "-r", "1", "-t", "1", "-tb", "2", "--no-machine", "--cache-dir", os.environ["LOCALRUN_CACHE"]]
    file = str(shared / "arch" / "llama" / "q4_0.gguf")
    assert main([*words, "-o", "json", file]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["n_threads"], row["n_threads_batch"], tuned) == (1, 2, [])
    assert main([*words, "--tune", "again", file]) == 0
    assert tuned == [True, True]
    assert "Q4_0: wide_from 6, matrix_from 25, share 1, quarters 4" in capsys.readouterr().out


def test_the_time_of_a_step_is_split_up_whole(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of kernel that a step runs is there, so are the engine's phases, and nothing is counted twice or lost."""
    file = shared / "arch" / "llama" / "q4_0.gguf"
    words = ["--profile", "-n", "5", "-np", "3", "-t", "2", "-o", "json", "--cache-dir", os.environ["LOCALRUN_CACHE"]]
    assert main([*words, str(file)]) == 0
    split = {part["part"]: part for part in json.loads(capsys.readouterr().out)}
    whole, outside = split.pop("whole step"), split.pop("all but kernels and waiting")
    assert sum(part["ms"] for part in split.values()) == pytest.approx(whole["ms"])
    phases = ("Python around the pass", "schedule", "prepare", "sample", "commit", "rest of the step")
    assert sum(split[name]["ms"] for name in phases) == pytest.approx(outside["ms"])
    with open_gguf(file) as gguf:
        ffn_type = FORMATS[gguf.tensors["blk.0.ffn_up.weight"].type].name
    kernels = {"embed", "attn_norm", "rope_kv", "attention", f"ffn_up {ffn_type}", "output_norm"}
    assert {*kernels, "schedule", "prepare", "sample", "commit", "waiting for other threads"} <= set(split)
    assert all(split[name]["ms"] > 0 for name in (*kernels, "schedule", "prepare", "sample", "commit"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.gguf"], "missing.gguf"),
        (["-p", "0", "-n", "0", "FILE"], "nothing to do"),
        (["-np", "32", "-b", "16", "FILE"], "32 sequences do not fit"),
        (["-r", "0", "FILE"], "-r must be"),
        (["--isa", "z80", "FILE"], "z80"),
        (["-ctk", "f64", "FILE"], "f64"),
    ],
)
def test_what_cannot_be_measured_is_one_line(shared: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    file = str(shared / "arch" / "llama" / "q4_0.gguf")
    assert main(["--no-machine", *[file if word == "FILE" else word for word in words]]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("Error: ") and message in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("instruction_set", ["amx", "avx512", "avx2", "neon", "generic"])
def test_the_machine_is_measured_by_each_instruction_set(instruction_set: str) -> None:
    """That the numbers are possible ones: more than any machine of this century is too slow for, less than any is fast enough for."""
    if instruction_set not in isa.available():
        pytest.skip(f"this machine does not execute {instruction_set}")
    with Yardstick(1, instruction_set, os.environ["LOCALRUN_CACHE"]) as yardstick:
        assert 1e7 < yardstick.read_bytes_s(8 << 20, repeats=3) < 1e13
        assert 1e7 < yardstick.multiply_adds_s(repeats=3) < 1e15
