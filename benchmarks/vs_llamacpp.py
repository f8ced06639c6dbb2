"""localrun beside llama.cpp in one run: same files, threads and lengths, the two taking turns, medians and ratios.

    python benchmarks/vs_llamacpp.py --models FOLDER [--only speed,batch,depth,load,busy] [--rounds 3] [--threads 2]

FOLDER holds .gguf files. Each measurement of either side is a process of its own. A ratio above 1 is in our favour. Quiet machines only:
the load average is printed before and after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import host
from peer import Peer, PeerError, add_option, find

SECTIONS = ("speed", "batch", "depth", "load", "busy")
# Targets: (what, a piece of the file's name) -> ratio to reach.
TARGETS = {
    ("tg128", "1.5b"): 1.3, ("tg128", "0.5b"): 2.0, ("tg128", "270m"): 2.0, ("tg128", "135m"): 2.0,
    ("pp512", "1.5b"): 1.7, ("pp512", "0.5b"): 2.2, ("pp512", "270m"): 2.0, ("pp512", "135m"): 3.5,
    ("tg64 x4", "1.5b"): 3.0, ("tg64 x8", "1.5b"): 3.0, ("tg32 @ d4096", "1.5b"): 2.0, ("tg32 @ d16384", "1.5b"): 2.0,
    ("load, s", ""): 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row of the table. Where less is better, `ratio` is the peer's over ours."""

    model: str
    what: str
    ours: float
    peer: float
    less_is_better: bool = False

    @property
    def ratio(self) -> float:
        return self.peer / self.ours if self.less_is_better else self.ours / self.peer

    @property
    def target(self) -> str:
        for (what, piece), wanted in TARGETS.items():
            if what == self.what and piece in self.model:
                return f"{wanted:.1f} {'yes' if self.ratio >= wanted else 'no'}"
        return ""


def take_turns(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Medians of `rounds` pairs."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return host.median([a for a, _ in pairs]), host.median([b for _, b in pairs])


class Comparison:
    """Both sides on the same files with the same threads."""

    def __init__(self, peer: Peer, threads: int, rounds: int) -> None:
        self.peer = peer
        self.threads = threads
        self.rounds = rounds

    def _pair(self, model: Path, what: str, prompt: int, gen: int, depth: int = 0) -> Line:
        base = ["-t", str(self.threads), "-r", "1", "-p", str(prompt), "-n", str(gen), "-d", str(depth)]
        ours, theirs = take_turns(
            self.rounds,
            lambda: float(host.ours(model, *base)["avg_ts"]),
            lambda: self.peer.bench(model, threads=self.threads, prompt=prompt, gen=gen, depth=depth)[0],
        )
        return Line(model.stem, what, ours, theirs)

    def speed(self, model: Path) -> list[Line]:
        """A prompt of 512 tokens, and 128 tokens written."""
        return [self._pair(model, "pp512", 512, 0), self._pair(model, "tg128", 0, 128)]

    def batch(self, model: Path) -> list[Line]:
        """Sequences written together: tokens a second of all of them."""
        lines = []
        for n in (1, 4, 8):
            base = ["-t", str(self.threads), "-r", "1", "-p", "0", "-n", "64", "-np", str(n)]
            ours, theirs = take_turns(
                self.rounds,
                lambda base=base: float(host.ours(model, *base)["avg_ts"]),  # type: ignore[misc]
                lambda n=n: self.peer.batched(model, threads=self.threads, sequences=n),  # type: ignore[misc]
            )
            lines.append(Line(model.stem, f"tg64 x{n}", ours, theirs))
        return lines

    def depth(self, model: Path) -> list[Line]:
        """Writing after a long context."""
        return [self._pair(model, f"tg32 @ d{n}", 0, 32, n) for n in (4096, 16384)]

    def load(self, model: Path) -> list[Line]:
        """A whole process that loads the model, reads one token and ends: seconds, most resident memory, and the most of it that is the
        process's own and no file's; the same of ours with weights left as the file has them, beside the same peer.
        """
        tool = self.peer.tool("llama-bench")
        theirs_command = [tool, "-m", model, "-t", str(self.threads), "-p", "1", "-n", "0", "-r", "1", "--no-warmup"]
        theirs = [host.run(theirs_command) for _ in range(self.rounds)]
        their_seconds = host.median([one.seconds for one in theirs])
        their_peaks = max(one.peak_bytes for one in theirs) / 2**20, max(one.own_bytes for one in theirs) / 2**20
        lines = []
        for pack, how in (("yes", ""), ("no", " mapped")):
            base = ["-t", str(self.threads), "-p", "1", "-n", "0", "-r", "1", "--no-warmup", "--pack", pack]
            host.ours(model, *base)  # kernels into the cache, the file into memory
            ours = [host.ours(model, *base) for _ in range(self.rounds)]
            seconds = host.median([one["process_s"] for one in ours])
            peaks = max(one["peak_bytes"] for one in ours) / 2**20, max(one["own_bytes"] for one in ours) / 2**20
            lines += [
                Line(model.stem, f"load{how}, s", seconds, their_seconds, True),
                Line(model.stem, f"peak{how}, MiB", peaks[0], their_peaks[0], True),
                Line(model.stem, f"own{how}, MiB", peaks[1], their_peaks[1], True),
            ]
        return lines

    def busy(self, model: Path) -> list[Line]:
        """Writing while another process never lets go of each core."""
        with host.busy(self.threads):
            return [self._pair(model, "tg32, others busy", 0, 32)]


def print_line(cells: tuple[str, ...]) -> None:
    widths = (38, 18, 10, 10, 7, 9)
    print("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |", flush=True)


def main() -> int:
    """Exit status 0, or 1 after a line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with .gguf files, or one file")
    parser.add_argument("--only", default="speed", help=f"sections, separated by commas, or all: {', '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_option(parser)
    options = parser.parse_args()
    sections = SECTIONS if options.only == "all" else tuple(options.only.split(","))
    if unknown := [section for section in sections if section not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}")
    models = [options.models] if options.models.is_file() else sorted(options.models.glob("*.gguf"), key=lambda path: path.stat().st_size)
    if not models:
        parser.error(f"{options.models} has no .gguf files")
    try:
        peer = find(options.peer_venv)
        print(f"machine: {host.describe()}\npeer: {peer.source}\nthreads: {options.threads}, medians of {options.rounds} turns\n")
        print_line(("model", "what", "localrun", "llama.cpp", "ratio", "target"))
        print_line(("-" * 5,) * 6)
        comparison = Comparison(peer, options.threads, options.rounds)
        for section in sections:
            # Batches and depths are about the largest of the models.
            for model in models if section in ("speed", "load") else models[-1:]:
                for line in getattr(comparison, section)(model):
                    print_line((line.model, line.what, f"{line.ours:.2f}", f"{line.peer:.2f}", f"{line.ratio:.2f}", line.target))
    except (PeerError, host.RunError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"\nload average at the end: {host.load_average()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
