"""What the daemon and a runner say to each other: msgpack frames over one duplex pipe, one struct a frame.

The daemon translates a dialect into a `Generate`; the runner answers with events that carry its `request_id`, any number of requests
interleaved. Nothing here knows HTTP, and nothing here knows kernels. Times are seconds, as floats.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

Overflow = Literal["error", "truncate_oldest", "shift", "sinks"]
DraftRule = Literal["exact", "ratio"]
FinishReason = Literal["stop", "length", "cancelled"]


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Names and defaults are Ollama's; the order in which they act is documented in engine/sampler.py."""

    temperature: float = 0.8
    top_k: int = 40
    """0 or less: off."""
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """How many of the latest tokens the penalties look at: 0 none, -1 the whole context."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: one is drawn and reported."""
    logit_bias: dict[int, float] = {}
    top_n_sigma: float = 0.0
    """0 or less: off."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    """0: off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """How many of the latest tokens DRY looks at: 0 none, -1 the whole context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    """0: off; 1, 2: that version, in place of all truncations."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    ignore_eos: bool = False
    """The end of a turn is never chosen."""
    banned_strings: list[str] = []
    """Texts that do not come: where one has come, its first token is taken back and another chosen."""


class ToolCall(Struct, kw_only=True):
    id: str
    name: str
    arguments: dict[str, Any] | str


class Image(Struct, kw_only=True, omit_defaults=True):
    """An image file in a text."""

    data: bytes
    """PNG, JPEG, ... as it is."""
    at: int = 0
    """Before which character of the text it stands."""


class Message(Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Image] = []


# ---- daemon -> runner ---------------------------------------------------------------------------------------------------------


class Load(Struct, tag="load", kw_only=True):
    """First frame of a runner's life."""

    path: str
    """The GGUF file (the first one, if split)."""
    cache_dir: str
    """Where compiled kernels and built tokenizers are kept."""
    digest: str = ""
    """Blob digest, keys the tokenizer cache; empty: no cache."""
    projector: str = ""
    """The mmproj file (GGUF) with which it sees images; empty: it sees none."""
    template: str | None = None
    """Jinja source that replaces the file's own, from a Modelfile."""
    num_thread: int = 0
    """Threads for one token at a time; 0: physical cores this process may use, or fewer where timing says so."""
    num_thread_batch: int = 0
    """Threads for passes of several tokens; 0: as many as num_thread."""
    tune: bool = True
    """Whether tile shapes that were timed for this processor are used, and timed in an idle moment where they are not known."""
    isa: str = ""
    """Instruction set to compile kernels for (LOCALRUN_ISA); empty: the best this machine executes."""
    num_batch: int = 512
    """Most tokens one forward pass takes."""
    num_ctx: int = 0
    """Longest context that will be asked for, where a model's mathematics depends on it (LongRoPE); 0: what the file says."""
    kv_cache_type: str = "f16"
    kv_budget: int = 0
    """Bytes for KV blocks; 0: what is free after the weights, bounded."""
    gpu_layers: int = -1
    """Layers to put on cards; -1: as many as fit."""
    max_queue: int = 512
    model_name: str = ""
    draft_path: str = ""
    """A smaller model with the same vocabulary that guesses ahead; empty: none."""
    draft_digest: str = ""
    session_dir: str = ""
    """Where K/V of conversations are kept; empty: nowhere."""
    session_bytes: int = 0
    """What that folder may hold."""


class Generate(Struct, tag="generate", kw_only=True):
    """Exactly one of `messages`, `prompt` and `prompt_tokens` is set."""

    request_id: str
    messages: list[Message] | None = None
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    images: list[Image] = []
    """With `prompt`: those that stand in it."""
    system: str | None = None
    """With `prompt`: the system message to render in front of it."""
    template: str | None = None
    raw: bool = False
    """`prompt` goes to the tokenizer as it is, no template."""
    context: list[int] = []
    """Tokens of an earlier turn, put before the prompt (Ollama's deprecated `context`)."""
    tools: list[dict[str, Any]] | None = None
    must_call: list[str] = []
    """Names of tools, one of which the answer must call, with arguments that satisfy its schema; empty: as the model likes."""
    parallel_tool_calls: bool = True
    """With `must_call`: whether several calls may come."""
    format: str | dict[str, Any] | None = None
    """"json": an object; a JSON schema; {"regex": ...}; {"grammar": ...} in Lark's or llama.cpp's notation. None or "": free text."""
    think: bool | str | None = None
    thinking_budget: int = -1
    """Most tokens of thinking, after which the engine ends it; below 0: by the level of `think` where the template has no notion of
    levels, else none."""
    template_kwargs: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    stop: list[str] = []
    max_tokens: int = -1
    """Below 0: until the model stops or the context is full. 0: only read the prompt."""
    num_ctx: int = 0
    """Most tokens (prompt and answer) this request may hold; 0: the model's own limit or the pool's, whichever is less."""
    overflow: Overflow = "error"
    logprobs: int | None = None
    """None: none. k: the chosen token's and the k likeliest ones' log-probabilities."""
    priority: int = 0
    """Lower numbers are served first; each level counts as much as 30 seconds of waiting, so nobody waits for ever."""
    deadline_s: float = 0.0
    """Seconds from its arrival in the runner after which the request ends with an error; 0: none."""
    score: bool = False
    """Whether the sum of the answer's log-probabilities is wanted (`Finished.logprob`), to choose the best of several answers."""
    adapters: list[str] = []
    """LoRA files (GGUF) whose changes to the weights add up, for this request only."""
    adapter_scale: float = 1.0
    """Factor of what they add."""
    draft_num_predict: int = -1
    """Most tokens guessed ahead, from the text's own past or by the draft model. Below 0: as many as pay, by measurement; 0: none."""
    session: bool = False
    """Whether the conversation's K/V are kept on disk, and taken from there: a chat goes on after a restart without being read again."""
    num_beams: int = 1
    """Above 1: beam search with so many beginnings at a time; sampling options have no part in it."""
    length_penalty: float = 1.0
    """Of beam search: answers are compared by log-probability / length ** length_penalty."""
    draft_rule: DraftRule = "exact"
    """When a guess is kept. "exact": when it is the token that would have come without guesses, so that they never change the answer;
    "ratio": the textbook rule, after which answers are distributed alike without being the same."""


