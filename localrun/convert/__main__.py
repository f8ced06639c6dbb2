"""`python -m localrun.convert FOLDER OUT [TYPE]`, and for adapters `FOLDER OUT --adapter-for MODEL.gguf`.

The program that the daemon and `localrun quantize` run in a process of its own.

With --json it prints a line {"done": values, "total": values} now and then and {"note": text} for what a person should know; an error is
one line on stderr, and the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from localrun.quantize.program import Reporter, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m localrun.convert")
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("type", nargs="?", default="")
    parser.add_argument("--title", default="")
    parser.add_argument("--adapter-for", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reporter = Reporter(options.json)

    def work(n_threads: int) -> None:
        # slow imports, after the arguments have been read
        if options.adapter_for:
            from localrun.convert.lora import convert_adapter

            convert_adapter(options.folder, options.adapter_for, options.target, n_threads=n_threads, told=reporter.told)
            return
        from localrun.convert.write import convert
        from localrun.quantize.importance import read_importance

        importance = read_importance(options.imatrix) if options.imatrix else None
        notes = convert(
            options.folder, options.target, options.type, n_threads=n_threads, title=options.title, importance=importance,
            told=reporter.told,
        )  # fmt: skip
        for note in notes:
            reporter.note(note)

    return run(work, options.threads, options.target)


if __name__ == "__main__":
    sys.exit(main())
