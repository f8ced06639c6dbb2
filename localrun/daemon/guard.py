"""Who may talk to the daemon: the Host header (DNS rebinding), the Origin header (foreign web pages), API keys; and CORS for those who may.

Every request passes here before any route. Knows headers only.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localrun import __version__
from localrun.api import anthropic, ollama, openai
from localrun.daemon.services import Activity
from localrun.errors import LocalrunError
from localrun.settings import Settings

OWN_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
OWN_ORIGINS = (
    *(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in OWN_HOSTS for port in ("", ":*")),
    "app://*",
    "file://*",
    "tauri://*",
    "vscode-webview://*",
    "vscode-file://*",
)
ALLOWED_HEADERS = (
    "Authorization, Content-Type, User-Agent, Accept, X-Requested-With, OpenAI-Beta, x-stainless-lang, x-stainless-package-version, "
    "x-stainless-os, x-stainless-arch, x-stainless-retry-count, x-stainless-runtime, x-stainless-runtime-version, x-stainless-async, "
    "x-stainless-helper-method, x-stainless-poll-helper, x-stainless-custom-poll-interval, x-stainless-timeout, anthropic-version, "
    "anthropic-beta, x-api-key, anthropic-dangerous-direct-browser-access"
)
ALLOWED_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
MOST_HEADERS = 100
OPEN_PATHS = ("/", "/health")
"""Answered without an API key: they tell nothing but that somebody is there."""


class Forbidden(LocalrunError):
    status = 403
    code = "forbidden"


class Unauthorized(LocalrunError):
    status = 401
    code = "unauthorized"


class TooManyHeaders(LocalrunError):
    status = 431
    code = "too_many_headers"


class Guard:
    """ASGI middleware: refuses what may not pass, counts what does."""

    def __init__(self, app: ASGIApp, settings: Settings, activity: Activity) -> None:
        self._app = app
        self._origins = [_pattern(text) for text in (*OWN_ORIGINS, *settings.origins)]
        self._keys = [key.encode() for key in settings.api_keys]
        self._hosts = own_names(settings.host)
        self._more_hosts = [_pattern(text) for text in settings.hosts]
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin", "")
        own = [(b"server", f"localrun/{__version__}".encode())]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        self._activity.open += 1
        self._activity.last = time.monotonic()
        try:
            self._check(scope, headers)
            if origin:
                own += _cors(origin)
            if scope["method"] == "OPTIONS":
                await self._preflight(send_with_headers)
            else:
                self._check_key(scope, headers)
                await self._app(scope, receive, send_with_headers)
        except LocalrunError as error:
            await _refuse(scope, error, send_with_headers)
        finally:
            self._activity.open -= 1
            self._activity.last = time.monotonic()

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if len(scope["headers"]) > MOST_HEADERS:
            raise TooManyHeaders(f"the request has more than {MOST_HEADERS} headers")
        host = headers.get("host", "")
        if not self.may_be_host(host):
            raise Forbidden(f"the Host header {host[:100]!r} is none of this machine's names; LOCALRUN_HOSTS allows more names")
        origin = headers.get("origin", "")
        if origin and not any(pattern.fullmatch(origin.lower()) for pattern in self._origins):
            raise Forbidden(f"pages of {origin[:100]!r} may not call this server; LOCALRUN_ORIGINS allows more origins")

    def may_be_host(self, header: str) -> bool:
        """Whether a Host header names this machine: nothing, its names, local domains, or any address but a public one that is not ours."""
        name = _host_name(header)
        if name is None:
            return False
        if name in self._hosts or name == "" or name.endswith((".localhost", ".local", ".internal")):
            return True
        if any(pattern.fullmatch(name) for pattern in self._more_hosts):
            return True
        try:
            address = ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        near = address.is_loopback or address.is_private or address.is_unspecified or address.is_link_local
        return near or str(address) in own_addresses()

    def _check_key(self, scope: Scope, headers: dict[str, str]) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")
        # Every key is compared, in constant time: how long it takes tells nothing about them.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            raise Unauthorized("this server wants an API key: Authorization: Bearer KEY")

    @staticmethod
    async def _preflight(send: Send) -> None:
        headers = [
            (b"access-control-allow-methods", ALLOWED_METHODS.encode()),
            (b"access-control-allow-headers", ALLOWED_HEADERS.encode()),
            (b"access-control-max-age", b"43200"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def own_names(bound: str) -> frozenset[str]:
    """Names of this machine: localhost, its host name, and what it listens on."""
    return frozenset({"localhost", socket.gethostname().lower(), bound.lower()})


def own_addresses() -> frozenset[str]:
    """Addresses of this machine's interfaces, as they are now."""
    import psutil

    found: set[str] = set()
    for addresses in psutil.net_if_addrs().values():
        found.update(one.address.partition("%")[0] for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(found)


def _host_name(header: str) -> str | None:
    """The name in a Host header, in lower case, without port and brackets; None: it is no Host header."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return (parts.hostname or "").rstrip(".")


def _pattern(text: str) -> re.Pattern[str]:
    """`*` stands for anything; the rest for itself."""
    return re.compile(".*".join(re.escape(part) for part in text.lower().split("*")))


def _cors(origin: str) -> Iterable[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, x-localrun-messages-dropped, x-localrun-prompt-tokens-dropped"),
        (b"vary", b"Origin"),
    ]


def error_shape(path: str) -> Callable[[LocalrunError], dict[str, Any]]:
    """How the dialect that a path belongs to says an error."""
    if path.startswith("/v1/messages"):
        return anthropic.error_body
    return openai.error_body if path.startswith("/v1/") else ollama.error_body


async def _refuse(scope: Scope, error: LocalrunError, send: Send) -> None:
    body = msgspec.json.encode(error_shape(scope["path"])(error))
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of its body is not read
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