class Render(Struct, tag="render", kw_only=True):
    """What the prompt of this request would be: answered by `Rendered`."""

    request: Generate


class Tokenize(Struct, tag="tokenize", kw_only=True):
    request_id: str
    text: str
    add_special: bool = True
    parse_special: bool = True


class Detokenize(Struct, tag="detokenize", kw_only=True):
    request_id: str
    tokens: list[int]


class Evaluate(Struct, tag="evaluate", kw_only=True):
    """Teacher-forced run over `tokens` (or `text`): answered by one `Evaluated` per chunk and a `Finished`."""

    request_id: str
    text: str | None = None
    tokens: list[int] | None = None
    top: int = 64
    """How many of the likeliest tokens to report at each position, besides `ids`."""
    ids: list[list[int]] | None = None
    """For each position, the token ids whose log-probability is wanted (a reference's)."""
    adapters: list[str] = []
    adapter_scale: float = 1.0


class Embed(Struct, tag="embed", kw_only=True):
    """Vectors for texts, all of them in as few passes as fit: answered by `Embedded`. Exactly one of `texts` and `tokens` is set."""

    request_id: str
    texts: list[str] | None = None
    tokens: list[list[int]] | None = None
    """As they are, nothing added."""
    normalize: bool = True
    """Length 1 in the Euclidean norm."""
    dimensions: int = 0
    """Only the first so many values, taken before normalizing; 0: all."""
    truncate: bool = True
    """Whether a text longer than the context loses its end; otherwise it is an error (context_length_exceeded)."""
    num_ctx: int = 0
    """Most tokens of one text; 0: the model's own limit."""
    priority: int = 0


class Rank(Struct, tag="rank", kw_only=True):
    """How well each document answers the query, by a model that was trained to say so: answered by `Ranked`."""

    request_id: str
    query: str
    documents: list[str]
    truncate: bool = True
    """Whether a document that does not fit beside the query loses its end; otherwise it is an error."""
    num_ctx: int = 0
    priority: int = 0


class Inspect(Struct, tag="inspect", kw_only=True):
    """How the engine stands: answered by `Inspected`."""

    request_id: str


class Cancel(Struct, tag="cancel", kw_only=True):
    request_id: str


class Shutdown(Struct, tag="shutdown"):
    """Finish nothing, free everything, exit 0."""


ToRunner = Load | Generate | Embed | Rank | Render | Tokenize | Detokenize | Evaluate | Inspect | Cancel | Shutdown


# ---- runner -> daemon ---------------------------------------------------------------------------------------------------------


class LoadProgress(Struct, tag="load_progress", kw_only=True):
    stage: str
    """'compiling kernels', 'packing weights', ..."""
    done: int
    total: int


class Loaded(Struct, tag="loaded", kw_only=True):
    architecture: str
    n_ctx_train: int
    n_vocab: int
    kv_tokens: int
    """Tokens the KV pool holds in all."""
    weight_bytes: int
    kv_bytes: int
    packed: bool
    """Whether the weights were repacked, or are read as they lie in the file."""
    isa: str
    num_thread: int
    num_thread_batch: int = 0
    has_template: bool
    capabilities: list[str]
    """In Ollama's words: "completion", "tools", "thinking", "insert", "vision", "embedding"; and "rerank"."""
    load_s: float
    n_embd: int = 0
    """Width of the vectors that Embed gives."""
    state_bytes: int = 0
    """What all slots of recurrent state may grow to; 0: the model has none."""
    n_layers: int = 0
    gpu_layers: int = 0
    """How many of them are on cards."""
    gpu_bytes: int = 0
    """Memory that they take there, KV blocks included."""
    gpu_note: str = ""
    """Why no layer is on a card, or fewer than were asked for."""
    cards: int = -1
    """How many there are to put layers on; -1: nobody looked."""


