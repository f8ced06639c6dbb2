"""From a message to a job: renders and tokenizes the prompt, checks every field, applies the overflow policy. Runs beside the engine's
loop, so that a long prompt's tokenization holds up nobody. What a request asks for and is not there is refused by name, never ignored.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from localrun.engine.answer import Answer
from localrun.engine.bans import BannedStrings
from localrun.engine.beams import BeamSearch
from localrun.engine.draws import draw_seed
from localrun.engine.images import MOST_IMAGES, PlacedImage, form_of, place
from localrun.engine.jobs import Evaluation, Generation
from localrun.engine.parts import Parts
from localrun.engine.sampler import Sampler
from localrun.engine.sequence import SINK_TOKENS, Sequence
from localrun.engine.speculate import Speculator
from localrun.errors import BadRequest, ContextOverflow, Unsupported
from localrun.messages import Detokenize, Detokenized, Evaluate, Generate, Render, Rendered, Sampling, Tokenize, Tokenized
from localrun.text.arguments import ArgumentCheck
from localrun.text.callgrammar import call_grammar
from localrun.text.harmony import BRIDGE as HARMONY_BRIDGE
from localrun.text.harmony import CALL as HARMONY_CALL
from localrun.text.harmony import FINAL as HARMONY_FINAL
from localrun.text.harmony import THINKING as HARMONY_THINKING
from localrun.text.harmony import is_harmony
from localrun.text.prompt import Prompt, build_prompt
from localrun.text.reply import ReplyParser, reply_parser
from localrun.text.thinking import thinking_marks
from localrun.text.toolformats import tool_schemas

if TYPE_CHECKING:
    from localrun.engine.adapters import AdapterShelf
    from localrun.engine.gate import Marks, ThinkingGate
    from localrun.engine.grammar import Constraint, GrammarCompiler
    from localrun.text.template import ChatTemplate

log = logging.getLogger(__name__)

_EVALUATED_BYTES = 64 << 20
"""Most bytes of logits that one step of an evaluation asks for."""
_MOST_LOGPROBS = 1000
_LEVELS = {"minimal": 128, "low": 512, "medium": 2048, "high": 8192}
"""Tokens of thinking at each level, for templates that do not tell the model of levels; "max": no bound."""
_MOST_STRINGS = 64
_MOST_DRAFTED = 24
MOST_BEAMS = 32
_CONTEXTS = 10
"""An answer that may shift its context and has no other bound ends after this many contexts, as Ollama's does."""


