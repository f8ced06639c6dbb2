"""`localrun perplexity`: how well a model predicts a text, and how far its probabilities are from a reference's. Quantizations are
chosen by it, and changes of kernels judged. Knows the daemon's /api/evaluate and the layout of reference files; the numbers are made in
likelihood.py.

A reference file (.npz) holds, for one text of n tokens: `tokens` (n), `top_ids` (n, k): the k likeliest next tokens by the reference;
`ref_top_logprobs` (n, k), `ref_argmax` (n), `ref_nll` (n-1); and the same three as `peer_*` where another program's figures are kept
beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from localrun.cli.autostart import connect
from localrun.cli.client import CliError, Json
from localrun.cli.completion import complete_model
from localrun.cli.likelihood import Distance, distance, perplexity

DEFAULT_WINDOW = 2048
MOST_TEXT = 32 * 1024 * 1024
"""Bytes of a text: what a request's body may hold, with room for the rest of it."""


@dataclass(frozen=True)
class Sayings:
    """What one source (the truth, a peer) says along the text."""

    logprobs: list[list[float]]
    choices: list[int]
    nll: list[float]


@dataclass(frozen=True)
class Reference:
    """A reference file."""

    tokens: list[int]
    top_ids: list[list[int]]
    truth: Sayings
    peer: Sayings | None


@dataclass
class Judgement:
    """What the daemon said, position by position."""

    tokens: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    windows: int = 1


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, as `localrun list` prints it.", autocompletion=complete_model)],
    textfile: Annotated[str, typer.Argument(metavar="TEXTFILE", help="UTF-8 text; - reads standard input.")],
    reference: Annotated[Path | None, typer.Option("--reference", metavar="FILE.npz", help="Compare with these probabilities.")] = None,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", metavar="N", min=2, help="Most tokens seen at once.")] = DEFAULT_WINDOW,
    stride: Annotated[int | None, typer.Option("--stride", metavar="N", min=1, help="Tokens a window moves on by [default: half].")] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="Threads, if not the daemon's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Measure how well a model predicts a text.

    Perplexity is exp of the mean negative log-likelihood of each token given those before it; lower is better, and only figures over the
    same text and vocabulary compare. A text longer than --ctx-size goes in overlapping windows: each token counts once, with at least
    (ctx-size - stride - 1) tokens before it. KL divergence takes the reference's likeliest tokens one by one and all others as one.

    \b
    Examples:
      localrun perplexity smollm2 book.txt
      localrun perplexity smollm2 prose.txt --reference smollm2.prose.npz
    """
    text = read_text(textfile)
    known = read_reference(reference) if reference is not None else None
    body: Json = {"model": model, "text": text, "window": ctx_size}
    if stride:
        body["stride"] = stride
    if threads:
        body["num_thread"] = threads
    if known is not None:
        body |= {"top": 1, "ids": known.top_ids, "window": 0}
        body.pop("stride", None)
    judged = ask(body)
    result = summary(model, textfile, judged, known, reference)
    if as_json:
        json.dump(result, sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(report(result))


# ---- what goes in -------------------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """Raises CliError."""
    try:
        data = sys.stdin.buffer.read(MOST_TEXT + 1) if name == "-" else _head(Path(name))
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror or error}") from None
    if len(data) > MOST_TEXT:
        raise CliError(f"{name} is larger than {MOST_TEXT >> 20} MiB; take a part of it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{name} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
    if not text:
        raise CliError(f"{name} is empty")
    return text


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_TEXT + 1)


def read_reference(path: Path) -> Reference:
    """Raises CliError for a file that cannot be read, that lacks an array, or whose arrays do not fit together."""
    import zipfile
    import zlib

    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if not hasattr(loaded, "files"):
            raise CliError(f"{path} holds a single array; a reference is an .npz file")
        with loaded as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise CliError(f"{path} is no .npz file of NumPy, or a damaged one") from None
    n, k = len(found.get("tokens", ())), found["top_ids"].shape[-1] if "top_ids" in found else 0
    shapes = {"tokens": (n,), "top_ids": (n, k)}
    sources = ["ref", "peer"] if any(name.startswith("peer_") for name in found) else ["ref"]
    for source in sources:
        shapes |= {f"{source}_top_logprobs": (n, k), f"{source}_argmax": (n,), f"{source}_nll": (n - 1,)}
    for name, shape in shapes.items():
        if name not in found:
            raise CliError(f"{path} has no array {name!r}; it has {', '.join(sorted(found)) or 'none'}")
        if found[name].shape != shape or n < 2 or k < 1:
            raise CliError(f"{path}: {name} is of shape {found[name].shape}, not {shape}")
        if found[name].dtype.kind not in ("i", "u", "f"):
            raise CliError(f"{path}: {name} holds no numbers")
    said = [Sayings(found[f"{s}_top_logprobs"].tolist(), found[f"{s}_argmax"].tolist(), found[f"{s}_nll"].tolist()) for s in sources]
    return Reference(found["tokens"].tolist(), found["top_ids"].tolist(), said[0], said[1] if len(said) > 1 else None)


# ---- asking -------------------------------------------------------------------------------------------------------------------


def ask(body: Json) -> Judgement:
    """Raises CliError."""
    judged = Judgement()
    done = False
    with connect(say=_say) as client, client.stream("/api/evaluate", body) as lines, _bar() as advance:
        for line in lines:
            if "nll" in line:
                _take(judged, line)
                advance(len(judged.tokens))
            elif line.get("done"):
                judged.seconds = float(line.get("total_duration") or 0) / 1e9
                done = True
            else:
                judged.windows = int(line.get("windows") or 1)
                advance(0, int(line.get("prompt_eval_count") or 0))
    if not done:
        raise CliError("the answer broke off before the end of the text")
    return judged


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _take(judged: Judgement, line: Json) -> None:
    if line.get("first") != len(judged.tokens):
        raise CliError(f"the daemon said what is at position {line.get('first')}; {len(judged.tokens)} comes next")
    judged.tokens += line["tokens"]
    judged.nll += line["nll"]
    judged.choices += [ids[0] for ids in line.get("top_ids") or []]
    judged.logprobs += line.get("logprobs") or []


@contextmanager
def _bar() -> Iterator[Any]:
    """advance(done, total=None): a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("evaluating", total=None)

        def advance(done: int, total: int | None = None) -> None:
            if total is not None:
                bars.update(task, total=total)
            bars.update(task, completed=done)

        yield advance


