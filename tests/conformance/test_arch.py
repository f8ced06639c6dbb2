"""Whole models against reference logits: tiny random ones of every variant of the architectures that are known here.

Files with F32 weights are compared with the reference's numbers; quantized ones, whose activations are rounded to 8 bits, must stay as
close to the same weights in F32 as the reference's own quantized run does. However a prompt is cut, the bits must not change.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import isa
from localrun.models.errors import ModelFileError
from localrun.models.load import load_model
from localrun.models.model import BLOCK_TOKENS, LoadOptions, Model, Span
from localrun.models.registry import ARCHITECTURES
from tests.conftest import REFERENCE

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MAX_DIFFERENCE = 1e-3
"""Of F32 models, in standard deviations of the reference's logits."""
CLEAR_MARGIN = 0.01
"""Where the reference's best two logits differ by more, the best must be the same."""
MOST_EXTRA_NOISE = 2.0
"""Of one quantized file: mean squared error against the same weights in F32, over the reference's own. Few rows: the ratio itself is
noisy."""
MOST_EXTRA_NOISE_OVER_ALL = 1.15
"""The same as the geometric mean over all files."""
ROUTER_FLIPS = {"qwen35moe": 1, "qwen3next": 1}
"""Rows in which a rounded activation chooses another expert than in the reference's run, so that even a clear best token may change. The
reference's own rounding moves these models' logits by up to 1.8 and 0.6.
"""
SAME_WEIGHTS = 1e-6
"""Normalised squared error where weights keep 16 bits and activations stay floats."""

