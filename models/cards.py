"""The part of a model that lies on cards: memory carried over from a recorded plan, KV blocks, and what one step sends and gets back.

A card takes successive layers, the first card the first of them (and, where all layers fit, the last card also what comes after them). A
step sends each card one header (kernels_cpu/head.py with its arrays) and the hidden rows that the place before it left, and reads the
hidden rows, or the logits, back: each one copy. Everything between is launches without arguments of their own, so a step whose sizes have
the same bounds as an earlier one can be replayed as a graph.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import attention_sizes, head
from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_gpu.device import Device, DeviceError, Launch
from localrun.kernels_gpu.layout import CARD_TYPES
from localrun.kernels_gpu.source import Kernel
from localrun.models.launches import Sizes, Step, steps_of
from localrun.models.plan import Recorder
from localrun.models.program import HOST, Instruction, Row
from localrun.models.recording import ARGS
from localrun.models.rope import AngleTable
from localrun.models.weights import Stack, Weight

ATTENTION_ROWS = 8
"""Rows of a sequence that a block of threads takes together in attention."""
SPLIT_ROWS = 16
"""Rows of a step up to which attention over one row is shared out in parts."""
UPLOAD_BYTES = 64 << 20
"""About how many bytes of the file are laid out at a time."""
FIRST_LOGIT_ROWS = 8
HEADER_BYTES = 256


def bound(n: int) -> int:
    """The power of 2 that n is rounded up to; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@dataclass
class Batch:
    """What a step works on, as RecordedModel.forward has it. Arrays: int32, one value a row of the batch (or an output)."""

    tokens: int
    outputs: int
    positions: NDArray[np.int32]
    output_rows: NDArray[np.int32]
    tables: list[NDArray[np.int32]]
    """Block table of each span."""
    spans: list[int]
    """Rows of each span."""
    longest: int
    """Positions of the longest sequence."""
    logits: bool = True
    """Whether logits are wanted, or else the last hidden states of the outputs."""


@dataclass
class Region:
    start: int
    nbytes: int
    card: int = 0
    """Address on the card; 0: not there yet."""
    vector: NDArray[np.float32] | None = None


