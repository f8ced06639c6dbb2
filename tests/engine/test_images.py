"""Images on their way into prompts: decoded, placed, encoded beside the engine, told apart in the prefix tree, never cut."""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from localrun.engine import images as module
from localrun.engine.images import ImageDesk, Pixels, Rows, Withdrawn, decode
from localrun.engine.jobs import Job
from localrun.errors import BadRequest, Busy, ContextOverflow, LocalrunError, Unsupported
from localrun.messages import Generate, Image, Message, Render, Sampling
from tests.engine.harness import Harness, Outcome
from tests.fakes import FakeModel

SIZE, N_TOKENS = 4, 10


def png(colour: tuple[int, ...] = (255, 0, 0), size: tuple[int, int] = (8, 6), kind: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Pillow.new(mode, size, colour).save(out, kind)
    return out.getvalue()


class FakeEncoder:
    """Rows that say which image they come from."""

    image_size, n_tokens = SIZE, N_TOKENS

    def __init__(self) -> None:
        self.encoded = 0
        self.closed = False
        self.hold = threading.Event()
        self.hold.set()

    def encode(self, pixels: Pixels, cancelled: Callable[[], bool]) -> Rows | None:
        while not self.hold.wait(0.001):
            if cancelled():
                return None
        if pixels[0, 0, 2] == 77:
            raise ValueError("a defect")
        self.encoded += 1
        return np.full((N_TOKENS, 3), (pixels * np.array([1, 2, 3])).sum(), np.float32)

    def close(self) -> None:
        self.closed = True


class SeeingModel(FakeModel):
    """Images are part of what its K/V are made of; one that is cut fails the pass."""

    def forward(self, spans: list[Any]) -> Any:
        for span in spans:
            for first, rows in span.images:
                assert first >= 0 and first + len(rows) <= len(span.tokens)
                assert first == 0 or len(rows) == N_TOKENS, "an image begins in the middle of a span and is not whole"
                assert (span.tokens[first : first + len(rows)] == 0).all()
                end = first + len(rows) == len(span.tokens)
                assert not end or span.start + first + len(rows) < 10_000
                span.tokens[first : first + len(rows)] = int(rows[0, 0]) % 200
            left = [i for i, token in enumerate(span.tokens) if token == 0]
            assert not left, "a placeholder without its image"
        return super().forward(spans)


def harness(n_blocks: int = 64, **options: Any) -> Harness:
    made = Harness(SeeingModel(max_batch=options.pop("max_batch", 64)), n_blocks, **options)
    made.parts.encoder = FakeEncoder()
    made.intake = type(made.intake)(made.parts, n_blocks * 16, made.engine.adapters, made.clock)
    return made


def ask(made: Harness, pictures: list[bytes], text: str = "look", **fields: Any) -> Outcome:
    made._n += 1
    images = [Image(data=data, at=i % (len(text) + 1)) for i, data in enumerate(pictures)]
    messages = [Message(role="user", content=text, images=images)]
    request = Generate(request_id=f"request {made._n}", messages=messages, max_tokens=6, sampling=Sampling(seed=1), **fields)
    job = made.intake.generation(request)
    for image in job.seq.images:
        assert image.pixels is not None
        image.rows = made.parts.encoder.encode(image.pixels, lambda: False)  # type: ignore[union-attr]
    return made.add_job(job)


RED, GREEN = png((255, 0, 0)), png((0, 255, 0))


def alone(pictures: list[bytes], text: str = "look") -> list[int]:
    made = harness()
    outcome = ask(made, pictures, text)
    made.run()
    return outcome.answer


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(st.tuples(st.lists(st.sampled_from([RED, GREEN]), max_size=3), st.integers(0, 8)), min_size=1, max_size=6),
    n_blocks=st.integers(12, 40),
    max_batch=st.integers(2 * N_TOKENS, 64),
)
def test_each_answer_is_the_one_it_gives_alone(asked: list[tuple[list[bytes], int]], n_blocks: int, max_batch: int) -> None:
    made = harness(n_blocks, max_batch=max_batch, max_running=6)
    outcomes = []
    for step in range(9):
        outcomes += [(pictures, ask(made, pictures)) for pictures, at in asked if at == step]
        made.step()
    made.run()
    for pictures, outcome in outcomes:
        assert outcome.finished is not None, outcome.failed
        assert outcome.answer == alone(pictures)


