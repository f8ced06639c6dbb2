"""What a GGUF header says about the memory that a model will take. Reads keys and tensor infos, no tensor's data.

Every architecture is answered, whether it can be run here or not; a key that is missing or of another kind counts as unknown (0).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.sizes import PACKINGS, ROWS, room
from localrun.kernels_cpu.state_sizes import conv_bytes, matrix_bytes, scan_bytes
from localrun.models.gguf import GGUFFile, TensorInfo
from localrun.models.registry import ARCHITECTURES
from localrun.models.show import parameter_count, quantization

EMBEDDING = "token_embd.weight"
_ADDED = ("attn_output", "ffn_down")
"""Matrices whose results are added to the row that a layer works on, unless a norm comes between."""


@dataclass(frozen=True)
class Facts:
    """Bytes and counts of one model file, or of all its parts."""

    architecture: str
    title: str
    quantization: str
    parameters: int
    file_bytes: int
    tensor_bytes: int
    """Of the tensors as they lie in the file."""
    packed_bytes: int
    """Of the weights as kernels read them fastest: every matrix repacked."""
    mapped_bytes: int
    """Of the embedding table where packed weights hold it too: looked up in the file, whose pages come back as its rows are needed."""
    read_bytes: int
    """Of packed weights that one token passes through: all but the experts that it does not use."""
    row_bytes: int
    """Scratch memory for each token of a batch."""
    vocabulary: int
    merges: int
    context_length: int
    """That the model was trained for; 0: the file does not say."""
    kv: tuple[tuple[int, int, int, int], ...]
    """(layers, kv heads, values of a key, values of a value), one entry for each kind of layer."""
    state_bytes: int = 0
    """What recurrent layers remember of one sequence, however long."""
    unsupported: str = ""
    """Why this program cannot run it, as far as the header tells; empty when nothing speaks against it."""

    @property
    def bits_per_weight(self) -> float:
        return self.tensor_bytes * 8 / self.parameters if self.parameters else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kv": [list(kind) for kind in self.kv]}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Facts:
        return cls(**body | {"kv": tuple((n, heads, k, v) for n, heads, k, v in body["kv"])})


def facts_of(gguf: GGUFFile) -> Facts:
    """Raises ModelFileError when the file names no architecture."""
    tied = "output.weight" not in gguf.tensors
    packed = read = 0
    for tensor in gguf.tensors.values():
        size = _memory(tensor) if tied or tensor.name != EMBEDDING else 0
        packed += size
        read += size * _used(gguf, tensor) // max(1, _count(gguf, "expert_count")) if "_exps." in tensor.name else size
    embedding = gguf.tensors.get(EMBEDDING)
    name = gguf.metadata.get("general.name")
    return Facts(
        architecture=gguf.architecture,
        title=name if isinstance(name, str) else "",
        quantization=quantization(gguf),
        parameters=parameter_count(gguf),
        file_bytes=gguf.file_size,
        tensor_bytes=sum(tensor.nbytes for tensor in gguf.tensors.values()),
        packed_bytes=packed,
        mapped_bytes=embedding.nbytes if tied and embedding else 0,
        read_bytes=read,
        row_bytes=_row_bytes(gguf),
        vocabulary=_length(gguf, "tokenizer.ggml.tokens"),
        merges=_length(gguf, "tokenizer.ggml.merges"),
        context_length=_count(gguf, "context_length"),
        kv=_kv(gguf),
        state_bytes=_state(gguf),
        unsupported=_unsupported(gguf),
    )


def _count(gguf: GGUFFile, key: str) -> int:
    value = gguf.metadata.get(f"{gguf.architecture}.{key}")
    return value if type(value) is int and value >= 0 else 0


def _length(gguf: GGUFFile, key: str) -> int:
    value = gguf.metadata.get(key)
    return len(value) if isinstance(value, list) else 0


def _memory(tensor: TensorInfo) -> int:
    """Bytes of a tensor in memory: matrices in groups of 16 rows, vectors as float32."""
    packing = PACKINGS.get(tensor.type)
    if len(tensor.shape) < 2 or packing is None or tensor.shape[0] % packing.format.block:
        return 4 * math.prod(tensor.shape)
    return math.prod(tensor.shape[2:]) * -(-tensor.shape[1] // ROWS) * packing.group_bytes(tensor.shape[0])


def _used(gguf: GGUFFile, tensor: TensorInfo) -> int:
    return _count(gguf, "expert_used_count") or max(1, _count(gguf, "expert_count"))


def _layers(gguf: GGUFFile) -> Iterator[tuple[int, int, int, int]]:
    """(kv heads, key, value, heads) of each layer that keeps keys and values."""
    values = gguf.metadata
    prefix = gguf.architecture
    heads = values.get(f"{prefix}.attention.head_count", 0)
    kv_heads = values.get(f"{prefix}.attention.head_count_kv", heads)
    n_layers = _count(gguf, "block_count")
    for i in range(min(n_layers, 10_000)):
        n, n_kv = (each[i] if isinstance(each, list) and i < len(each) else each for each in (heads, kv_heads))
        if type(n) is not int or type(n_kv) is not int or n <= 0 or n_kv <= 0 or not _attends(gguf, i):
            continue
        dim = _count(gguf, "attention.key_length") or _count(gguf, "embedding_length") // n
        yield n_kv, dim, _count(gguf, "attention.value_length") or _count(gguf, "embedding_length") // n, n


def _attends(gguf: GGUFFile, layer: int) -> bool:
    """Whether a layer attends, where layers may be of other kinds: recurrent, or a feed-forward part alone."""

    def has(*names: str) -> bool:
        return any(f"blk.{layer}.{name}.weight" in gguf.tensors for name in names)

    return has("attn_k") or not (has("ssm_conv1d", "shortconv.conv") or (has("ffn_up") and not has("attn_output", "attn_qkv", "ffn_norm")))


def _state(gguf: GGUFFile) -> int:
    """Bytes of a slot of recurrent state (kernels_cpu/slots.py)."""
    width, inner, n_state = (_count(gguf, key) for key in ("embedding_length", "ssm.inner_size", "ssm.state_size"))
    total = 0
    for i in range(min(_count(gguf, "block_count"), 10_000)):
        taps, channels = 0, 0
        for name in ("ssm_conv1d.weight", "shortconv.conv.weight"):
            if (conv := gguf.tensors.get(f"blk.{i}.{name}")) is not None and len(conv.shape) > 1:
                taps, channels = conv.shape[:2]
        a = gguf.tensors.get(f"blk.{i}.ssm_a")
        if f"blk.{i}.ssm_x.weight" in gguf.tensors:
            total += scan_bytes(inner, n_state)
        elif a is not None:
            total += matrix_bytes(inner, n_state)
        if a is not None and f"blk.{i}.ssm_in.weight" in gguf.tensors and channels > inner:
            total += conv_bytes(inner, taps - 1)  # Mamba 2's x, then B and C
            channels -= inner
        total += conv_bytes(channels, taps - 1) if taps else 0
        if f"blk.{i}.time_mix_key.weight" in gguf.tensors:
            total += matrix_bytes(width, _count(gguf, "wkv.head_size")) + 2 * conv_bytes(width, 1)
    return total


def _kv(gguf: GGUFFile) -> tuple[tuple[int, int, int, int], ...]:
    kinds: dict[tuple[int, int, int], int] = {}
    for n_kv, dim, dim_v, _ in _layers(gguf):
        kinds[n_kv, dim, dim_v] = kinds.get((n_kv, dim, dim_v), 0) + 1
    return tuple((n, *kind) for kind, n in kinds.items())


def _row_bytes(gguf: GGUFFile) -> int:
    """Of every buffer that has a row for each token: layers use the same ones after one another."""
    width = _count(gguf, "embedding_length")
    attended = max((n * dim_v for _, _, dim_v, n in _layers(gguf)), default=0)
    experts = max(1, _count(gguf, "expert_used_count"))
    results: dict[str, int] = {}
    inputs = {width, attended}
    normed = any("post_attention_norm" in name or "post_ffw_norm" in name for name in gguf.tensors)
    for name, tensor in gguf.tensors.items():
        leaf = re.fullmatch(r"blk\.\d+\.(.+)\.weight", name)
        if leaf is None or len(tensor.shape) < 2:
            continue
        times = experts if leaf[1].endswith("_exps") else 1
        inputs.add(tensor.shape[0])
        if normed or not leaf[1].startswith(_ADDED):
            results[leaf[1]] = max(results.get(leaf[1], 0), room(tensor.shape[1]) * 4 * times)
    plain = 4 * (2 * room(width) + room(attended))
    # what matmuls read is quantized to bytes, with a quarter more for sums and scales, and laid out once more for matrix instructions
    return plain + sum(results.values()) + sum(n * 5 // 4 * 2 for n in inputs)


def _unsupported(gguf: GGUFFile) -> str:
    if gguf.architecture not in ARCHITECTURES:
        return f"architecture {gguf.architecture[:40]!r} is not supported"
    for tensor in gguf.tensors.values():
        if len(tensor.shape) >= 2 and tensor.type not in PACKINGS:
            return f"tensors of type {FORMATS[tensor.type].name} are not supported"
    return ""
