"""Requests of every kind that the OpenAPI document admits, and of kinds it does not: none is answered with a 5xx, and every refusal says
why in its dialect's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from localrun.api.fields import Body, use_of
from localrun.api.routes import ROUTES
from localrun.errors import DownloadFailed
from tests.daemon import serving
from tests.daemon.serving import Daemon, saying

EXAMPLES = 10
"""For each operation and mode."""

AWAY = ("keep_alive", "num_thread", "timeout")
"""Fields of which any value is right, and some take a new process, or answer with 504 because that is what they are for."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """No request leaves the machine."""

    def nobody(*anything: Any, **more: Any) -> None:
        raise DownloadFailed("there is no network here")

    with serving.daemon(tmp_path_factory.mktemp("any"), saying("word")) as running, pytest.MonkeyPatch.context() as patch:
        for name in ("pull", "push"):
            patch.setattr(type(running.store), name, nobody)
        yield running


@pytest.fixture(scope="module")
def document(served: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/openapi.json").json()
    return found


def tamed(body: Any, kind: type[Body] | None) -> Any:
    """The body, for a model that exists, and without what is refused: else next to nothing would be read."""
    if not isinstance(body, dict) or kind is None:
        return body
    away = {wire for wire, use, _ in use_of(kind).values() if use == "refused"} | set(AWAY)
    body = {name: value for name, value in body.items() if name not in away}
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if isinstance(body.get("options"), dict):
        body["options"] = {}
    return body


@pytest.mark.parametrize("mode", list(GenerationMode), ids=[mode.value for mode in GenerationMode])
@pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])
def test_no_request_is_answered_with_5xx(served: Daemon, document: dict[str, Any], route: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[route.path.replace(":path", "")][route.method]
    if mode is GenerationMode.NEGATIVE and route.body is None:
        return

    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), tame=st.booleans())
    def ask(case: Any, tame: bool) -> None:
        body = tamed(case.body, route.body) if tame or mode is GenerationMode.POSITIVE else case.body
        sent: dict[str, Any] = {}
        if isinstance(body, bytes):
            sent["content"] = body
        elif not isinstance(body, schemathesis.core.NotSet):
            sent["content"] = json.dumps(body).encode("utf-8", "surrogatepass")
        reply = served.http.request(route.method, case.formatted_path, **sent)
        downloads = route.path in ("/api/pull", "/api/push") and reply.status_code == 502
        assert reply.status_code < 500 or downloads, (reply.status_code, reply.text[:500], str(body)[:500])
        if reply.status_code >= 400 and route.method != "HEAD":
            said = reply.json()["error"] if reply.headers.get("content-type", "").startswith("application/json") else reply.text
            message = said if isinstance(said, str) else said["message"]
            assert message and "\n" not in message and "Traceback" not in message, reply.text

    ask()