TABLE = {
    "apertus": {"f32": "exact"},
    "arcee": {"f32": "exact"},
    "arctic": {"f32": "exact"},
    "baichuan": {"f32": "exact"},
    "bert": {"f32": "exact vectors", "q8_0": "rounded vectors", "q4_0": "rounded vectors"},
    "bert-reranker": {"f32": "exact vectors"},
    "bitnet": {"f32": "exact"},
    "bloom": {"f32": "exact"},
    "chatglm": {"f32": "exact"},
    "codeshell": {"f32": "exact"},
    "cohere2": {"f32": "exact", "q8_0": "rounded"},
    "command-r": {"f32": "exact", "q4_0": "rounded"},
    "command-r-qknorm": {"q8_0": "rounded"},
    "dbrx": {"f32": "exact"},
    "deci": {"f32": "exact"},
    "deepseek": {"f32": "exact"},
    "deepseek2": {"f32": "exact", "q4_0": "rounded"},
    "deepseek2-lite": {"f32": "exact"},
    "deepseek3": {"f32": "exact", "q8_0": "rounded"},
    "dots1": {"f32": "exact"},
    "ernie4_5": {"f32": "exact"},
    "ernie4_5-moe": {"f32": "exact"},
    "exaone": {"f32": "exact", "q8_0": "rounded"},
    "exaone-moe": {"f32": "exact"},
    "exaone4": {"f32": "exact", "q8_0": "rounded"},
    "falcon": {"f32": "exact", "q8_0": "rounded"},
    "falcon-40b": {"f32": "exact", "q8_0": "rounded"},
    "falcon-h1": {"f32": "exact", "q8_0": "rounded"},
    "gemma": {"f32": "exact", "q4_0": "rounded"},
    "gemma-embedding": {"f32": "exact vectors", "q8_0": "rounded vectors"},
    "gemma2": {"f32": "exact", "q8_0": "rounded"},
    "gemma3": {"f32": "exact", "q4_0": "rounded"},
    "gemma3n": {"mixq": "rounded"},
    "gemma4": {"f32": "exact", "q4_0": "rounded"},
    "gemma4-moe": {"f32": "exact", "q8_0": "rounded"},
    "glm4": {"f32": "exact", "q8_0": "rounded"},
    "glm4moe": {"f32": "exact", "q8_0": "rounded"},
    "gpt-oss": {"f32": "exact", "q8_0": "rounded", "mxfp4": "rounded"},
    "gpt2": {"f32": "exact", "q8_0": "rounded", "q4_0": "rounded"},
    "gptneox": {"f32": "exact", "q4_0": "rounded"},
    "granite": {"f32": "exact", "q4_0": "rounded"},
    "granitehybrid": {"f32": "exact", "q8_0": "rounded"},
    "granitemoe": {"f32": "exact", "q8_0": "rounded"},
    "hunyuan-dense": {"f32": "exact"},
    "hunyuan-moe": {"f32": "exact"},
    "internlm2": {"f32": "exact", "q4_0": "rounded"},
    "jais": {"f32": "exact"},
    "jamba": {"f32": "exact"},
    "lfm2": {"f32": "exact", "q8_0": "rounded"},
    "lfm2moe": {"f32": "exact"},
    "jina-bert-v2": {"f32": "exact vectors", "q8_0": "rounded vectors"},
    "llama": {"f32": "exact", "q8_0": "rounded", "q4_0": "rounded"},
    "llama-16": {"f16": "same", "bf16": "same"},
    "llama-attnbias": {"f32": "exact", "q5_1": "rounded"},
    "llama-embed": {"f32": "exact vectors"},
    "llama-headdim": {"f32": "exact", "q8_0": "rounded"},
    "llama-k": {"q4_K": "rounded", "q2_K": "rounded", "iq4_xs": "rounded", "iq2_xxs": "rounded"},
    "llama-ropelinear": {"f32": "exact", "q8_0": "rounded"},
    "llama-tied": {"f32": "exact", "q4_1": "rounded"},
    "llama-tq": {"tq1_0": "rounded", "tq2_0": "rounded", "iq1_s": "rounded", "nvfp4": "rounded", "iq4_nl": "rounded"},
    "llama3-ropefreqs": {"f32": "exact", "q5_0": "rounded"},
    "llama4": {"f32": "exact", "q8_0": "rounded"},
    "mamba": {"f32": "exact", "q4_0": "rounded", "q8_0": "rounded"},
    "mamba2": {"f32": "exact", "q8_0": "rounded"},
    "minicpm": {"f32": "exact"},
    "minicpm3": {"f32": "exact"},
    "minimax-m2": {"f32": "exact"},
    "mistral-swkey": {"f32": "exact", "q8_0": "rounded"},
    "mistral3": {"f32": "exact", "q4_0": "rounded"},
    "mixtral": {"f32": "exact", "q8_0": "rounded", "q4_0": "rounded"},
    "modern-bert": {"f32": "exact vectors"},
    "mpt": {"f32": "exact", "q4_0": "rounded"},
    "nemotron": {"f32": "exact", "q4_0": "rounded"},
    "nemotron_h": {"f32": "exact"},
    "nomic-bert": {"f32": "exact vectors", "q8_0": "rounded vectors"},
    "nomic-bert-moe": {"f32": "exact vectors"},
    "olmo": {"f32": "exact"},
    "olmo2": {"f32": "exact", "q4_1": "rounded"},
    "olmo2-swa": {"f32": "exact", "q8_0": "rounded"},
    "openelm": {"f32": "exact"},
    "orion": {"f32": "exact"},
    "phi2": {"f32": "exact", "q8_0": "rounded"},
    "phi3": {"f32": "exact", "q4_0": "rounded"},
    "phi3-longrope": {"f32": "exact", "q8_0": "rounded"},
    "phi3-longrope-short": {"f32": "exact"},
    "phimoe": {"f32": "exact", "q8_0": "rounded"},
    "plamo": {"f32": "exact"},
    "qwen": {"f32": "exact"},
    "qwen2": {"f32": "exact", "q4_0": "rounded"},
    "qwen2moe": {"f32": "exact", "q4_0": "rounded"},
    "qwen3": {"f32": "exact", "q8_0": "rounded", "q4_1": "rounded"},
    "qwen3-embedding": {"f32": "exact vectors", "q8_0": "rounded vectors"},
    "qwen3-k": {"q3_K": "rounded", "q5_K": "rounded", "iq3_s": "rounded", "iq1_m": "rounded", "q4_K_mix": "rounded"},
    "qwen3-reranker": {"f32": "exact vectors", "q8_0": "rounded vectors"},
    "qwen35": {"f32": "exact", "q8_0": "rounded"},
    "qwen35moe": {"f32": "exact", "q8_0": "rounded"},
    "qwen3next": {"f32": "exact", "q8_0": "rounded"},
    "qwen3moe": {"f32": "exact", "q8_0": "rounded"},
    "qwen3moe-k": {"q4_K_mix": "rounded", "iq2_xs": "rounded"},
    "refact": {"f32": "exact"},
    "rwkv6": {"f32": "exact"},
    "rwkv7": {"f32": "exact", "q8_0": "rounded"},
    "seed_oss": {"f32": "exact"},
    "smallthinker": {"f32": "exact"},
    "smollm3": {"f32": "exact", "q4_0": "rounded"},
    "stablelm": {"f32": "exact", "q4_0": "rounded"},
    "starcoder2": {"f32": "exact", "q5_1": "rounded"},
    "t5": {"f32": "exact answers", "q8_0": "rounded answers"},
    "t5encoder": {"f32": "exact vectors"},
    "xverse": {"f32": "exact"},
}
"""What each file is for: `exact` (F32), `same` (16-bit weights), `rounded` (quantized), with ` vectors` behind it where the model gives
vectors or scores (test_vectors.py), with ` answers` where an encoder reads the prompt (test_t5.py); any other word: refused, in a line that
says it."""
ARCHITECTURE_OF = {
    "bert-reranker": "bert",
    "command-r-qknorm": "command-r",
    "deepseek2-lite": "deepseek2",
    "deepseek3": "deepseek2",
    "falcon-40b": "falcon",
    "gemma4-moe": "gemma4",
    "llama-16": "llama",
    "llama-attnbias": "llama",
    "llama-headdim": "llama",
    "llama-k": "llama",
    "llama-ropelinear": "llama",
    "llama-tied": "llama",
    "llama-tq": "llama",
    "llama3-ropefreqs": "llama",
    "mistral-swkey": "llama",
    "mixtral": "llama",
    "olmo2-swa": "olmo2",
    "phi3-longrope": "phi3",
    "phi3-longrope-short": "phi3",
    "qwen3-embedding": "qwen3",
    "qwen3-k": "qwen3",
    "qwen3-reranker": "qwen3",
    "qwen3moe-k": "qwen3moe",
}
"""Of the files that are not named as their architecture."""

