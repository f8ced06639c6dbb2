"""What a runner is made of: a model, a tokenizer and a template. Only `load_parts` knows that they come from a file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from localrun.errors import BadRequest, LoadFailed, LocalrunError, ModelFileRejected
from localrun.messages import Load
from localrun.models.errors import ModelFileError
from localrun.models.model import LoadOptions, Model, Progress

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from localrun.engine.images import Encoder
    from localrun.text.template import ChatTemplate
    from localrun.text.tokenizer import Tokenizer


@dataclass
class Parts:
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    encoder: Encoder | None = None
    """Makes rows of images, for a model that sees."""
    draft: Model | None = None
    """Guesses ahead for the model; has its vocabulary."""
    pair_template: str = ""
    """How a model that ranks reads a query and a document, with {query} and {document} in it; empty: as its vocabulary puts two texts."""

    @property
    def capabilities(self) -> list[str]:
        """What a client may ask for, in Ollama's words."""
        info = self.model.info
        if info.pooling == "rank":
            return ["rerank"]
        if not info.causal or info.pooling:
            return ["embedding"]
        able = {
            "tools": self.template.supports_tools,
            "thinking": self.template.supports_thinking,
            "vision": self.encoder is not None,
        }
        return ["completion", *(name for name, has in able.items() if has)]


Loader = Callable[[Load, Progress], Parts]

_UNUSED_TOKENS = 512
"""By which vocabularies of one family differ at most: padding of the embedding table to a round number."""


def load_parts(load: Load, progress: Progress) -> Parts:
    """Everything from the model file. Raises ModelFileError, LocalrunError, or what the kernels raise for want of memory."""
    from localrun.kernels_cpu.library import CompileError
    from localrun.models.gguf import open_gguf
    from localrun.models.load import load_model
    from localrun.text.template import chat_template_for
    from localrun.text.tokenizer import load_tokenizer

    path = Path(load.path)
    with open_gguf(path) as gguf:
        tokenizer = load_tokenizer(gguf, Path(load.cache_dir) if load.digest else None, load.digest)
        template = chat_template_for(gguf, load.template)
        pair_template = gguf.metadata.get("tokenizer.chat_template.rerank")
        n_embd = int(gguf.metadata.get(f"{gguf.architecture}.embedding_length", 0))
    options = LoadOptions(
        n_threads=load.num_thread,
        n_threads_batch=load.num_thread_batch,
        tune=load.tune,
        n_ctx=load.num_ctx,
        max_batch=load.num_batch,
        kv_type=load.kv_cache_type,
        cache_dir=load.cache_dir,
        isa=load.isa,
        images=bool(load.projector),
        gpu_layers=load.gpu_layers,
    )
    with contextlib.ExitStack() as loaded:
        try:
            model = load_model(path, options, progress)
            loaded.callback(model.close)
            if load.draft_path and model.info.state_bytes:
                raise BadRequest(
                    f"draft: a model of the kind {model.info.architecture} cannot take guesses back, so none are made for it; load it "
                    "without",
                    param="draft",
                )
            encoder = _load_encoder(load, n_embd, replace(options, n_threads=model.info.n_threads), progress) if load.projector else None
            if encoder is not None:
                loaded.callback(encoder.close)
            draft = _load_draft(load, tokenizer, replace(options, images=False), progress) if load.draft_path else None
        except (CompileError, ValueError) as error:
            raise LoadFailed(str(error)) from error
        loaded.pop_all()
    return Parts(model, tokenizer, template, encoder, draft, pair_template if isinstance(pair_template, str) else "")


def _load_encoder(load: Load, n_embd: int, options: LoadOptions, progress: Progress) -> Encoder:
    """Raises ModelFileError, LoadFailed."""
    from localrun.models.vision import load_vision

    encoder = load_vision(load.projector, n_embd, options, progress)
    if encoder.n_tokens > options.max_batch:
        encoder.close()
        raise LoadFailed(f"an image takes {encoder.n_tokens} tokens, which come in one pass; num_batch is {options.max_batch}")
    return encoder


def _load_draft(load: Load, tokenizer: Tokenizer, options: LoadOptions, progress: Progress) -> Model:
    """Raises BadRequest when it has another vocabulary, and what `load_parts` raises."""
    from localrun.models.gguf import open_gguf
    from localrun.models.load import load_model
    from localrun.text.tokenizer import load_tokenizer

    with open_gguf(Path(load.draft_path)) as gguf:
        own = load_tokenizer(gguf, Path(load.cache_dir) if load.draft_digest else None, load.draft_digest)
    check_same_vocabulary(tokenizer, own)
    model = load_model(load.draft_path, replace(options, gpu_layers=0), progress)
    if model.info.state_bytes or not model.info.causal or model.info.decoder_start >= 0:
        model.close()
        raise BadRequest(f"draft: a model of the kind {model.info.architecture} cannot take guesses back; choose another", param="draft")
    return model


def check_same_vocabulary(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Raises BadRequest unless the draft model's tokens are the model's, but for unused ones at the end."""
    for token in range(min(tokenizer.n_vocab, draft.n_vocab)):
        theirs, ours = draft.piece(token, special=True), tokenizer.piece(token, special=True)
        if theirs != ours:
            raise BadRequest(
                f"draft: the draft model has another vocabulary: its token {token} is {theirs!r}, the model's is {ours!r}; "
                "choose a smaller model of the same family",
                param="draft",
            )
    if abs(tokenizer.n_vocab - draft.n_vocab) > _UNUSED_TOKENS or tokenizer.eog_ids != draft.eog_ids:
        raise BadRequest(
            f"draft: the draft model has another vocabulary, of {draft.n_vocab} tokens where the model has {tokenizer.n_vocab}, or ends "
            "its turns with other tokens; choose a smaller model of the same family",
            param="draft",
        )


def resolve_loader(loader: Loader | str | None) -> Loader:
    """The loader itself; `"package.module:function"` is imported; None is `load_parts`."""
    if loader is None:
        return load_parts
    if isinstance(loader, str):
        module, _, name = loader.partition(":")
        found: Loader = getattr(import_module(module), name)
        return found
    return loader


def as_localrun_error(error: Exception, what: str) -> LocalrunError:
    """The error to report for whatever went wrong in the layers below: the one place where theirs become ours.

    What is nobody's fault but ours is logged, with `what` was being done.
    """
    if isinstance(error, LocalrunError):
        return error
    if isinstance(error, ModelFileError):
        return ModelFileRejected(str(error))
    if isinstance(error, MemoryError):
        return LoadFailed("not enough memory for this model; close something, or choose a smaller model or num_ctx")
    if isinstance(error, OSError):
        return LoadFailed(f"{error.strerror or type(error).__name__}: {error.filename or 'the model file'}")
    log.error("%s failed", what, exc_info=error)
    return LocalrunError(f"internal error in the runner: {type(error).__name__}: {' '.join(str(error).split())}")
