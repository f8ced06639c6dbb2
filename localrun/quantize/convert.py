"""A GGUF file in another type: tensors are read, quantized by all threads a piece at a time, and written in the file's order.

Memory: a few pieces a thread, whatever the file's size. Knows files and threads; types are chosen in mixes.py.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import FORMATS, Format
from localrun.kernels_cpu.reference import dequantize
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, open_gguf
from localrun.models.gguf_write import OutTensor, alignment_of, header
from localrun.quantize import blocks, kquants, mixes

PIECE = 1 << 20
"""About how many values are quantized at a time."""
FLOATS = ("F32", "F16", "BF16")
QUANTIZERS: dict[str, Callable[[NDArray[np.float32], NDArray[np.uint8]], None]] = {
    "Q4_0": blocks.q4_0, "Q4_1": blocks.q4_1, "Q5_0": blocks.q5_0, "Q5_1": blocks.q5_1, "Q8_0": blocks.q8_0,
    "Q2_K": kquants.q2_k, "Q3_K": kquants.q3_k, "Q4_K": kquants.q4_k, "Q5_K": kquants.q5_k, "Q6_K": kquants.q6_k,
}  # fmt: skip

Told = Callable[[int, int], None]
"""Values done, values in all."""


def quantize_file(
    source: Path, target: Path, name: str, *, n_threads: int, again: bool = False, told: Told = lambda done, total: None
) -> None:
    """Writes `source` as a file of type `name` ("Q4_K_M") to `target`, which appears when it is whole.

    again: a file that is quantized already may be the source, at the price of both errors. Raises ValueError (the type; a source that is
    quantized; weights that are no finite numbers), ModelFileError, OSError.
    """
    name = mixes.file_type(name)
    with open_gguf(source) as gguf:
        shape = mixes.Shape.of(gguf.architecture, gguf.metadata, gguf.tensors)
        types = {info.name: mixes.type_of(info.name, info.shape, FORMATS[info.type], name, shape) for info in gguf.tensors.values()}
        for info in gguf.tensors.values():
            _check(gguf, info, types[info.name], again)
        metadata = {key: value for key, value in gguf.metadata.items() if not key.startswith("split.")}
        metadata |= {"general.file_type": mixes.FILE_TYPES[name], "general.quantization_version": 2}
        kinds = gguf.value_types | {"general.file_type": "uint32", "general.quantization_version": "uint32"}
        tensors = [OutTensor(info.name, info.shape, types[info.name].id) for info in gguf.tensors.values()]
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with draft.open("xb") as file, ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
                file.write(header(metadata, kinds, tensors))
                total = sum(math.prod(tensor.shape) for tensor in tensors)
                done = 0
                for tensor in tensors:
                    for piece, count in _pieces(gguf, tensor, pool, n_threads):
                        file.write(piece)
                        done += count
                        told(done, total)
                    file.write(bytes(-tensor.nbytes % alignment_of(metadata)))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def _check(gguf: GGUFFile, info: TensorInfo, target: Format, again: bool) -> None:
    now = FORMATS[info.type]
    if now is target or now.name in FLOATS:
        return
    if not again:
        raise ValueError(
            f"quantization is only supported for F16, BF16 and F32 models: tensor {info.name} is {now.name}; start from the unquantized "
            "model, or allow requantizing, which adds both errors"
        )
    if now.name.startswith("I") and now.name[1:].isdigit():
        raise ModelFileError(gguf.path, f"tensor {info.name}", f"is of type {now.name}, which holds no weights")


def _pieces(gguf: GGUFFile, tensor: OutTensor, pool: ThreadPoolExecutor, n_threads: int) -> Iterator[tuple[bytes | memoryview, int]]:
    """The tensor's bytes in its new type, in order, with the number of values in each piece."""
    info = gguf.tensors[tensor.name]
    now, target = FORMATS[info.type], FORMATS[tensor.type]
    row = info.shape[0] if info.shape else 1
    rows = math.prod(info.shape[1:])
    if now is target:
        yield bytes(gguf.data(tensor.name)), row * rows
        return
    data = np.frombuffer(gguf.data(tensor.name), np.uint8).reshape(rows, now.row_bytes(row))
    step = max(1, PIECE // row)
    waiting: deque[tuple[Future[bytes], int]] = deque()
    for first in range(0, rows, step):
        part = data[first : first + step]
        waiting.append((pool.submit(_converted, part, now, target, row, tensor.name), len(part) * row))
        if len(waiting) > 2 * n_threads:
            future, count = waiting.popleft()
            yield future.result(), count
    while waiting:
        future, count = waiting.popleft()
        yield future.result(), count
    del data
    gguf.drop_pages(tensor.name)


def _converted(part: NDArray[np.uint8], now: Format, target: Format, row: int, name: str) -> bytes:
    values: NDArray[np.float32] = np.ascontiguousarray(dequantize(now.id, part, row), np.float32).reshape(-1)
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
    QUANTIZERS[target.name](values, out)
    return out.tobytes()