CASES = [(name, variant, kind) for name, variants in TABLE.items() for variant, kind in variants.items()]
RUN = [(name, variant) for name, variant, kind in CASES if kind in ("exact", "same", "rounded")]
POOLED = [(name, variant, kind) for name, variant, kind in CASES if kind in ("exact vectors", "rounded vectors")]
ANSWERED = [(name, variant) for name, variant, kind in CASES if kind in ("exact answers", "rounded answers")]
KNOWN = [*RUN, *((name, variant) for name, variant, _ in POOLED), *ANSWERED]
REFUSED = [(name, variant, kind) for name, variant, kind in CASES if (name, variant) not in KNOWN]


@dataclass(frozen=True)
class Reference:
    """The arrays of one file."""

    arrays: dict[str, NDArray[Any]]

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.arrays["tokens"]

    def get(self, name: str) -> Floats:
        """The array; the run with an exact GELU where the reference's table of rounded values made a difference."""
        exact = name.replace("_tail8", "_exact_gelu_tail8") if name.endswith("_tail8") else f"{name}_exact_gelu"
        return self.arrays.get(exact, self.arrays[name])


def path_of(name: str, variant: str) -> Path:
    path = REFERENCE / "arch" / name / f"{variant}.gguf"
    if not path.exists():
        pytest.skip(f"conformance data not present ({path})")
    return path


