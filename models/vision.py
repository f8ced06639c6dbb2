"""Images for Gemma 3: SigLIP's vision transformer (Zhai et al. 2023) and the projector behind it (Gemma Team 2025), from an mmproj file.

A square image of image_size pixels is cut into patches; each is a row: a matrix, a learned position, pre-norm layers whose patches all see
each other, a norm. Means of squares of patches go through an RMS norm and a matrix into the width of the language model, one row for each
of its placeholder tokens. Keys are under "clip.", tensors under "v." and "mm.". Knows pixels as numbers, not image files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import head, isa, team, vision_sizes
from localrun.kernels_cpu.library import KernelLibrary
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.spec import KernelSpec
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo
from localrun.models.load import from_file, kernel_cache
from localrun.models.model import LoadOptions, Progress
from localrun.models.params import Keys
from localrun.models.plan import Recorder
from localrun.models.program import Instruction, Program, Row, float_bits, room
from localrun.models.recording import LOGITS_ADDRESS
from localrun.models.validate import F32, check_model
from localrun.models.weights import Weight, Weights

ARCHITECTURE = "clip"
PROJECTOR = "gemma3"
SQUARE = 4
"""Patches of a side of what becomes one token, where the file does not say."""
MAX_PATCHES = 1 << 14
PATCH, POSITIONS, INPUT = "v.patch_embd.weight", "v.position_embd.weight", "mm.input_projection.weight"

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Vision:
    """Hyper-parameters."""

    n_layers: int
    width: int
    ffn: int
    n_heads: int
    image_size: int
    patch_size: int
    square: int
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n_embd: int
    """Width of the language model."""
    swapped: bool
    """Whether the file calls the first matrix of the feed-forward part ffn_down, as older ones do."""

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def n_tokens(self) -> int:
        """Rows that an image becomes."""
        return (self.side // self.square) ** 2

    @property
    def dim(self) -> int:
        return self.width // self.n_heads


def read_vision(gguf: GGUFFile, n_embd: int) -> Vision:
    """Hyper-parameters of an mmproj file for a language model of width n_embd; the tensors are checked. Raises ModelFileError."""
    keys = Keys(gguf, ARCHITECTURE)
    if gguf.architecture != ARCHITECTURE:
        raise ModelFileError(gguf.path, "general.architecture", f'is "{gguf.architecture}"; a projector for images says "{ARCHITECTURE}"')
    kind = keys.str("projector_type", keys.str("vision.projector_type", ""))
    if kind != PROJECTOR:
        raise keys.error("projector_type", f'is "{kind}", which is not supported; supported is "{PROJECTOR}"')
    if not keys.bool("use_gelu", True):
        raise keys.error("use_gelu", "is false; only GELU is supported")
    if keys.bool("use_silu", False):
        raise keys.error("use_silu", "is true; only GELU is supported")
    width, ffn = keys.int("vision.embedding_length", minimum=1), keys.int("vision.feed_forward_length", minimum=1)
    up = gguf.tensors.get("v.blk.0.ffn_up.weight")
    p = Vision(
        n_layers=keys.int("vision.block_count", minimum=1, maximum=1024),
        width=width,
        ffn=ffn,
        n_heads=keys.int("vision.attention.head_count", minimum=1),
        image_size=keys.int("vision.image_size", minimum=1),
        patch_size=keys.int("vision.patch_size", minimum=1),
        square=keys.int("vision.projector.scale_factor", SQUARE, minimum=1),
        eps=keys.float("vision.attention.layer_norm_epsilon", above=0),
        mean=tuple(keys.floats("vision.image_mean", length=3)),
        std=tuple(keys.floats("vision.image_std", length=3)),
        n_embd=n_embd,
        swapped=up is not None and up.shape == (ffn, width) and width != ffn,
    )
    if width % p.n_heads:
        raise keys.error("vision.attention.head_count", f"{p.n_heads} heads do not divide a width of {width}")
    if p.image_size % p.patch_size or p.side % p.square or p.side**2 > MAX_PATCHES:
        raise keys.error("vision.patch_size", f"an image of {p.image_size} pixels is not cut by {p.patch_size} into squares of {p.square}")
    if not all(value > 0 for value in p.std):
        raise keys.error("vision.image_std", "must be above 0")
    check_model(gguf, _tensors(p))
    return p


def _tensors(p: Vision) -> dict[str, tuple[int, ...]]:
    """Shape (ne0 first) by name."""
    width = (p.width,)
    first, second = ((p.width, p.ffn), (p.ffn, p.width))
    up, down = ("ffn_down", "ffn_up") if p.swapped else ("ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {
        PATCH: (p.patch_size, p.patch_size, 3, p.width), "v.patch_embd.bias": width, POSITIONS: (p.width, p.side**2),
        "v.post_ln.weight": width, "v.post_ln.bias": width, "mm.soft_emb_norm.weight": width, INPUT: (p.n_embd, p.width),
    }  # fmt: skip
    for i in range(p.n_layers):
        blk = f"v.blk.{i}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{blk}{name}.weight": (p.width, p.width), f"{blk}{name}.bias": width}
        for name in ("ln1", "ln2"):
            shapes |= {f"{blk}{name}.weight": width, f"{blk}{name}.bias": width}
        shapes |= {f"{blk}{up}.weight": first, f"{blk}{up}.bias": (p.ffn,), f"{blk}{down}.weight": second, f"{blk}{down}.bias": width}
    return shapes


def patches(pixels: NDArray[np.uint8], p: Vision) -> Floats:
    """Rows that the encoder takes: (patches, 3 * patch_size^2), each channel by channel. pixels: uint8 (image_size, image_size, 3)."""
    if pixels.shape != (p.image_size, p.image_size, 3):
        raise ValueError(f"an image of {pixels.shape}, not of {p.image_size} x {p.image_size} x 3")
    mean, std = np.array(p.mean, np.float32), np.array(p.std, np.float32)
    values: Floats = np.divide(np.subtract(pixels.astype(np.float32) / np.float32(255), mean), std, dtype=np.float32)
    cut = values.reshape(p.side, p.patch_size, p.side, p.patch_size, 3)  # (row, y, column, x, channel)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(p.side**2, -1)


# ---- recording ----------------------------------------------------------------------------------------------------------------


class _Recorder(Recorder):
    """A recorder of passes over one image."""

    def __init__(self, weights: Weights, p: Vision, n_threads: int, amx: bool) -> None:
        super().__init__(weights, p.side**2, n_threads, "f32", amx)
        self.n = p.side**2
        self.starts: list[int] = []
        """Instructions at which a layer begins: between those a pass may be left."""

    def begin_layer(self) -> None:
        self.starts.append(len(self._instructions))

    def input(self, width: int) -> Row:
        return self.row("patches", width)

    def kernel(self, factory: str, args: list[int], chunks: int, name: str) -> None:
        self._instructions.append(Instruction(KernelSpec("vision", factory), args, "one", chunks, False, name))

    def attend(self, q: Row, k: Row, v: Row, p: Vision) -> Row:
        """softmax(q k / sqrt(dim)) v of every head, over all patches: (T, width)."""
        out = self.row("attended", p.width)
        keys, values = -(-self.n // 16) * p.dim * 64, -(-p.dim // 16) * self.n * 64
        at_keys, _ = self._buffer("keys", -(-keys * p.n_heads // self.n))
        at_values, _ = self._buffer("values", -(-values * p.n_heads // self.n))
        sizes = [p.n_heads, p.dim, self.n]
        laid_out = [at_keys, keys, at_values, values]
        self.kernel("keys_values", [k.address, k.stride, v.address, v.stride, *sizes, *laid_out], -(-self.n // 16), "keys_values")
        scratch, scratch_bytes = self._per_thread("vision", vision_sizes.scratch_bytes(self.n))
        rest = [out.address, out.stride, float_bits(1 / math.sqrt(p.dim)), scratch, scratch_bytes]
        self.kernel("attend", [q.address, q.stride, *sizes, *laid_out, *rest], -(-self.n // vision_sizes.ROWS) * p.n_heads, "attention")
        return out


def _record(p: Vision, r: _Recorder, w: Weights) -> Row:
    """The forward pass of one image; returns where its patches go. T patches, O tokens."""
    pixels = r.input(3 * p.patch_size**2)
    x = r.matmul(_patch_matrix(p, w), r.quantized(pixels, "patches"), "x", bias=w.vector("v.patch_embd.bias"))
    positions = _padded(w.values(POSITIONS).reshape(-1, p.width), w)
    r.add(Row(positions, room(p.width) * 4, p.width), x, "position_embd")
    up, down = ("ffn_down", "ffn_up") if p.swapped else ("ffn_up", "ffn_down")
    for i in range(p.n_layers):
        r.begin_layer()
        blk = f"v.blk.{i}."

        def linear(name: str, h: Any, to: str, add_to: Row | None = None, beside: bool = False, blk: str = blk) -> Row:
            return r.matmul(w.matrix(f"{blk}{name}.weight"), h, to, bias=w.vector(f"{blk}{name}.bias"), add_to=add_to, beside=beside)

        h = r.norm(x, w.vector(f"{blk}ln1.weight"), p.eps, "ln1", kind="layer", bias=w.vector(f"{blk}ln1.bias"))
        q, k, v = (linear(f"attn_{c}", h, c, beside=c != "q") for c in "qkv")
        linear("attn_out", r.quantized(r.attend(q, k, v, p), "attended"), "attn_out", add_to=x)
        h = r.norm(x, w.vector(f"{blk}ln2.weight"), p.eps, "ln2", kind="layer", bias=w.vector(f"{blk}ln2.bias"))
        linear(down, r.activated(linear(up, h, "ffn"), "gelu_tanh", "gelu"), "ffn_out", add_to=x)
    r.begin_layer()
    r.norm(x, w.vector("v.post_ln.weight"), p.eps, "post_ln", kind="layer", bias=w.vector("v.post_ln.bias"), buffer="post")
    post, pooled = r.row("post", p.width), r.row("pooled", p.width)
    r.kernel("pool", [post.address, post.stride, p.width, p.side, p.square, pooled.address, pooled.stride], p.n_tokens, "pool")
    r.logits(_input_matrix(p, w), r.norm(pooled, w.vector("mm.soft_emb_norm.weight"), p.eps, "soft_emb_norm", outputs_only=True))
    return pixels


def _patch_matrix(p: Vision, w: Weights) -> Weight:
    """The convolution over a patch as a matrix: its values lie channel by channel, row by row, as patches' do."""
    return _own_matrix(PATCH, w.values(PATCH).reshape(p.width, -1), w)


