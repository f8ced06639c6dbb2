"""From a file to a model that computes: reads the hyper-parameters, records the plan, compiles kernels, packs weights, replays.

Heavy: imports NumPy and LLVM; belongs into a runner process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import platformdirs
from numpy.typing import NDArray

from localrun.kernels_cpu import head, isa, sizes, team
from localrun.kernels_cpu.attention_sizes import PART
from localrun.kernels_cpu.library import CompileError, KernelLibrary
from localrun.kernels_cpu.shapes import DEFAULT, Shape, ShapesFile
from localrun.kernels_cpu.spec import KernelSpec
from localrun.models.batch import KERNEL as PLACE
from localrun.models.batch import BatchRows
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.model import BLOCK_TOKENS, LoadOptions, ModelInfo, Progress, Span
from localrun.models.params import INT_MAX, Keys
from localrun.models.peaks import LARGEST, PEAKS, Peaks, PeaksOfRow
from localrun.models.placing import Recorded, place
from localrun.models.plan import PLACE_IMAGES, Recorder
from localrun.models.pooling import ENCODER_DECODERS, LONGEST_WHOLE, POOLINGS, is_causal
from localrun.models.profile import Profile
from localrun.models.program import Program, room
from localrun.models.recording import LOGITS_ADDRESS, SPARE_ROWS, ImageRows
from localrun.models.registry import family_of
from localrun.models.rope import AngleTable
from localrun.models.vectors import pooled, rows_to_pool, scores_of, view
from localrun.models.weights import Weights

if TYPE_CHECKING:
    from localrun.models.adapters import Adapters
    from localrun.models.cards import Cards
    from localrun.models.lora import Adapter
    from localrun.models.tuning import Tuning

assert BLOCK_TOKENS == sizes.BLOCK
T = TypeVar("T")
FIRST_LOGIT_ROWS = 8
ANSWERS_BESIDE = 64
"""Rows of a pass that are for the next tokens of other sequences when an encoder's input takes as many as its context has."""
ATTENTION_CHUNKS = 4
"""Chunks of attention a thread, below which rows are shared out in parts."""


def _allowed_cpus() -> int:
    """What the system counts as processors and this process may use, two for a core that runs two threads; at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores that this process may use, at least 1."""
    import psutil  # takes 10 ms, and a load that is told how many threads to use needs none of it

    allowed = _allowed_cpus()
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))


