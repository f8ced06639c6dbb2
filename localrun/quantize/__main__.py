"""`python -m localrun.quantize IN OUT TYPE`: the program that the daemon and `localrun quantize` run in a process of its own.

With --json it prints a line {"done": values, "total": values} now and then; an error is one line on stderr, and the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import psutil

from localrun.models.errors import ModelFileError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m localrun.quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("type")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--requantize", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    said = 0.0

    def told(done: int, total: int) -> None:
        nonlocal said
        if options.json and (done == total or time.monotonic() - said > 0.1):
            said = time.monotonic()
            sys.stdout.write(json.dumps({"done": done, "total": total}) + "\n")
            sys.stdout.flush()

    # slow imports, after the arguments have been read
    from localrun.quantize.convert import quantize_file

    try:
        n_threads = options.threads or psutil.cpu_count(logical=False) or 1
        quantize_file(options.source, options.target, options.type, n_threads=n_threads, again=options.requantize, told=told)
    except (ValueError, ModelFileError) as error:
        sys.stderr.write(f"{error}\n")
    except OSError as error:
        sys.stderr.write(f"cannot write {error.filename or options.target}: {error.strerror}\n")
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
