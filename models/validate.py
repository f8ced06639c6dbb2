"""Checks a file against what a family needs, before anything is loaded: keys, tensors' names, shapes and types, vocabulary, values.

A family says which tensors it expects; the checks are the same for all. Each raises ModelFileError at the first thing that is wrong, so
that a damaged or unsupported file gives one clear line instead of a crash or of nonsense later. Nothing here knows how a tensor is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, printable
from localrun.models.params import Keys

F32 = 0
F16 = 1
BF16 = 30

WEIGHT_TYPES = frozenset(FORMATS) - {9, 15, 24, 25, 26, 27, 28}
"""Types that a matrix may have: all but Q8_1 and Q8_K (made for activations), the integers and F64."""

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20

NO_TOKEN = 0xFFFFFFFF
"""What some converters write for a special token that a vocabulary does not have: -1 in an unsigned field."""

SPECIAL_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "fim_pre", "fim_suf", "fim_mid")
"""X of tokenizer.ggml.X_token_id ("seperator" is how the format spells it)."""

FINITE_BUDGET = 64 << 20
"""Bytes of float matrices whose values are all looked at; larger ones would cost more to read than the check is worth."""

# The exponent bits of a float type: all of them set means infinity or NaN.
_EXPONENT = {F32: ("<u4", 0x7F800000), F16: ("<u2", 0x7C00), BF16: ("<u2", 0x7F80)}


def check_hyperparameters(keys: Keys, *, fewest_heads: int = 1) -> None:
    """The keys that every transformer has: present, of the right type, in range and in agreement with each other.

    fewest_heads: 0 where a layer may have no attention.
    Raises ModelFileError. Families read the values themselves; after this they need not check them again.
    """
    n_layers = keys.int("block_count", minimum=1, maximum=MAX_LAYERS)
    width = keys.int("embedding_length", minimum=1, maximum=MAX_WIDTH)
    keys.int("context_length", minimum=1)
    heads = keys.per_layer("attention.head_count", n_layers, minimum=fewest_heads, maximum=MAX_WIDTH)
    head_width = keys.int("attention.key_length", 0, minimum=1, maximum=MAX_WIDTH)
    keys.int("attention.value_length", 0, minimum=1, maximum=MAX_WIDTH)
    if not head_width:
        most = max(max(heads), 1)
        if width % most:
            raise keys.error("attention.head_count", f"is {most}, which does not divide the embedding length {width}")
        head_width = width // most
    if keys.has("attention.head_count_kv"):
        for n, n_kv in zip(heads, keys.per_layer("attention.head_count_kv", n_layers, minimum=fewest_heads)):
            if n_kv and n % n_kv:
                raise keys.error("attention.head_count_kv", f"is {n_kv}, which does not divide the {n} heads")
    rope = keys.int("rope.dimension_count", head_width)
    if rope % 2 or rope > head_width:
        raise keys.error("rope.dimension_count", f"is {rope}, but must be even and at most the {head_width} values of a head")
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        keys.float(name, 0.0, above=0.0, maximum=1.0)
    n_experts = keys.int("expert_count", 0, maximum=1 << 16)
    n_used = keys.int("expert_used_count", 0)
    if n_used > n_experts:
        raise keys.error("expert_used_count", f"is {n_used}, more than the {n_experts} experts there are")


def check_model(
    gguf: GGUFFile,
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
    *,
    weight_types: Collection[int] = WEIGHT_TYPES,
) -> None:
    """The file's tensors are exactly those of the tables, with these shapes and with types that fit their place.

    expected, optional: shape by name, ne0 first as in TensorInfo (a matrix from n to m values: (n, m)); a tensor that is in neither is an
    error too, for a model that ignores a part of itself answers wrongly. Vectors (norms, biases) must be F32, the rest one of weight_types.
    All values of vectors, and of matrices in floats up to FINITE_BUDGET bytes in all, must be finite.
    Raises ModelFileError.
    """
    optional = optional or {}
    for name, shape in expected.items():
        if name not in gguf.tensors:
            raise ModelFileError(gguf.path, f"tensor {name}", f"is missing; {gguf.architecture} needs it, of the shape {list(shape)}")
        _check_tensor(gguf, gguf.tensors[name], shape, weight_types)
    for name, shape in optional.items():
        if name in gguf.tensors:
            _check_tensor(gguf, gguf.tensors[name], shape, weight_types)
    left = [name for name in gguf.tensors if name not in expected and name not in optional]
    if left:
        more = f" (nor are {len(left) - 1} more)" if len(left) > 1 else ""
        raise ModelFileError(gguf.path, f"tensor {printable(left[0])}", f"is no part of a {gguf.architecture} model as supported{more}")
    check_finite(gguf)


def _check_tensor(gguf: GGUFFile, info: TensorInfo, shape: tuple[int, ...], weight_types: Collection[int]) -> None:
    if _without_ones(info.shape) != _without_ones(shape):
        raise ModelFileError(gguf.path, f"tensor {info.name}", f"has the shape {list(info.shape)}, but {list(shape)} is needed")
    allowed = weight_types if len(shape) > 1 else (F32,)
    if info.type not in allowed:
        names = ", ".join(FORMATS[t].name for t in sorted(allowed))
        raise ModelFileError(gguf.path, f"tensor {info.name}", f"is of type {FORMATS[info.type].name}; supported here: {names}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Outer dimensions of 1 mean nothing in ggml: (16,) and (16, 1) are the same tensor."""
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n] or (1,)


