"""Images in requests: base64 as Ollama has it, data: URLs as OpenAI has them, to the bytes of image files. Looks at no pixel."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from localrun.api.options import ModelDefaults
from localrun.errors import BadRequest, Unsupported
from localrun.messages import Image, Message


def require_vision(model: ModelDefaults) -> None:
    """Raises Unsupported for a model that sees no images."""
    if "vision" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support images', param="images")


def from_base64(given: Sequence[str]) -> list[Image]:
    """Images in front of a text. Raises BadRequest."""
    return [Image(data=_decoded(text, f"images[{i}]")) for i, text in enumerate(given)]


def from_url(url: str, at: int) -> Image:
    """The image of a data: URL, which stands before character `at`. Raises BadRequest, Unsupported."""
    head, comma, text = url.partition(",")
    if not head.startswith("data:"):
        raise Unsupported("image_url: images are not fetched from other machines; send them as data: URLs", param="messages")
    if not comma or not head.endswith(";base64"):
        raise BadRequest("image_url: a data: URL must say ;base64, and hold the image", param="messages")
    return Image(data=_decoded(text, "image_url"), at=at)


def check_seen(messages: Sequence[Message], model: ModelDefaults) -> None:
    """Raises Unsupported where messages have images that the model does not see."""
    if any(message.images for message in messages):
        require_vision(model)


def _decoded(text: str, name: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{name}: this is not base64", param="images") from None
    if not data:
        raise BadRequest(f"{name}: there is nothing in it", param="images")
    return data
