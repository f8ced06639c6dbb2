"""Checks and times the kernels of an NVIDIA card: one script, under five minutes, JSON at the end.

    python benchmarks/gpu_check.py [--model FILE.gguf] [--out gpu.json]     on a machine with CuPy and a card
    python benchmarks/gpu_check.py --emulate                                anywhere: reduced sizes on the emulated card, nothing is timed

Four parts: every matrix product against NumPy's contract, to the bit; logits of a model (the one given, and a random one of an 8B's shape)
with all layers on the card against the CPU's, to the bit; decoding one token at a time, as tokens a second and as a share of the memory
bandwidth that a copy on the same card reaches, with and without CUDA graphs; prefill of one long prompt.

The exit status is 1 when anything differs, 2 when there is no card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from localrun.kernels_cpu import head, reference
from localrun.kernels_cpu.activation_sizes import META, SUPER
from localrun.kernels_cpu.formats import BY_NAME, FORMATS
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_gpu import card
from localrun.kernels_gpu.device import Device, Launch
from localrun.kernels_gpu.emulator import Emulator
from localrun.kernels_gpu.layout import CARD_TYPES, PLANES
from localrun.kernels_gpu.source import WARP_ROWS_THREADS, Kernel
from localrun.models.gguf_write import OutTensor, header
from localrun.models.launches import MOST_BY_ROWS, ROWS_OF_FLOATS, TILE_ROWS, TILE_TOKENS, WARPS, rows_of_warp
from localrun.models.load import RecordedModel, load_model
from localrun.models.model import BLOCK_TOKENS, LoadOptions, Span

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
TOKENS = (1, 2, 4, 8, 33)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A LLaMA-like model."""

    layers: int
    width: int
    heads: int
    n_kv: int
    ffn: int
    vocabulary: int
    context: int


EIGHT_B = Shape(32, 4096, 32, 8, 14336, 128256, 8192)
TINY = Shape(2, 256, 4, 2, 512, 320, 512)


# ---- kernels ----------------------------------------------------------------------------------------------------------------------


def random_rows(rng: np.random.Generator, name: str, rows: int, n: int) -> Bytes:
    """Random weights in that type: any bits, but scales of moderate size."""
    form = BY_NAME[name]
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(0, 1, (rows, n)).astype(np.float32)
        if name == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.astype(np.float16 if name == "F16" else np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * n // form.block, form.block_bytes), np.uint8)
    scales = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
              "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": ()}  # fmt: skip
    for at in scales.get(name, (0,)):
        blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | 0x20
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 130, len(blocks))
    if name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x20
    return blocks.reshape(rows, form.row_bytes(n))


def put(device: Device, array: NDArray[Any]) -> int:
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    address = device.allocate(len(data))
    if len(data):
        device.upload(address, data)
    return address


