"""What is common to everything that is recorded: named buffers, instructions one behind the other, the places where they run, who reads a
row in which form, and at the end the table that `kernels_cpu.team` replays. Knows no operation; plan.Recorder has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import head, lora_sizes
from localrun.kernels_cpu.activation_sizes import META, SUPER, tile_bytes
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import MATRIX, MATRIX_STEP, table_of
from localrun.models.program import (
    HOST,
    MAX_RANK,
    RULES,
    Activation,
    Hidden,
    Instruction,
    Memory,
    Program,
    Row,
    Rule,
    Site,
    float_bits,
    room,
)
from localrun.models.weights import Weight, Weights

READER_WORDS = 8
"""Arguments by which an instruction that finishes a row says who reads it (activations.give)."""
ARGS = 24
"""int64 arguments an instruction may have."""
SOFT_CAP = "soft_cap"
"""Name of the instruction that reads the logits where the matmul before it wrote them."""
OUT_ADDRESS_AT = 5
"""Argument of lora.low_rank that says where the address of its output lies."""
SPARE_ROWS = 8
"""Rows behind the last one that matmul tiles may read (never use)."""
LOGITS_ADDRESS = 6
"""Argument of the matmul of the logits that says where they go."""
INT64_MAX = 2**63 - 1


class ImageRows:
    """For each row of a batch, where its values lie that an image gives (0: nowhere), and how many positions it sees."""

    def __init__(self, memory: Memory, rows: int) -> None:
        self.sources = memory.allocate(8 * rows)
        self.ends = memory.allocate(4 * rows)
        self.source_rows = memory.view(self.sources, rows, np.int64)
        self.end_rows = memory.view(self.ends, rows, np.int32)


class AdapterRows(Protocol):
    """Where instructions that apply adapters find which row has which."""

    numbers: int
    """Address of int32, one for each row of a batch; 0: none."""
    scales: int
    """Address of float32, one for each row."""

    def table(self, site: Site) -> int:
        """Address of what each adapter says about that matrix: lora_sizes.ENTRY bytes for each number."""


class Recording:
    """A forward pass as far as it is recorded."""

    def __init__(
        self, weights: Weights, max_batch: int, n_threads: int, kv_type: str, amx: bool = False, n_ctx: int = 0, places: Sequence[int] = (),
        images: bool = False,
    ) -> None:
        """places: of the first layers, the card that each lies on; one more than there are layers: what comes after them is there, too."""
        self.places = places
        self.borders: list[tuple[int, Row]] = []
        """Where the place changes: number of the first instruction there, and the row that is handed over."""
        self.marks: list[tuple[int, int]] = []
        """Of each layer: number of its first instruction, and bytes of a pool block of those before it at the same place."""
        self._place = HOST
        self.weights = weights
        self.n_ctx = n_ctx
        """Longest context that will be used; 0: what the file says."""
        self.amx = amx
        """Whether activations are also laid out for matrix instructions."""
        self.max_batch = max_batch
        self.n_threads = n_threads
        self.kv_type = kv_type
        self.memory = Memory()
        self.kv_bytes = {HOST: 0}
        """Bytes of a pool block as far as recorded, by place."""
        self._instructions: list[Instruction] = []
        self._buffers: dict[str, tuple[int, int]] = {}
        self._scratch: dict[str, int] = {}
        self._tile_buffers: dict[str, int] = {}
        self._hidden: Hidden | None = None
        self._head: list[Instruction] = []
        self._scores: Row | None = None
        self._encoder: list[Instruction] = []
        self._both = False
        self._decoders_kv_type = kv_type
        self.ends: NDArray[np.int32] | None = None
        """Where tokens see those behind them: for each row how many positions its sequence has, set before each step."""
        self._max_positions = 0
        self.partial_bytes = 0
        self.fewest_kv = 1 << 30
        self.images = ImageRows(self.memory, max_batch + SPARE_ROWS) if images else None
        """Where the rows of images are named, if spans may have some."""
        self.image_row = Row(0, 0, 0)
        """Where they go, in a model that can have them."""
        self.sites: list[Site] = []
        self._logits: Instruction | None = None
        self.state_bytes = 0
        """Bytes of a slot of recurrent state as far as recorded."""

    # ---- memory ----

    def _buffer(self, name: str, stride: int, per_token: int = 1) -> tuple[int, int]:
        """(address, stride) of the buffer of that name, max_batch * per_token + SPARE_ROWS rows."""
        if name not in self._buffers:
            self._buffers[name] = (self.memory.allocate((self.max_batch * per_token + SPARE_ROWS) * stride), stride)
        address, have = self._buffers[name]
        if have != stride:
            raise ValueError(f"buffer {name} is used with rows of {have} and of {stride} bytes")
        return address, stride

    def row(self, name: str, width: int, per_token: int = 1) -> Row:
        """The float32 buffer of that name."""
        address, stride = self._buffer(f"{name}.{width}.{per_token}", room(width) * 4, per_token)
        return Row(address, stride, width, per_token)

    def _per_thread(self, name: str, nbytes: int) -> tuple[int, int]:
        """(address, bytes a thread) of scratch memory."""
        nbytes = -(-nbytes // 64) * 64
        key = f"{name}.{nbytes}"
        if key not in self._scratch:
            self._scratch[key] = self.memory.allocate(nbytes * self.n_threads)
        return self._scratch[key], nbytes

    def _append(
        self, module: str, factory: str, params: Sequence[int | str], args: list[int], name: str, rule: Rule = "tokens", factor: int = 1,
        beside: bool = False,
    ) -> Instruction:
        instruction = Instruction(KernelSpec(module, factory, tuple(params)), args, rule, factor, beside, name, place=self._place)
        self._instructions.append(instruction)
        return instruction

    # ---- places ----

    def layer(self, i: int, x: Row) -> None:
        """Layer i begins (i the number of layers: what comes after them). All that it takes over from before is in x."""
        self.marks.append((len(self._instructions), self.kv_bytes.get(self._place, 0)))
        place = self.places[i] if i < len(self.places) else HOST
        if place != self._place:
            self.borders.append((len(self._instructions), x))
            self._place = place

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a pool block in the host's memory, as far as recorded."""
        return self.kv_bytes[HOST]

    @property
    def has_scores(self) -> bool:
        """Whether there is a classification head."""
        return self._scores is not None

    @property
    def hidden_row(self) -> Row | None:
        """Where the last hidden states are."""
        return self._hidden.row if self._hidden else None

    @property
    def recorded(self) -> list[Instruction]:
        """All instructions, whoever runs them."""
        return self._instructions

    # ---- who reads what ----

    def _activation(self, width: int, producer: Instruction, readers_at: int, buffer: str, per_token: int = 1) -> Activation:
        producer.args.extend([0] * (readers_at + READER_WORDS - len(producer.args)))
        return Activation(width, producer, readers_at, buffer, per_token)

    def _form(self, x: Activation, kind: str) -> tuple[int, int, int]:
        """Where a matmul of that kind reads the activation; the first to ask makes the producer write it."""
        if kind not in x.forms:
            n = x.width
            stride = {"256": n // 256 * SUPER, "32": (n + 63) // 64 * 64 + n // 32 * META, "f": room(n) * 4}[kind]
            name = f"{x.buffer}.{n}.{x.per_token}.{kind}"
            address, stride = self._buffer(name, -(-stride // 64) * 64, x.per_token)
            tiles = self._tiles(name, tile_bytes(kind, n, self.max_batch)) if self.amx and x.per_token == 1 else 0
            x.forms[kind] = address, stride, tiles
            at = ("256", "32", "f").index(kind)
            x.producer.args[x.readers_at + 2 * at : x.readers_at + 2 * at + 2] = [address, stride]
            if tiles:
                x.producer.args[x.readers_at + 6 + at] = tiles
        return x.forms[kind]

    def _tiles(self, name: str, nbytes: int) -> int:
        """Address of the tiles that go with a buffer."""
        if name not in self._tile_buffers:
            self._tile_buffers[name] = self.memory.allocate(nbytes) if nbytes else 0
        return self._tile_buffers[name]

    def _site(self, weight: Weight, x: Activation | None, out: Row, factor: float, outputs: bool) -> None:
        """Notes where adapters of a matrix would act."""
        rows = weight.rows if x is not None else out.width
        self.sites.append(Site(len(self._instructions) - 1, weight.name, weight.first_row, rows, x, out, factor, outputs))

    # ---- the end ----

    def finish(self, adapters: AdapterRows | None = None) -> Program:
        """The program of the host, as recorded so far. adapters: with an instruction beside each matrix that applies the adapters of the
        rows.
        """
        instructions, adapted = [i for i in self._instructions if i.place == HOST], dict[int, Site]()
        cut = self.borders[0][0] if self.borders else 0
        if adapters is not None:
            instructions, adapted = self._with_adapters(adapters)
        logits = next((i for i, instruction in enumerate(instructions) if instruction is self._logits), -1)
        n = len(instructions)
        table = table_of(n)
        args = np.zeros((n, ARGS), np.int64)
        waits = 0
        for i, instruction in enumerate(instructions):
            if i == cut:
                waits = 0
            args[i, : len(instruction.args)] = instruction.args
            if instruction.name == SOFT_CAP:
                args[i, 0] = args[logits, LOGITS_ADDRESS:].ctypes.data
            if self._is_logits(adapted.get(i)):
                args[i, OUT_ADDRESS_AT] = args[logits, LOGITS_ADDRESS:].ctypes.data
            table[i, 1] = args[i].ctypes.data
            if instruction.kernel.factory == "matmul":
                table[i, MATRIX], table[i, MATRIX_STEP] = args[i, 0], args[i, 8] * (16 * args[i, 12] or args[i, 1])
            if instruction.beside:
                table[i, 3] = -1
            else:
                table[i, 3] = waits
                waits = i - (cut if i >= cut else 0)
        return Program(
            table, args, [i.kernel for i in instructions], [i.name for i in instructions],
            np.array([RULES.index(i.rule) for i in instructions]), np.array([i.factor for i in instructions], np.int64),
            np.array([i.large_factor or i.factor for i in instructions], np.int64),
            np.array([i.most or INT64_MAX for i in instructions], np.int64), logits, self._max_positions,
            self.partial_bytes, self.fewest_kv, adapted, self._hidden,
            [i for i, instruction in enumerate(instructions) if any(instruction is one for one in self._head)],
            [i for i, one in enumerate(instructions) if i == logits or one.name == SOFT_CAP or self._is_logits(adapted.get(i))],
            self._scores, *self._halves(instructions), self.ends, cut,
        )

    def _halves(self, instructions: list[Instruction]) -> tuple[list[int], list[int]]:
        """Indices of an encoder's instructions and of its decoder's, where there are both."""
        if not self._encoder:
            return [], []
        encoder = {id(instruction) for instruction in self._encoder}
        at = [i for i, instruction in enumerate(instructions) if id(instruction) in encoder]
        return at, [i for i in range(len(instructions)) if i not in at]

    @staticmethod
    def _is_logits(site: Site | None) -> bool:
        """Whether an adapter's product is added to the logits, whose place is set before each step."""
        return site is not None and site.outputs and not site.out.address

    # ---- adapters ----

    def _with_adapters(self, adapters: AdapterRows) -> tuple[list[Instruction], dict[int, Site]]:
        """All instructions, those that apply adapters behind the products that are made side by side; the latter by their number."""
        by_product: dict[int, list[Site]] = {}
        for site in self.sites:
            by_product.setdefault(site.after, []).append(site)
        made: list[Instruction] = []
        adapted: dict[int, Site] = {}
        pending: list[Site] = []
        for i, instruction in enumerate([*self._instructions, None]):
            if instruction is None or not instruction.beside:
                for k, site in enumerate(pending):
                    adapted[len(made)] = site
                    made.append(self._low_rank(site, adapters, beside=k > 0))
                pending = []
            if instruction is not None:
                made.append(instruction)
                pending += by_product.get(i, [])
        return made, adapted

    def _low_rank(self, site: Site, adapters: AdapterRows, *, beside: bool) -> Instruction:
        x, stride, _ = self._form(site.x, "f") if site.x is not None else (0, 0, 0)
        scratch, scratch_bytes = self._per_thread("low_rank", lora_sizes.scratch_bytes(MAX_RANK))
        args = [
            x, stride, site.x.width if site.x is not None else 0, site.out.address, site.out.stride, 0, -(-site.rows // 16),
            adapters.numbers, adapters.scales, head.OUTPUT_ROWS if site.outputs else 0, head.OUTPUTS if site.outputs else head.TOKENS,
            adapters.table(site), scratch, scratch_bytes, float_bits(site.factor),
        ]
        rule: Rule = "outputs" if site.outputs else "tokens"
        return Instruction(KernelSpec("lora", "low_rank", (int(site.x is None),)), args, rule, 1, beside, "low_rank")
