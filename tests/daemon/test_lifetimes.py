"""What lives how long: requests whose client goes, models after their last request, runners that die, and nothing after the daemon."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun.engine.parts import Parts
from localrun.errors import LoadFailed
from localrun.messages import Load
from localrun.models.model import Progress
from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon, saying
from tests.models.build import Tensor

HI = [{"role": "user", "content": "hi"}]
LONG = "word " * 3000


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Fails when `condition` has not come true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def chat(running: Daemon, **more: Any) -> dict[str, Any]:
    response = running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "stream": False, **more})
    answer: dict[str, Any] = response.json()
    return answer | {"status": response.status_code}


def load_slowly(load: Any, progress: Any, *, gate: str) -> Any:
    """Loads when the file `gate` exists, telling of progress until then."""
    steps = 0
    while not Path(gate).exists():
        time.sleep(0.02)
        steps += 1
        progress("waiting at the gate", steps, 10_000)
    return fakes.load_scripted(load, progress, reply="loaded")


def load_upside_down(load: Any, progress: Any) -> Any:
    """A load that fails, with a message that names the file."""
    raise LoadFailed(f"the weights are upside down of {load.path}")


def load_silently(load: Any, progress: Any) -> Any:
    """A load that hangs."""
    time.sleep(600)


# ---- clients that go ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HI}),
        ("/api/chat", {"messages": HI, "stream": False}),
        ("/api/generate", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HI, "stream": True}),
        ("/v1/chat/completions", {"messages": HI, "n": 2}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
    ],
)
def test_a_client_that_goes_stops_its_generation(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    with serving.daemon(tmp_path, saying(LONG, delay=0.01)) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
            send(client, path, {"model": "tiny", **body})
            wait_until(lambda: any(one.get("running") for one in running.loaded()))
        wait_until(lambda: running.loaded()[0]["requests"] == 0 and running.loaded()[0]["running"] == 0)
        assert running.loaded()[0]["engine"]["passes"] < 3500, "by itself it ends with the context, after 4,000"


def test_a_client_that_goes_while_the_model_loads_leaves_nothing_behind(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving.daemon(tmp_path, functools.partial(load_slowly, gate=str(gate))) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
            send(client, "/api/chat", {"model": "tiny", "messages": HI})
            wait_until(lambda: running.loaded() and running.loaded()[0]["requests"] == 1)
        wait_until(lambda: running.loaded()[0]["requests"] == 0)
        wait_until(lambda: running.loaded()[0]["status"] == "waiting at the gate")
        gate.touch()
        # the load goes on, and the model stays for its keep_alive
        wait_until(lambda: "kv_tokens" in running.loaded()[0])
        assert chat(running)["message"]["content"] == "loaded"


def send(client: socket.socket, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


# ---- models that stay and go --------------------------------------------------------------------------------------------------


def test_a_model_goes_when_its_keep_alive_is_over(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        assert chat(running, keep_alive="1h")["status"] == 200
        assert len(running.loaded()) == 1
        assert chat(running, keep_alive="300ms")["status"] == 200
        wait_until(lambda: running.loaded() == [])
        assert chat(running, keep_alive=0)["status"] == 200
        wait_until(lambda: running.loaded() == [])


def test_keep_alive_counts_from_the_end_of_the_last_request(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("word " * 40, delay=0.02)) as running:
        assert chat(running, keep_alive="50ms")["status"] == 200  # takes 4 s: it would be gone in the middle of it
        wait_until(lambda: running.loaded() == [])


def test_expires_at_says_when(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    with serving.daemon(tmp_path, keep_alive=60.0) as running:
        for keep_alive, seconds in ((None, 60), ("90", 90), (30, 30), ("2m", 120)):
            chat(running, **({} if keep_alive is None else {"keep_alive": keep_alive}))
            left = (datetime.fromisoformat(running.loaded()[0]["expires_at"]) - datetime.now(UTC)).total_seconds()
            assert seconds - 25 < left <= seconds  # they differ by 30, and a busy machine may take a while to answer
        for for_ever in (-1, "-1", "-5m"):
            chat(running, keep_alive=for_ever)
            assert datetime.fromisoformat(running.loaded()[0]["expires_at"]).year > datetime.now(UTC).year + 50


def test_the_idle_model_used_least_lately_makes_room(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, max_loaded_models=2) as running:
        for name in ("a", "b", "c"):
            running.add_model(name, serving.tiny_gguf(keys={"general.note": ("string", name)}))
        for name in ("a", "b", "a", "c"):
            assert chat(running, model=name)["status"] == 200
        assert sorted(one["name"] for one in running.loaded()) == ["a:latest", "c:latest"]


def test_a_model_in_use_is_not_sent_away_and_the_newcomer_waits(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("word " * 30, delay=0.02), max_loaded_models=1) as running:
        running.add_model("other", serving.tiny_gguf(keys={"general.note": ("string", "other")}))
        answers: list[dict[str, Any]] = []
        first = threading.Thread(target=lambda: answers.append(chat(running)))
        first.start()
        wait_until(lambda: answers or (running.loaded() and running.loaded()[0]["requests"] == 1))
        second = chat(running, model="other", options={"num_predict": 2})
        first.join()
        assert answers[0]["status"] == second["status"] == 200
        assert answers[0]["message"]["content"] == "word " * 30
        assert [one["name"] for one in running.loaded()] == ["other:latest"]


def test_models_with_one_file_share_a_runner(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        running.add_model("twin", system="be brief")
        chat(running)
        pid = running.loaded()[0]["pid"]
        chat(running, model="twin")
        assert sorted((one["name"], one["pid"]) for one in running.loaded()) == [("tiny:latest", pid), ("twin:latest", pid)]


def test_each_name_of_one_file_has_its_own_keep_alive(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        running.add_model("twin", system="be brief")
        chat(running, model="twin", keep_alive="1h")
        pid = running.loaded()[0]["pid"]
        chat(running, keep_alive="200ms")
        wait_until(lambda: [(one["name"], one["pid"]) for one in running.loaded()] == [("twin:latest", pid)])
        chat(running, keep_alive=0)
        assert [(one["name"], one["pid"]) for one in running.loaded()] == [("twin:latest", pid)]
        chat(running, model="twin", keep_alive=0)
        assert running.loaded() == []


def test_another_number_of_threads_loads_the_model_again(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        chat(running)
        pid, threads = running.loaded()[0]["pid"], running.loaded()[0]["num_thread"]
        chat(running, options={"num_thread": threads})
        assert running.loaded()[0]["pid"] == pid
        chat(running, options={"num_thread": threads + 2})
        assert running.loaded()[0]["pid"] != pid


def load_with_threads(load: Load, progress: Progress, told: str) -> Parts:
    """Notes what it is told of threads and tuning."""
    with Path(told).open("a", encoding="utf-8") as file:
        file.write(f"{load.num_thread} {load.num_thread_batch} {load.tune}\n")
    parts = fakes.load_scripted(load, progress)
    few = load.num_thread or 2
    parts.model.info = replace(parts.model.info, n_threads=few, n_threads_batch=load.num_thread_batch or few)
    return parts


def test_another_number_of_threads_for_prompts_loads_the_model_again(tmp_path: Path) -> None:
    """From the setting, the Modelfile or the request; a request that says nothing takes what is there."""
    told = tmp_path / "told"
    load = functools.partial(load_with_threads, told=str(told))
    with serving.daemon(tmp_path, load, num_thread_batch=3, tune=False) as running:
        running.add_model("own", params={"num_thread_batch": 6})
        chat(running)
        first = running.loaded()[0]
        assert (first["num_thread"], first["num_thread_batch"]) == (2, 3)
        chat(running, options={"num_thread_batch": 3})
        chat(running, options={"num_thread_batch": 0})
        assert running.loaded()[0]["pid"] == first["pid"]
        chat(running, options={"num_thread": 5, "num_thread_batch": 4})
        assert (running.loaded()[0]["num_thread"], running.loaded()[0]["num_thread_batch"]) == (5, 4)
        chat(running, model="own")
    assert told.read_text().splitlines() == ["0 3 False", "5 4 False", "0 6 False"]


def load_with_draft(load: Load, progress: Progress, told: str) -> Parts:
    """Notes what it is told of a draft model and of the KV cache."""
    with Path(told).open("a", encoding="utf-8") as file:
        file.write(f"{Path(load.path).name} {Path(load.draft_path).name if load.draft_path else '-'} {load.kv_cache_type}\n")
    return fakes.load_scripted(load, progress)


def test_a_draft_model_and_a_kv_type_load_the_model_again(tmp_path: Path) -> None:
    """From the Modelfile or the request; a request that says nothing takes what is there; a name nobody has is a 404."""
    told = tmp_path / "told"
    with serving.daemon(tmp_path, functools.partial(load_with_draft, told=str(told))) as running:
        running.add_model("smaller", serving.tiny_gguf(keys={"general.name": ("string", "smaller")}))
        running.add_model("quick", params={"draft": "smaller", "kv_cache_type": "q8_0"})
        weights = running.store.get("tiny").model_path.name
        smaller = running.store.get("smaller").model_path.name
        chat(running)
        chat(running, options={"draft": "smaller"})
        chat(running)
        chat(running, options={"kv_cache_type": "q4_0"})
        chat(running, model="quick")
        chat(running, model="quick", options={"draft": ""})
        assert told.read_text(encoding="utf-8").splitlines() == [
            f"{weights} - f16", f"{weights} {smaller} f16", f"{weights} - q4_0", f"{weights} {smaller} q8_0",
        ]  # fmt: skip
        response = running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "options": {"draft": "nobody"}})
        assert response.status_code == 404
        assert "nobody" in response.json()["error"]
        itself = running.http.post("/v1/chat/completions", json={"model": "quick", "messages": HI, "options": {"draft": "tiny"}})
        assert itself.status_code == 400
        assert "is the model itself" in itself.json()["error"]["message"]
        wrong = running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "options": {"kv_cache_type": "q2"}})
        assert wrong.status_code == 400
        assert 'option "kv_cache_type" must be one of f16, bf16, q8_0, q4_0' in wrong.json()["error"]


def test_a_longer_context_than_the_rotary_factors_are_for_loads_the_model_again(tmp_path: Path) -> None:
    """Of a model with factors for short and long contexts: by the side of the limit on which num_ctx lies, not by each other number."""
    keys = {"llama.rope.scaling.original_context_length": ("uint32", 1024)}
    tensors = [Tensor(f"rope_factors_{which}.weight", (4,), 0, bytes(16)) for which in ("long", "short")]
    with serving.daemon(tmp_path) as running:
        running.add_model("rotary", serving.tiny_gguf(keys=keys, tensors=tensors))
        pids = []
        for num_ctx in (512, 1024, 0, 2048, 4096, 100):
            chat(running, model="rotary", options={"num_ctx": num_ctx} if num_ctx else {})
            pids.append(running.loaded()[0]["pid"])
        assert len({pids[0], pids[1], pids[2]}) == 1
        assert pids[3] == pids[4] != pids[2]
        assert pids[5] != pids[4]
        for num_ctx in (512, 4096):
            chat(running, options={"num_ctx": num_ctx})
            pids.append(running.loaded()[-1]["pid"])
        assert pids[-1] == pids[-2]


def test_too_many_that_wait_are_refused(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving.daemon(tmp_path, functools.partial(load_slowly, gate=str(gate)), max_queue=2) as running:
        waiting = [threading.Thread(target=chat, args=(running,)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: running.loaded() and running.loaded()[0]["requests"] == 2)
        response = running.http.post("/api/chat", json={"model": "tiny", "messages": HI})
        assert response.status_code == 503
        assert response.json()["error"] == "server busy, please try again.  maximum pending requests exceeded"
        assert response.headers["retry-after"] == "1"
        gate.touch()
        for thread in waiting:
            thread.join(120)


def test_only_so_many_are_answered_at_once(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("word " * 10, delay=0.01), num_parallel=2) as running:
        answers: list[dict[str, Any]] = []
        most, turns, end = 0, 0, time.monotonic() + 120
        while most < 2:  # a busy machine may not look while two are answered
            assert time.monotonic() < end
            threads = [threading.Thread(target=lambda: answers.append(chat(running))) for _ in range(5)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                most = max([most, *(one.get("running", 0) for one in running.loaded())])
            turns += 1
        assert most == 2
        assert [one["message"]["content"] for one in answers] == ["word " * 10] * 5 * turns


def test_blobs_that_no_model_needs_go_at_the_start(tmp_path: Path) -> None:
    from localrun.store import Store

    store = Store(tmp_path / "models")
    old, young = store.blobs.put(b"old"), store.blobs.put(b"young")
    os.utime(store.blobs.path(old), (0, 0))
    with serving.daemon(tmp_path, noprune=True):
        assert store.blobs.has(old)
    with serving.daemon(tmp_path):
        wait_until(lambda: not store.blobs.has(old))
        assert store.blobs.has(young)


# ---- loads that fail ----------------------------------------------------------------------------------------------------------


def test_a_load_that_fails_says_why_and_the_next_request_tries_again(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, load_upside_down) as running:
        for _ in range(2):
            answer = chat(running)
            assert answer["status"] == 500
            assert answer["error"] == "the weights are upside down of tiny:latest"
        assert running.loaded() == []


def test_mistakes_of_ours_stay_in_the_log(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, functools.partial(fakes.load_failing, message="no such file: /secret")) as running:
        assert chat(running)["error"] == "internal error in the model's process; the server's log has the details"


def test_a_load_that_makes_no_progress_is_given_up(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, load_silently, load_timeout=0.5) as running:
        answer = chat(running)
        assert answer["status"] == 500
        assert answer["error"] == "timed out waiting for tiny:latest to load: no progress for 0.5 seconds"
        wait_until(lambda: running.loaded() == [])


def test_a_damaged_file_is_refused_with_its_fault(daemon: Daemon) -> None:
    daemon.add_model("damaged", serving.tiny_gguf()[:200])
    response = daemon.http.post("/api/show", json={"model": "damaged"})
    assert response.status_code == 500
    assert "Traceback" not in response.text and response.json()["error"].count("\n") == 0
    assert daemon.http.get("/api/tags").status_code == 200
    assert daemon.http.request("DELETE", "/api/delete", json={"model": "damaged"}).status_code == 200


# ---- runners that die ---------------------------------------------------------------------------------------------------------


def test_kill_9_fails_the_waiting_and_the_next_request_has_a_fresh_runner(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying(LONG, delay=0.01)) as running:
        lines: list[dict[str, Any]] = []
        answers: list[dict[str, Any]] = []

        def read() -> None:
            with running.http.stream("POST", "/api/chat", json={"model": "tiny", "messages": HI}) as response:
                lines.extend(json.loads(line) for line in response.iter_lines())

        streamed = threading.Thread(target=read)
        whole = threading.Thread(target=lambda: answers.append(chat(running)))
        for thread in (streamed, whole):
            thread.start()
        wait_until(lambda: lines and running.loaded()[0].get("running") == 2)
        pid = running.loaded()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        for thread in (streamed, whole):
            thread.join(120)
            assert not thread.is_alive()
        assert answers[0]["status"] == 500
        assert answers[0]["error"].startswith("model runner has unexpectedly stopped, this may be due to resource limitations")
        assert "SIGKILL" in answers[0]["error"]
        assert set(lines[-1]) == {"error"} and lines[-1]["error"] == answers[0]["error"]
        assert all(line["done"] is False for line in lines[:-1])
        again = chat(running, options={"num_predict": 3})
        assert again["status"] == 200 and running.loaded()[0]["pid"] != pid


def test_a_crash_in_a_forward_pass_is_the_same(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, serving.load_crashing) as running:
        answer = chat(running)
        assert answer["status"] == 500 and "(exit code 139)" in answer["error"]
        response = running.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": True})
        assert response.status_code == 200
        *_, error, done = response.text.strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "runner_died"
        assert done == "data: [DONE]"


def test_a_runner_that_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        chat(running)
        pid = running.loaded()[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
    # serving.daemon waits for the daemon's end, in bounded time
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
