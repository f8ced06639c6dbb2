"""What the engine sees of a model: a batch of token rows goes in, logits of the asked rows come out.

A model knows token ids, positions and KV blocks. It knows nothing of text, requests, sampling or which sequence belongs to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from localrun.kernels_gpu.device import Device
    from localrun.models.lora import Adapter

BLOCK_TOKENS = 16
"""Tokens a KV block holds."""
PEAK = 128
"""Logits of which a peak is the largest: with fewer there are more peaks to look at, with more there is more behind each."""
MAX_ADAPTERS = 63
"""Adapters that a model holds at a time."""

Progress = Callable[[str, int, int], None]
"""(stage, done, total)"""


class Span(NamedTuple):
    """Successive tokens of one sequence in a batch.

    tokens: int32 (n,); start: position of the first of them, all earlier positions being in the KV cache already;
    block_table: int32 (ceil((start + n) / BLOCK_TOKENS),) pool block of each BLOCK_TOKENS positions;
    outputs: int32 indices into `tokens` whose logits are wanted (empty: none);
    encoded: of an encoder-decoder, how many of the sequence's first tokens are the encoder's input; a span has all of these or none;
    adapter: what `add_adapter` returned, 0: none; adapter_scale: factor of what it adds.
    state: slot whose recurrent state the span goes on from and leaves its own in (start 0: from nothing), -1 where a model has none;
    snapshots: (number of tokens, slot) in rising order: after so many of `tokens` the state is written to that slot, too.
    images: (index of a token, float32 (rows, width)) in rising order: rows of an image in place of the embeddings of so many tokens from
    there on, which all see each other; the end of an image is in the span of its beginning, or of what is left to compute of it.
    """

    tokens: NDArray[np.int32]
    start: int
    block_table: NDArray[np.int32]
    outputs: NDArray[np.int32]
    adapter: int = 0
    adapter_scale: float = 1.0
    state: int = -1
    snapshots: tuple[tuple[int, int], ...] = ()
    encoded: int = 0
    images: tuple[tuple[int, NDArray[np.float32]], ...] = ()


@dataclass(frozen=True)
class LoadOptions:
    n_threads: int = 0
    """Of passes of one row. 0: physical cores this process may use, or fewer where timing says so (kernels_cpu/shapes.py)."""
    n_threads_batch: int = 0
    """Of passes of more rows. 0: as many as n_threads."""
    n_ctx: int = 0
    """Longest context that will be used, where a model's mathematics depends on it (LongRoPE); 0: what the file says."""
    max_batch: int = 512
    """Most token rows (over all spans) of one forward pass."""
    kv_type: str = "f16"
    pack: bool | None = None
    """Repack weights for speed: None decides by free memory."""
    cache_dir: str = ""
    """Where compiled kernels are kept; empty: the user's cache directory."""
    isa: str = ""
    """Instruction set to compile for; empty: the best this machine executes."""
    gpu_layers: int = -1
    """Layers to put on cards, the first ones; -1: as many as fit, 0: none. One more than there are: what comes after them, too."""
    devices: Sequence[Device] | None = None
    """The cards; None: those of this machine."""
    images: bool = False
    """Whether spans will have images. Raises ModelFileError for a model that cannot have any."""
    tune: bool = True
    """Whether tile shapes that were timed for this processor are used, and may be timed (`Model.tune`)."""
    timed: bool = False
    """Whether passes on the processor are timed instruction by instruction (models/profile.py)."""