class Intake:
    """`pool_tokens`: what the KV pool holds in all. `adapters`: the engine's. Safe to use from one thread besides the engine's."""

    def __init__(
        self,
        parts: Parts,
        pool_tokens: int,
        adapters: AdapterShelf,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_sessions: bool = False,
    ) -> None:
        self._parts = parts
        self._keeps_sessions = keeps_sessions
        self._tokenizer = parts.tokenizer
        self._n_vocab = parts.model.info.n_vocab
        self._most_tokens = min(parts.model.info.n_ctx_train or pool_tokens, pool_tokens)
        self._adapters = adapters
        self._form = form_of(parts.encoder) if parts.encoder is not None else None
        self._clock = clock
        self._grammars: GrammarCompiler | None = None
        self._making = threading.Lock()
        self._known_breakers: dict[tuple[str, ...], dict[int, bool]] = {}

    def generation(self, request: Generate) -> Generation:
        """Raises BadRequest, ContextOverflow, Unsupported, TemplateError."""
        arrival = self._clock()
        self._refuse_what_is_missing(request)
        check_sampling(request.sampling, self._n_vocab)
        context = self.context_length(request)
        begun = self._decoders_part(request)
        prompt = self.prompt(request, context - len(begun))
        tokens = prompt.tokens + begun
        encoded = len(tokens) - 1 if begun else 0
        images = self._placed(prompt)
        shifts = request.overflow in ("shift", "sinks") and not images
        if not (request.deadline_s >= 0 and math.isfinite(request.deadline_s)):
            raise BadRequest(f"deadline_s must be 0 or more, it is {request.deadline_s:g}", param="deadline_s")
        deadline = arrival + request.deadline_s if request.deadline_s else None
        seq = Sequence(
            request.request_id,
            tokens,
            context,
            arrival,
            priority=request.priority,
            deadline=deadline,
            may_reuse=not encoded,
            whole=encoded,
            encoded=encoded,
        )
        seq.images = images
        given = request.sampling.seed
        seed = draw_seed() if given is None or given < 0 else given
        breakers = self._breakers(request.sampling.dry_sequence_breakers)
        sampler = Sampler(request.sampling, seed, self._tokenizer.eog_ids, breakers)
        guesser = None
        if self._parts.draft is not None and request.draft_num_predict and not images:  # it does not see them
            guesser = Sampler(msgspec.structs.replace(request.sampling, mirostat=0), seed, self._tokenizer.eog_ids, breakers)
        if request.session and (reason := self._cannot_keep(request)):
            raise Unsupported(f"session: {reason}", param="session")
        if request.draft_rule == "ratio" and request.sampling.mirostat:
            raise Unsupported("draft_rule: ratio cannot be combined with mirostat, whose cut follows its own draws", param="draft_rule")
        job = Generation(
            seq,
            sampler,
            Answer(
                self._tokenizer,
                _checked_strings(request.stop, "stop"),
                self._parser(request, prompt),
                ArgumentCheck(request.tools) if request.tools else None,
            ),
            BannedStrings(_checked_strings(request.sampling.banned_strings, "banned_strings"), self._tokenizer.piece),
            self._tokenizer.eog_ids,
            n_logprobs=request.logprobs,
            scores=request.score,
            max_tokens=_CONTEXTS * context if shifts and request.max_tokens < 0 else request.max_tokens,
            shifts=shifts,
            prepares=shifts and request.overflow == "sinks",
            keeps=request.session,
            constraint=self._constraint(request, prompt),
            speculator=_speculator(request.draft_num_predict, prompt.tokens),
            guesser=guesser,
            by_ratio=request.draft_rule == "ratio",
            dropped_messages=prompt.dropped_messages,
            dropped_tokens=prompt.dropped_tokens,
        )
        self._take_adapters(seq, request)
        return job

    def search(self, request: Generate) -> BeamSearch:
        """As `generation`, of a request with num_beams above 1."""
        if not 1 <= request.num_beams <= MOST_BEAMS:
            raise BadRequest(f"num_beams must be from 1 to {MOST_BEAMS}, it is {request.num_beams}", param="num_beams")
        if not math.isfinite(request.length_penalty):
            raise BadRequest(f"length_penalty must be a number, it is {request.length_penalty:g}", param="length_penalty")
        excluded = {
            "format": request.format not in (None, ""),
            "logprobs": request.logprobs is not None,
            "banned_strings": bool(request.sampling.banned_strings),
            "session": request.session,
            f'overflow "{request.overflow}"': request.overflow in ("shift", "sinks"),
        }
        job = self.generation(request)
        excluded["images"] = bool(job.seq.images)
        excluded["a required tool call or a bound on thinking"] = job.constraint is not None
        asked = [name for name, is_asked in excluded.items() if is_asked]
        if asked:
            self._adapters.release(job.seq.adapter)
            raise Unsupported(f"num_beams: beam search cannot be combined with {' and '.join(asked)}", param="num_beams")
        stops = _checked_strings(request.stop, "stop")
        tail = max((len(stop.encode()) for stop in stops), default=0) + 4

        def ends(tokens: list[int]) -> bool:
            text = self.text(tokens[-tail:]) if stops else ""
            return any(stop in text for stop in stops)

        return BeamSearch(
            job.seq,
            request.num_beams,
            request.length_penalty,
            job.answer,
            self._tokenizer.eog_ids,
            job.max_tokens,
            ends,
            job.dropped_messages,
            job.dropped_tokens,
        )

    def _placed(self, prompt: Prompt) -> list[PlacedImage]:
        """The prompt's images, decoded."""
        encoder = self._parts.encoder
        if not prompt.images or encoder is None:
            return []
        if len(prompt.images) > MOST_IMAGES:
            raise BadRequest(f"images: {len(prompt.images)} in one prompt; at most {MOST_IMAGES} are taken", param="images")
        return [place(image.data, start, encoder) for start, image in prompt.images]

    def _take_adapters(self, seq: Sequence, request: Generate | Evaluate) -> None:
        """The last thing: from here on the job has something to give back."""
        if not math.isfinite(request.adapter_scale):
            raise BadRequest(f"adapter_scale must be a number, it is {request.adapter_scale:g}", param="adapter_scale")
        seq.adapter_scale = request.adapter_scale
        if seq.adapter_scale:
            seq.adapter = self._adapters.take(request.adapters)

    def _decoders_part(self, request: Generate) -> list[int]:
        """Of an encoder-decoder: what closes a text for its encoder, unless the tokens are given, and the decoder's first token."""
        start = self._parts.model.info.decoder_start
        if start < 0:
            return []
        return [*(self._tokenizer.around()[1] if request.prompt_tokens is None else []), start]

    def _cannot_keep(self, request: Generate) -> str:
        """Why this request's K/V cannot be kept on disk; empty: they can."""
        if self._parts.model.info.state_bytes:
            return "this model has recurrent state, which is not kept on disk"
        if self._parts.model.info.decoder_start >= 0:
            return "what an encoder has read is not kept on disk"
        if request.adapters:
            return "K/V that adapters have a part in are not kept on disk"
        if request.images or any(message.images for message in request.messages or []):
            return "K/V of images are not kept on disk"
        return "" if self._keeps_sessions else "nothing is kept on disk here (LOCALRUN_SESSION_SIZE is 0)"

    def context_length(self, request: Generate) -> int:
        """Most tokens that the request's prompt and answer may hold together."""
        if request.num_ctx < 0:
            raise BadRequest(f"num_ctx must not be negative, it is {request.num_ctx}", param="num_ctx")
        return min(request.num_ctx, self._most_tokens) if request.num_ctx else self._most_tokens

    def prompt(self, request: Generate, context: int) -> Prompt:
        """The prompt under the request's overflow policy; at least one token."""
        try:
            prompt = build_prompt(request, self._tokenizer, self._parts.template, context, self._form)
        except ContextOverflow:
            plain = request.messages is None and not request.images and (request.raw or request.prompt_tokens is not None)
            if not plain or request.overflow not in ("shift", "sinks"):
                raise
            prompt = self._shifted(request, context)
        if not prompt.tokens:
            raise BadRequest("the prompt is empty", param="prompt")
        return prompt

    def _shifted(self, request: Generate, context: int) -> Prompt:
        """A prompt that has no whole messages to drop: its first few tokens, and as many of the last as leave room for an answer."""
        whole = build_prompt(request, self._tokenizer, self._parts.template, 1 << 30, self._form)
        kept = max(1, context - max(1, context // 8))
        first = min(SINK_TOKENS, kept // 2)
        tokens = whole.tokens[:first] + whole.tokens[len(whole.tokens) - (kept - first) :]
        return Prompt(tokens, self.text(tokens), dropped_tokens=len(whole.tokens) - len(tokens))

    def rendered(self, message: Render) -> Rendered:
        request = message.request
        self._refuse_what_is_missing(request)
        prompt = self.prompt(request, self.context_length(request))
        return Rendered(request_id=request.request_id, text=prompt.text, tokens=len(prompt.tokens))

    def tokenized(self, message: Tokenize) -> Tokenized:
        tokens = self._tokenizer.encode(message.text, add_special=message.add_special, parse_special=message.parse_special)
        return Tokenized(request_id=message.request_id, tokens=tokens)

    def detokenized(self, message: Detokenize) -> Detokenized:
        return Detokenized(request_id=message.request_id, text=self.text(self._checked_ids(message.tokens, "tokens")))

    def evaluation(self, message: Evaluate) -> Evaluation:
        """Raises BadRequest, ContextOverflow."""
        if not self._parts.model.info.causal:
            raise Unsupported("this model gives no likelihoods: its tokens see those behind them")
        if self._parts.model.info.decoder_start >= 0:
            raise Unsupported("this model gives no likelihoods of a text: it is an encoder-decoder, which needs an input besides")
        if (message.text is None) == (message.tokens is None):
            raise BadRequest("exactly one of text and tokens must be given", param="text")
        tokens = self._tokenizer.encode(message.text) if message.text is not None else self._checked_ids(message.tokens or [], "tokens")
        if not tokens:
            raise BadRequest("there is nothing to evaluate", param="text")
        if len(tokens) > self._most_tokens:
            raise ContextOverflow(len(tokens), self._most_tokens)
        if message.top < 0:
            raise BadRequest(f"top must not be negative, it is {message.top}", param="top")
        if message.ids is not None:
            if len(message.ids) != len(tokens):
                raise BadRequest(f"ids has {len(message.ids)} rows for {len(tokens)} tokens", param="ids")
            for row in message.ids:
                self._checked_ids(row, "ids")
        seq = Sequence(
            message.request_id,
            tokens,
            len(tokens),
            self._clock(),
            priority=1,
            may_reuse=False,
            wants_all_rows=True,
            max_chunk=max(1, min(512, _EVALUATED_BYTES // (4 * self._n_vocab))),
        )
        self._take_adapters(seq, message)
        return Evaluation(seq, top=message.top, ids=message.ids)

    def _refuse_what_is_missing(self, request: Generate) -> None:
        """What the model, not the engine, cannot do."""
        if "completion" not in self._parts.capabilities:
            raise Unsupported(f"this model does not generate text; it is for {' and '.join(self._parts.capabilities)}")
        if request.overflow in ("shift", "sinks") and self._parts.model.info.decoder_start >= 0:
            raise Unsupported("overflow: an encoder reads the prompt as a whole, so nothing of it can be dropped later", param="overflow")
        template = self._template(request)
        if request.think and not template.supports_thinking:
            raise Unsupported("think: this model does not support thinking", param="think")
        if request.tools and not template.supports_tools:
            raise Unsupported("tools: this model does not support tools", param="tools")
        if request.logprobs is not None and not 0 <= request.logprobs <= _MOST_LOGPROBS:
            raise BadRequest(f"logprobs must be from 0 to {_MOST_LOGPROBS}, it is {request.logprobs}", param="logprobs")

    def _is_chat(self, request: Generate) -> bool:
        """Whether the prompt went through a template that has a say in how the reply is written."""
        return not request.raw and request.prompt_tokens is None and not self._template(request).fallback

    def _template(self, request: Generate) -> ChatTemplate:
        return self._parts.template if request.template is None else self._parts.template.with_source(request.template)

    def _parser(self, request: Generate, prompt: Prompt) -> ReplyParser | None:
        if not self._is_chat(request):
            return None
        parser = reply_parser(self._template(request), prompt.text, request.tools)
        return parser if parser.marks else None

    def _constraint(self, request: Generate, prompt: Prompt) -> Constraint | ThinkingGate | None:
        """What `format` or `must_call` asks for; of a model that thinks first, of what comes after, and for how long it may think."""
        template = self._template(request)
        thinks = self._is_chat(request) and (is_harmony(template.source) or thinking_marks(template.source) is not None)
        constraint = None
        if request.must_call:
            constraint = self._grammars_of_this_model().compile_calls(self._call_grammar(request, thinks))
        elif request.format:
            constraint = self._grammars_of_this_model().compile(request.format)
        budget = self._thinking_budget(request, template)
        if not thinks or (constraint is None and budget < 0):
            return constraint
        from localrun.engine.gate import ThinkingGate

        lead = "" if constraint is None else HARMONY_CALL if request.must_call else HARMONY_FINAL
        marks = _gate_marks(template.source, lead)
        begun = prompt.text.rstrip().endswith(marks.start.rstrip())
        if not begun and request.think is False and not marks.lead:
            return constraint
        return ThinkingGate(constraint, self._tokenizer, self._n_vocab, marks, begun=begun, budget=budget)

    @staticmethod
    def _thinking_budget(request: Generate, template: ChatTemplate) -> int:
        """Below 0: none."""
        if request.thinking_budget >= 0 or not isinstance(request.think, str):
            return request.thinking_budget
        return -1 if template.knows_levels else _LEVELS.get(request.think, -1)

    def _call_grammar(self, request: Generate, thinks: bool) -> str:
        """Raises BadRequest, Unsupported."""
        if request.format:
            raise BadRequest("format and a tool call that must come exclude each other", param="tool_choice")
        tools = request.tools or []
        unknown = next((name for name in request.must_call if name not in tool_schemas(tools)), None)
        if unknown is not None:
            raise BadRequest(f"tool_choice: there is no tool {unknown!r}", param="tool_choice")
        template = self._template(request)
        source = template.tool_source if template.tool_source is not None else template.source
        return call_grammar(
            source, tools, request.must_call, self._tokenizer, several=request.parallel_tool_calls, after_thinking=thinks
        )

    def _grammars_of_this_model(self) -> GrammarCompiler:
        with self._making:
            return self._made_grammars()

    def prepare(self) -> None:
        """What takes long and some request may need, made while nobody waits; see GrammarCompiler.prepare."""
        if not self._parts.model.info.causal:
            return
        try:
            self._grammars_of_this_model().prepare()
        except Exception as error:  # whoever needs it is told why
            log.warning("structured output is not prepared: %s", error)

    def _made_grammars(self) -> GrammarCompiler:
        if self._grammars is None:
            from localrun.engine.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(self._tokenizer, self._n_vocab)
        return self._grammars

    def _breakers(self, strings: tuple[str, ...]) -> Callable[[int], bool]:
        """Whether a token's text holds one of the strings; looked up once for each token that is asked about."""
        wanted = [string.encode("utf-8") for string in _checked_strings(strings, "dry_sequence_breakers")]
        if len(self._known_breakers) > _MOST_STRINGS:
            self._known_breakers.clear()
        known = self._known_breakers.setdefault(strings, {})

        def is_breaker(token: int) -> bool:
            answer = known.get(token)
            if answer is None:
                piece = self._tokenizer.piece(token, special=True)
                answer = known[token] = token in self._tokenizer.eog_ids or any(string in piece for string in wanted)
            return answer

        return is_breaker

    def _checked_ids(self, ids: list[int], param: str) -> list[int]:
        for token in ids:
            if not 0 <= token < self._n_vocab:
                raise BadRequest(f"{param}: {token} is no token of this model, which has {self._n_vocab}", param=param)
        return ids

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids).decode("utf-8", "replace")


def _gate_marks(source: str, lead: str) -> Marks:
    """How thinking and answer are told apart in the replies to a template. lead: what begins a harmony answer under a grammar, if any."""
    from localrun.engine.gate import Marks

    if is_harmony(source):
        start, end = HARMONY_THINKING
        return Marks(start, end, end if lead else end + HARMONY_BRIDGE + HARMONY_FINAL, lead, HARMONY_BRIDGE)
    marks = thinking_marks(source)
    assert marks is not None
    return Marks(marks.start, marks.end, f"\n{marks.end}\n\n")


def _speculator(most: int, tokens: list[int]) -> Speculator | None:
    if not most:
        return None
    speculator = Speculator(_MOST_DRAFTED if most < 0 else most)
    speculator.index(tokens)  # here, where the time it takes for a long prompt is nobody else's
    return speculator


def _checked_strings(strings: Iterable[str], param: str) -> list[str]:
    strings = [string for string in strings if string]
    if len(strings) > _MOST_STRINGS:
        raise BadRequest(f"{param}: at most {_MOST_STRINGS} strings are taken, there are {len(strings)}", param=param)
    return strings


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("repeat_penalty", 1e-6, math.inf),
    ("repeat_last_n", -1, math.inf),
    ("top_n_sigma", -math.inf, math.inf),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dry_multiplier", 0.0, math.inf),
    ("dry_base", 1.0, math.inf),
    ("dry_allowed_length", 1, math.inf),
    ("dry_penalty_last_n", -1, math.inf),
    ("mirostat", 0, 2),
    ("mirostat_tau", 0.0, math.inf),
    ("mirostat_eta", 0.0, 1.0),
)


def check_sampling(options: Sampling, n_vocab: int) -> None:
    """Raises BadRequest that names the first option outside its range."""
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if not (low <= value <= high and math.isfinite(value)):
            wanted = "a number" if low == -math.inf else f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
            raise BadRequest(f"{name} must be {wanted}, it is {value:g}", param=name)
    for token, bias in options.logit_bias.items():
        if not 0 <= token < n_vocab:
            raise BadRequest(f"logit_bias: {token} is no token of this model, which has {n_vocab}", param="logit_bias")
        if not math.isfinite(bias):
            raise BadRequest(f"logit_bias of {token} is not a number", param="logit_bias")
