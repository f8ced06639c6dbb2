"""Records a forward pass once as a flat program of kernels, replays it for every batch.

A family's `record` function is plain Python that runs once per loaded model and calls the methods of `Recorder` in the order of the
mathematics. Nothing is computed then: each call appends one instruction (a kernel, its arguments, how its work is cut). `Recorder.finish`
turns them into the table that `kernels_cpu.team` replays; what differs from step to step is read from the step header by the kernels
themselves.

    Row          float32 values of every token of the batch, in a named buffer that later layers use again
    Activation   a row as matmuls want it; in which forms is known when all its readers are recorded

An instruction waits for everything before it unless it is recorded as `beside` the previous one (Q, K and V; gate and up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from localrun.kernels_cpu import attention_sizes, head, routing
from localrun.kernels_cpu.amx_sizes import MOST_GROUPS
from localrun.kernels_cpu.amx_sizes import scratch_bytes as matrix_scratch_bytes
from localrun.kernels_cpu.shapes import DEFAULT as SHAPE
from localrun.kernels_cpu.sizes import GROUP, fits, layer_block_bytes
from localrun.models.errors import ModelFileError
from localrun.models.program import (
    EMBEDDING,
    HOST,
    Activation,
    DistanceBias,
    Hidden,
    Routing,
    Row,
    Rule,
    float_bits,
    room,
)
from localrun.models.recording import SOFT_CAP, SPARE_ROWS, Recording
from localrun.models.weights import Stack, Vector, Weight

PLACE_IMAGES = "place_images"
"""Name of the instruction that has no work where no span has an image."""
CHUNK_BYTES = 128 << 10
"""About how many weight bytes one chunk of a matmul reads: small enough for all to end together. Threads take several at once."""
EXPERT_BYTES = 256 << 10
"""The same for experts, of which there are many and small ones."""
MIN_CHUNKS = 8
"""Of a matmul with few tokens, a thread."""
LARGE_CHUNKS = 6
"""Chunks a thread, at least, of a matmul with many tokens."""
Activated = Literal["silu", "gelu_tanh", "relu", "relu_squared", "tanh", "sigmoid"]
"""Functions of kernels_cpu/math.py that may stand alone."""


class Recorder(Recording):
    """Appends instructions; see the module's docstring. Shapes: T tokens of the batch, O rows whose logits are wanted."""

    # ---- operations ----

    def limit_positions(self, n: int) -> None:
        """Longer contexts are refused."""
        self._max_positions = n

    def see_both_ways(self) -> None:
        """Attention from here on reaches the end of a sequence, which comes whole in one pass; keys and values live for that pass only, so
        they are kept in full.
        """
        self.ends = np.zeros(self.max_batch + SPARE_ROWS, np.int32)
        self._both = True
        self._decoders_kv_type, self.kv_type = self.kv_type, "f32"

    def see_behind_only(self) -> None:
        """Attention from here on is causal again, and keys and values are kept for passes to come."""
        self._both = False
        self.kv_type = self._decoders_kv_type

    def decode_from_here(self) -> None:
        """What was recorded so far is an encoder, what follows is a decoder; a pass runs the one or the other."""
        self._encoder = list(self._instructions)

    def embed(self, table: Weight, scale: float = 1.0, positions: Vector | None = None, name: str = "x") -> Row:
        """x[t] = table[token t] * scale (+ positions[position t]). table: (n_vocab, width) -> (T, width)."""
        x = self.row(name, table.columns)
        if positions:
            self._max_positions = positions.n // table.columns
        args = [table.source, table.row_bytes, table.columns, float_bits(scale), x.address, x.stride, positions.address if positions else 0]
        self._append("elementwise", "embed", [table.type_name], args, "embed")
        self._site(table, None, x, scale, False)
        return x

    def norm(
        self,
        x: Row,
        weight: Vector | None,
        eps: float,
        name: str,
        *,
        kind: Literal["rms", "layer", "none"] = "rms",
        bias: Vector | None = None,
        outputs_only: bool = False,
        beside: bool = False,
        buffer: str = "normed",
        in_place: bool = False,
    ) -> Activation:
        """The norm of a row, ready for matmuls. (T, width) -> (T, width), or (O, width) of the rows whose logits are wanted.

        buffer: a name of its own keeps the activation readable after the next norm. in_place: the row itself is normed, too.
        """
        scratch = self.row(buffer, x.width) if kind != "none" and not in_place else x
        args = [
            x.address, x.stride, x.width, weight.address if weight else 0, float_bits(eps), {"none": 0, "rms": 1, "layer": 2}[kind],
            bias.address if bias else 0, scratch.address, scratch.stride,
        ]
        rule: Rule = "outputs" if outputs_only else "tokens"
        instruction = self._append("elementwise", "norm", [], args, name, rule, beside=beside)
        activation = self._activation(x.width, instruction, 9, buffer)
        instruction.args.append(head.OUTPUT_ROWS if outputs_only else 0)
        return activation

    def quantized(self, x: Row, name: str) -> Activation:
        """A row as it is, ready for matmuls."""
        return self.norm(x, None, 0.0, name, kind="none", buffer="quantized")

    def norm_add(self, y: Row, weight: Vector, eps: float, x: Row, name: str) -> None:
        """x += RMS norm of y. Both (T, width)."""
        args = [y.address, y.stride, y.width, weight.address, float_bits(eps), x.address, x.stride]
        self._append("elementwise", "norm_add", [], args, name)

    def gated(self, gate: Row, up: Row, activation: Literal["silu", "gelu_tanh", "relu", "sigmoid"], name: str) -> Activation:
        """act(gate) * up, ready for matmuls. (T, width) each; gate's buffer is overwritten."""
        args = [gate.address, up.address, gate.stride, gate.width]
        instruction = self._append("elementwise", "gated", [activation], args, name, factor=gate.per_token)
        return self._activation(gate.width, instruction, 4, "gated", gate.per_token)

    def gated_limited(self, gate: Row, up: Row, limit: float, name: str) -> Activation:
        """gpt-oss's g sigmoid(1.702 g) (u + 1) with both inputs held within `limit`, ready for matmuls; gate's buffer is overwritten."""
        args = [gate.address, up.address, gate.stride, gate.width]
        instruction = self._append("experts", "gated_limited", [], args, name, factor=gate.per_token)
        activation = self._activation(gate.width, instruction, 4, "gated", gate.per_token)
        instruction.args.append(float_bits(limit))
        return activation

    def activated(self, x: Row, activation: Activated, name: str) -> Activation:
        """act(x), ready for matmuls; x's buffer is overwritten."""
        instruction = self._append("pointwise", "activated", [activation], [x.address, x.stride, x.width], name, factor=x.per_token)
        return self._activation(x.width, instruction, 3, "activated", x.per_token)

    def xielu(self, x: Row, p: float, n: float, b: float, eps: float, name: str) -> Activation:
        """xIELU (kernels_cpu/pointwise.py), ready for matmuls; x's buffer is overwritten."""
        instruction = self._append("pointwise", "xielu", [], [x.address, x.stride, x.width], name)
        activation = self._activation(x.width, instruction, 3, "activated")
        instruction.args.extend(float_bits(value) for value in (p, n, b, eps))
        return activation

    def add_constant(self, x: Row, vector: Vector, name: str) -> None:
        """x += vector (width,), the same for all rows."""
        self._append("encoder", "add_constant", [], [x.address, x.stride, x.width, vector.address], name)

    def add(self, y: Row, x: Row, name: str, *, scale: float = 1.0, gate: Row | None = None) -> None:
        """x += scale * y, or sigmoid(gate) * y with a gate (T, 1). Both (T, width)."""
        args = [
            y.address,
            y.stride,
            x.address,
            x.stride,
            x.width,
            float_bits(scale),
            gate.address if gate else 0,
            gate.stride if gate else 0,
        ]
        self._append("pointwise", "add", [], args, name)

    def scale(self, x: Row, name: str, *, factor: float = 1.0, factors: Vector | None = None) -> None:
        """x *= factor, and, value by value, factors (width,)."""
        self._append("pointwise", "scale", [], [x.address, x.stride, x.width, float_bits(factor), factors.address if factors else 0], name)

    def clamp(self, x: Row, limit: float, name: str) -> None:
        """Values of x into -limit..limit."""
        self._append("pointwise", "clamp", [], [x.address, x.stride, x.width, float_bits(limit)], name)

    def scale_by_position(self, x: Row, table: int, name: str) -> None:
        """x[t] *= factor of position t, from the header's table of that number (rope.Temperature)."""
        self._append("pointwise", "scale_by_position", [], [x.address, x.stride, x.width, head.ROPE + 8 * table], name)

    def norm_heads(
        self, x: Row, n_heads: int, weight: Vector | None, eps: float, name: str, *, kind: Literal["rms", "layer", "l2"] = "rms",
        bias: Vector | None = None, beside: bool = False,
    ) -> None:
        """The norm of each of a row's heads, in place; one head: of the whole row. weight: (dim,) for all heads, or (n_heads * dim,)."""
        dim = x.width // n_heads
        step = 4 * dim if weight and weight.n > dim else 0
        args = [
            x.address,
            x.stride,
            n_heads,
            dim,
            weight.address if weight else 0,
            step,
            bias.address if bias else 0,
            float_bits(eps),
            {"rms": 1, "layer": 2, "l2": 3}[kind],
        ]
        self._append("heads", "norm_heads", [], args, name, factor=x.per_token, beside=beside)

    def rotate(self, x: Row, n_heads: int, n_rot: int, table: int, name: str, *, halves: bool, first: int = 0) -> None:
        """Rotates values first .. first + n_rot of each of a row's heads by the angles of the header's table of that number."""
        step = 4 * x.width // n_heads
        self._append(
            "heads", "rotate", [], [x.address + 4 * first, x.stride, n_heads, step, n_rot, head.ROPE + 8 * table, int(halves)], name
        )

    def matmul(
        self, weight: Weight, x: Activation, name: str, *, bias: Vector | None = None, add_to: Row | None = None, beside: bool = False
    ) -> Row:
        """out = W x (+ bias). weight (n, m), x (T, m) -> (T, n); with `add_to` (T, n), the result is added there."""
        out = add_to or self.row(name, weight.rows)
        self._matmul(weight, x, out, name, bias, add_to is not None, beside, "tokens")
        return out

    def logits(self, weight: Weight, x: Activation, bias: Vector | None = None) -> None:
        """The output matrix, for the rows whose logits are wanted; where they go is set before each step."""
        self._matmul(weight, x, Row(0, room(weight.rows) * 4, weight.rows), "logits", bias, False, False, "outputs")
        self._logits = self._instructions[-1]

    def soft_cap(self, n_vocab: int, cap: float) -> None:
        """logits = cap * tanh(logits / cap); after `logits`."""
        self._append("pointwise", "soft_cap", [], [0, room(n_vocab) * 4, n_vocab, float_bits(cap)], SOFT_CAP, "outputs")

    # ---- vectors and scores instead of logits ----

    def hidden(self, x: Row, *, by_output: bool, scale: float = 1.0) -> None:
        """Names the last hidden states: a row for each token, or (by_output) for each that is asked for; scale: what they were multiplied
        by for other readers' sake.
        """
        self._hidden = Hidden(x, by_output, scale)

    def score(
        self, x: Activation, output: Weight, bias: Vector | None, *, dense: Weight | None = None, dense_bias: Vector | None = None
    ) -> None:
        """A classification head on the rows that are asked for, run only when scores are wanted: output act(dense x), act being tanh
        (Devlin et al. 2019).
        """
        first = len(self._instructions)
        if dense is not None:
            y = self.row("cls", dense.rows)
            self._matmul(dense, x, y, "cls", dense_bias, False, False, "outputs")
            instruction = self._append("encoder", "activated_outputs", ["tanh"], [y.address, y.stride, y.width], "cls_tanh", "outputs")
            x = self._activation(y.width, instruction, 3, "cls_activated")
        scores = self.row("scores", output.rows)
        self._matmul(output, x, scores, "scores", bias, False, False, "outputs")
        self._head = self._instructions[first:]
        self._scores = scores

    def _matmul(
        self,
        weight: Weight,
        x: Activation,
        out: Row,
        name: str,
        bias: Vector | None,
        add: bool,
        beside: bool,
        rows: Literal["tokens", "outputs"],
    ) -> None:
        if weight.columns != x.width:
            raise ValueError(f"{weight.name} takes {weight.columns} values, {name} gives {x.width}")
        away = self._place != HOST
        address, stride, tiles = self._form(x, weight.kind)
        groups = -(-weight.rows // 16)
        per_chunk = max(1, min(CHUNK_BYTES // max(weight.group_bytes, 1), groups // (MIN_CHUNKS * self.n_threads)))
        # Chunks of large batches are large too: what the groups of one share (activations) is worth more than the weights of one.
        per_large = min(MOST_GROUPS, max(1, groups // (LARGE_CHUNKS * self.n_threads))) if tiles else per_chunk
        unpacked_at = -(-matrix_scratch_bytes() // 64) * 64 if self.amx else 0
        unpacked = 0 if weight.packed else weight.group_bytes * (MOST_GROUPS if tiles else 1)
        scratch, scratch_bytes = self._per_thread("matmul", unpacked_at + unpacked)
        args = [
            0 if away else weight.address, weight.group_bytes, weight.columns // weight.block, weight.rows, address, stride, out.address,
            out.stride, per_chunk, bias.address if bias else 0, int(add), head.TOKENS if rows == "tokens" else head.OUTPUTS,
            0 if weight.packed else weight.row_bytes, scratch, scratch_bytes, unpacked_at, tiles,
            per_large, SHAPE.matrix_from, SHAPE.wide_from,
        ]
        rule: Rule = "matmul" if rows == "tokens" else "output_matmul"
        instruction = self._append("matmul", "matmul", [weight.type_name], args, name, rule, -(-groups // per_chunk), beside)
        instruction.large_factor = -(-groups // per_large)
        instruction.weight = weight if away else None
        if weight.name != EMBEDDING:
            self._site(weight, x, out, 1.0, rows == "outputs")

    def rope_kv(
        self, q: Row, k: Row, v: Row, *, n_heads: int, n_kv: int, dim: int, dim_v: int, n_rot: int, table: int, halves: bool, scale: float,
        q_norm: Vector | None = None, k_norm: Vector | None = None, eps: float = 0.0, layer: int | None = None,
    ) -> int:
        """Norms and rotates heads in place, scales q, writes k and v into the cache; returns the layer's offset in a pool block.

        q (T, n_heads * dim), k (T, n_kv * dim), v (T, n_kv * dim_v); table: which of the header's angle tables; n_rot 0: no rotation.
        layer: offset of an earlier layer whose keys and values are used again; k and v are then left alone.
        """
        if not fits(self.kv_type, dim, dim_v):
            raise ValueError(
                f"kv_cache_type {self.kv_type} needs heads of a multiple of {GROUP} values; this model's have {dim} and {dim_v}"
            )
        offset = self.kv_bytes.setdefault(self._place, 0) if layer is None else layer
        if layer is None:
            self.kv_bytes[self._place] += layer_block_bytes(n_kv, dim, dim_v, self.kv_type)
        else:
            n_kv = 0
        args = [
            q.address, q.stride, k.address, k.stride, v.address, v.stride, n_heads, n_kv, q_norm.address if q_norm else 0,
            k_norm.address if k_norm else 0, float_bits(eps), n_rot, head.ROPE + 8 * table, int(halves), offset, float_bits(scale),
        ]
        self._append("attention", "rope_kv", [self.kv_type, dim, dim_v], args, "rope_kv")
        return offset

    def attention(
        self, q: Row, layer: int, *, n_heads: int, n_kv: int, dim: int, dim_v: int, window: int = 0, soft_cap: float = 0.0,
        sinks: Vector | None = None, slopes: Vector | None = None, distances: DistanceBias | None = None, cross: bool = False,
    ) -> Row:
        """Attention of q over the layer at that offset, causal unless `see_both_ways`, but for an image's rows, which see each other:
        (T, n_heads * dim_v).

        slopes: ALiBi's, one a head; distances: T5's; cross: the layer is of what the encoder has read, and all of it is seen.
        """
        ends, sees = 0, list[int]()
        if self.ends is not None and (self._both or cross):
            ends, sees = self.ends.ctypes.data, [attention_sizes.BOTH]
        elif self.images is not None:
            ends, sees = self.images.ends, [attention_sizes.FURTHER]
        out = self.row("attended", n_heads * dim_v)
        scratch, scratch_bytes = self._per_thread("attention", attention_sizes.scratch_bytes(dim, dim_v))
        args = [
            q.address, q.stride, n_heads, n_kv, out.address, out.stride, layer, window, float_bits(soft_cap), scratch, scratch_bytes,
            sinks.address if sinks else 0, slopes.address if slopes else distances.address if distances else 0, ends,
            distances.stride if distances else 0,
        ]
        bias = attention_sizes.ALIBI if slopes else attention_sizes.TABLE_BIAS if distances else 0
        if self._place == HOST:
            self.partial_bytes = max(self.partial_bytes, attention_sizes.partial_bytes(n_heads, dim_v))
            self.fewest_kv = min(self.fewest_kv, n_kv)
        self._append(
            "attention",
            "attention",
            [self.kv_type, dim, dim_v, int(soft_cap > 0), bias, *sees],
            args,
            "attention",
            "tile_parts",
            n_kv,
        )
        self._append("attention", "attention_merge", [dim_v], list(args), "attention_merge", "merges", n_kv)
        return out

    # ---- images ----

    def place_images(self, x: Row) -> None:
        """x[t] = the image's row where token t stands for one; x (T, width), after the embedding."""
        self.image_row = x
        if self.images is not None:
            self._append("vision", "place_rows", [], [x.address, x.stride, x.width, self.images.sources], PLACE_IMAGES)

    # ---- experts ----

    def route(
        self, scores: Row, k: int, *, gate: str = "softmax", bias: Vector | None = None, normalise: bool, scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
    ) -> Routing:
        """Chooses k experts for each token by its scores (T, experts), and sorts tokens by expert. See kernels_cpu/experts.py."""
        n = scores.width
        layout = routing.Layout(self.max_batch * k, n)
        address, _ = self._buffer(f"routing.{n}.{k}", -(-layout.nbytes // (self.max_batch + SPARE_ROWS)))
        asked = self.row("asked", n)
        args = [
            scores.address,
            scores.stride,
            n,
            k,
            routing.GATES[gate],
            bias.address if bias else 0,
            int(normalise),
            float_bits(scale),
            *groups,
            address + layout.choices,
            address + layout.weights,
            asked.address,
            asked.stride,
        ]
        self._append("experts", "route", [], args, "route")
        args = [address + layout.choices, n, k]
        args += [address + at for at in (layout.order, layout.places, layout.starts, layout.active, layout.n_active)]
        self._append("experts", "sort", [], args, "sort", "one")
        return Routing(n, k, address, layout)

    def gather(self, x: Activation, routing: Routing, *, weighted: bool = False) -> Activation:
        """The rows of x by expert, ready for expert_matmul: (T * k, width); `weighted`: times the weights of the choices."""
        address, stride, _ = self._form(x, "f")
        k = routing.k
        instruction = self._append("experts", "gather", [], [address, stride, x.width, routing.at("order")], "gather", factor=k)
        gathered = self._activation(x.width, instruction, 4, "gathered", k)
        scaled = self.row("gathered", x.width, k) if weighted else None
        instruction.args += [k, routing.at("weights") if scaled else 0, scaled.address if scaled else 0, scaled.stride if scaled else 0]
        return gathered

    def expert_matmul(
        self, stack: Stack, x: Activation, routing: Routing, name: str, *, bias: tuple[Vector, int] | None = None, beside: bool = False
    ) -> Row:
        """Each expert's matrix times the rows of its tokens (gathered, or what was made of them): (T * k, n). bias: see rows_of_vectors."""
        out = self.row(name, stack.rows, routing.k)
        where = [routing.at("starts"), routing.at("active"), routing.at("n_active")]
        self._stack_matmul(stack, x, out, name, bias, where, beside, routing.k, 0)
        return out

    def copy_part(self, x: Row, y: Row, n_heads: int, name: str, *, n: int, first: int, to: int, same: bool = False) -> None:
        """Values first .. first + n of each of x's heads to `to` .. of each of y's; `same`: x has one head for all of y's."""
        step = 0 if same else 4 * x.width // n_heads
        args = [x.address + 4 * first, x.stride, step, n, n_heads, y.address + 4 * to, y.stride, 4 * y.width // n_heads]
        self._append("heads", "copy_part", [], args, name)

    def heads_matmul(self, stack: Stack, x: Activation, name: str, *, room_after: int = 0) -> Row:
        """Each head's matrix times its own row of x (T * n, columns): (T, n * (rows + room_after)), heads side by side.

        rows, and what a row of the result holds, must be multiples of 16. Raises ModelFileError.
        """
        if stack.rows % 16:
            raise ModelFileError(
                self.weights.gguf.path, f"tensor {stack.name}", f"has heads of {stack.rows} values; only multiples of 16 are supported"
            )
        out = self.row(name, (stack.rows + room_after) * stack.n)
        if out.width % 16:
            raise ModelFileError(
                self.weights.gguf.path, f"tensor {stack.name}", f"gives rows of {out.width} values; only multiples of 16 are supported"
            )
        each = Row(out.address, (stack.rows + room_after) * 4, stack.rows, stack.n)
        self._stack_matmul(stack, x, each, name, None, [0, 0, 0], False, 1, 1)
        return out

    def _stack_matmul(
        self,
        stack: Stack,
        x: Activation,
        out: Row,
        name: str,
        bias: tuple[Vector, int] | None,
        where: list[int],
        beside: bool,
        k: int,
        by_head: int,
    ) -> None:
        if stack.columns != x.width:
            raise ValueError(f"{stack.name} takes {stack.columns} values, {name} gives {x.width}")
        address, stride, _ = self._form(x, stack.kind)
        groups = -(-stack.rows // 16)
        per_chunk = max(1, min(EXPERT_BYTES // max(stack.group_bytes, 1), groups))
        parts = -(-groups // per_chunk)
        scratch, scratch_bytes = self._per_thread("experts", 0 if stack.packed else stack.group_bytes)
        args = [
            0 if self._place != HOST else self.weights.table(stack.addresses()),
            stack.group_bytes,
            stack.columns // stack.block,
            stack.rows,
            address,
            stride,
            out.address,
            out.stride,
            per_chunk,
            parts,
            bias[0].address if bias else 0,
            bias[1] if bias else 0,
            *where,
            0 if stack.packed else stack.row_bytes,
            scratch,
            scratch_bytes,
            stack.n,
        ]
        rule: Rule = "one" if by_head else "tokens"
        instruction = self._append(
            "experts", "expert_matmul", [stack.type_name, by_head], args, name, rule, parts * (stack.n if by_head else k), beside
        )
        instruction.most = parts * stack.n
        instruction.weight = stack if self._place != HOST else None

    def combine(self, y: Row, routing: Routing, x: Row, name: str, *, add: bool, weighted: bool = True, scale: float = 1.0) -> None:
        """x (+)= scale * sum over a token's choices of weight * y; y (T * k, width) by expert, x (T, width)."""
        args = [
            y.address,
            y.stride,
            y.width,
            routing.at("weights") if weighted else 0,
            routing.at("places"),
            routing.k,
            x.address,
            x.stride,
            int(add),
            float_bits(scale),
        ]
        self._append("experts", "combine", [], args, name)

    def by_head(self, x: Row, n: int, width: int, name: str) -> Activation:
        """A part of each of a row's n heads, the first `width` values, as rows of their own, ready for heads_matmul: (T * n, width)."""
        args = [x.address, x.stride, width, n, 4 * x.width // n]
        instruction = self._append("heads", "by_head", [], args, name, factor=n)
        return self._activation(width, instruction, 5, name, n)

    # ---- what goes over a sequence token by token ----

    def over_spans(
        self, module: str, factory: str, params: Sequence[int | str], args: Sequence[int], name: str, *, parts: int, part_bytes: int
    ) -> None:
        """A kernel of slots.over_spans; gives it the next parts * part_bytes of a slot. args: the kernel's own."""
        self._append(module, factory, params, [parts, self.state_bytes, part_bytes, *args], name, "spans", parts)
        self.state_bytes += parts * part_bytes

    # ---- what one family alone has ----

    def apply(self, module: str, factory: str, args: Sequence[int | float], name: str) -> None:
        """A kernel of one chunk a token, whose arguments are written by the caller; floats are given as their bits."""
        self._append(module, factory, [], [float_bits(a) if isinstance(a, float) else a for a in args], name)