@dataclass(frozen=True)
class ModelInfo:
    architecture: str
    n_vocab: int
    n_ctx_train: int
    max_batch: int
    kv_bytes_per_block: int
    weight_bytes: int
    packed: bool
    isa: str
    n_threads: int
    """Of a pass of one row."""
    n_embd: int = 0
    """Width of the vectors `embed` gives."""
    pooling: str = ""
    """How `embed` makes a sequence's vector: "mean", "cls", "last" or "rank" (one score); empty: no file says so, the last token's."""
    causal: bool = True
    """Whether a token sees only those before it. If not, `embed` is all the model can do."""
    decoder_start: int = -1
    """Of an encoder-decoder, the token before the answer's first; the prompt is the encoder's. -1: the model is none."""

    @property
    def whole(self) -> bool:
        """Whether `embed` must have a sequence whole in one pass; otherwise it may come in parts, the last of which gives the vector."""
        return not self.causal or self.pooling in ("mean", "cls")

    n_layers: int = 0
    gpu_layers: int = 0
    """How many of them are on cards."""
    gpu_bytes: int = 0
    """Memory that weights and KV blocks take on cards."""
    gpu_note: str = ""
    """Why no layer is on a card, or fewer than were asked for."""
    gpu_kv_bytes_per_block: int = 0
    """What a KV block takes on cards, beside kv_bytes_per_block."""
    cards: int = -1
    """How many there are to put layers on; -1: nobody looked."""
    kv_blocks: int = 0
    """Most blocks that `allocate_kv` can reserve; 0: as many as the host's memory holds."""
    state_bytes: int = 0
    """Bytes of a slot, which holds what recurrent layers remember of one sequence; 0: there are none."""
    n_threads_batch: int = 0
    """Of a pass of more rows than one."""


class RowPeaks(Protocol):
    """Finds the largest logits of a row without reading it whole: through the largest of each PEAK successive ones."""

    def changed(self, ids: NDArray[np.int64]) -> None:
        """These entries of the row may have been changed, to anything finite or minus infinity."""

    def largest(self, k: int) -> NDArray[np.int64] | None:
        """Ids int64 (at most k,) of the k largest finite entries, in descending order, equal ones by id. None where the row itself has to
        be looked at: one of the model's logits is not finite, or k is so large that peaks are of no use.
        """


class Model(Protocol):
    info: ModelInfo

    def allocate_kv(self, n_blocks: int) -> None:
        """Reserves the KV pool: blocks 0..n_blocks-1. Called once, before the first forward."""

    def allocate_state(self, n_slots: int) -> None:
        """Reserves slots 0..n_slots-1 for recurrent state. Called once, before the first forward; not at all where state_bytes is 0."""

    def forward(self, spans: list[Span]) -> NDArray[np.float32]:
        """Runs all spans in one pass, writing their K/V into their blocks.

        Returns float32 (total outputs, n_vocab), rows in span order; the memory is reused by the next call.
        A row's bits depend on its own sequence only, not on what else is in the batch.
        Raises ValueError when the spans hold more than max_batch rows, or when two of them name the same slot.
        """

    def peaks(self) -> Sequence[RowPeaks]:
        """Of each row that the latest `forward` gave, before anybody has changed them. Good until the next call."""

    def embed(self, spans: list[Span]) -> NDArray[np.float32]:
        """Runs all spans and pools each one's last hidden states as the file says. A span is a whole sequence from position 0, or, unless
        `info.whole`, tokens that follow what is in the KV cache.

        Returns float32 (len(spans), n_embd), not normalized ((len(spans), 1) for "rank"). `outputs` is not looked at. The K/V go into the
        spans' blocks as in `forward`. Raises ValueError when the spans hold more than max_batch rows.
        """

    def read_adapter(self, paths: Sequence[Path | str]) -> Adapter:
        """Low-rank adapters from GGUF files, added up and checked against the model. May be called by any thread.

        Raises ModelFileError, naming the tensor, for a file that is no adapter or none for this model.
        """

    def add_adapter(self, adapter: Adapter) -> int:
        """Makes it usable by spans; the weights stay as they are. Returns its number, which no later one gets.

        Raises ValueError when there are MAX_ADAPTERS. Not during `forward`.
        """

    def remove_adapter(self, number: int) -> None:
        """Gives its memory back. An unknown number is fine. Not during `forward`."""

    def copy_block(self, source: int, target: int) -> None:
        """Copies the K/V of one pool block over another (copy on write)."""

    def read_block(self, block: int) -> bytes:
        """A copy of a pool block's K/V, kv_bytes_per_block bytes: to be given to `write_block`, now or in another process."""

    def write_block(self, block: int, content: bytes) -> None:
        """Puts back what `read_block` gave of a block of the same model file and KV type."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies one slot over another."""

    def tune(self, seconds: float) -> bool:
        """Times tile shapes on this processor for about so many seconds, if there are any that nobody has timed, and uses and remembers
        what is better. No result depends on them. False: there is nothing more to time, now. Not during `forward`.
        """

    def close(self) -> None:
        """Gives threads, mappings and memory back. Idempotent."""