class Started(Struct, tag="started", kw_only=True):
    """The prompt was accepted."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    dropped_messages: int = 0
    dropped_tokens: int = 0
    near_miss: str = ""
    """Where a long prompt stopped agreeing with one that is cached, if much of it had to be read again for that."""


class TokenLogprob(Struct, kw_only=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class Logprob(Struct, kw_only=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float
    top: list[TokenLogprob] = []


class Piece(Struct, tag="piece", kw_only=True):
    """Text that can be shown: whole UTF-8 characters, no part of a stop string. May be empty when only logprobs are carried."""

    request_id: str
    text: str
    thinking: str = ""
    tool_calls: list[ToolCall] = []
    logprobs: list[Logprob] = []


class Finished(Struct, tag="finished", kw_only=True):
    request_id: str
    reason: FinishReason
    stop: str | None = None
    """The stop string that ended it, if one did."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seed: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    """From arrival in the runner to the first token."""
    context: list[int] = []
    """Prompt and answer as token ids."""
    dropped_tokens: int = 0
    """How many tokens the overflow policy `shift` took out of the middle while the answer grew."""
    passes: int = 0
    """Forward passes that brought tokens: fewer than completion_tokens where drafts came true."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    logprob: float = 0.0
    """With `score`: the sum over the answer's tokens, the end of the turn included."""
    thinking_tokens: int = 0
    """Of completion_tokens, those that were thinking, its marks included."""
    tool_problems: list[str] = []
    """Why what looked like a tool call came as text, and where a call's arguments break the tool's schema."""
    draft_saved_s: float = 0.0
    """Estimated time that drafts have saved, less what checking them took."""


class Failed(Struct, tag="failed", kw_only=True):
    """A request (or, with an empty id, the load) ended with an error; see errors.from_wire."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class Rendered(Struct, tag="rendered", kw_only=True):
    request_id: str
    text: str
    tokens: int


class Tokenized(Struct, tag="tokenized", kw_only=True):
    request_id: str
    tokens: list[int]


class Detokenized(Struct, tag="detokenized", kw_only=True):
    request_id: str
    text: str


class Evaluated(Struct, tag="evaluated", kw_only=True):
    """For `len(nll)` successive positions starting at `first`."""

    request_id: str
    first: int
    tokens: list[int]
    nll: list[float]
    """Negative log-likelihood of the token that follows each position (the text's last position has none)."""
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    logprobs: list[list[float]] = []
    """For the `ids` asked for."""


class Embedded(Struct, tag="embedded", kw_only=True):
    request_id: str
    n: int
    width: int
    data: bytes
    """float32, little-endian, (n, width)."""
    prompt_tokens: list[int]
    """Of each text, as read."""
    truncated: list[int] = []
    """Which texts lost their end."""


class Ranked(Struct, tag="ranked", kw_only=True):
    request_id: str
    scores: list[float]
    """Of each document, in the order given: the model's own score, higher is better."""
    prompt_tokens: list[int]
    truncated: list[int] = []


class Inspected(Struct, tag="inspected", kw_only=True):
    request_id: str
    running: int
    waiting: int
    kv_blocks: int
    """In all: free, cached and held by requests."""
    kv_blocks_held: int
    kv_blocks_cached: int
    block_tokens: int
    evicted_blocks: int
    """Cached blocks that have made room so far."""
    copied_blocks: int
    preemptions: int
    passes: int
    rows: int
    """Tokens that all passes together have read or made."""
    busy_s: float
    """Time spent in passes."""
    near_misses: list[str] = []
    """The latest few; see Started.near_miss."""
    state_slots: int = 0
    """Of recurrent state, in all: free, snapshots, and held by requests."""
    state_snapshots: int = 0
    state_slots_held: int = 0
    evicted_snapshots: int = 0
    """That have made room so far, other than with their blocks."""


FromRunner = (
    LoadProgress | Loaded | Started | Piece | Finished | Failed | Embedded | Ranked
    | Rendered | Tokenized | Detokenized | Evaluated | Inspected
)

_encoder = msgspec.msgpack.Encoder()
_to_runner: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)
_from_runner: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)


def encode(message: ToRunner | FromRunner) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_runner(frame: bytes) -> ToRunner:
    """Raises msgspec.ValidationError on anything that is no message for a runner."""
    return _to_runner.decode(frame)


def decode_from_runner(frame: bytes) -> FromRunner:
    """Raises msgspec.ValidationError on anything that is no message from a runner."""
    return _from_runner.decode(frame)
