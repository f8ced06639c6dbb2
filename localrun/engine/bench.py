"""`python -m localrun.engine.bench FILE.gguf`: how fast a model reads and writes on this machine. `localrun bench` runs it in a process
of its own.

Tests and columns are named as in llama-bench, so that results stand side by side: pp512 reads a prompt of 512 tokens, tg128 writes 128
tokens one by one, "@ d4096" does so after 4096 tokens of context. The model is driven as the engine drives it, without scheduler,
sampler or HTTP. Token ids are random: no word is faster than another.

Decoding is held against the memory's read-only bandwidth (weights that every token reads, and the context's keys and values), prompts
against the multiply-adds that the instruction set can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile
from localrun.models.load import default_threads, load_model
from localrun.models.model import BLOCK_TOKENS, LoadOptions, Model, Span

if TYPE_CHECKING:
    from localrun.engine.machine import Machine
    from localrun.models.load import RecordedModel

NO_ROWS = np.zeros(0, np.int32)
TUNING_S = 0.1


@dataclass(frozen=True)
class Trial:
    """n_prompt tokens read, or n_gen tokens written in each of `parallel` sequences, after n_depth tokens of context."""

    n_prompt: int
    n_gen: int
    n_depth: int
    parallel: int = 1

    @property
    def name(self) -> str:
        base = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        if self.parallel > 1:
            base += f" x{self.parallel}"
        return base + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return (self.n_prompt or self.n_gen) * self.parallel


@dataclass(frozen=True)
class FileFacts:
    """What the file says of the model, as far as speeds depend on it."""

    path: str
    description: str
    size: int
    n_params: int
    read_per_token: int
    """Bytes of weights that one decoded token reads."""
    macs_per_token: int
    """Multiply-adds with weights that one token of a prompt takes, the output matrix apart."""
    macs_of_output: int

    @classmethod
    def of(cls, gguf: GGUFFile) -> FileFacts:
        """Reads the header only."""
        matrices = {name: info for name, info in gguf.tensors.items() if len(info.shape) > 1}
        output = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
        inner = [info for name, info in matrices.items() if name not in ("token_embd.weight", "output.weight")]
        params = sum(prod(info.shape) for info in gguf.tensors.values())
        counts: dict[str, int] = {}
        for info in inner:
            counts[FORMATS[info.type].name] = counts.get(FORMATS[info.type].name, 0) + info.nbytes
        kind = max(counts, key=lambda name: counts[name]) if counts else "?"
        tied = output == "token_embd.weight"
        return cls(
            path=str(gguf.path),
            description=f"{gguf.architecture} {_count(params)} {kind}",
            size=sum(info.nbytes for info in gguf.tensors.values()),
            n_params=params,
            read_per_token=sum(info.nbytes for name, info in gguf.tensors.items() if tied or name != "token_embd.weight"),
            macs_per_token=sum(prod(info.shape) for info in inner),
            macs_of_output=prod(gguf.tensors[output].shape) if output in gguf.tensors else 0,
        )


def _count(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


def _deviation(samples: Sequence[float]) -> float:
    """Of a sample, as llama-bench has it; 0 of a single value."""
    return float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0


@dataclass
class Loading:
    """Seconds of a load, and of that, compiling kernels."""

    total_s: float = 0.0
    compile_s: float = 0.0
    _compiling_since: float | None = None

    def heard(self, stage: str, done: int, total: int) -> None:
        """A step of the load."""
        now = time.perf_counter()
        if stage == "compiling kernels":
            self._compiling_since = now if self._compiling_since is None else self._compiling_since
            self.compile_s = now - self._compiling_since
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{stage} {done}/{total}" + ("\n" if done == total else ""))
            sys.stderr.flush()


@dataclass
class Result:
    """One test's samples, in tokens a second."""

    test: Trial
    samples: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples)

    @property
    def deviation(self) -> float:
        return _deviation(self.samples)