def reference_of(name: str, variant: str) -> Reference:
    with np.load(path_of(name, variant).with_suffix(".npz")) as arrays:
        return Reference({key: arrays[key] for key in arrays.files})


def load(name: str, variant: str, **options: Any) -> Model:
    asked = {"n_threads": 2, "max_batch": 64, "n_ctx": 256, "kv_type": "f32", "cache_dir": os.environ["LOCALRUN_CACHE"], **options}
    model = load_model(path_of(name, variant), LoadOptions(**asked))
    model.allocate_kv(16)
    if model.info.state_bytes:
        model.allocate_state(3)
    return model


def slot_of(model: Model, slot: int) -> int:
    """The slot, of a model that has recurrent state."""
    return slot if model.info.state_bytes else -1


def logits(model: Model, tokens: NDArray[np.int32], chunks: list[int], blocks: NDArray[np.int32] | None = None) -> Floats:
    """Logits after each of the tokens, fed in such pieces; (n, n_vocab). The blocks lie in the pool in no order."""
    table = np.array([3, 9, 0, 7, 5], np.int32) if blocks is None else blocks
    assert sum(chunks) == len(tokens) <= len(table) * BLOCK_TOKENS
    rows, start = [], 0
    for n in chunks:
        span = Span(tokens[start : start + n], start, table, np.arange(n, dtype=np.int32), state=slot_of(model, 1))
        rows.append(model.forward([span]).copy())
        start += n
    return np.concatenate(rows)


def noise(got: Floats, truth: Floats) -> float:
    """Normalised mean squared error."""
    return float(((got - truth) ** 2).mean() / (truth**2).mean())


@functools.cache
def answers(name: str, variant: str) -> dict[str, Floats]:
    """Our logits for the reference's tokens: whole, in the reference's chunks, one token at a time."""
    model = load(name, variant)
    try:
        ref = reference_of(name, variant)
        chunks = [int(n) for n in ref.arrays["inc_chunks"]]
        cuts = {"whole": [len(ref.tokens)], "chunked": chunks, "one at a time": [1] * len(ref.tokens)}
        return {cut: logits(model, ref.tokens, sizes) for cut, sizes in cuts.items()}
    finally:
        model.close()


def assert_close(got: Floats, want: Floats) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= MAX_DIFFERENCE * want.std()