def _input_matrix(p: Vision, w: Weights) -> Weight:
    """The file keeps it the other way round: (vision width, language width)."""
    return _own_matrix(INPUT, np.ascontiguousarray(w.values(INPUT).reshape(p.width, p.n_embd).T), w)


def _own_matrix(name: str, values: Floats, w: Weights) -> Weight:
    """A matrix (rows, columns) in float32 that does not lie in the file so."""
    info = TensorInfo(name, values.shape[::-1], F32, 0, values.nbytes, 0)
    return Weight(w, info, PACKINGS[F32], w.keep(values), 0, len(values))


def _padded(values: Floats, w: Weights) -> int:
    """Address of rows with room up to a multiple of 16."""
    padded = np.zeros((len(values), room(values.shape[1])), np.float32)
    padded[:, : values.shape[1]] = values
    return w.keep(padded)


# ---- running ------------------------------------------------------------------------------------------------------------------


class VisionEncoder:
    """A loaded mmproj file. `encode` may be called by one thread at a time; it has threads of its own."""

    def __init__(
        self, p: Vision, program: Program, crew: team.Team, header: NDArray[np.int64], r: _Recorder, w: Weights, pixels: Row
    ) -> None:
        self.params = p
        self.image_size, self.n_tokens = p.image_size, p.n_tokens
        self._team = crew
        self._recorder = r
        self._weights: Weights | None = w
        self._header = header
        self._program = program
        self._output_rows = np.arange(p.n_tokens, dtype=np.int32)
        self._out = np.zeros((p.n_tokens, room(p.n_embd)), np.float32)
        program.args[program.logits, LOGITS_ADDRESS] = self._out.ctypes.data
        header[head.TOKENS // 8] = p.side**2
        header[head.OUTPUTS // 8] = p.n_tokens
        header[head.OUTPUT_ROWS // 8] = self._output_rows.ctypes.data
        room_for = r.memory.view(pixels.address, p.side**2 * pixels.stride // 4, np.float32)
        self._pixels = room_for.reshape(p.side**2, -1)[:, : pixels.width]
        self._stages = self._cut(p)

    def _cut(self, p: Vision) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """The program layer by layer: table, chunks, grains. Rows that wait for earlier ones do so within their part."""
        chunks = self._program.chunks(p.side**2, p.n_tokens, 0, 0)
        grains = self._program.grains(chunks, self._team.n_threads, p.side**2)
        borders = [0, *self._recorder.starts, len(chunks)]
        stages = []
        for first, end in itertools.pairwise(borders):
            table = self._program.table[first:end].copy()
            waits = table[:, 3] >= 0
            table[waits, 3] = np.maximum(table[waits, 3] - first, 0)
            stages.append((table, chunks[first:end], grains[first:end]))
        return stages

    def encode(self, pixels: NDArray[np.uint8], cancelled: Callable[[], bool] = lambda: False) -> Floats | None:
        """The rows that stand for an image: float32 (n_tokens, n_embd); None when `cancelled` said so, between two layers.

        pixels: uint8 (image_size, image_size, 3).
        """
        if self._weights is None:
            raise RuntimeError("the encoder is closed")
        self._pixels[:] = patches(pixels, self.params)
        for table, chunks, grains in self._stages:
            if cancelled():
                return None
            self._team.run(table, chunks, grains)
        return self._out[:, : self.params.n_embd].copy()

    def close(self) -> None:
        """Gives threads, mappings and memory back. Idempotent."""
        if self._weights is not None:
            self._team.close()
            self._weights.close()
            self._weights = None


def load_vision(path: str | Path, n_embd: int, options: LoadOptions, progress: Progress | None = None) -> VisionEncoder:
    """Loads an mmproj file for a language model of width n_embd. Raises ModelFileError."""
    return from_file(path, lambda gguf: _load(gguf, n_embd, options, progress))


def _load(gguf: GGUFFile, n_embd: int, options: LoadOptions, progress: Progress | None) -> VisionEncoder:
    p = read_vision(gguf, n_embd)
    chosen = isa.select(options.isa)
    library = KernelLibrary(chosen, kernel_cache(options), n_workers=options.n_threads)
    weights = Weights(gguf, options.pack)
    recorder = _Recorder(weights, p, options.n_threads, chosen.amx)
    pixels = _record(p, recorder, weights)
    program = recorder.finish()
    addresses = library.load([*program.kernels, *weights.kernels(), *team.specs()], progress)
    program.table[:, 0] = [addresses[spec] for spec in program.kernels]
    header = np.zeros(head.SIZE // 8, np.int64)
    crew = team.Team(library, options.n_threads, header)
    try:
        weights.fill(library, crew, progress)
        return VisionEncoder(p, program, crew, header, recorder, weights, pixels)
    except BaseException:
        crew.close()
        raise
