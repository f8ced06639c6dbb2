"""`python -m localrun.quantize IN OUT TYPE`: the program that the daemon and `localrun quantize` run in a process of its own.

With --json it prints a line {"done": values, "total": values} now and then; an error is one line on stderr, and the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from localrun.quantize.program import Reporter, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m localrun.quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("type")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--requantize", action="store_true")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reporter = Reporter(options.json)

    def work(n_threads: int) -> None:
        # slow imports, after the arguments have been read
        from localrun.quantize.convert import quantize_file
        from localrun.quantize.importance import read_importance

        quantize_file(
            options.source, options.target, options.type, n_threads=n_threads, again=options.requantize,
            importance=read_importance(options.imatrix) if options.imatrix else None, told=reporter.told,
        )  # fmt: skip

    return run(work, options.threads, options.target)


if __name__ == "__main__":
    sys.exit(main())