class RecordedModel:
    """A loaded model: models.model.Model over a recorded program."""

    def __init__(
        self,
        info: ModelInfo,
        program: Program,
        library: KernelLibrary,
        crew: team.Team,
        header: NDArray[np.int64],
        recorder: Recorder,
        weights: Weights,
        tables: list[AngleTable],
        cards: Cards | None = None,
        shapes: ShapesFile | None = None,
        free: bool = False,
    ) -> None:
        """shapes: where tile shapes are remembered, None: nowhere; free: whether fewer threads may take a pass of one row."""
        self.info = info
        self._program = program
        self._library = library
        self._team = crew
        self._header = header
        self._recorder = recorder
        self._adapters: Adapters | None = None
        self._weights: Weights | None = weights
        self.profile: Profile | None = None
        """Where passes leave their times, with LoadOptions.timed."""
        self._shapes, self._free = shapes, free
        self._tuning: Tuning | None = None
        self._tuned: dict[str, Shape] = {}
        self._few, self._many = info.n_threads, info.n_threads_batch
        """Threads of a pass of one row, and of others."""
        self._size: tuple[object, ...] = ()
        """On which the chunks and grains of the latest pass depend; most passes are like the one before."""
        self._chunks = self._grains = np.zeros(0, np.int64)
        self._use(shapes.read(program.weight_types) if shapes is not None else {})
        self._tables = tables
        self._cards = cards
        self._kv = np.zeros(0, np.uint8)
        self._n_blocks = 0
        self._state = np.zeros((0, 0), np.uint8)
        self._partial = np.zeros(64, np.uint8)
        self._set(head.PARTIAL, self._partial.ctypes.data)
        self._logits = np.zeros((0, room(info.n_vocab)), np.float32)
        self._rows = BatchRows(library.address(PLACE), header, info.max_batch, SPARE_ROWS, info.n_vocab, program.max_positions)
        self._peaks = Peaks(library.address(PEAKS), library.address(LARGEST), info.n_vocab)
        self._latest = 0
        """Rows of logits that the last pass gave."""
        self._spans = np.zeros((info.max_batch, 3), np.int32)
        self._segments = np.zeros((info.max_batch, 3), np.int32)
        self._set(head.SPANS, self._spans.ctypes.data)
        self._set(head.SEGMENTS, self._segments.ctypes.data)

    def _set(self, offset: int, value: int) -> None:
        self._header[offset // 8] = value

    @property
    def file(self) -> GGUFFile:
        """The file it was loaded from, open until `close`."""
        if self._weights is None:
            raise RuntimeError("the model is closed")
        return self._weights.gguf

    def allocate_kv(self, n_blocks: int) -> None:
        """See Model. The host's memory is taken by the system only as blocks are written; the cards' was when the model was loaded."""
        if self.info.kv_blocks and n_blocks > self.info.kv_blocks:
            raise ValueError(f"{n_blocks} KV blocks; the cards have room for {self.info.kv_blocks}")
        self._kv = np.zeros(n_blocks * self.info.kv_bytes_per_block + 64, np.uint8)
        self._n_blocks = n_blocks
        self._set(head.KV, self._kv_address())
        self._set(head.KV_BLOCK, self.info.kv_bytes_per_block)

    def _kv_address(self) -> int:
        return int(-(-self._kv.ctypes.data // 64) * 64)

    def allocate_state(self, n_slots: int) -> None:
        """See Model. Memory is taken by the system only as slots are written."""
        whole = np.zeros(n_slots * self.info.state_bytes + 64, np.uint8)
        start = -whole.ctypes.data % 64
        self._state = whole[start : start + n_slots * self.info.state_bytes].reshape(n_slots, self.info.state_bytes)
        self._set(head.SLOTS, self._state.ctypes.data)
        self._set(head.SLOT_BYTES, self.info.state_bytes)

    def forward(self, spans: list[Span]) -> NDArray[np.float32]:
        """See Model. Raises ValueError of a model that gives vectors only."""
        if self._program.logits < 0 and not (self._cards and self._cards.ends_in_logits):
            raise ValueError(f"a {self.info.architecture} model gives vectors, no logits")
        if self.info.decoder_start < 0:
            self._latest = self._run(spans, [span.outputs for span in spans], pooling=False)
            return self._logits[: self._latest, : self.info.n_vocab]
        for span in spans:
            if span.start < span.encoded and (span.start or len(span.tokens) != span.encoded or len(span.outputs)):
                raise ValueError("an encoder's input must come whole and alone, and has no logits")
        reading, answering = ([span for span in spans if (span.start < span.encoded) is side] for side in (True, False))
        if reading:
            self._run(reading, [span.outputs for span in reading], pooling=False, skip=self._program.decoder)
        self._latest = 0
        if answering:
            self._latest = self._run(answering, [span.outputs for span in answering], pooling=False, skip=self._program.encoder)
        return self._logits[: self._latest, : self.info.n_vocab]

    def peaks(self) -> list[PeaksOfRow]:
        """See Model."""
        return self._peaks.of(self._latest, self._team)

    def embed(self, spans: list[Span]) -> NDArray[np.float32]:
        """See Model."""
        if not self.info.n_embd:
            raise ValueError(f"a {self.info.architecture} model gives no vectors")
        pooling, causal = self.info.pooling, self.info.causal
        wanted = [rows_to_pool(len(span.tokens), pooling, causal) for span in spans]
        if self.info.whole and any(span.start for span in spans):
            raise ValueError("this model's sequences must come whole")
        n = self._run(spans, wanted, pooling=True)
        if self._program.scores is not None:
            return scores_of(view(self._program.scores, n))
        assert self._program.hidden is not None
        return pooled(self._program.hidden, [len(span.tokens) for span in spans], wanted)

    def _run(self, spans: list[Span], wanted: list[NDArray[np.int32]], *, pooling: bool, skip: Sequence[int] = ()) -> int:
        """One pass; how many rows were asked for. wanted: indices into each span's tokens; pooling: hidden states or scores of these rows
        instead of logits; skip: instructions of the other half of an encoder-decoder.
        """
        if self._weights is None:
            raise RuntimeError("the model is closed")
        rows = self._rows
        firsts = rows.fill(spans, wanted, self._n_blocks)
        tokens, outputs, longest = rows.tokens, rows.outputs, rows.longest
        adapted = seen = False
        for row, span in zip(firsts, spans, strict=True):
            if span.images or span.adapter:
                self._check(span)
                adapted, seen = adapted or span.adapter > 0, seen or len(span.images) > 0
            if self._program.ends is not None:
                self._program.ends[row : row + len(span.tokens)] = span.encoded or len(span.tokens)
            if self._recorder.images is not None:
                self._place_images(self._recorder.images, row, span)
            if self._adapters is not None:
                self._adapters.assign(row, len(span.tokens), span.adapter, span.adapter_scale)
        for i, angles in enumerate(self._tables):
            self._set(head.ROPE + 8 * i, angles.address(longest))
        if self.info.state_bytes:
            self._place_state(spans)
        members = self._few if tokens == 1 else self._many
        parts = self._parts(tokens, rows.tiles, longest, members)
        if not pooling:
            self._room_for_logits(outputs)
        size = tokens, outputs, rows.tiles, parts, len(spans), members, pooling, adapted, seen, skip
        if size != self._size:
            self._cut(*size)
            self._size = size
        chunks, grains = self._chunks, self._grains
        if self._cards is None:
            self._team.run(self._program.table, chunks, grains, members)
            if self.profile:
                self.profile.add()
            return outputs
        cut = self._program.cut
        before, behind = self._program.around_cards
        self._team.run(before, chunks[:cut], grains[:cut], members)
        lengths = [len(span.tokens) for span in spans]
        tables = [np.ascontiguousarray(span.block_table, np.int32) for span in spans]
        from localrun.models.cards import Batch

        batch = Batch(tokens, outputs, rows.positions[:tokens], rows.output_rows[:outputs], tables, lengths, longest, not pooling)
        self._cards.run(batch, self._logits)
        if cut < len(chunks):
            self._team.run(behind, chunks[cut:], grains[cut:], members)
        return outputs

    def _cut(
        self, tokens: int, outputs: int, tiles: int, parts: int, spans: int, members: int, pooling: bool, adapted: bool, seen: bool,
        skip: Sequence[int],
    ) -> None:
        """Into how many chunks each instruction is cut, 0: it is left out, and how many a thread takes at once.

        adapted, seen: whether there are adapters, images; the rest as in `_run`.
        """
        chunks = self._program.chunks(tokens, outputs, tiles, parts, spans)
        if self._adapters is not None:
            self._adapters.skip_idle(chunks, adapted)
        if self._recorder.images is not None and not seen:
            chunks[self._program.names_at(PLACE_IMAGES)] = 0
        if pooling:
            chunks[self._program.logits_only] = 0
        else:
            chunks[self._program.head] = 0
            if not outputs and self._program.logits >= 0:
                chunks[self._program.logits] = 0
        chunks[list(skip)] = 0
        self._chunks, self._grains = chunks, self._program.grains(chunks, members, tokens)

    def _place_images(self, rows: ImageRows, row: int, span: Span) -> None:
        """Names the images' rows of a span that begins at `row`, and what each row sees."""
        n = len(span.tokens)
        rows.source_rows[row : row + n] = 0
        rows.end_rows[row : row + n] = self._rows.positions[row : row + n] + 1
        for first, values in span.images:
            end = first + len(values)
            rows.source_rows[row + first : row + end] = values.ctypes.data + np.arange(len(values)) * values.strides[0]
            rows.end_rows[row + first : row + end] = span.start + end

    def _place_state(self, spans: list[Span]) -> None:
        """Tells the kernels which slots the spans go on from, and where on the way their state is copied."""
        used = [slot for span in spans for slot in (span.state, *(slot for _, slot in span.snapshots))]
        if len(set(used)) < len(used) or min(used) < 0 or max(used) >= len(self._state):
            raise ValueError(f"state slots {used} of {len(self._state)}")
        row = segments = 0
        for i, span in enumerate(spans):
            if span.start == 0:
                self._state[span.state] = 0
            self._spans[i] = span.state, segments, 0
            n = len(span.tokens)
            ends = [*span.snapshots] if span.snapshots and span.snapshots[-1][0] == n else [*span.snapshots, (n, -1)]
            done = 0
            for end, slot in ends:
                if not done < end <= n:
                    raise ValueError(f"a snapshot after {end} of {n} tokens, behind one after {done}")
                self._segments[segments] = row + done, end - done, slot
                segments += 1
                done = end
            self._spans[i, 2] = len(ends)
            row += n

    def _parts(self, tokens: int, tiles: int, longest: int, members: int) -> int:
        """Into how many parts attention over a row is shared out: only where there are too few rows and heads to keep all threads busy."""
        parts = -(-longest // PART)
        alone = tokens == tiles and self._program.ends is None
        if not alone or parts == 1 or tiles * self._program.fewest_kv >= members * ATTENTION_CHUNKS:
            parts = 1
        elif (size := tiles * parts * self._program.partial_bytes + 64) > len(self._partial):
            self._partial = np.zeros(size, np.uint8)
            self._set(head.PARTIAL, self._partial.ctypes.data)
        self._set(head.PARTS, parts)
        return parts

    def _check(self, span: Span) -> None:
        """What a span has that most have not: images, an adapter."""
        n = len(span.tokens)
        done = 0
        for first, values in span.images:
            if self._recorder.images is None or values.dtype != np.float32 or values.shape[1:] != (self._recorder.image_row.width,):
                raise ValueError(f"rows of an image of the shape {values.shape} in a {self.info.architecture} model")
            if first < done or first + len(values) > n or values.strides[1] != 4:
                raise ValueError("an image outside its span")
            done = first + len(values)
        if span.adapter and not (self._adapters and self._adapters.knows(span.adapter)):
            raise ValueError(f"there is no adapter {span.adapter}")

    def _room_for_logits(self, rows: int) -> None:
        if rows > len(self._logits):
            size = min(self.info.max_batch, max(FIRST_LOGIT_ROWS, 2 * len(self._logits), rows))
            self._logits = np.zeros((size, room(self.info.n_vocab)), np.float32)
            self._peaks.read(self._logits)
            if self._program.logits >= 0:
                self._program.args[self._program.logits, LOGITS_ADDRESS] = self._logits.ctypes.data

    def read_adapter(self, paths: Sequence[Path | str]) -> Adapter:
        """See Model."""
        if self._weights is None:
            raise RuntimeError("the model is closed")
        from localrun.models.lora import read_adapter

        adapter = read_adapter(paths, self._weights.gguf, {site.tensor for site in self._recorder.sites})
        # Where they have to be compiled, no pass shall wait for it.
        self._library.compile([KernelSpec("lora", "low_rank", (kind,)) for kind in (0, 1)])
        return adapter

    def add_adapter(self, adapter: Adapter) -> int:
        """See Model. The first one replaces the program by one with an instruction beside each matrix."""
        if self._weights is None:
            raise RuntimeError("the model is closed")
        if self._cards is not None:
            raise ValueError("adapters act on the CPU only; load the model with num_gpu 0")
        if self._adapters is None:
            from localrun.models.adapters import Adapters

            adapters = Adapters(self.info.max_batch + SPARE_ROWS)
            program = self._recorder.finish(adapters)
            addresses = self._library.load(program.kernels)
            program.table[:, 0] = [addresses[spec] for spec in program.kernels]
            program.args[program.logits, LOGITS_ADDRESS] = self._program.args[self._program.logits, LOGITS_ADDRESS]
            adapters.use(program)
            program.use(self._tuned)
            self._tuning = None
            self._program, self._adapters = program, adapters
        self._size = ()
        return self._adapters.add(adapter)

    def remove_adapter(self, number: int) -> None:
        """See Model."""
        if self._adapters is not None:
            self._adapters.remove(number)
            self._size = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The tile shapes in use, by weight type."""
        return {name: self._tuned.get(name, DEFAULT) for name in self._program.weight_types}

    def _use(self, shapes: dict[str, Shape]) -> None:
        self._tuned |= shapes
        self._program.use(self._tuned)
        self._size = ()
        if self._free:
            self._few = self._tuned.get(self._program.most_read(), DEFAULT).members(self.info.n_threads)

    def tune(self, seconds: float, *, again: bool = False) -> bool:
        """See Model. again: also what is known already."""
        if self._weights is None or self._shapes is None:
            return False
        if self._tuning is None:
            from localrun.models.tuning import tuning_of

            known = () if again else self._tuned
            self._tuning = tuning_of(self._program, self._team, self._header, self.info.max_batch, known)
        before = dict(self._tuning.found)
        more = self._tuning.step(seconds)
        if self._tuning.found != before:
            self._use(self._tuning.found)
            self._shapes.write(self._tuning.found)
        return more

    def copy_block(self, source: int, target: int) -> None:
        """See Model."""
        size = self.info.kv_bytes_per_block
        start = self._kv_address() - self._kv.ctypes.data
        self._kv[start + target * size : start + (target + 1) * size] = self._kv[start + source * size : start + (source + 1) * size]
        if self._cards is not None:
            self._cards.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        """See Model."""
        host = bytes(self._kv[self._within(block)])
        return host if self._cards is None else self._cards.read_block(block) + host

    def write_block(self, block: int, content: bytes) -> None:
        """See Model."""
        where = self._within(block)
        away = len(content) - self.info.kv_bytes_per_block
        if self._cards is not None:
            self._cards.write_block(block, content[:away])
        self._kv[where] = np.frombuffer(content[away:], np.uint8)

    def _within(self, block: int) -> slice:
        if not 0 <= block < self._n_blocks:
            raise ValueError(f"block {block} of {self._n_blocks}")
        start = self._kv_address() - self._kv.ctypes.data + block * self.info.kv_bytes_per_block
        return slice(start, start + self.info.kv_bytes_per_block)

    def copy_state(self, source: int, target: int) -> None:
        """See Model."""
        self._state[target] = self._state[source]

    def close(self) -> None:
        """See Model."""
        if self._weights is not None:
            self._team.close()
            if self._cards is not None:
                self._cards.close()
            self._state = np.zeros((0, 0), np.uint8)
            self._kv = np.zeros(0, np.uint8)
            self._weights.close()
            self._weights = None
            self._adapters = None


def load_model(path: str | Path, options: LoadOptions, progress: Progress | None = None) -> RecordedModel:
    """Loads a GGUF file.

    Raises ModelFileError when the file is damaged, incomplete or of a kind without support; ValueError for an option that cannot be obeyed.
    """
    if options.kv_type not in sizes.KV_TYPES:
        raise ValueError(f"kv_cache_type {options.kv_type}: supported are {', '.join(sizes.KV_TYPES)}")
    return from_file(path, lambda gguf: _load(gguf, options, progress))


def from_file(path: str | Path, load: Callable[[GGUFFile], T]) -> T:
    """What `load` makes of a GGUF file, which is closed where that fails. Kernels that cannot be compiled raise ModelFileError."""
    gguf = open_gguf(path)
    try:
        return load(gguf)
    except CompileError as error:
        gguf.close()
        raise ModelFileError(gguf.path, "", f"cannot be loaded: {error}") from error
    except BaseException:
        gguf.close()
        raise


def kernel_cache(options: LoadOptions) -> Path:
    """The folder under which compiled kernels are kept."""
    return Path(options.cache_dir) if options.cache_dir else Path(platformdirs.user_cache_dir("localrun"))


def _load(gguf: GGUFFile, options: LoadOptions, progress: Progress | None) -> RecordedModel:
    keys = Keys(gguf)
    family = family_of(gguf)
    params = family.read(keys, gguf)
    chosen = isa.select(options.isa)
    few = options.n_threads or default_threads()
    many = options.n_threads_batch or few
    n_threads = max(few, many)
    cache = kernel_cache(options)
    library = KernelLibrary(chosen, cache, n_workers=_allowed_cpus())
    n_layers = keys.int("block_count", minimum=1)
    causal = is_causal(gguf)
    pooling = POOLINGS[keys.int("pooling_type", 0)] or ("" if causal else "mean")
    whole = not causal or pooling in ("mean", "cls")
    twofold = gguf.architecture in ENCODER_DECODERS
    context = keys.int("context_length") * (2 if twofold else 1)
    longest = min(context, LONGEST_WHOLE) if whole or twofold else 0
    max_batch = max(options.max_batch, longest + (ANSWERS_BESIDE if twofold else 0))

    def record(places: Sequence[int], probe: bool) -> Recorded:
        away = tuple(f"blk.{i}." for i in range(min(len(places), n_layers)))
        some = Weights(gguf, False if probe else options.pack, lambda name: bool(away) and name.startswith(away))
        r = Recorder(some, max_batch, n_threads, options.kv_type, chosen.amx, options.n_ctx, places, options.images)
        return some, r, [AngleTable(rope) for rope in family.record(params, r, some)]

    if options.images:
        options = replace(options, gpu_layers=0)
    placed = place(record, n_layers, options.n_ctx or context, options, cache)
    if options.images:
        placed.note = "a model that sees images runs on the CPU"
    weights, recorder, cards = placed.weights, placed.recorder, placed.cards
    if options.images and not recorder.image_row.width:
        raise ModelFileError(gguf.path, "general.architecture", f"images are not supported in {gguf.architecture} models")
    program = recorder.finish()
    addresses = library.load([*program.kernels, *weights.kernels(), *team.specs(), PEAKS, LARGEST, PLACE], progress)
    program.table[:, 0] = [addresses[spec] for spec in program.kernels]
    header = np.zeros(head.SIZE // 8, np.int64)
    crew = team.Team(library, n_threads, header, timed=options.timed)
    try:
        weights.fill(library, crew, progress)
    except BaseException:
        crew.close()
        raise
    n_vocab = gguf.tensors["token_embd.weight"].shape[1]
    info = ModelInfo(
        architecture=gguf.architecture,
        n_vocab=n_vocab,
        n_ctx_train=min(context, program.max_positions or INT_MAX, longest or INT_MAX),
        max_batch=max_batch,
        kv_bytes_per_block=recorder.kv_block_bytes,
        weight_bytes=weights.packed_bytes if weights.pack else sum(info.nbytes for info in gguf.tensors.values()),
        packed=weights.pack,
        isa=chosen.name,
        n_threads=few,
        n_threads_batch=many,
        state_bytes=recorder.state_bytes,
        n_embd=program.hidden.row.width if program.hidden else 0,
        pooling=pooling,
        causal=causal,
        n_layers=n_layers,
        gpu_layers=min(cards.layers, n_layers) if cards else 0,
        gpu_bytes=cards.weight_bytes + placed.kv_blocks * cards.kv_block_bytes if cards else 0,
        gpu_note=placed.note,
        gpu_kv_bytes_per_block=cards.kv_block_bytes if cards else 0,
        cards=placed.found,
        kv_blocks=placed.kv_blocks,
        decoder_start=keys.int("decoder_start_token_id") if twofold else -1,
    )
    shapes = ShapesFile(cache, chosen, n_threads, packed=weights.pack) if options.tune else None
    free = not options.n_threads and few == n_threads
    model = RecordedModel(info, program, library, crew, header, recorder, weights, placed.tables, cards, shapes, free)
    if options.timed:
        model.profile = Profile(program)
    return model
