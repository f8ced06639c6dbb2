"""Images on their way into a prompt: decoded where requests are taken in, made into rows by a thread of their own, remembered by digest.

Encoding takes seconds and holds up nobody: a request comes to the engine when its images are ready. Knows pixels and rows; what a model
makes of them is models/vision.py's, where they stand in a prompt is text/pictures.py's.
"""

from __future__ import annotations

import hashlib
import io
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.engine.parts import as_localrun_error
from localrun.errors import BadRequest, Busy, LocalrunError
from localrun.text.pictures import PictureForm

if TYPE_CHECKING:
    from PIL import Image as Pillow

    from localrun.engine.jobs import Job

log = logging.getLogger(__name__)

MOST_BYTES = 32 << 20
MOST_PIXELS = 64 << 20
"""Of one image, before it is made smaller."""
MOST_IMAGES = 64
"""Of one request."""
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
REMEMBERED = 64
"""Images whose rows are kept for the next request."""
STOP_S = 10.0

Pixels = NDArray[np.uint8]
Rows = NDArray[np.float32]


class Encoder(Protocol):
    """models.vision.VisionEncoder, as far as it is needed here."""

    image_size: int
    n_tokens: int

    def encode(self, pixels: Pixels, cancelled: Callable[[], bool]) -> Rows | None:
        """Rows of an image; None when `cancelled` said so."""

    def close(self) -> None:
        """Gives everything back."""


def form_of(encoder: Encoder) -> PictureForm:
    """How Gemma 3 reads an image: on lines of its own, between two tokens; the placeholder is its padding token."""
    return PictureForm("\n\n<start_of_image>", "<end_of_image>\n\n", encoder.n_tokens, 0)


@dataclass(eq=False)
class PlacedImage:
    """An image that stands at tokens start .. start + n of a sequence."""

    start: int
    n: int
    pixels: Pixels | None
    """Until there are rows."""
    digest: bytes
    rows: Rows | None = None

    @property
    def end(self) -> int:
        return self.start + self.n

    def key(self, i: int) -> int:
        """What its token i is known by in the prefix tree: no token's id, and no other image's."""
        return -1 - (int.from_bytes(self.digest[:16]) << 16 | i)


def place(data: bytes, start: int, encoder: Encoder) -> PlacedImage:
    """Decodes an image. Raises BadRequest."""
    pixels = decode(data, encoder.image_size)
    return PlacedImage(start, encoder.n_tokens, pixels, hashlib.sha256(pixels.tobytes()).digest())


def decode(data: bytes, size: int) -> Pixels:
    """A file's pixels, as a square of `size`: uint8 (size, size, 3). Resized as the reference does, bilinear and without regard to its
    shape; turned as its EXIF data say; what is transparent is white. Raises BadRequest.
    """
    from PIL import Image, ImageOps

    if len(data) > MOST_BYTES:
        raise BadRequest(f"images: {len(data)} bytes; at most {MOST_BYTES >> 20} MiB are taken", param="images")
    try:
        with Image.open(io.BytesIO(data), formats=KINDS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadRequest(f"images: {width} x {height} pixels; at most {MOST_PIXELS} are taken", param="images")
            upright = _opaque(ImageOps.exif_transpose(image))
            return np.asarray(upright.resize((size, size), Image.Resampling.BILINEAR), np.uint8)
    except BadRequest:
        raise
    except Exception as error:  # decoders of damaged files raise whatever they like
        kinds = ", ".join(KINDS)
        raise BadRequest(f"images: this is no image that can be read ({kinds}): {type(error).__name__}", param="images") from error


def _opaque(image: Pillow.Image) -> Pillow.Image:
    """In RGB, over white where it is transparent."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    above = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


@dataclass(frozen=True)
class Withdrawn:
    """A job that ends before the engine has seen it. error: None: it was cancelled."""

    job: Job
    error: LocalrunError | None = None


class ImageDesk:
    """Encodes the images of jobs, one job after the other, and delivers each to the engine, or as Withdrawn. Has the encoder: closes it,
    too.
    """

    def __init__(self, encoder: Encoder, deliver: Callable[[Job | Withdrawn], None], most: int) -> None:
        """most: jobs that may wait."""
        self._encoder = encoder
        self._deliver = deliver
        self._most = most
        self._lock = threading.Lock()
        self._pending: dict[str, Job] = {}
        self._cancelled: set[str] = set()
        self._known: OrderedDict[bytes, Rows] = OrderedDict()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="images", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises Busy when too many wait, LocalrunError when the id is in use."""
        with self._lock:
            if len(self._pending) >= self._most:
                raise Busy
            if job.seq.request_id in self._pending:
                raise LocalrunError(f"request id {job.seq.request_id!r} is in use")
            self._pending[job.seq.request_id] = job
        self._queue.put(job)

    def cancel(self, request_id: str) -> bool:
        """Whether the job was here: then it will be delivered as Withdrawn, soon."""
        with self._lock:
            if request_id in self._pending:
                self._cancelled.add(request_id)
                return True
            return False

    def close(self) -> None:
        """Ends the thread, after the layer it is in, and the encoder. Idempotent."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("an image is still being encoded; its memory goes with the process")
        else:
            self._encoder.close()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None and not self._closed:
            error: LocalrunError | None = None
            try:
                self._encode(job)
            except Exception as failure:
                error = as_localrun_error(failure, f"the images of request {job.seq.request_id}")
            # under the lock: a cancellation comes before this, or finds the job where it is delivered to
            with self._lock:
                del self._pending[job.seq.request_id]
                cancelled = job.seq.request_id in self._cancelled
                self._cancelled.discard(job.seq.request_id)
                self._deliver(Withdrawn(job, error) if cancelled or error is not None else job)

    def _encode(self, job: Job) -> None:
        """Fills in the rows; leaves it at that when nobody wants them any more."""
        deadline = job.seq.deadline

        def unwanted() -> bool:
            late = deadline is not None and time.monotonic() >= deadline
            return self._closed or late or job.seq.request_id in self._cancelled

        for image in job.seq.images:
            rows = self._known.get(image.digest)
            if rows is None:
                assert image.pixels is not None
                rows = self._encoder.encode(image.pixels, unwanted)
            if rows is None:
                return
            self._known[image.digest] = rows
            self._known.move_to_end(image.digest)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            image.rows, image.pixels = rows, None