def assert_same_choice(got: Floats, want: Floats) -> None:
    best_two = np.sort(want, axis=1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > CLEAR_MARGIN
    assert clear.sum() > len(want) // 2
    assert (got.argmax(axis=1) == want.argmax(axis=1))[clear].all()


def test_every_known_architecture_is_run() -> None:
    """A family without reference data, or whose files are all refused, is none that we know to be right."""
    assert set(ARCHITECTURES) == {ARCHITECTURE_OF.get(name, name) for name, _ in KNOWN}


def test_page_of_models_is_not_stale(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("models_docs", repository / "scripts" / "models_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (repository / "docs" / "models.md").read_text(encoding="utf-8") == module.document(), "run: python scripts/models_docs.py"


def test_page_on_adding_a_model_shows_a_real_one(repository: Path) -> None:
    shown = (repository / "models" / "glm4.py").read_text(encoding="utf-8")
    page = (repository / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    assert shown in page, "docs/adding-a-model.md walks through models/glm4.py: show it as it is"


def test_every_variant_of_a_known_architecture_has_a_row(shared: Path) -> None:
    index = json.loads((shared / "arch" / "index.json").read_text(encoding="utf-8"))
    assert {e["name"]: e["architecture"] for e in index if e["name"] in TABLE} == {n: ARCHITECTURE_OF.get(n, n) for n in TABLE}
    present = {
        entry["name"]: set(entry["variants"])
        for entry in index
        if entry["architecture"] in ARCHITECTURES
    }
    assert present == {name: set(variants) for name, variants in TABLE.items()}


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant, kind in CASES if kind == "exact"])
def test_f32_logits(name: str, variant: str) -> None:
    ref = reference_of(name, variant)
    got = answers(name, variant)
    assert_close(got["whole"], ref.get("logits"))
    assert_same_choice(got["whole"], ref.get("logits"))
    assert_close(got["chunked"][ref.arrays["inc_positions"]], ref.get("inc_logits"))


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant, kind in CASES if kind == "exact"])
def test_f32_greedy_continuation(name: str, variant: str) -> None:
    """Token by token after the prompt, along the reference's choices."""
    ref = reference_of(name, variant)
    want_tokens = ref.arrays["greedy_tokens"]
    model = load(name, variant)
    try:
        table = np.arange(5, dtype=np.int32)
        last = logits(model, ref.tokens, [len(ref.tokens)], table)[-1]
        for step, want in enumerate(want_tokens):
            best, second = np.sort(last)[-2:][::-1]
            assert best - second < CLEAR_MARGIN or int(last.argmax()) == want, f"step {step}"
            span = Span(np.array([want], np.int32), len(ref.tokens) + step, table, np.zeros(1, np.int32), state=slot_of(model, 1))
            last = model.forward([span])[0].copy()
            if "logits_exact_gelu" not in ref.arrays:  # else these rows, too, were made with rounded GELU values
                assert_close(last, ref.arrays["greedy_logits"][step])
    finally:
        model.close()


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant, kind in CASES if kind == "same"])
def test_16_bit_weights(name: str, variant: str) -> None:
    ref = reference_of(name, variant)
    truth = ref.get("deq_logits_tail8")
    got = answers(name, variant)["whole"][-len(truth) :]
    assert noise(got, truth) <= SAME_WEIGHTS
    assert_same_choice(got, truth)


def extra_noise(name: str, variant: str) -> float:
    """Our squared error over the reference's, over the last rows and the ends of the chunks."""
    ref = reference_of(name, variant)
    got = answers(name, variant)
    truth = np.concatenate([ref.get("deq_logits_tail8"), ref.get("deq_inc_logits")])
    theirs = np.concatenate([ref.get("logits_tail8"), ref.get("inc_logits")])
    ours = np.concatenate([got["whole"][-8:], got["chunked"][ref.arrays["inc_positions"]]])
    return noise(ours, truth) / noise(theirs, truth)


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant, kind in CASES if kind == "rounded"])
def test_quantized_logits(name: str, variant: str) -> None:
    ref = reference_of(name, variant)
    assert extra_noise(name, variant) <= MOST_EXTRA_NOISE
    whole = answers(name, variant)["whole"]
    clear = ref.arrays["argmax_margin"] > 0.5
    assert clear.any()
    assert (whole.argmax(axis=1) != ref.arrays["argmax"])[clear].sum() <= ROUTER_FLIPS.get(name, 0)


def test_quantized_logits_over_all(shared: Path) -> None:
    ratios = [extra_noise(name, variant) for name, variant, kind in CASES if kind == "rounded"]
    assert np.exp(np.log(ratios).mean()) <= MOST_EXTRA_NOISE_OVER_ALL


@pytest.mark.parametrize(("name", "variant"), RUN)
@pytest.mark.parametrize("cut", ["chunked", "one at a time"])
def test_cutting_the_prompt_changes_no_bit(name: str, variant: str, cut: str) -> None:
    got = answers(name, variant)
    assert np.array_equal(got["whole"].view(np.uint32), got[cut].view(np.uint32))