class Driver:
    """Feeds a model. Sequence s has the pool blocks s * blocks to (s + 1) * blocks - 1, and slot s of recurrent state."""

    def __init__(self, model: Model, n_context: int, n_sequences: int) -> None:
        self.model = model
        self._blocks = -(-n_context // BLOCK_TOKENS)
        self._drawn = 0
        model.allocate_kv(self._blocks * n_sequences)
        if model.info.state_bytes:
            model.allocate_state(n_sequences)
        self._filled = [0] * n_sequences

    def _table(self, sequence: int, n: int) -> NDArray[np.int32]:
        """The blocks of its first n positions."""
        first = sequence * self._blocks
        return np.arange(first, first - (-n // BLOCK_TOKENS), dtype=np.int32)

    def _slot(self, sequence: int) -> int:
        return sequence if self.model.info.state_bytes else -1

    def tokens(self, n: int) -> NDArray[np.int32]:
        """The next n of a sequence that repeats itself after 2**64, by its upper half (Knuth's multiplier): as good as random here, and a
        benchmark of short processes need not load a generator.
        """
        numbers = np.arange(self._drawn, self._drawn + n, dtype=np.uint64) * np.uint64(6364136223846793005)
        self._drawn += n
        return ((numbers >> np.uint64(32)) % np.uint64(self.model.info.n_vocab)).astype(np.int32)

    def read(self, sequence: int, start: int, n: int) -> None:
        """A prompt of n tokens from position `start` on, in pieces of at most max_batch; logits of the last token only."""
        ids, step = self.tokens(n), self.model.info.max_batch
        for first in range(0, n, step):
            piece = ids[first : first + step]
            outputs = np.array([len(piece) - 1], np.int32) if first + step >= n else NO_ROWS
            table = self._table(sequence, start + first + len(piece))
            self.model.forward([Span(piece, start + first, table, outputs, state=self._slot(sequence))])
        self._filled[sequence] = start + n

    def fill(self, sequence: int, n: int) -> None:
        """Has n tokens of context there, if it has not already."""
        if self._filled[sequence] < n:
            self.read(sequence, 0, n)

    def write(self, sequences: int, start: int, n: int) -> None:
        """n tokens one by one in each of the first `sequences` sequences, from position `start` on."""
        ids = self.tokens(n * sequences).reshape(n, sequences)
        only = np.zeros(1, np.int32)
        for i in range(n):
            self.model.forward(
                [Span(ids[i, s : s + 1], start + i, self._table(s, start + i + 1), only, state=self._slot(s)) for s in range(sequences)]
            )

    def run(self, test: Trial, n: int | None = None) -> float:
        """Seconds that the test takes; n: fewer tokens than it asks for."""
        for sequence in range(test.parallel):
            self.fill(sequence, test.n_depth)
        began = time.perf_counter()
        if test.n_prompt:
            self.read(0, test.n_depth, n or test.n_prompt)
        else:
            self.write(test.parallel, test.n_depth, n or test.n_gen)
        return time.perf_counter() - began


# ---- what is run --------------------------------------------------------------------------------------------------------------


def trials_of(options: argparse.Namespace) -> list[Trial]:
    """All combinations, prompts first, as llama-bench orders them."""
    found = []
    for depth in options.n_depth:
        found += [Trial(n, 0, depth) for n in options.n_prompt if n]
        found += [Trial(0, n, depth, parallel) for n in options.n_gen if n for parallel in options.parallel]
    return found


def measured(path: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each test, as soon as it is done. Raises ModelFileError, ValueError."""
    tests = trials_of(options)
    if not tests:
        raise ValueError("nothing to do: every -p and -n is 0")
    for n_threads, n_many, n_batch in itertools.product(options.threads or [0], options.threads_batch or [0], options.batch_size):
        machine = _machine(n_threads or default_threads(), options)
        loading = Loading()
        began = time.perf_counter()
        asked = LoadOptions(
            n_threads=n_threads,
            n_threads_batch=n_many,
            max_batch=n_batch,
            kv_type=options.cache_type,
            pack=_pack(options.pack),
            cache_dir=options.cache_dir,
            isa=options.isa,
            tune=options.tune != "no",
        )
        model = load_model(path, asked, loading.heard)
        loading.total_s = time.perf_counter() - began
        try:
            if options.tune == "again":
                while model.tune(TUNING_S, again=True):
                    pass
            facts = FileFacts.of(model.file)
            longest = max(test.n_depth + max(test.n_prompt, test.n_gen) for test in tests)
            driver = Driver(model, longest, max(test.parallel for test in tests))
            for test in tests:
                if test.parallel > n_batch:
                    raise ValueError(f"{test.parallel} sequences do not fit into a batch of {n_batch}")
                if not options.no_warmup:
                    driver.run(test, 1 if test.n_gen else None)  # not counted: the first touch of memory
                result = Result(test)
                for _ in range(options.repetitions):
                    result.samples.append(test.tokens / driver.run(test))
                yield row(facts, model, options.cache_type, result, loading, machine) | {"shapes": shapes_of(model)}
        finally:
            model.close()


def shapes_of(model: RecordedModel) -> dict[str, dict[str, int]]:
    """The tile shapes that its matrices are multiplied in, by weight type; see kernels_cpu/shapes.py."""
    return {name: dataclasses.asdict(shape) for name, shape in model.shapes.items()}


def _machine(n_threads: int, options: argparse.Namespace) -> Machine | None:
    if options.no_machine:
        return None
    from localrun.engine.machine import Yardstick

    with Yardstick(n_threads, options.isa, options.cache_dir) as yardstick:
        return yardstick.measured()


def _pack(word: str) -> bool | None:
    return {"auto": None, "yes": True, "no": False}[word]


def row(facts: FileFacts, model: Model, kv_type: str, result: Result, loading: Loading, machine: Machine | None) -> dict[str, Any]:
    """One result. Names of llama-bench's JSON where it has one; the rest is ours. Times in nanoseconds where the name says so."""
    test, info = result.test, model.info
    one_ns = [round(test.tokens / speed * 1e9) for speed in result.samples]
    found: dict[str, Any] = {
        "model_filename": facts.path,
        "model_type": facts.description,
        "model_size": facts.size,
        "model_n_params": facts.n_params,
        "n_batch": info.max_batch,
        "n_ubatch": info.max_batch,
        "n_threads": info.n_threads,
        "n_threads_batch": info.n_threads_batch,
        "type_k": kv_type,
        "type_v": kv_type,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "avg_ns": round(sum(one_ns) / len(one_ns)),
        "stddev_ns": round(_deviation(one_ns)),
        "avg_ts": result.mean,
        "stddev_ts": result.deviation,
        "samples_ns": one_ns,
        "samples_ts": result.samples,
        "test": test.name,
        "parallel": test.parallel,
        "isa": info.isa,
        "packed": info.packed,
        "load_s": loading.total_s - loading.compile_s,
        "compile_s": loading.compile_s,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    if machine is not None:
        found |= {"read_bytes_s": machine.read_bytes_s, "multiply_adds_s": machine.multiply_adds_s} | shares(facts, model, result, machine)
    return found


def shares(facts: FileFacts, model: Model, result: Result, machine: Machine) -> dict[str, float]:
    """How close to the machine's limits a result is. read_share: bytes that decoding has to read, over what the memory gives;
    peak_share: multiply-adds with weights over what the instruction set gives. The keys and values of the context count as bytes,
    attention's arithmetic does not count."""
    test = result.test
    if test.n_gen:
        context = test.n_depth + test.n_gen / 2
        kv = (model.info.kv_bytes_per_block / BLOCK_TOKENS * context + model.info.state_bytes) * test.parallel
        steps_s = result.mean / test.parallel
        return {"read_share": steps_s * (facts.read_per_token + kv) / machine.read_bytes_s}
    macs = facts.macs_per_token + facts.macs_of_output / test.n_prompt
    return {"peak_share": result.mean * macs / machine.multiply_adds_s}


def profiled(path: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each part of a decoding step. Raises ModelFileError, ValueError."""
    from localrun.engine.profile import profile

    asked = LoadOptions(
        n_threads=(options.threads or [0])[0], n_threads_batch=(options.threads_batch or [0])[0], kv_type=options.cache_type,
        pack=_pack(options.pack), cache_dir=options.cache_dir, tune=options.tune != "no",
        isa=options.isa, gpu_layers=0, timed=True,
    )  # fmt: skip
    model = load_model(path, asked)
    try:
        parts = profile(model, path, max(options.n_gen) or 1, max(options.parallel))
    finally:
        model.close()
    whole = parts[-1].seconds
    return [{"part": part.name, "ms": part.seconds * 1e3, "share": part.seconds / whole} for part in parts]


# ---- the command --------------------------------------------------------------------------------------------------------------

COLUMNS = ("model", "size", "params", "isa", "threads", "test", "t/s", "of the machine")


def markdown(found: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    if "read_share" in found:
        limit = f"{found['read_share']:.0%} of {found['read_bytes_s'] / 1e9:.1f} GB/s"
    elif "peak_share" in found:
        limit = f"{found['peak_share']:.0%} of {found['multiply_adds_s'] / 1e9:.0f} G/s"
    else:
        limit = ""
    return (
        found["model_type"], f"{found['model_size'] / 2**20:.2f} MiB", f"{found['model_n_params'] / 1e6:.2f} M",
        found["isa"] + ("" if found["packed"] else " mapped"), str(found["n_threads"]), found["test"],
        f"{found['avg_ts']:.2f} ± {found['stddev_ts']:.2f}", limit,
    )  # fmt: skip


def natural(text: str) -> list[int]:
    """`512,1024` -> [512, 1024]."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 0")
    return found


def positive(text: str) -> list[int]:
    """The same, none of them 0."""
    found = natural(text)
    if 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r} has a 0")
    return found


def parser() -> argparse.ArgumentParser:
    """Options, named as llama-bench's where it has them. Lists are separated by commas."""
    p = argparse.ArgumentParser(prog="localrun bench", description="How fast a model reads and writes on this machine.")
    p.add_argument("model", help="a .gguf file")
    p.add_argument("-p", "--n-prompt", type=natural, default=[512], help="tokens of a prompt (512); 0: no such test")
    p.add_argument("-n", "--n-gen", type=natural, default=[128], help="tokens to write (128); 0: no such test")
    p.add_argument("-d", "--n-depth", type=natural, default=[0], help="tokens of context before (0)")
    p.add_argument("-b", "--batch-size", type=positive, default=[512], help="most tokens of one pass (512)")
    p.add_argument("-np", "--parallel", type=positive, default=[1], help="sequences that are written together (1)")
    p.add_argument("-t", "--threads", type=positive, default=[], help="threads (physical cores)")
    p.add_argument("-tb", "--threads-batch", type=positive, default=[], help="threads for prompts and several sequences (as --threads)")
    p.add_argument("-r", "--repetitions", type=int, default=5, help="repetitions of each test (5)")
    p.add_argument("-ctk", "--cache-type", default="f16", help="type of keys and values (f16)")
    p.add_argument("--isa", default="", help="instruction set (the best)")
    p.add_argument("--pack", choices=("auto", "yes", "no"), default="auto", help="repack weights (auto)")
    p.add_argument("--tune", choices=("known", "again", "no"), default="known", help="tile shapes: remembered, timed anew, the usual")
    p.add_argument("--profile", action="store_true", help="where a decoding step's time goes (-n steps, -np answers at once)")
    p.add_argument("--no-warmup", action="store_true", help="count the first run of each test, too")
    p.add_argument("--no-machine", action="store_true", help="do not measure the machine's limits")
    p.add_argument("--cache-dir", default="", help="where compiled kernels are kept")
    p.add_argument("-o", "--output", choices=("md", "json", "jsonl"), default="md", help="format (md)")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after a line on stderr."""
    options = parser().parse_args(arguments)
    rows = []
    try:
        if options.repetitions < 1:
            raise ValueError("-r must be at least 1")
        if options.profile:
            split = profiled(options.model, options)
            if options.output != "md":
                _say(json.dumps(split, indent=2))
            else:
                for part in split:
                    _say(f"{part['part']:<28} {part['ms']:9.3f} ms {part['share']:6.1%}")
            return 0
        for found in measured(options.model, options):
            rows.append(found)
            if options.output == "jsonl":
                _say(json.dumps(found))
            elif options.output == "md":
                if len(rows) == 1:
                    _print_row(COLUMNS)
                    _print_row(["-" * len(name) for name in COLUMNS])
                _print_row(markdown(found))
    except (ModelFileError, ValueError, OSError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    if options.output == "json":
        _say(json.dumps(rows, indent=2))
    elif options.output == "md":
        first = rows[0]
        busy = "" if first["load_average"] is None else f"; load average {first['load_average']:.1f}"
        compiled = f", kernels compiled in {first['compile_s']:.1f} s" if first["compile_s"] else ""
        _say(f"\nloaded in {first['load_s']:.2f} s{compiled}{busy}")
        if options.tune == "again":
            for name, shape in first["shapes"].items():
                _say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shape.items()))
    return 0


def _print_row(cells: Sequence[str]) -> None:
    widths = (28, 12, 12, 12, 7, 16, 20, 22)
    _say("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The model is closed, its threads have ended: to take the interpreter apart would be 20 ms for nothing.
    os._exit(status)
