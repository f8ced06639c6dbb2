"""A daemon for tests: in a thread of this process, on a port of its own, with a scripted model in real runner processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from localrun.daemon import management
from localrun.daemon import serve as serving
from localrun.daemon.app import create_app
from localrun.settings import Settings
from localrun.store import Store
from localrun.store.manifests import LAYER_TYPE, Layer
from localrun.store.names import Name
from tests import fakes
from tests.models.build import Builder, Tensor

CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_TEMPLATE = CHATML + "{% if tools %}{{ tools }}{% endif %}"
THINK_TEMPLATE = CHATML + "{% if enable_thinking %}<think>{% endif %}"


def tiny_gguf(
    template: str = CHATML, keys: dict[str, tuple[str, Any]] | None = None, tensors: list[Tensor] | None = None
) -> bytes:
    """A file with little but a header: what a fake runner is told to load, and what show tells of. keys: more of them, or others."""
    own: dict[str, tuple[str, Any]] = {
        "general.architecture": ("string", "llama"),
        "general.name": ("string", "tiny"),
        "llama.context_length": ("uint32", 4096),
        "llama.embedding_length": ("uint32", 64),
        "tokenizer.ggml.tokens": ("array[string]", [f"t{i}" for i in range(40)]),
        "tokenizer.chat_template": ("string", template),
    }
    listed: list[tuple[str | bytes, str, Any]] = [(name, kind, content) for name, (kind, content) in (own | (keys or {})).items()]
    return Builder(keys=listed, tensors=tensors or []).bytes()


@dataclass
class Daemon:
    """A running one."""

    url: str
    store: Store
    settings: Settings
    http: httpx.Client
    server: Any = field(repr=False)

    def add_model(self, name: str, gguf: bytes | None = None, **layers: Any) -> None:
        """Puts a model into the store. layers: template, system, license (text), params, messages (JSON)."""
        add_model(self.store, name, gguf, **layers)

    def lines(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All objects of an NDJSON reply."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all server-sent events of a reply; `[DONE]` as it is."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("\n\n")
        datas = [block.removeprefix("data: ") for block in response.text[:-2].split("\n\n")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    def loaded(self) -> list[dict[str, Any]]:
        """/api/ps."""
        found: list[dict[str, Any]] = self.http.get("/api/ps").json()["models"]
        return found


def add_model(store: Store, name: str, gguf: bytes | None = None, **layers: Any) -> None:
    """See Daemon.add_model."""
    data = gguf if gguf is not None else tiny_gguf()
    digest = store.blobs.put(data)
    made = [Layer(f"{LAYER_TYPE}model", digest, len(data))]
    for kind, content in layers.items():
        made.append(store.text_layer(kind, content) if isinstance(content, str) else store.json_layer(kind, content))
    store.commit(Name.parse(name), {"model_format": "gguf", "model_family": "llama", "model_type": "1M", "file_type": "F32"}, made)


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def daemon(folder: Path, load: Any = None, **settings: Any) -> Iterator[Daemon]:
    """A daemon with the model "tiny" in its store. load: a loader of tests.fakes; by default one that repeats what it is told."""
    chosen = Settings(port=0, models=folder / "models", cache=Path(os.environ["LOCALRUN_CACHE"]), **settings)
    store = Store(chosen.models)
    add_model(store, "tiny")
    app = create_app(chosen, store=store, load=load or fakes.load_scripted, warm=False)
    listener = serving.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    # What a busy machine's runner does not say in time is left out of /api/ps and /metrics: here everything is waited for.
    patience = pytest.MonkeyPatch()
    patience.setattr(management, "INSPECTION_S", 60.0)
    ready = threading.Event()
    server = serving.server_for(app, 0.0, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="daemon")
    thread.start()
    try:
        assert ready.wait(120), "the daemon did not start"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=180) as http:
            yield Daemon(f"http://127.0.0.1:{port}", store, chosen, http, server)
    finally:
        server.should_exit = True
        thread.join(120)
        listener.close()
        patience.undo()
        assert not thread.is_alive(), "the daemon did not end"


def load_crashing(load: Any, progress: Any) -> Any:
    """A model whose process dies in its fourth forward pass: three tokens have come by then, for it never ends its turn."""
    model = fakes.CrashingModel(after_passes=4)
    model._eog_bias = -1e6
    return fakes.parts_of(model)


def saying(text: str, **options: Any) -> Any:
    """A loader whose model says this."""
    return functools.partial(fakes.load_scripted, reply=text, **options)