@pytest.mark.parametrize(
    ("name", "variant"),
    [("llama", "q4_0"), ("llama-k", "q4_K"), ("gemma3", "q4_0"), ("llama-16", "f16"), ("mixtral", "q4_0"), ("gemma4-moe", "q8_0"),
     ("phi3", "q4_0"), ("mamba", "q8_0"), ("falcon-h1", "q8_0")],
)
@pytest.mark.parametrize("options", [{"pack": False}, {"pack": True}, {"n_threads": 1}, {"max_batch": 49}], ids=str)
def test_no_setting_of_speed_changes_a_bit(name: str, variant: str, options: dict[str, Any]) -> None:
    """Packed or as the weights lie in the file, one thread or two, the model's rooms for rows."""
    ref = reference_of(name, variant)
    model = load(name, variant, **options)
    try:
        got = logits(model, ref.tokens, [len(ref.tokens)])
    finally:
        model.close()
    assert np.array_equal(got.view(np.uint32), answers(name, variant)["whole"].view(np.uint32))


def test_threads_that_are_put_to_sleep_in_the_middle_change_no_bit() -> None:
    """Far more threads than cores: some always lose their core while they hold work, at every place of the program."""
    ref = reference_of("llama-k", "q4_K")
    model = load("llama-k", "q4_K", n_threads=8)
    try:
        for _ in range(10):
            got = logits(model, ref.tokens, [20, 24, 1, 1, 1, 1])
            assert np.array_equal(got.view(np.uint32), answers("llama-k", "q4_K")["whole"].view(np.uint32))
    finally:
        model.close()


@pytest.mark.parametrize(
    ("name", "variant"),
    [("llama", "q8_0"), ("gemma3", "q4_0"), ("gpt-oss", "mxfp4"), ("qwen3moe", "q8_0"), ("deepseek2", "q4_0"), ("mpt", "q4_0"),
     ("mamba", "q8_0"), ("falcon-h1", "q8_0"), ("lfm2", "q8_0"), ("qwen3next", "q8_0"), ("rwkv7", "q8_0")],
)
def test_neighbours_in_a_batch_change_no_bit(name: str, variant: str) -> None:
    ref = reference_of(name, variant)
    whole = answers(name, variant)["whole"]
    model = load(name, variant)
    try:
        other = ref.tokens[::-1].copy()
        tables = [np.array([12, 1, 6], np.int32), np.array([8, 2, 14], np.int32)]
        every = np.arange(20, dtype=np.int32)

        def span(tokens: NDArray[np.int32], which: int, start: int, end: int, outputs: int) -> Span:
            return Span(tokens[start:end], start, tables[which], every[:outputs], state=slot_of(model, which))

        first = model.forward([span(other, 1, 0, 7, 0), span(ref.tokens, 0, 0, 20, 20)]).copy()
        second = model.forward([span(ref.tokens, 0, 20, 40, 20), span(other, 1, 7, 8, 1)]).copy()
        third = model.forward([span(other, 1, 8, 40, 0), span(ref.tokens, 0, 40, 48, 8)]).copy()
    finally:
        model.close()
    got = np.concatenate([first, second[:20], third])
    assert np.array_equal(got.view(np.uint32), whole.view(np.uint32))


@pytest.fixture(params=["amx", "avx512", "avxvnni", "avx2", "neon", "generic"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in isa.available():
        pytest.skip(f"this machine does not execute {request.param}")
    yield request.param


@pytest.mark.parametrize(("name", "variant"), [("qwen2", "f32"), ("llama-k", "q4_K")])
def test_each_instruction_set(name: str, variant: str, instruction_set: str) -> None:
    ref = reference_of(name, variant)
    model = load(name, variant, isa=instruction_set)
    try:
        got = logits(model, ref.tokens, [len(ref.tokens)])
    finally:
        model.close()
    if variant == "f32":
        assert_close(got, ref.get("logits"))
    else:
        truth = ref.get("deq_logits_tail8")
        assert noise(got[-8:], truth) <= MOST_EXTRA_NOISE * noise(ref.get("logits_tail8"), truth)


@pytest.mark.parametrize(("name", "variant", "word"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, variant: str, word: str) -> None:
    with pytest.raises(ModelFileError, match=word) as refusal:
        load(name, variant).close()
    assert "\n" not in str(refusal.value)