def run(device: Device, kernel: Kernel, grid: tuple[int, int, int], args: list[int], tokens: int) -> None:
    words = np.zeros(32, np.int64)
    words[: len(args)] = args
    state = np.zeros(head.SIZE // 8, np.int64)
    state[head.TOKENS // 8] = tokens
    device.prepare([kernel])
    device.run([Launch(kernel, grid, put(device, words), put(device, state))])


def product(device: Device, name: str, rows: Bytes, x: Floats) -> Floats:
    """W x on the card: float32 (tokens, rows)."""
    card_type = CARD_TYPES[name]
    tokens, n = x.shape
    stride = {"256": n // 256 * SUPER, "32": (n + 63) // 64 * 64 + n // 32 * META, "f": n * 4}[card_type.kind]
    stride = -(-stride // 64) * 64
    given = device.allocate(tokens * stride)
    readers = [0] * 8
    at = ("256", "32", "f").index(card_type.kind)
    readers[2 * at : 2 * at + 2] = [given, stride]
    run(device, Kernel("norm"), (tokens, 1, 1), [put(device, x), n * 4, n, 0, 0, 0, 0, 0, 0, *readers, 0], tokens)
    planes = [put(device, plane) for plane in card_type.planes(rows.reshape(-1, BY_NAME[name].block_bytes))]
    out = device.allocate(tokens * len(rows) * 4)
    at_once = min(tokens, MOST_BY_ROWS)
    if card_type.is_float:
        kernel = Kernel("floats", (card_type.struct, at_once), WARP_ROWS_THREADS)
        grid = (-(-len(rows) // ROWS_OF_FLOATS), -(-tokens // at_once), 1)
    elif tokens > MOST_BY_ROWS:
        kernel, grid = Kernel("tiles", (card_type.struct,)), (-(-len(rows) // TILE_ROWS), -(-tokens // TILE_TOKENS), 1)
    else:
        kernel = Kernel("matvec", (card_type.struct, at_once, rows_of_warp(at_once)), WARP_ROWS_THREADS)
        grid = (-(-len(rows) // (WARPS * rows_of_warp(at_once))), 1, 1)
    args = [*planes, *[0] * (PLANES - len(planes)), n // card_type.block, len(rows), given, stride, out, len(rows) * 4]
    args += [0, 0, head.TOKENS // 8]
    run(device, kernel, grid, args, tokens)
    result = np.empty(tokens * len(rows) * 4, np.uint8)
    device.download(out, result)
    device.release()
    return result.view(np.float32).reshape(tokens, len(rows))


def check_products(device: Device, n: int, rows: int) -> dict[str, str]:
    """By type: "exact", or how many results differ."""
    rng = np.random.default_rng(1)
    found = {}
    for number in sorted(PACKINGS):
        name = FORMATS[number].name
        weights = random_rows(rng, name, rows, n)
        wrong = 0
        for tokens in TOKENS:
            x = rng.normal(0, 1, (tokens, n)).astype(np.float32)
            wrong += int((product(device, name, weights, x) != reference.matmul(number, weights, x)).sum())
        found[name] = f"{wrong} differ" if wrong else "exact"
    return found


# ---- models -----------------------------------------------------------------------------------------------------------------------


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of a Q4_K_M mix: every second layer keeps V and the down matrix in Q6_K."""
    width, kv = shape.width, shape.n_kv * (shape.width // shape.heads)
    yield "token_embd.weight", (width, shape.vocabulary), "Q4_K"
    yield "output.weight", (width, shape.vocabulary), "Q6_K"
    yield "output_norm.weight", (width,), "F32"
    for i in range(shape.layers):
        finer = "Q6_K" if i % 2 else "Q4_K"
        for name, dims, kind in (
            ("attn_norm", (width,), "F32"), ("attn_q", (width, width), "Q4_K"), ("attn_k", (width, kv), "Q4_K"),
            ("attn_v", (width, kv), finer), ("attn_output", (width, width), "Q4_K"), ("ffn_norm", (width,), "F32"),
            ("ffn_gate", (width, shape.ffn), "Q4_K"), ("ffn_up", (width, shape.ffn), "Q4_K"), ("ffn_down", (shape.ffn, width), finer),
        ):  # fmt: skip
            yield f"blk.{i}.{name}.weight", dims, kind


def write_random_model(path: Path, shape: Shape) -> None:
    """Random bits with small scales, so that values stay moderate through all layers."""
    rng = np.random.default_rng(2)
    listed = list(tensors(shape))
    keys: dict[str, tuple[str, Any]] = {
        "general.architecture": ("string", "llama"), "llama.block_count": ("uint32", shape.layers),
        "llama.context_length": ("uint32", shape.context), "llama.embedding_length": ("uint32", shape.width),
        "llama.feed_forward_length": ("uint32", shape.ffn), "llama.attention.head_count": ("uint32", shape.heads),
        "llama.attention.head_count_kv": ("uint32", shape.n_kv), "llama.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
        "tokenizer.ggml.model": ("string", "gpt2"), "tokenizer.ggml.tokens": ("array[string]", [f"t{i}" for i in range(shape.vocabulary)]),
        "tokenizer.ggml.merges": ("array[string]", []),
    }  # fmt: skip
    infos = [OutTensor(name, dims, BY_NAME[kind].id) for name, dims, kind in listed]
    with path.open("wb") as file:
        file.write(header({key: value for key, (_, value) in keys.items()}, {key: kind for key, (kind, _) in keys.items()}, infos))
        for (_, dims, kind), info in zip(listed, infos):
            if kind == "F32":
                file.write(np.ones(dims, np.float32).tobytes())
            else:
                some = random_rows(rng, kind, min(64, dims[1]), dims[0])
                for at in (208,) if kind == "Q6_K" else (0, 2):
                    some.reshape(-1, BY_NAME[kind].block_bytes)[:, at : at + 2] = np.array([2e-4], np.float16).view(np.uint8)
                for first in range(0, dims[1], len(some)):
                    file.write(some[: dims[1] - first].tobytes())
            file.write(bytes(-info.nbytes % 32))


def feed(model: RecordedModel, tokens: NDArray[np.int32], start: int, last_only: bool = True) -> Floats:
    """Logits of the last token (or all) of the next ones of a sequence in blocks 0, 1, ..."""
    n = len(tokens)
    table = np.arange(-(-(start + n) // BLOCK_TOKENS), dtype=np.int32)
    outputs = np.array([n - 1], np.int32) if last_only else np.arange(n, dtype=np.int32)
    return model.forward([Span(tokens, start, table, outputs)])


def check_logits(path: Path, device: Device, cache: str, prompt: int) -> dict[str, Any]:
    """A prompt and eight tokens, all layers on the card and none."""
    found = []
    layers = 0
    for gpu_layers in (1 << 20, 0):
        model = load_model(path, LoadOptions(cache_dir=cache, gpu_layers=gpu_layers, devices=[device], max_batch=max(prompt, 32)))
        try:
            layers = max(layers, model.info.gpu_layers)
            model.allocate_kv(-(-(prompt + 8) // BLOCK_TOKENS))
            tokens = np.random.default_rng(3).integers(0, model.info.n_vocab, prompt + 8).astype(np.int32)
            rows = [feed(model, tokens[:prompt], 0).copy()]
            rows += [feed(model, tokens[i : i + 1], i).copy() for i in range(prompt, prompt + 8)]
            found.append(np.concatenate(rows))
        finally:
            model.close()
    same = bool(np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32)))
    return {"layers_on_card": layers, "same_bits": same, "largest_difference": float(np.abs(found[0] - found[1]).max())}


def time_model(path: Path, device: Device, cache: str, prompt: int, answer: int) -> dict[str, float]:
    """Prefill of one prompt, then one token at a time. Seconds are of the whole pass, as the engine sees it."""
    model = load_model(path, LoadOptions(cache_dir=cache, gpu_layers=1 << 20, devices=[device], max_batch=prompt))
    try:
        model.allocate_kv(-(-(prompt + answer + 8) // BLOCK_TOKENS))
        tokens = np.random.default_rng(4).integers(0, model.info.n_vocab, prompt + answer + 8).astype(np.int32)
        feed(model, tokens[:prompt], 0)
        began = time.perf_counter()
        feed(model, tokens[:prompt], 0)
        prefill = time.perf_counter() - began
        for i in range(prompt, prompt + 8):
            feed(model, tokens[i : i + 1], i)
        began = time.perf_counter()
        for i in range(prompt + 8, prompt + 8 + answer):
            feed(model, tokens[i : i + 1], i)
        decode = (time.perf_counter() - began) / answer
        return {
            "weight_bytes": float(model.info.gpu_bytes - model.info.kv_blocks * model.info.gpu_kv_bytes_per_block),
            "prefill_tokens_per_second": prompt / prefill, "decode_tokens_per_second": 1 / decode, "decode_ms": decode * 1e3,
        }  # fmt: skip
    finally:
        model.close()


def copy_bandwidth(device: Device, nbytes: int = 1 << 30) -> float:
    """Bytes a second that a copy inside the card reads and writes."""
    a, b = device.allocate(nbytes), device.allocate(nbytes)
    wait = np.zeros(64, np.uint8)
    device.copy(a, b, nbytes)
    device.download(a, wait)
    began = time.perf_counter()
    for _ in range(10):
        device.copy(a, b, nbytes)
    device.download(a, wait)
    took = time.perf_counter() - began
    device.release()
    return 2 * 10 * nbytes / took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a real model to compare, too (the starter model)")
    parser.add_argument("--emulate", action="store_true", help="reduced, on the emulated card: shows that the script and the kernels work")
    parser.add_argument("--out", type=Path, help="where the JSON goes, beside the terminal")
    asked = parser.parse_args()
    cache = platformdirs.user_cache_dir("localrun")
    plain: Device | None = None
    if asked.emulate:
        device: Device = Emulator(Path(cache))
    else:
        devices, note = card.find(Path(cache))
        if not devices:
            print(f"no card: {note}", file=sys.stderr)
            return 2
        device = devices[0]
        plain = next(d for d in card.find(Path(cache), graphs=False)[0] if d.name == device.name)
    report: dict[str, Any] = {"device": device.name, "emulated": asked.emulate}
    report["products"] = check_products(device, 256 if asked.emulate else 4096, 20 if asked.emulate else 200)
    with tempfile.TemporaryDirectory() as folder:
        random_model = Path(folder) / "random.gguf"
        write_random_model(random_model, TINY if asked.emulate else EIGHT_B)
        report["logits"] = {"random": check_logits(random_model, device, cache, 20 if asked.emulate else 64)}
        if asked.model:
            report["logits"]["model"] = check_logits(asked.model, device, cache, 20 if asked.emulate else 64)
        if plain is not None:
            report["copy_bandwidth"] = copy_bandwidth(device)
            for name, each in (("graphs", device), ("no_graphs", plain)):
                times = time_model(random_model, each, cache, 512, 64)
                times["share_of_copy_bandwidth"] = times["weight_bytes"] * times["decode_tokens_per_second"] / report["copy_bandwidth"]
                report[name] = times
    text = json.dumps(report, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")
    right = all(result == "exact" for result in report["products"].values()) and all(one["same_bits"] for one in report["logits"].values())
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
