"""Images in prompts: where they stand in the text, and the tokens that stand for them.

While a template is at work, an image is a mark in the text that nobody can write, being drawn anew for each prompt. Afterwards each mark
becomes what the model expects around an image, with as many placeholders as it becomes rows. Knows no pixels.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from localrun.errors import BadRequest
from localrun.messages import Image, Message
from localrun.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PictureForm:
    """How a model reads an image: text before and after it, special tokens among it, and n_tokens times the token `placeholder`."""

    before: str
    after: str
    n_tokens: int
    placeholder: int


class Pictures:
    """The images of one prompt, numbered in their order."""

    def __init__(self, form: PictureForm | None) -> None:
        """form: None: the model sees no images, and there are none."""
        self._form = form
        self._nonce = secrets.token_hex(8)
        self._mark = re.compile(f"\ue000{self._nonce}\\.(\\d+)\ue001")
        self.images: list[Image] = []

    def marked(self, text: str, images: Sequence[Image]) -> str:
        """The text with marks where its images stand. Raises BadRequest for a place outside the text."""
        result, done = "", 0
        for image in sorted(images, key=lambda one: one.at):
            if not 0 <= image.at <= len(text):
                raise BadRequest(f"images: a place at {image.at} in a text of {len(text)} characters", param="images")
            result += f"{text[done : image.at]}\ue000{self._nonce}.{len(self.images)}\ue001"
            done = image.at
            self.images.append(image)
        return result + text[done:]

    def marked_messages(self, messages: list[Message]) -> list[Message]:
        """The messages with their images as marks."""
        return [
            msgspec.structs.replace(message, content=self.marked(message.content, message.images), images=[]) if message.images else message
            for message in messages
        ]

    def encode(self, text: str, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
        """The text's tokens, and where images stand in them: (index of the first placeholder, number of the image)."""
        if self._form is None or not self.images:
            return tokenizer.encode(text, add_special=False, parse_special=True), []
        form = self._form
        parts = self._mark.split(text)  # text, number, text, number, ..., text
        tokens: list[int] = []
        places: list[tuple[int, int]] = []
        for i in range(0, len(parts), 2):
            piece = (form.after if i else "") + parts[i] + (form.before if i + 1 < len(parts) else "")
            if piece:
                tokens += tokenizer.encode(piece, add_special=False, parse_special=True)
            if i + 1 < len(parts):
                places.append((len(tokens), int(parts[i + 1])))
                tokens += [form.placeholder] * form.n_tokens
        return tokens, places

    def shown(self, text: str) -> str:
        """The text for people, images as [img-0] and so on, as Ollama writes them."""
        if self._form is None or not self.images:
            return text
        form = self._form
        return self._mark.sub(lambda found: f"{form.before}[img-{found.group(1)}]{form.after}", text)
