"""`localrun bench`: how fast a model is on this machine. The measuring is done by localrun.engine.bench in a process of its own, which
this program starts and does not import; the daemon is only asked which file a name stands for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import localrun
from localrun.cli.autostart import connect
from localrun.cli.client import CliError
from localrun.cli.completion import complete_model
from localrun.cli.environment import for_daemon


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, or a .gguf file.", autocompletion=complete_model)],
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", metavar="N,...", help="Tokens of a prompt; 0: no such test.")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", metavar="N,...", help="Tokens to write; 0: no such test.")] = "128",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", metavar="N,...", help="Tokens of context before.")] = "0",
    batch_size: Annotated[str, typer.Option("-b", "--batch-size", metavar="N,...", help="Most tokens of one pass.")] = "512",
    parallel: Annotated[str, typer.Option("--parallel", metavar="N,...", help="Sequences that are written together.")] = "1",
    threads: Annotated[str, typer.Option("-t", "--threads", metavar="N,...", help="Threads  [default: physical cores].")] = "",
    threads_batch: Annotated[
        str, typer.Option("--threads-batch", "-tb", metavar="N,...", help="Threads for prompts and several sequences  [default: as -t].")
    ] = "",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Repetitions of each test.")] = 5,
    cache_type: Annotated[str, typer.Option("--cache-type", metavar="TYPE", help="Type of the keys and values.")] = "f16",
    isa: Annotated[str, typer.Option("--isa", metavar="NAME", help="Instruction set  [default: the best].")] = "",
    pack: Annotated[str, typer.Option("--pack", metavar="auto|yes|no", help="Repack the weights.")] = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="Where the time of a decoding step goes, instead of speeds.")] = False,
    tune: Annotated[
        str, typer.Option("--tune", metavar="known|again|no", help="Tile shapes: those remembered, timed anew, or the usual ones.")
    ] = "known",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, fields named as in llama-bench's.")] = False,
) -> None:
    """Measure how fast a model reads and writes.

    Tests are named as in llama-bench: pp512 reads a prompt of 512 tokens, tg128 writes 128. Numbers separated by commas make a test each.
    The last column holds the speed against what this machine can do at most: bytes read for tg, multiply-adds for pp.

    \b
    Examples:
      localrun bench smollm2
      localrun bench smollm2 -p 0 -n 64 -d 0,4096 --json
      localrun bench smollm2 --profile --parallel 8
      localrun bench smollm2 --tune again
    """
    command = [sys.executable, "-P", "-m", "localrun.engine.bench", "-o", "json" if as_json else "md"]
    given = {"-p": n_prompt, "-n": n_gen, "-d": n_depth, "-b": batch_size, "-np": parallel, "-t": threads, "-r": str(repetitions)}
    given |= {"-ctk": cache_type, "--isa": isa, "--pack": pack, "--tune": tune, "-tb": threads_batch}
    for name, value in given.items():
        if value:
            command += [name, value]
    if profile:
        command.append("--profile")
    package_root = Path(localrun.__file__).resolve().parent.parent
    done = subprocess.run([*command, "--", str(file_of(model))], env=for_daemon(package_root), check=False)
    if done.returncode < 0:
        raise CliError(f"the measuring process was ended by signal {-done.returncode}")
    if done.returncode:
        raise typer.Exit(done.returncode)


def file_of(model: str) -> Path:
    """The weights of a model, given by name or as a file. Raises CliError."""
    path = Path(model)
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise CliError(f"{model}: no such file")
        return path.absolute()
    with connect(say=_say) as client:
        if not client.where.here:
            raise CliError(f"the daemon is at {client.where.url}; bench measures this machine, so give it a .gguf file")
        modelfile = str(client.post("/api/show", {"model": model}).get("modelfile", ""))
    # The Modelfile of /api/show names the file that the model is made from.
    for line in modelfile.splitlines():
        if line.startswith("FROM "):
            return Path(line.removeprefix("FROM ").strip().strip('"'))
    raise CliError(f"the daemon does not say which file {json.dumps(model)} is made from")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
