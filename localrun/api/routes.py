"""Every route of the daemon, on one screen. The handler is named here and found in localrun.daemon; `body` is what the request must hold
(None: nothing is read); the family decides how an error is written. docs/api.md and the OpenAPI document are made from this list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localrun.api import anthropic_schema, evaluate, openai_schema, responses_schema, schema, storage, vectors_schema
from localrun.api.fields import Body

Family = Literal["ollama", "openai", "anthropic"]


@dataclass(frozen=True)
class Route:
    """One path and what happens there."""

    method: str
    path: str
    handler: str
    family: Family
    body: type[Body] | None
    summary: str
    raw: bool = False
    """The body is bytes that the handler reads itself."""

    @property
    def methods(self) -> list[str]:
        return [self.method]


def _route(methods: str, path: str, handler: str, family: Family, body: type[Body] | None, summary: str, raw: bool = False) -> list[Route]:
    return [Route(method, path, handler, family, body, summary, raw) for method in methods.split()]


ROUTES: list[Route] = [
    *_route("GET HEAD", "/", "root", "ollama", None, "Says that the server is there."),
    *_route("GET HEAD", "/api/version", "version", "ollama", None, "Version of the API that is spoken, and of localrun."),
    *_route("GET HEAD", "/api/tags", "tags", "ollama", None, "Models in the store, the latest changed first."),
    *_route("GET", "/api/ps", "ps", "ollama", None, "Models in memory."),
    *_route("POST", "/api/show", "show", "ollama", schema.ShowBody, "Everything about one model."),
    *_route("POST", "/api/generate", "generate", "ollama", schema.GenerateBody, "Answers one prompt."),
    *_route("POST", "/api/chat", "chat", "ollama", schema.ChatBody, "Answers a conversation."),
    *_route("POST", "/api/tokenize", "tokenize", "ollama", schema.TokenizeBody, "A text as tokens."),
    *_route("POST", "/api/detokenize", "detokenize", "ollama", schema.DetokenizeBody, "Tokens as text."),
    *_route("POST", "/api/evaluate", "evaluate", "ollama", evaluate.EvaluateBody, "How likely the model finds a text."),
    *_route("POST", "/api/pull", "pull", "ollama", schema.PullBody, "Brings a model into the store."),
    *_route("POST", "/api/create", "create", "ollama", schema.CreateBody, "Makes a model from another one or from files."),
    *_route("POST", "/api/push", "push", "ollama", schema.PushBody, "Sends a model to a registry."),
    *_route("POST", "/api/plan", "plan", "ollama", storage.PlanBody, "What a model will take and give here, from its header alone."),
    *_route("POST", "/api/export", "export", "ollama", storage.ExportBody, "Models as one stream of bytes."),
    *_route("POST", "/api/import", "import_models", "ollama", None, "Takes in the models of such a stream.", raw=True),
    *_route("POST", "/api/check", "check", "ollama", storage.CheckBody, "Compares the store's files with their digests."),
    *_route("GET", "/api/partials", "partials", "ollama", None, "Interrupted downloads."),
    *_route("DELETE", "/api/partials", "remove_partials", "ollama", storage.PartialsBody, "Forgets interrupted downloads."),
    *_route("POST", "/api/copy", "copy", "ollama", schema.CopyBody, "Gives a model a second name."),
    *_route("DELETE", "/api/delete", "delete", "ollama", schema.ModelBody, "Removes a model, and the files that no other model needs."),
    *_route("HEAD", "/api/blobs/{digest}", "blob_exists", "ollama", None, "Whether a file is in the store."),
    *_route("POST", "/api/blobs/{digest}", "blob_upload", "ollama", None, "Brings a file into the store, for /api/create.", raw=True),
    *_route("POST", "/api/embed", "embed", "ollama", vectors_schema.EmbedBody, "Texts as vectors."),
    *_route("POST", "/api/embeddings", "embeddings", "ollama", vectors_schema.EmbeddingsBody, "One text as a vector."),
    *_route("GET", "/api/status", "status", "ollama", None, "That there is no cloud."),
    *_route("POST", "/api/me", "no_account", "ollama", None, "That there are no accounts."),
    *_route("POST", "/api/signout", "no_account", "ollama", None, "That there are no accounts."),
    *_route("GET", "/v1/models", "v1_models", "openai", None, "Models in the store."),
    *_route("GET", "/v1/models/{model:path}", "v1_model", "openai", None, "One model of the store."),
    *_route("POST", "/v1/chat/completions", "v1_chat", "openai", openai_schema.ChatCompletionBody, "Answers a conversation."),
    *_route("POST", "/v1/completions", "v1_completions", "openai", openai_schema.CompletionBody, "Continues a text."),
    *_route("POST", "/v1/embeddings", "v1_embeddings", "openai", vectors_schema.EmbeddingBody, "Texts or tokens as vectors."),
    *_route("POST", "/v1/rerank", "rerank", "openai", vectors_schema.RerankBody, "How well documents answer a query."),
    *_route("POST", "/rerank", "rerank", "openai", vectors_schema.RerankBody, "The same, where other servers have it."),
    *_route("POST", "/v1/audio/transcriptions", "not_there", "openai", None, "Not supported yet."),
    *_route("POST", "/v1/responses", "v1_responses", "openai", responses_schema.ResponsesBody, "Answers a conversation, in items."),
    *_route("POST", "/v1/messages", "v1_messages", "anthropic", anthropic_schema.MessagesBody, "Answers a conversation, Anthropic's way."),
    *_route("POST", "/v1/messages/count_tokens", "count_tokens", "anthropic", anthropic_schema.CountTokensBody, "Tokens of a prompt."),
    *_route("GET HEAD", "/health", "health", "ollama", None, "Whether the server works."),
    *_route("GET", "/metrics", "metrics", "ollama", None, "Figures for Prometheus."),
]
