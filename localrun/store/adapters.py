"""LoRA adapters in GGUF files: whether one is sound, and whether it belongs to a model (Hu et al. 2021, arXiv:2106.09685).

    general.type = "adapter", adapter.type = "lora", adapter.lora.alpha f32, general.architecture as the model's
    for each adapted matrix NAME of the model (n values to m):   NAME.lora_a (n, r)   NAME.lora_b (r, m)

The matrix of a token embedding is adapted the other way round: NAME.lora_a (m, r), NAME.lora_b (r, n), m tokens of n values. Shapes are
ggml's, a row's length first. Reads headers, no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from localrun.errors import BadRequest, ModelFileRejected
from localrun.kernels_cpu.formats import FORMATS
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, open_gguf, printable
from localrun.store.manifests import LAYER_TYPE, Layer
from localrun.store.names import check_digest
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.quantizing import convert_adapter, folder_of

if TYPE_CHECKING:
    from localrun.store.store import Store

AdapterSource = Path | str | Mapping[str, str]
"""A file or folder of this machine; the digest of a blob; or name -> digest of the files of a folder."""
FLOATS = ("F32", "F16", "BF16")
_A, _B = ".lora_a", ".lora_b"


def is_adapter(gguf: GGUFFile) -> bool:
    """Whether the file is an adapter of any kind, and no model."""
    return gguf.metadata.get("general.type") == "adapter"


def adapter_sources(files: Mapping[str, str]) -> list[AdapterSource]:
    """What blobs with these names are: GGUF files each an adapter, all others together one in safetensors."""
    single: list[AdapterSource] = [digest for name, digest in files.items() if name.lower().endswith(".gguf")]
    rest = {name: digest for name, digest in files.items() if not name.lower().endswith(".gguf")}
    return single + ([rest] if rest else [])


def check(adapter: GGUFFile, base: GGUFFile, name: str) -> None:
    """Raises ModelFileRejected, with one sentence about the adapter `name`, when it is no LoRA adapter or none for `base`."""

    def problem(text: str) -> ModelFileRejected:
        return ModelFileRejected(f"adapter {name}: {text}", param="adapters")

    keys = adapter.metadata
    if not is_adapter(adapter):
        raise problem(f'general.type is {printable(repr(keys.get("general.type")))}, not "adapter"; FROM takes models')
    if keys.get("adapter.type") != "lora":
        raise problem(f'adapter.type is {printable(repr(keys.get("adapter.type")))}; only "lora" is supported')
    if adapter.architecture != base.architecture:
        raise problem(f"it is for models of architecture {printable(adapter.architecture)}, and this one is {base.architecture}")
    alpha = keys.get("adapter.lora.alpha")
    if type(alpha) is not float or not math.isfinite(alpha):
        raise problem("adapter.lora.alpha is missing or no finite number")
    if not adapter.tensors:
        raise problem("it holds no tensors")
    for tensor in adapter.tensors.values():
        if not tensor.name.endswith((_A, _B)):
            raise problem(f"tensor {printable(tensor.name)} is neither a lora_a nor a lora_b")
        if FORMATS[tensor.type].name not in FLOATS:
            raise problem(f"tensor {printable(tensor.name)} is {FORMATS[tensor.type].name}; F32, F16 and BF16 are supported")
    for target in sorted({tensor.name.removesuffix(_A).removesuffix(_B) for tensor in adapter.tensors.values()}):
        a, b = adapter.tensors.get(target + _A), adapter.tensors.get(target + _B)
        if a is None or b is None:
            raise problem(f"{printable(target)} has a {'lora_b' if a is None else 'lora_a'} and no {'lora_a' if a is None else 'lora_b'}")
        wanted = base.tensors.get(target)
        if wanted is None:
            raise problem(f"it changes {printable(target)}, which the model does not have")
        text = _mismatch(a, b, wanted)
        if text:
            raise problem(text)


def _mismatch(a: TensorInfo, b: TensorInfo, base: TensorInfo) -> str:
    """What is wrong with the shapes; empty when they fit."""
    if len(base.shape) != len(a.shape) or len(a.shape) != len(b.shape) or len(base.shape) < 2 or base.shape[2:] != a.shape[2:]:
        return f"{base.name} has the shape {list(base.shape)}, and its lora_a {list(a.shape)} and lora_b {list(b.shape)}"
    n, m = base.shape[:2]
    if base.name == "token_embd.weight":
        n, m = m, n
    if (a.shape[0], b.shape[1]) != (n, m) or a.shape[2:] != b.shape[2:]:
        return (
            f"{base.name} of the model maps {n} values to {m}, and the adapter's maps {a.shape[0]} to {b.shape[1]}: it is for another size"
        )
    if a.shape[1] != b.shape[0]:
        return f"{base.name}: lora_a has rank {a.shape[1]} and lora_b {b.shape[0]}"
    return ""


def take_in(store: Store, source: AdapterSource, base: str, copy: bool, progress: Progress, cancelled: Cancelled) -> Layer:
    """The layer of an adapter for the model whose GGUF file is the blob `base`: its file is linked like a model's, or converted.

    Raises ModelFileRejected (no adapter, or none for this model), BadRequest, DiskFull, StorageFailed, RequestCancelled.
    """
    if isinstance(source, str):
        digest = check_digest(source)
        if not store.blobs.has(digest):
            raise BadRequest(f"blob {digest} is not in the store; send it first", param="adapters")
        _check_file(store.blobs.path(digest), store, base, digest)
    elif isinstance(source, Mapping):
        with folder_of(store.blobs, source, "adapters") as folder:
            digest = _converted(store, folder, base, progress, cancelled)
    elif source.is_dir() or source.suffix.lower() == ".safetensors":
        digest = _converted(store, source, base, progress, cancelled)
    elif source.resolve().parent == store.blobs.folder.resolve():
        # a path that `show --modelfile` printed
        digest = check_digest(source.name)
        _check_file(source, store, base, digest)
    else:
        _check_file(source, store, base, str(source))
        status = f"reading {source.name}"
        digest, _ = store.blobs.adopt(source, copy=copy, progress=lambda done, size: progress(PullProgress(status, None, size, done)))
    progress(PullProgress(f"using adapter layer {digest}"))
    return Layer(f"{LAYER_TYPE}adapter", digest, store.blobs.size(digest))


def _converted(store: Store, source: Path, base: str, progress: Progress, cancelled: Cancelled) -> str:
    progress(PullProgress("converting adapter"))
    digest, _ = convert_adapter(store.blobs, source, base, progress, cancelled)
    try:
        _check_file(store.blobs.path(digest), store, base, str(source))
    except ModelFileRejected:
        store.drop_unneeded([digest])
        raise
    return digest


def _check_file(path: Path, store: Store, base: str, name: str) -> None:
    try:
        with open_gguf(path) as adapter, open_gguf(store.blobs.path(base)) as model:
            check(adapter, model, name)
    except ModelFileError as error:
        raise ModelFileRejected(f"adapter {name}: {error.field or 'file'}: {error.problem}", param="adapters") from error