def check_finite(gguf: GGUFFile) -> None:
    """Looks for NaN and infinity in all vectors and, smallest first, in float matrices up to FINITE_BUDGET bytes. Raises ModelFileError."""
    floats = sorted((info for info in gguf.tensors.values() if info.type in _EXPONENT), key=lambda info: info.nbytes)
    left = FINITE_BUDGET
    for info in floats:
        if len(info.shape) > 1:
            left -= info.nbytes
            if left < 0:
                continue
        bad = _first_not_finite(gguf, info)
        if bad is not None:
            raise ModelFileError(gguf.path, f"tensor {info.name}", f"value {bad} is NaN or infinite; the file is damaged")


def _first_not_finite(gguf: GGUFFile, info: TensorInfo) -> int | None:
    import numpy as np  # a process that only reads headers must not pay for it

    dtype, exponent = _EXPONENT[info.type]
    bits = np.frombuffer(gguf.data(info.name), dtype)
    step = 1 << 18
    for start in range(0, len(bits), step):
        bad = (bits[start : start + step] & exponent) == exponent
        if bad.any():
            return start + int(bad.argmax())
    return None


def vocabulary_size(gguf: GGUFFile) -> int:
    """Number of tokens: the length of tokenizer.ggml.tokens. Raises ModelFileError when there are none."""
    n = Keys(gguf).length("tokenizer.ggml.tokens", "string")
    if not n:
        raise ModelFileError(gguf.path, "tokenizer.ggml.tokens", "is empty; the model has no vocabulary")
    return n


def check_tokenizer_keys(gguf: GGUFFile, known_pre: Collection[str] | None = None) -> None:
    """The vocabulary's arrays are of the right types and fit together, and the special tokens are tokens.

    What the texts are is read by text/vocab.py, which refuses one that is there twice: decoding them would take as long as all else that
    a load does before it packs.
    known_pre: names of pre-tokenizers that are implemented; when given, a GPT-2 style vocabulary must name one of them or none.
    Raises ModelFileError.
    """
    keys = Keys(gguf)
    model = keys.str("tokenizer.ggml.model")
    n = vocabulary_size(gguf)
    for name, kinds in (("tokenizer.ggml.token_type", ("int32", "uint32")), ("tokenizer.ggml.scores", ("float32",))):
        needed = model == "llama" and name.endswith("scores")
        if (needed or keys.has(name)) and (found := keys.length(name, *kinds)) != n:
            raise keys.error(name, f"has {found} items, but {n} are needed")
    if model == "gpt2":
        keys.length("tokenizer.ggml.merges", "string")
        pre = keys.str("tokenizer.ggml.pre", None)
        if known_pre is not None and pre is not None and pre not in known_pre:
            raise keys.error("tokenizer.ggml.pre", f"{printable(repr(pre))} is no pre-tokenizer that is supported")
    for name in SPECIAL_TOKENS:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = keys.int(key, NO_TOKEN, maximum=NO_TOKEN)
        if token_id >= n and token_id != NO_TOKEN:
            raise keys.error(key, f"is {token_id}, but the vocabulary has {n} tokens")
