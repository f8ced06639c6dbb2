"""The application: routes, their handlers, the guard in front, and what is started and ended with it. Knows who is where, and nothing of
what they do."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse

from localrun import __version__
from localrun.api.routes import ROUTES, Route
from localrun.daemon import evaluation, generation, management, runners, storage, vectors
from localrun.daemon.exchange import Exchange, Handler
from localrun.daemon.guard import Guard, error_shape
from localrun.daemon.loader import Loader
from localrun.daemon.runners import LoadHook
from localrun.daemon.services import Activity, Services
from localrun.errors import LocalrunError, NotFound
from localrun.settings import Settings
from localrun.store import Store
from localrun.store.hub import Web

log = logging.getLogger(__name__)


class MethodNotAllowed(LocalrunError):
    status = 405
    code = "method_not_allowed"


def create_app(settings: Settings, *, store: Store | None = None, load: LoadHook = None, warm: bool = True) -> FastAPI:
    """The daemon as an ASGI application.

    store: in place of the one that settings name. load: what runners load models with, in place of the real thing (tests); picklable.
    warm: have the process that runners start from do its imports at once, so that the first load is quick.
    """
    activity = Activity()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models = store or Store(settings.models, Web(settings.hf_endpoint, settings.hf_token), settings.pull_rate)
        services = Services(settings, models, Loader(settings, load), activity)
        app.state.services = services
        if warm:
            await services.in_thread(runners.warm_up)
        if not settings.noprune:
            services.long_job(services.prune)
        try:
            yield
        finally:
            await services.close()

    app = _App(
        title="localrun",
        version=__version__,
        summary="Language models on one's own machine: Ollama's dialect and OpenAI's.",
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers={HTTPException: _no_such_route},
        redirect_slashes=False,
    )
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _endpoint(app, route),
            methods=route.methods,
            summary=route.summary,
            operation_id=re.sub(r"\W+", "_", f"{route.method}{route.path}").strip("_").lower(),
            tags=[route.family],
            openapi_extra=_request_body(route),
            response_model=None,
        )
    app.state.activity = activity
    app.add_middleware(Guard, settings=settings, activity=activity)
    return app


def handler_of(route: Route) -> Handler:
    """The function that a route names."""
    for module in (generation, management, evaluation, storage, vectors):
        found = getattr(module, route.handler, None)
        if found is not None:
            handler: Handler = found
            return handler
    raise LookupError(f"no handler {route.handler!r} for {route.method} {route.path}")


def _endpoint(app: FastAPI, route: Route) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    handler = handler_of(route)

    async def endpoint(request: Request) -> Response:
        return Exchange(app.state.services, route, handler, request)

    return endpoint


def _request_body(route: Route) -> dict[str, Any] | None:
    if route.raw:
        schema: dict[str, Any] = {"type": "string", "format": "binary"}
        return {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": schema}}}}
    if route.body is None:
        return None
    schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class _App(FastAPI):
    """FastAPI whose document knows the bodies, which are read by exchange.py and not by FastAPI."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            bodies = {route.body for route in ROUTES if route.body is not None}
            wanted = [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)]
            _, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            self.openapi_schema = document
        return self.openapi_schema


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the words of each dialect."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/v1/"):
        if error.status_code == 405:
            problem: LocalrunError = MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}")
        else:
            problem = NotFound(f"there is no {request.url.path}")
        return JSONResponse(error_shape(request.url.path)(problem), problem.status, headers=dict(error.headers or {}))
    text = "405 method not allowed" if error.status_code == 405 else "404 page not found"
    return PlainTextResponse(text, error.status_code, headers=dict(error.headers or {}))
