"""`localrun plan`: what a model will take and give on the daemon's machine, before it is downloaded or loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from localrun.cli.autostart import connect
from localrun.cli.client import Json
from localrun.cli.format import size
from localrun.cli.models import AsJson, block, say, write_json

NO_FIT = 3
"""Exit status when the model does not fit, so that scripts need not read the text."""


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL|FILE|URL", help="Name, .gguf file, its https address, or hf.co/OWNER/REPO:QUANT.")],
    ctx: Annotated[int, typer.Option("--ctx", metavar="N", min=0, help="Tokens of context for each user  [default: the model's].")] = 0,
    users: Annotated[int, typer.Option("--users", metavar="N", min=1, help="Contexts to have room for at once.")] = 1,
    cache_type: Annotated[str, typer.Option("--cache-type", metavar="TYPE", help="Number format of the KV cache  [default: as set].")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept plain HTTP, for an address that begins with http://.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model needs and how fast it can be here, from its header alone.

    Of a model on the web the first megabytes are read and no more. The exit status is 3 when it does not fit into memory.

    \b
    Examples:
      localrun plan smollm2
      localrun plan hf.co/OWNER/REPO-GGUF:Q4_K_M --ctx 32768 --users 4
      localrun plan ./model.gguf --cache-type q8_0 --json
    """
    path = Path(model)
    body: Json = {"model": str(path.absolute()) if path.is_file() else model, "num_ctx": ctx, "users": users, "insecure": insecure}
    if cache_type:
        body["kv_cache_type"] = cache_type
    with connect(say=say) as client:
        answer = client.post("/api/plan", body)
    if as_json:
        write_json(answer)
    else:
        sys.stdout.write(plan_text(answer))
    if not answer.get("fits"):
        raise typer.Exit(NO_FIT)


def plan_text(answer: Json) -> str:
    """/api/plan's answer for people."""
    quantization, memory = answer["quantization"], answer["memory"]
    words = f", {quantization['words']}" if quantization["words"] else ""
    disk = size(answer["size"]) + (f" (download {size(answer['download'])})" if answer["download"] else "")
    text = block(
        "Model",
        [
            ("architecture", answer["architecture"]),
            ("parameters", _count(answer["parameters"])),
            ("quantization", f"{quantization['name']}{words}"),
            ("bits per weight", f"{quantization['bits_per_weight']:.2f}"),
            ("size on disk", disk),
            ("context length", f"{answer['context_length']:,}" if answer["context_length"] else "not said"),
            *([("cannot be run", answer["unsupported"])] if answer["unsupported"] else []),
        ],
    )
    who = "1 user" if answer["users"] == 1 else f"{answer['users']} users"
    packed = "" if answer["packed"] else " (read from the file: too little memory to lay them out for speed)"
    parts = [("weights", size(memory["weights"]) + packed)]
    parts += [("embedding", size(memory["embedding"]))] if memory["embedding"] else []
    parts += [(f"KV cache, {answer['kv_cache_type']}", size(memory["kv"]))]
    parts += [("recurrent state", size(memory["state"]))] if memory.get("state") else []
    parts += [(name, size(memory[name])) for name in ("scratch", "tokenizer", "process")]
    parts += [("total", f"{size(memory['total'])} of {size(memory['available'])} that are free")]
    text += block(f"Memory for {who} with {answer['num_ctx']:,} tokens of context", parts)
    text += block("KV cache per 1,000 tokens", [(kind, size(count)) for kind, count in answer["kv_per_1000_tokens"].items()])
    return text + block("Here", _here(answer))


def _here(answer: Json) -> list[tuple[str, str]]:
    rows = [("fits", "yes" if answer["fits"] else "no")]
    longest = f"{answer['max_ctx']:,} tokens for each user" if answer["max_ctx"] else "none: even a short one does not fit"
    rows.append(("longest context", longest))
    if answer["tokens_per_second"]:
        memory = f"memory reads {answer['bandwidth'] / 1e9:.0f} GB/s with {answer['threads']} threads"
        rows.append(("tokens a second", f"at most {answer['tokens_per_second']:.0f} ({memory})"))
    if "gpu" in answer:
        gpu = answer["gpu"]
        where = ", ".join(f"{one['name']} with {size(one['free'])} free" for one in gpu["cards"])
        rows.append(("layers on cards", f"about {gpu['layers']} of {gpu['of']}, {size(gpu['size_vram'])} ({gpu['note'] or where})"))
    if "choices" in answer:
        rows.append(("largest that fits", answer["largest_that_fits"] or "none of the repository's"))
        rows += [(f"  {one['quantization']}", f"{size(one['size'])}{'' if one['fits'] else ', too large'}") for one in answer["choices"]]
    return rows


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)