def test_the_tree_tells_images_apart() -> None:
    made = harness()
    outcomes = []
    for pictures in ([RED], [RED], [GREEN], [png((255, 0, 0), kind="BMP")]):
        outcomes.append(ask(made, pictures, "what is in this picture? " * 3))
        made.run()
    cached = [one.started.cached_tokens for one in outcomes if one.started is not None]
    prompt = outcomes[0].started.prompt_tokens if outcomes[0].started else 0
    assert cached[1] == cached[3] == prompt - 1, "the same pixels are the same image, whatever the file"
    assert cached[2] == outcomes[0].tokens.index(0) and cached[0] == 0
    assert outcomes[0].answer == outcomes[1].answer != outcomes[2].answer


def test_where_images_stand_in_a_text() -> None:
    made = harness()
    message = Message(role="user", content="one two", images=[Image(data=RED, at=4), Image(data=GREEN)])
    request = Generate(request_id="a", messages=[message])
    job = made.intake.generation(request)
    text = made.intake.text(job.seq.tokens)
    pads = made.intake.text([0] * N_TOKENS)
    around = f"\n\n<start_of_image>{pads}<end_of_image>\n\n"
    assert f"{around}one {around}two" in text
    for image in job.seq.images:
        assert job.seq.tokens[image.start : image.end] == [0] * N_TOKENS
    assert [image.digest for image in job.seq.images] == [made.intake.generation(request).seq.images[i].digest for i in range(2)]
    assert "\n\n<start_of_image>[img-0]<end_of_image>\n\none " in made.intake.rendered(Render(request=request)).text


def test_what_is_dropped_from_a_prompt_takes_its_images_along() -> None:
    made = harness()
    turns = [Message(role="user", content="first " * 20, images=[Image(data=RED)]), Message(role="assistant", content="yes")]
    last = Message(role="user", content="last", images=[Image(data=GREEN)])
    request = Generate(request_id="a", messages=[*turns, last], num_ctx=100, overflow="truncate_oldest")
    job = made.intake.generation(request)
    assert job.dropped_messages == 2
    assert [image.digest for image in job.seq.images] == [module.place(GREEN, 0, made.parts.encoder).digest]  # type: ignore[arg-type]
    assert job.seq.tokens[job.seq.images[0].start : job.seq.images[0].end] == [0] * N_TOKENS
    with pytest.raises(ContextOverflow):
        made.intake.generation(Generate(request_id="b", messages=[last], num_ctx=N_TOKENS))


def test_a_model_that_sees_nothing_says_so() -> None:
    with pytest.raises(Unsupported, match="images"):
        Harness().intake.generation(Generate(request_id="a", messages=[Message(role="user", content="x", images=[Image(data=RED)])]))


# ---- files --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_kinds_of_files(kind: str) -> None:
    pixels = decode(png((10, 200, 30), kind=kind), SIZE)
    assert pixels.shape == (SIZE, SIZE, 3)
    assert np.abs(pixels.astype(int) - [10, 200, 30]).max() <= 12


def test_resizing_is_bilinear_and_ignores_the_shape() -> None:
    rng = np.random.default_rng(0)
    source = Pillow.fromarray(rng.integers(0, 256, (30, 50, 3), np.uint8))
    out = io.BytesIO()
    source.save(out, "PNG")
    assert np.array_equal(decode(out.getvalue(), 7), np.asarray(source.resize((7, 7), Pillow.Resampling.BILINEAR)))


def test_what_is_transparent_is_white_and_exif_turns() -> None:
    assert (decode(png((0, 0, 0, 0), mode="RGBA"), SIZE) == 255).all()
    assert np.array_equal(decode(png((9,), mode="L"), SIZE), np.full((SIZE, SIZE, 3), 9))
    lying = Pillow.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8)).resize((8, 8), Pillow.Resampling.NEAREST)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    out = io.BytesIO()
    lying.save(out, "PNG", exif=exif)
    upright = decode(out.getvalue(), 8)
    assert (upright[0] == 0).all() and (upright[-1] == 255).all()


@pytest.mark.parametrize("data", [b"", b"hello", RED[:50], RED[:40], b"GIF89a" + bytes(40)])
def test_what_is_no_image_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(BadRequest, match="images: ") as refusal:
        decode(data, SIZE)
    assert "\n" not in str(refusal.value)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=200), kind=st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"BM", b"GIF89a", b"RIFF\x10\0\0\0WEBP"]))
