"""What can go wrong, as one tree. Each class fixes the HTTP status and a short machine-readable code; the message is one line that says
what is wrong and what to do. The API layer turns any of these into the dialect's error shape, the CLI prints the message.

    LocalrunError                 500 internal_error
    ├── BadRequest                400 invalid_request
    │   ├── ContextOverflow       400 context_length_exceeded
    │   ├── TemplateError         400 template_error
    │   └── Unsupported           400 unsupported
    ├── NotFound                  404 not_found
    │   └── ModelNotFound         404 model_not_found
    ├── Conflict                  409 conflict
    ├── RequestCancelled          499 request_cancelled
    ├── ModelFileRejected         500 model_file_rejected
    ├── LoadFailed                500 load_failed
    ├── RunnerDied                500 runner_died
    ├── DownloadFailed            502 download_failed
    ├── Busy                      503 busy
    ├── DeadlineExceeded          504 deadline_exceeded
    └── DiskFull                  507 disk_full

Layers below (`models`, `kernels_*`) do not know this file: their errors are mapped here once, by the runner and by the store.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")

class LocalrunError(Exception):
    """Base of every error a user may see. `str(error)` is the one line to show."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        # What a client sent may be quoted in it, line breaks and all.
        super().__init__(_CONTROL.sub(" ", message))
        self.param = param
        """Name of the request field at fault, if one is."""


class BadRequest(LocalrunError):
    status = 400
    code = "invalid_request"


class ContextOverflow(BadRequest):
    """The prompt needs more tokens than the context allows, and the request did not ask for anything to be dropped."""

    code = "context_length_exceeded"

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"the prompt is longer than the context length currently available to the model: it has {needed} tokens, "
            f"{available} fit; shorten the prompt or raise num_ctx"
        )
        self.needed = needed
        self.available = available


class TemplateError(BadRequest):
    """A chat template is no valid template, refuses these messages, or does not come to an end."""

    code = "template_error"


class Unsupported(BadRequest):
    code = "unsupported"


class NotFound(LocalrunError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(LocalrunError):
    status = 409
    code = "conflict"


class RequestCancelled(LocalrunError):
    status = 499
    code = "request_cancelled"

    def __init__(self, message: str = "request canceled") -> None:
        super().__init__(message)


class ModelFileRejected(LocalrunError):
    """A model file is malformed or of a kind that is not supported."""

    code = "model_file_rejected"


class LoadFailed(LocalrunError):
    code = "load_failed"


class RunnerDied(LocalrunError):
    code = "runner_died"


class DownloadFailed(LocalrunError):
    status = 502
    code = "download_failed"


class DeadlineExceeded(LocalrunError):
    """A request took longer than it said it may."""

    status = 504
    code = "deadline_exceeded"


class Busy(LocalrunError):
    status = 503
    code = "busy"

    def __init__(self, message: str = "server busy, please try again.  maximum pending requests exceeded") -> None:
        super().__init__(message)


class DiskFull(LocalrunError):
    status = 507
    code = "disk_full"


_BY_CODE: dict[str, type[LocalrunError]] = {}


def _register(cls: type[LocalrunError]) -> None:
    _BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _register(sub)


_register(LocalrunError)


def from_wire(code: str, message: str, param: str | None = None) -> LocalrunError:
    """The error that a runner reported by code and message, as an exception of the right class (unknown codes: the base class)."""
    cls = _BY_CODE.get(code, LocalrunError)
    error = cls.__new__(cls)
    LocalrunError.__init__(error, message, param=param)
    return error