class Segment:
    """One card's layers. Raises NotOnCard for a plan that a card cannot carry out, DeviceError."""

    def __init__(self, device: Device, recorder: Recorder, instructions: Sequence[Instruction], x: Row, tables: list[AngleTable]) -> None:
        self.device = device
        self.x = x
        self.max_batch = recorder.max_batch
        self.kv_block_bytes = 0
        self.weight_bytes = 0
        self._regions = [Region(start, nbytes) for start, nbytes in recorder.memory.regions]
        self._regions += [Region(v.address, v.memory.nbytes, vector=v.memory) for v in recorder.weights.vectors]
        self._regions.sort(key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]
        self._planes: dict[tuple[str, int, int], list[int]] = {}
        self._partial_bytes = max((attention_sizes.partial_bytes(i.args[2], int(i.kernel.params[2])) for i in instructions
                                   if i.kernel.factory == "attention"), default=0)  # fmt: skip
        self.logit_bytes = next((i.args[7] for i in instructions if i.kernel.factory == "matmul" and not i.args[6]), 0)
        self.steps: list[Step] = [step for instruction in instructions for step in steps_of(instruction, self)]
        self._x = self.at(x.address)
        self.hidden = recorder.hidden_row if self.logit_bytes else None
        self._args = device.allocate(len(self.steps) * ARGS * 8)
        self._logits, self._logit_rows = 0, 0
        self._tables, self._table_rows = tables, [0] * len(tables)
        self._words = np.zeros(HEADER_BYTES // 8, np.int64)
        self._head = self._image_bytes = self._partial = self._partial_room = 0
        self._image = np.zeros(0, np.uint8)
        self._launches: dict[Sizes, list[Launch]] = {}
        self._n_blocks = self._kv = 0
        if self.logit_bytes:
            self._room_for_logits(min(FIRST_LOGIT_ROWS, self.max_batch))
        self._upload_args()
        self._x_rows = device.host_buffer(self.max_batch * x.stride)

    # ---- memory ----

    def at(self, address: int) -> int:
        """See launches.Target."""
        if not address:
            return 0
        region = self._regions[bisect.bisect_right(self._starts, address) - 1]
        if not region.start <= address < region.start + region.nbytes:
            raise DeviceError(f"{self.device.name}: an address that is neither a buffer's nor a vector's")
        if not region.card:
            region.card = self.device.allocate(region.nbytes)
            if region.vector is not None:
                self.device.upload(region.card, region.vector.view(np.uint8))
        return region.card + address - region.start

    def planes(self, weight: Weight | Stack) -> list[int]:
        """See launches.Target. Every matrix is sent once."""
        parts = weight.slices if isinstance(weight, Stack) else [weight]
        key = (weight.name, parts[0].first_row, weight.rows)
        if key not in self._planes:
            self._planes[key] = self._send(parts)
        return self._planes[key]

    def _send(self, parts: Sequence[Weight]) -> list[int]:
        card_type = CARD_TYPES[parts[0].type_name]
        form_bytes = BY_NAME[parts[0].type_name].block_bytes
        values = sum(part.rows for part in parts) * parts[0].columns
        blocks = values // card_type.block
        addresses = [self.device.allocate(blocks * size) if size else 0 for size in card_type.plane_bytes]
        self.weight_bytes += card_type.nbytes(values)
        done = [0] * len(addresses)
        for part in parts:
            rows = part.file_rows()
            at_once = max(1, UPLOAD_BYTES // part.row_bytes)
            for first in range(0, len(rows), at_once):
                some = rows[first : first + at_once].reshape(-1, form_bytes)
                for i, plane in enumerate(card_type.planes(some)):
                    if plane.size:
                        self.device.upload(addresses[i] + done[i], plane.reshape(-1))
                        done[i] += plane.nbytes
        return addresses

    def allocate_kv(self, n_blocks: int) -> None:
        """Raises DeviceMemoryError."""
        self._kv = self.device.allocate(n_blocks * self.kv_block_bytes + 64) if self.kv_block_bytes else 0
        self._n_blocks = n_blocks

    def copy_block(self, source: int, target: int) -> None:
        """The K/V of one block over another."""
        size = self.kv_block_bytes
        if size:
            self.device.copy(self._kv + source * size, self._kv + target * size, size)

    def read_block(self, block: int) -> bytes:
        """The K/V of one block."""
        content = np.empty(self.kv_block_bytes, np.uint8)
        if content.size:
            self.device.download(self._kv + block * content.size, content)
        return content.tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Puts back what read_block gave."""
        if content:
            self.device.upload(self._kv + block * self.kv_block_bytes, np.frombuffer(content, np.uint8))

    def _room_for_logits(self, rows: int) -> None:
        if rows <= self._logit_rows:
            return
        rows = min(self.max_batch, max(rows, 2 * self._logit_rows))
        self._logits, self._logit_rows = self.device.allocate(rows * self.logit_bytes), rows
        self._upload_args()

    def _upload_args(self) -> None:
        words = np.zeros((len(self.steps), ARGS), np.int64)
        for i, step in enumerate(self.steps):
            words[i, : len(step.args)] = step.args
            if step.logits_at >= 0:
                words[i, step.logits_at] = self._logits
        self.device.upload(self._args, words.view(np.uint8).reshape(-1))

    def kernels(self, sizes: Sizes) -> list[Kernel]:
        """What a step of these bounds launches."""
        return [step.kernel(sizes) for step in self.steps if min(step.grid(sizes)) > 0]

    # ---- a step ----

    def _launch_list(self, sizes: Sizes) -> list[Launch]:
        if sizes not in self._launches:
            self.device.prepare(self.kernels(sizes))
            self._launches[sizes] = [
                Launch(step.kernel(sizes), grid, self._args + i * ARGS * 8, self._head)
                for i, step in enumerate(self.steps)
                if min(grid := step.grid(sizes)) > 0
            ]
        return self._launches[sizes]

    def _write_header(self, batch: Batch) -> int:
        """Lays the header out for this card and sends it. Returns the parts that attention over one row is shared out in."""
        split = batch.tokens <= SPLIT_ROWS
        parts = -(-batch.longest // attention_sizes.PART) if split else 1
        tiles = _tiles(batch.spans, 1 if split else ATTENTION_ROWS)
        blocks = np.concatenate(batch.tables)
        starts = np.cumsum([0, *(len(table) for table in batch.tables)])[:-1]
        arrays: dict[int, NDArray[np.generic]] = {
            head.POSITIONS: batch.positions, head.OUTPUT_ROWS: batch.output_rows, head.TILES: tiles,
            head.TABLES: np.repeat(starts, batch.spans) * 4,
        }  # fmt: skip
        self._room_for_image(HEADER_BYTES + blocks.nbytes + sum(-(-array.nbytes // 16) * 16 for array in arrays.values()) + 64)
        at = HEADER_BYTES
        blocks_at = self._head + at
        at = self._put(at, blocks)
        words = self._words
        for offset, array in arrays.items():
            words[offset // 8] = self._head + at
            at = self._put(at, array + blocks_at if offset == head.TABLES else array)
        words[head.TOKENS // 8], words[head.OUTPUTS // 8], words[head.N_TILES // 8] = batch.tokens, batch.outputs, len(tiles)
        words[head.KV // 8], words[head.KV_BLOCK // 8] = self._kv, self.kv_block_bytes
        words[head.PARTS // 8] = parts
        self._send_tables(batch.longest)
        if parts > 1:
            self._room_for_partial(len(tiles) * parts * self._partial_bytes)
            words[head.PARTIAL // 8] = self._partial
        self._put(0, words)
        self.device.upload(self._head, self._image[:at])
        return parts

    def _put(self, at: int, array: NDArray[np.generic]) -> int:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self._image[at : at + len(data)] = data
        return at + -(-len(data) // 16) * 16

    def _room_for_image(self, nbytes: int) -> None:
        if nbytes > self._image_bytes:
            self._image_bytes = max(2 * nbytes, 4096)
            self._head = self.device.allocate(self._image_bytes)
            self._image = self.device.host_buffer(self._image_bytes)
            self._launches.clear()

    def _room_for_partial(self, nbytes: int) -> None:
        if nbytes > self._partial_room:
            self._partial_room = 2 * nbytes
            self._partial = self.device.allocate(self._partial_room)

    def _send_tables(self, longest: int) -> None:
        for i, table in enumerate(self._tables):
            rows = table.rows(longest)
            if len(rows) > self._table_rows[i]:
                address = self.device.allocate(rows.nbytes)
                self.device.upload(address, rows.view(np.uint8).reshape(-1))
                self._words[(head.ROPE + 8 * i) // 8], self._table_rows[i] = address, len(rows)

    def run(self, batch: Batch, rows: NDArray[np.uint8], answer: NDArray[np.uint8]) -> None:
        """Takes hidden rows (uint8 (tokens * stride,)). Into `answer` goes what the last layer here leaves of them, or, after the whole
        model, the logits (uint8 (outputs * logit_bytes,)) or the last hidden states of the outputs.
        """
        if self.logit_bytes and batch.logits:
            self._room_for_logits(batch.outputs)
        parts = self._write_header(batch)
        size = batch.tokens * self.x.stride
        self._x_rows[:size] = rows
        self.device.upload(self._x, self._x_rows[:size])
        sizes = Sizes(min(bound(batch.tokens), self.max_batch), bound(batch.outputs), bound(parts), batch.logits)
        launches = self._launch_list(sizes)
        # The same bounds and addresses: the same launches, that a graph can hold.
        self.device.run(launches, (sizes, self._head, self._args) if batch.tokens <= SPLIT_ROWS else None)
        source = self._x
        if self.logit_bytes:
            source = self._logits if batch.logits or self.hidden is None else self.at(self.hidden.address)
        if answer.size or not self.logit_bytes:
            self.device.download(source, answer)


def _memory(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The host's memory from an address of the plan on."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _tiles(spans: Sequence[int], rows: int) -> NDArray[np.int32]:
    """int32 (tiles, 2): first row and rows of up to `rows` successive rows of one span."""
    tiles = []
    first = 0
    for n in spans:
        tiles += [(first + i, min(rows, n - i)) for i in range(0, n, rows)]
        first += n
    return np.array(tiles, np.int32).reshape(-1, 2)


@dataclass
class Cards:
    """All cards of a model."""

    segments: list[Segment] = field(default_factory=list)
    layers: int = 0
    """Layers on cards; one more than the model has: what comes after them, too."""

    @classmethod
    def of(cls, devices: Sequence[Device], recorder: Recorder, tables: list[AngleTable]) -> Cards:
        """Carries the recorded plan's device parts over: allocates, sends weights, compiles for a single token.

        Raises NotOnCard, DeviceError (DeviceMemoryError where there is too little); what was allocated is then given back.
        """
        cards = cls()
        borders = [*recorder.borders, (len(recorder.recorded), None)]
        try:
            for (first, x), (end, _) in pairwise(borders):
                part = recorder.recorded[first:end]
                if x is None or not part or part[0].place == HOST:
                    continue
                device = devices[part[0].place]
                segment = Segment(device, recorder, part, x, tables)
                segment.kv_block_bytes = recorder.kv_bytes.get(part[0].place, 0)
                device.prepare(segment.kernels(Sizes(1, 1, 1)))
                cards.segments.append(segment)
        except BaseException:
            for device in devices:
                device.release()
            raise
        cards.layers = sum(place != HOST for place in recorder.places)
        return cards

    @property
    def weight_bytes(self) -> int:
        return sum(segment.weight_bytes for segment in self.segments)

    @property
    def kv_block_bytes(self) -> int:
        return sum(segment.kv_block_bytes for segment in self.segments)

    def allocate_kv(self, n_blocks: int) -> None:
        for segment in self.segments:
            segment.allocate_kv(n_blocks)

    def copy_block(self, source: int, target: int) -> None:
        for segment in self.segments:
            segment.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        """The K/V of one block, layer after layer as the host's memory would have them."""
        return b"".join(segment.read_block(block) for segment in self.segments)

    def write_block(self, block: int, content: bytes) -> None:
        """Puts back what read_block gave. Raises ValueError when it is of another size."""
        if len(content) != self.kv_block_bytes:
            raise ValueError(f"{len(content)} bytes for blocks of {self.kv_block_bytes} on cards")
        for segment in self.segments:
            own, content = content[: segment.kv_block_bytes], content[segment.kv_block_bytes :]
            segment.write_block(block, own)

    @property
    def ends_in_logits(self) -> bool:
        """Whether what comes after the layers is on a card, too."""
        return bool(self.segments and self.segments[-1].logit_bytes)

    def run(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """Takes the hidden rows from the host's buffer, and replaces them by what the cards' last layer leaves; where what comes after is
        on a card, their logits go to `logits` (float32 (outputs or more, room)), or their last hidden states to where the host's
        plan has them.
        """
        x = self.segments[0].x
        rows = _memory(x.address, batch.tokens * x.stride)
        for segment in self.segments:
            answer = rows
            if segment.logit_bytes and batch.logits:
                answer = logits[: batch.outputs].view(np.uint8).reshape(-1)
            elif segment.logit_bytes and segment.hidden is not None:
                answer = _memory(segment.hidden.address, batch.outputs * segment.hidden.stride)
            segment.run(batch, rows, answer)

    def close(self) -> None:
        """Gives the cards' memory back."""
        for segment in self.segments:
            segment.device.release()
        self.segments = []