# ---- what comes out -----------------------------------------------------------------------------------------------------------


def summary(model: str, textfile: str, judged: Judgement, known: Reference | None, path: Path | None) -> Json:
    """Everything that is known, as --json prints it. Raises CliError when the reference is about other tokens."""
    if not judged.nll:
        raise CliError(f"{textfile} is a single token; nothing follows it that could be predicted")
    own = perplexity(judged.nll)
    result: Json = {
        "model": model,
        "text": textfile,
        "tokens": len(judged.tokens),
        "windows": judged.windows,
        "seconds": judged.seconds,
        "perplexity": own.value,
        "perplexity_error": own.error,
    }
    if known is None:
        return result
    if judged.tokens != known.tokens:
        raise CliError(f"{path} is about another text or vocabulary: {_first_difference(judged.tokens, known.tokens)}")
    rest = f"{len(known.top_ids[0])} likeliest tokens of the reference, the others as one"
    ours = _figures(known, Sayings(judged.logprobs, judged.choices, judged.nll))
    result |= {"reference": str(path), "divergence_over": rest, "reference_perplexity": perplexity(known.truth.nll).value, **ours}
    if known.peer is not None:
        result["peer"] = _figures(known, known.peer)
    return result


def _figures(known: Reference, said: Sayings) -> Json:
    found: Distance = distance(known.truth.logprobs, known.truth.choices, said.logprobs, said.choices, said.nll)
    return {
        "perplexity": found.perplexity.value,
        "mean_kl": found.mean_kl,
        "p99_kl": found.p99_kl,
        "max_kl": found.max_kl,
        "agreement": found.agreement,
    }


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    for at, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return f"token {at} is {a} here and {b} there"
    return f"{len(ours)} tokens here and {len(theirs)} there"


def report(result: Json) -> str:
    """The same for people."""
    over = f" in {result['windows']} windows" if result["windows"] > 1 else ""
    lines = [
        f"{result['model']}, {result['text']}: {result['tokens']} tokens{over}, {result['seconds']:.1f} s",
        f"perplexity {result['perplexity']:.4f} +- {result['perplexity_error']:.4f}",
    ]
    if "mean_kl" not in result:
        return "\n".join(lines) + "\n"
    peer = result.get("peer")
    rows = [("", "this model", "peer"), ("perplexity", *_both(result, peer, "perplexity", "{:.4f}"))]
    for name, key in (("KL mean", "mean_kl"), ("KL 99%", "p99_kl"), ("KL max", "max_kl")):
        rows.append((name, *_both(result, peer, key, "{:.6f}")))
    rows.append(("same first choice", *_both(result, peer, "agreement", "{:.2%}")))
    lines.append(f"against {result['reference']}, whose perplexity is {result['reference_perplexity']:.4f};")
    lines.append(f"KL in nats over the {result['divergence_over']}:")
    lines += [f"  {name:<18}{ours:>12}{theirs:>12}".rstrip() for name, ours, theirs in rows]
    return "\n".join(lines) + "\n"


def _both(result: Json, peer: Json | None, key: str, form: str) -> tuple[str, str]:
    return form.format(result[key]), form.format(peer[key]) if peer is not None else ""
