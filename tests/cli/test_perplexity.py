"""`localrun perplexity` as a process of its own, against a daemon that says what it is told to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.cli.fake_daemon import FakeDaemon

LN2 = math.log(2)
TOKENS = [1, 10, 11]
REFERENCE: dict[str, Any] = {
    "tokens": np.array(TOKENS, np.int32),
    "top_ids": np.array([[10, 5], [11, 5], [7, 5]], np.int32),
    "ref_top_logprobs": np.log(np.array([[0.5, 0.25]] * 3, np.float32)),
    "ref_argmax": np.array([10, 11, 7], np.int32),
    "ref_nll": np.array([LN2, LN2], np.float32),
    "peer_top_logprobs": np.log(np.array([[0.25, 0.25]] * 3, np.float32)),
    "peer_argmax": np.array([5, 5, 5], np.int32),
    "peer_nll": np.array([2 * LN2, 2 * LN2], np.float32),
}


def judge(body: dict[str, Any]) -> Iterator[Any]:
    """Every token has probability 1/2, the two reported ones 1/2 and 1/4; in two lines."""
    yield {"model": body["model"], "prompt_eval_count": 3, "windows": 1, "done": False}
    for first, tokens, nll in ((0, TOKENS[:2], [LN2, LN2]), (2, TOKENS[2:], [])):
        line: dict[str, Any] = {"model": body["model"], "first": first, "tokens": tokens, "nll": nll}
        if "ids" in body:
            line |= {"top_ids": [[10], [11], [7]][first : first + len(tokens)], "top_logprobs": [[-LN2]] * len(tokens)}
            line["logprobs"] = [[-LN2, -2 * LN2]] * len(tokens)
        yield line
    yield {"model": body["model"], "done": True, "prompt_eval_count": 3, "total_duration": 1_500_000_000}


@pytest.fixture
def judging(fake: FakeDaemon) -> FakeDaemon:
    fake.routes["POST", "/api/evaluate"] = judge
    return fake


def write_reference(path: Path, **changed: Any) -> Path:
    arrays = {name: array for name, array in (REFERENCE | changed).items() if array is not None}
    np.savez(path, **arrays)
    return path


def test_perplexity_of_a_text(judging: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab", encoding="utf-8")
    done = localrun("perplexity", "smollm2", str(tmp_path / "text"), "-c", "64", "--stride", "16", "-t", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"smollm2, {tmp_path / 'text'}: 3 tokens, 1.5 s", "perplexity 2.0000 +- 0.0000"]
    assert judging.bodies("/api/evaluate") == [{"model": "smollm2", "text": "ab", "window": 64, "stride": 16, "num_thread": 1}]


def test_against_a_reference_beside_its_peer(judging: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    file = write_reference(tmp_path / "r.npz")
    done = localrun("perplexity", "smollm2", "-", "--reference", str(file), stdin="ab")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert rows["perplexity"] == ["2.0000", "4.0000"]
    assert rows["KL mean"] == ["0.000000", f"{LN2 / 4:.6f}"]
    assert rows["same first choice"] == ["100.00%", "0.00%"]
    [body] = judging.bodies("/api/evaluate")
    assert (body["ids"], body["top"], body["window"]) == (REFERENCE["top_ids"].tolist(), 1, 0)


def test_as_json(judging: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    file = write_reference(tmp_path / "r.npz", peer_top_logprobs=None, peer_argmax=None, peer_nll=None)
    found = json.loads(localrun("perplexity", "smollm2", "-", "--reference", str(file), "--json", stdin="ab").stdout)
    assert found["perplexity"] == pytest.approx(2)
    assert found["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert found["agreement"] == 1
    assert "peer" not in found
    assert "others as one" in found["divergence_over"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": np.array([1, 10, 12], np.int32)}, "token 2 is 11 here and 12 there"),
        ({"ref_nll": None}, "has no array 'ref_nll'"),
        ({"peer_nll": None}, "has no array 'peer_nll'"),
        ({"ref_argmax": np.zeros(2, np.int32)}, "ref_argmax is of shape (2,), not (3,)"),
        ({"top_ids": np.array([["a", "b"]] * 3)}, "top_ids holds no numbers"),
    ],
)
def test_references_that_do_not_fit(judging: FakeDaemon, localrun: Run, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    done = localrun("perplexity", "smollm2", "-", "--reference", str(write_reference(tmp_path / "r.npz", **changed)), stdin="ab")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_files_that_are_no_reference(judging: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive", encoding="utf-8")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name, message in (("text.npz", "is no .npz file"), ("single.npy", "a single array"), ("missing.npz", "No such file")):
        done = localrun("perplexity", "smollm2", "-", "--reference", str(tmp_path / name), stdin="ab")
        assert done.returncode == 1
        assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [(b"", "is empty"), (b"ab\xff", "byte 2 is 0xff")])
def test_texts_that_are_none(judging: FakeDaemon, localrun: Run, text: bytes, message: str) -> None:
    done = localrun("perplexity", "smollm2", "-", stdin=text)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert judging.bodies("/api/evaluate") == []


def test_a_missing_file_and_a_missing_model(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    assert "cannot read" in localrun("perplexity", "smollm2", str(tmp_path / "none")).stderr
    fake.raw["/api/evaluate"] = (404, b'{"error": "model \'nope\' not found"}')
    done = localrun("perplexity", "nope", "-", stdin="ab")
    assert (done.returncode, done.stderr) == (1, "Error: model 'nope' not found\n")


def test_an_answer_that_breaks_off_gives_no_number(fake: FakeDaemon, localrun: Run) -> None:
    def broken(body: dict[str, Any]) -> Iterator[Any]:
        yield {"model": "m", "prompt_eval_count": 3, "windows": 1, "done": False}
        yield {"model": "m", "first": 0, "tokens": [1, 10], "nll": [1.0, 1.0]}

    fake.routes["POST", "/api/evaluate"] = broken
    done = localrun("perplexity", "smollm2", "-", stdin="ab")
    assert (done.returncode, done.stdout) == (1, "")
    assert "broke off" in done.stderr


def test_a_hole_in_the_answer_gives_no_number(fake: FakeDaemon, localrun: Run) -> None:
    fake.routes["POST", "/api/evaluate"] = lambda body: iter([{"model": "m", "first": 1, "tokens": [10], "nll": [1.0]}])
    done = localrun("perplexity", "smollm2", "-", stdin="ab")
    assert (done.returncode, done.stdout) == (1, "")
    assert "position 1; 0 comes next" in done.stderr
