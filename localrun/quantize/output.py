"""Writes a whole GGUF file whose tensors are computed by all threads, a piece at a time, in the file's order.

Memory: a few pieces a thread, whatever the file's size. The file appears under its name when it is whole. Knows nothing of where weights
come from.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import Format
from localrun.models.gguf_write import OutTensor, alignment_of, header
from localrun.quantize import blocks, kquants

PIECE = 1 << 20
"""About how many values are quantized at a time."""
FLOATS = ("F32", "F16", "BF16")
QUANTIZERS: dict[str, Callable[..., None]] = {
    "Q4_0": blocks.q4_0, "Q4_1": blocks.q4_1, "Q5_0": blocks.q5_0, "Q5_1": blocks.q5_1, "Q8_0": blocks.q8_0,
    "Q2_K": kquants.q2_k, "Q3_K": kquants.q3_k, "Q4_K": kquants.q4_k, "Q5_K": kquants.q5_k, "Q6_K": kquants.q6_k,
}  # fmt: skip

Told = Callable[[int, int], None]
"""Values done, values in all."""
Job = tuple[Callable[[], bytes], int]
"""Makes the bytes of one piece, in any thread; how many values those are."""


def write_file(
    target: Path, metadata: Mapping[str, Any], kinds: Mapping[str, str], tensors: Sequence[OutTensor],
    jobs: Callable[[OutTensor], Iterable[Job]], *, n_threads: int, told: Told = lambda done, total: None,
) -> None:  # fmt: skip
    """Writes the file to `target`. jobs: the pieces of a tensor, in order. Raises OSError, and what a job raises; nothing is left then."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file, ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
            file.write(header(metadata, kinds, tensors))
            total = sum(math.prod(tensor.shape) for tensor in tensors)
            done = 0
            for tensor in tensors:
                for piece, count in _in_order(pool, 2 * n_threads, jobs(tensor)):
                    file.write(piece)
                    done += count
                    told(done, total)
                file.write(bytes(-tensor.nbytes % alignment_of(metadata)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _in_order(pool: ThreadPoolExecutor, ahead: int, jobs: Iterable[Job]) -> Iterator[tuple[bytes, int]]:
    waiting: deque[tuple[Future[bytes], int]] = deque()
    for job, count in jobs:
        waiting.append((pool.submit(job), count))
        if len(waiting) > ahead:
            future, count = waiting.popleft()
            yield future.result(), count
    while waiting:
        future, count = waiting.popleft()
        yield future.result(), count


def encode(values: NDArray[np.float32], target: Format, name: str, weights: NDArray[np.float32] | None = None) -> bytes:
    """Whole rows of the tensor `name`, of any shape, as bytes of type `target`. weights: for each column, how much errors there count;
    None: all count alike. Raises ValueError when the values are no finite numbers."""
    values = np.ascontiguousarray(values, np.float32).reshape(-1)
    if not np.isfinite(values).all():
        raise ValueError(f"tensor {name} holds values that are no finite numbers; the model is damaged")
    if target.name == "F32":
        return values.tobytes()
    if target.name == "F16":
        return np.clip(values, -65504, 65504).astype(np.float16).tobytes()
    if target.name == "BF16":
        bits: Any = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    out = np.zeros(len(values) // target.block * target.block_bytes, np.uint8)
    QUANTIZERS[target.name](values, out, *(() if weights is None else (weights,)))
    return out.tobytes()