def test_damaged_files_never_raise_anything_else(data: bytes, kind: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert decode(kind + data, SIZE).shape == (SIZE, SIZE, 3)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 47)
    with pytest.raises(BadRequest, match="8 x 6 pixels"):
        decode(RED, SIZE)
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(BadRequest, match="bytes"):
        decode(RED, SIZE)
    with pytest.raises(BadRequest, match="at most 64"):
        harness(400).intake.generation(
            Generate(request_id="a", messages=[Message(role="user", content="x", images=[Image(data=RED)] * 65)], num_ctx=0)
        )


# ---- the desk -----------------------------------------------------------------------------------------------------------------


class Desk:
    def __init__(self, most: int = 8) -> None:
        self.encoder = FakeEncoder()
        self.delivered: queue.SimpleQueue[Job | Withdrawn] = queue.SimpleQueue()
        self.desk = ImageDesk(self.encoder, self.delivered.put, most)
        self.made = harness()

    def job(self, name: str, picture: bytes = RED, **fields: Any) -> Job:
        message = Message(role="user", content="x", images=[Image(data=picture)])
        return self.made.intake.generation(Generate(request_id=name, messages=[message], **fields))

    def next(self) -> Job | Withdrawn:
        return self.delivered.get(timeout=120)


@pytest.fixture
def desk() -> Any:
    made = Desk()
    yield made
    made.encoder.hold.set()
    made.desk.close()
    made.desk.close()
    assert made.encoder.closed


def test_jobs_come_with_their_rows_and_known_images_are_not_encoded_again(desk: Desk) -> None:
    for name, picture in (("a", RED), ("b", GREEN), ("c", RED)):
        desk.desk.submit(desk.job(name, picture))
    jobs = [desk.next() for _ in range(3)]
    assert [job.seq.request_id for job in jobs if not isinstance(job, Withdrawn)] == ["a", "b", "c"]
    rows = [job.seq.images[0].rows for job in jobs if not isinstance(job, Withdrawn)]
    assert rows[0] is rows[2] and rows[0] is not None and desk.encoder.encoded == 2
    assert all(job.seq.images[0].pixels is None for job in jobs if not isinstance(job, Withdrawn))


def test_cancelling_ends_the_encoding_and_the_waiting(desk: Desk) -> None:
    desk.encoder.hold.clear()
    for name in "ab":
        desk.desk.submit(desk.job(name))
    with pytest.raises(LocalrunError, match="in use"):
        desk.desk.submit(desk.job("a"))
    assert desk.desk.cancel("b") and desk.desk.cancel("a") and not desk.desk.cancel("c")
    assert [isinstance(desk.next(), Withdrawn) for _ in range(2)] == [True, True]
    assert not desk.desk.cancel("a")
    desk.encoder.hold.set()
    desk.desk.submit(desk.job("a"))
    assert not isinstance(desk.next(), Withdrawn)


def test_a_defect_ends_its_own_request_only(desk: Desk) -> None:
    desk.desk.submit(desk.job("a", png((1, 2, 77))))
    desk.desk.submit(desk.job("b"))
    first, second = desk.next(), desk.next()
    assert isinstance(first, Withdrawn) and "a defect" in str(first.error)
    assert not isinstance(second, Withdrawn)
    desk.made.outcomes["a"] = Outcome()
    desk.made.engine.withdraw(first.job, first.error)
    assert desk.made.outcomes["a"].failed is not None


def test_a_deadline_is_kept_while_an_image_is_encoded(desk: Desk) -> None:
    desk.encoder.hold.clear()
    job = desk.job("a")
    job.seq.deadline = time.monotonic() + 0.02
    desk.desk.submit(job)
    late = desk.next()
    assert not isinstance(late, Withdrawn)
    outcome = desk.made.add_job(late)
    desk.made.clock.advance(time.monotonic() + 1)
    desk.made.step()
    assert outcome.failed is not None and outcome.failed.code == "deadline_exceeded"


def test_a_full_desk_is_busy() -> None:
    made = Desk(most=1)
    made.encoder.hold.clear()
    try:
        made.desk.submit(made.job("a"))
        with pytest.raises(Busy):
            made.desk.submit(made.job("b"))
    finally:
        made.desk.close()
    assert made.encoder.closed
