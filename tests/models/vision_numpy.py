"""A tiny random mmproj file, and SigLIP with Gemma 3's projector in NumPy, written from the papers: what the encoder is held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.build import Builder, Tensor

Array = NDArray[np.float64]
EPS = 1e-6


def shapes(*, width: int, ffn: int, layers: int, patch: int, side: int, n_embd: int, swapped: bool = False) -> dict[str, tuple[int, ...]]:
    """As NumPy has them: rows first."""
    found: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, 3, patch, patch), "v.patch_embd.bias": (width,), "v.position_embd.weight": (side * side, width),
        "v.post_ln.weight": (width,), "v.post_ln.bias": (width,),
        "mm.soft_emb_norm.weight": (width,), "mm.input_projection.weight": (width, n_embd),
    }  # fmt: skip
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    for i in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            found |= {f"v.blk.{i}.{name}.weight": (width, width), f"v.blk.{i}.{name}.bias": (width,)}
        found |= {f"v.blk.{i}.{name}.{part}": (width,) for name in ("ln1", "ln2") for part in ("weight", "bias")}
        found |= {f"v.blk.{i}.{up}.weight": (ffn, width), f"v.blk.{i}.{up}.bias": (ffn,)}
        found |= {f"v.blk.{i}.{down}.weight": (width, ffn), f"v.blk.{i}.{down}.bias": (width,)}
    return found


def mmproj(
    *, width: int = 48, ffn: int = 72, layers: int = 2, heads: int = 4, patch: int = 5, side: int = 6, square: int = 2, n_embd: int = 64,
    seed: int = 0, half: bool = False, swapped: bool = False, keys: Mapping[str, tuple[str, Any] | None] | None = None,
    drop: str = "",
) -> tuple[bytes, dict[str, Array]]:
    """The file and its tensors. half: matrices in F16; keys: others, None takes one out; drop: a tensor that is missing."""
    rng = np.random.default_rng(seed)
    tensors: list[Tensor] = []
    values: dict[str, Array] = {}
    for name, shape in shapes(width=width, ffn=ffn, layers=layers, patch=patch, side=side, n_embd=n_embd, swapped=swapped).items():
        kind = np.float16 if half and len(shape) > 1 else np.float32
        size = 1.5 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.3
        data = rng.normal(0, size, shape) + (1.0 if "norm" in name or "ln" in name else 0)
        stored = data.astype(kind)
        values[name] = stored.astype(np.float64)
        if name != drop:
            tensors.append(Tensor(name, shape[::-1], 1 if kind is np.float16 else 0, stored.tobytes()))
    says: dict[str, tuple[str, Any] | None] = {
        "general.architecture": ("string", "clip"), "general.type": ("string", "mmproj"), "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("string", "gemma3"), "clip.use_gelu": ("bool", True),
        "clip.vision.image_size": ("uint32", patch * side), "clip.vision.patch_size": ("uint32", patch),
        "clip.vision.embedding_length": ("uint32", width), "clip.vision.feed_forward_length": ("uint32", ffn),
        "clip.vision.block_count": ("uint32", layers), "clip.vision.attention.head_count": ("uint32", heads),
        "clip.vision.attention.layer_norm_epsilon": ("float32", EPS), "clip.vision.projector.scale_factor": ("uint32", square),
        "clip.vision.image_mean": ("array[float32]", [0.5, 0.4, 0.3]), "clip.vision.image_std": ("array[float32]", [0.5, 0.6, 0.7]),
        **(keys or {}),
    }  # fmt: skip
    return Builder(keys=[(key, *pair) for key, pair in says.items() if pair is not None], tensors=tensors).bytes(), values


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    result: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPS) * weight + bias
    return result


def gelu(x: Array) -> Array:
    """The tanh form (Hendrycks and Gimpel 2016)."""
    result: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result


def encode(w: Mapping[str, Array], pixels: NDArray[np.uint8], *, heads: int = 4, square: int = 2, swapped: bool = False) -> Array:
    """(tokens, n_embd) of an image uint8 (size, size, 3)."""
    kernel = w["v.patch_embd.weight"]
    width, _, patch, _ = kernel.shape
    side = len(pixels) // patch
    image = (pixels / 255.0 - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.6, 0.7])
    x = np.zeros((side * side, width))
    for row in range(side):
        for column in range(side):
            cut = image[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            x[row * side + column] = np.einsum("ocyx,yxc->o", kernel, cut) + w["v.patch_embd.bias"]
    x = x + w["v.position_embd.weight"]
    layer = 0
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    while f"v.blk.{layer}.ln1.weight" in w:

        def linear(name: str, h: Array, blk: str = f"v.blk.{layer}.") -> Array:
            result: Array = h @ w[f"{blk}{name}.weight"].T + w[f"{blk}{name}.bias"]
            return result

        h = layer_norm(x, w[f"v.blk.{layer}.ln1.weight"], w[f"v.blk.{layer}.ln1.bias"])
        q, k, v = (linear(f"attn_{c}", h).reshape(len(x), heads, -1) for c in "qkv")
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width // heads)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + linear("attn_out", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), width))
        h = layer_norm(x, w[f"v.blk.{layer}.ln2.weight"], w[f"v.blk.{layer}.ln2.bias"])
        x = x + linear(down, gelu(linear(up, h)))
        layer += 1
    x = layer_norm(x, w["v.post_ln.weight"], w["v.post_ln.bias"])
    squares = side // square
    pooled = x.reshape(squares, square, squares, square, width).mean(axis=(1, 3)).reshape(squares * squares, width)
    normed = pooled / np.sqrt((pooled**2).mean(axis=-1, keepdims=True) + EPS) * w["mm.soft_emb_norm.weight"]
    result: Array = normed @ w["mm.input_projection.weight"]
    return result
