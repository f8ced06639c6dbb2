"""`localrun quantize`: a GGUF file in another type, in a process of its own, without the daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import localrun
from localrun.cli.client import CliError, Json
from localrun.cli.environment import for_daemon
from localrun.cli.progress import follow


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF file (of a split one, the first part), or safetensors folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    type_name: Annotated[str, typer.Argument(metavar="TYPE", help="q4_K_M, q4_K_S, q5_K_M, q6_K, q8_0, q4_0, f16, ...")],
    threads: Annotated[int, typer.Option("-t", "--threads", metavar="N", min=0, help="Threads  [default: physical cores].")] = 0,
    imatrix: Annotated[Path | None, typer.Option("--imatrix", metavar="FILE", help="Importance matrix that weighs errors.")] = None,
    requantize: Annotated[bool, typer.Option("--requantize", help="Accept a file that is quantized already; both errors add up.")] = False,
) -> None:
    """Make the weights of a model smaller, or convert a checkpoint.

    \b
    Examples:
      localrun quantize model-f16.gguf model-q4_K_M.gguf q4_K_M
      localrun quantize model-f16.gguf model-q3_K_M.gguf q3_K_M --imatrix imatrix.gguf
      localrun quantize ./checkpoint-folder model-f16.gguf f16
    """
    if not source.exists():
        raise CliError(f"{source}: no such file")
    if source.is_dir() and requantize:
        raise CliError("--requantize is for GGUF files; a checkpoint is not quantized")
    if target.exists() and target.resolve() == source.resolve():
        raise CliError(f"{target} is the file to read; name another one to write")
    module = "localrun.convert" if source.is_dir() else "localrun.quantize"
    command = [sys.executable, "-P", "-m", module, "--json", "--threads", str(threads), *(["--imatrix", str(imatrix)] if imatrix else [])]
    command += [*(["--requantize"] if requantize else []), "--", str(source), str(target), type_name]
    package_root = Path(localrun.__file__).resolve().parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=for_daemon(package_root)) as child:
        follow(_objects(child, f"quantizing to {type_name}"))


def _objects(child: subprocess.Popen[str], status: str) -> Iterator[Json]:
    assert child.stdout is not None
    assert child.stderr is not None
    for line in child.stdout:
        item = json.loads(line)
        if "note" in item:
            yield {"status": f"note: {item['note']}"}
            continue
        yield {"status": status, "total": item["total"], "completed": item["done"]}
    said = child.stderr.read().strip().splitlines()
    if child.wait():
        raise CliError(said[-1] if said else f"the quantizing process ended with status {child.returncode}")
    yield {"status": "success"}
