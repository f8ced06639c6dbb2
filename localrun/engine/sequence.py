"""One answer being made: its tokens, its blocks, how far it is. State is read through properties; the scheduler and the step change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrun.engine.adapters import LoadedAdapter
    from localrun.engine.images import PlacedImage
    from localrun.engine.prefix import Node


SINK_TOKENS = 4
"""The first tokens stay where a span is dropped: attention leans on them, whatever they say (Xiao et al. 2023, StreamingLLM)."""


Kind = tuple[float, ...]
"""Sequences whose K/V of the same tokens are the same; () is the model's own."""


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """`tokens` are prompt and answer; `computed` of them have their K/V in `blocks`."""

    request_id: str
    tokens: list[int]
    limit: int
    """Most tokens, prompt and answer, that it may hold: min(num_ctx, model, pool)."""
    arrival: float
    """Clock time, seconds."""
    priority: int = 0
    deadline: float | None = None
    """Clock time after which it is of no use."""
    may_reuse: bool = True
    """Whether it takes part in the prefix tree; an evaluation, which wants every row's logits, does not."""
    wants_all_rows: bool = False
    adapter: LoadedAdapter | None = None
    adapter_scale: float = 1.0
    images: list[PlacedImage] = field(default_factory=list)
    """Those that stand in its prompt, in their order. A sequence that has some is never shifted."""
    pools: bool = False
    """Whether a vector is wanted of it, and no logits."""
    whole: int = 0
    """So many of its first tokens must come in one pass, with no others of it."""
    encoded: int = 0
    """So many of its first tokens are an encoder's input."""
    max_chunk: int = 1 << 30
    """Most tokens of it in one step."""

    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    n_cached: int = 0
    """Prompt tokens that came from the prefix tree at the first admission."""
    n_preempted: int = 0
    in_tree: int = 0
    """How many of its tokens, from the start, are known to be in the tree."""
    tree_cursor: Node | None = None
    search: tuple[str, int] | None = None
    """Of a beam search: its name, and how many beams it may have. They wait for each other, each in its place."""
    slot: int = -1
    """Of a model with recurrent state: the slot that holds the state after `computed` tokens."""
    saves: dict[int, int] = field(default_factory=dict)
    """Slots that get snapshots in this step, by the number of tokens after which they are taken."""
    branch: int = 0
    """A block boundary up to which the tree knew the tokens but had no snapshot: others have left the path behind it before."""
    n_rewound: int = 0
    held: bool = False
    """Waits for what is saved of it to be brought back; it is not scheduled before."""
    draft: list[int] = field(default_factory=list)
    """Guesses at the next tokens, to be checked in the next step."""
    n_prompt: int = 0
    n_dropped: int = 0
    """Tokens that a context shift has taken out of the middle."""

    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)

    @property
    def kind(self) -> Kind:
        """What its K/V depend on besides its tokens."""
        return () if self.adapter is None else (self.adapter.serial, self.adapter_scale)

    @property
    def keys(self) -> list[int]:
        """What its tokens are known by in the prefix tree: themselves, but for those that stand for an image."""
        if not self.images:
            return self.tokens
        keys = list(self.tokens)
        for image in self.images:
            keys[image.start : image.end] = [image.key(i) for i in range(image.n)]
        return keys

    def uncut(self, count: int, most: int) -> int:
        """As many of its next `count` tokens as can be computed without leaving an image in the middle, whose rows see each other; more,
        up to `most`, where it begins with one.
        """
        end = self.computed + count
        for image in self.images:
            if image.start < end < image.end:
                if image.start > self.computed:
                    return image.start - self.computed
                return image.end - self.computed if image.end - self.computed <= most else 0
        return count

    @property
    def pending(self) -> int:
        """Tokens whose K/V is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        """One token away from the next."""
        return self.pending == 1 and not self.wants_all_rows and self.computed > 0

    def after_shift(self) -> list[int]:
        """What will stay of the tokens so far when the context is full."""
        sinks = min(SINK_TOKENS, self.limit // 4)
        n = max(1, (self.limit - sinks) // 2)
        return self.tokens[:sinks] + self.tokens[sinks + n :]

    def shift(self) -> int:
        """Takes half of the tokens out, the oldest but for the first few. Returns how many; their K/V must have been dropped before."""
        sinks = min(SINK_TOKENS, self.limit // 4)
        n = max(1, (len(self.tokens) - sinks) // 2)
        del self.tokens[sinks : sinks + n]
        self.n_dropped += n
        return n

    @property
    def n_output(self) -> int:
        return len(self.tokens) + self.n_dropped - self.n_prompt

    @property
    def position(self) -> int:
        """Number of tokens before the next one, dropped ones included: what its draw is keyed by."""
        return len(self.tokens) + self.n_dropped

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED
