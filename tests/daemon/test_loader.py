"""Which models are in memory, decided without any: runners here are stand-ins that load when told to."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from localrun.daemon.loader import LEAST_BESIDE_WEIGHTS, Loader, Wanted
from localrun.errors import Busy, LoadFailed, LocalrunError
from localrun.messages import Load, Loaded, LoadProgress
from localrun.settings import Settings
from localrun.store.facts import Facts

MEBI = 1 << 20


class Machine:
    """Memory, and who has it."""

    def __init__(self, mebibytes: int) -> None:
        self.free = mebibytes * MEBI
        self.least = self.free
        self.runners: list[StandIn] = []

    def runner(self, hook: Any) -> Any:
        made = StandIn(self)
        self.runners.append(made)
        return made

    def available(self) -> int:
        return self.free


class StandIn:
    """Looks like a Runner: takes its model's size from the file's, gives it back when it is stopped."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gone = asyncio.Event()
        self.held = 0
        self.busy = 0
        self.pid = 1
        self.fails: LocalrunError | None = None

    async def start(self, load: Load, on_progress: Any) -> Loaded:
        on_progress(LoadProgress(stage="reading", done=0, total=1))
        await asyncio.sleep(0.001)
        if Path(load.path).name == "broken":
            raise LoadFailed("broken")
        self.held = Path(load.path).stat().st_size + LEAST_BESIDE_WEIGHTS
        self.machine.free -= self.held
        self.machine.least = min(self.machine.least, self.machine.free)
        return Loaded(
            architecture="x", n_ctx_train=1, n_vocab=1, kv_tokens=1, weight_bytes=1, kv_bytes=1, packed=False, isa="none",
            num_thread=load.num_thread or 2, has_template=True, capabilities=[], load_s=0.0,
        )  # fmt: skip

    async def stop(self) -> None:
        await asyncio.sleep(0.001)
        self.machine.free += self.held
        self.held = 0
        self.gone.set()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Wanted]:
    """Models a, b and c of 100, 200 and 300 MiB (sparse), and one that does not load."""
    made = {}
    for name, size in (("a", 100), ("b", 200), ("c", 300), ("broken", 1)):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size * MEBI)
        made[name] = Wanted(name=name, path=path)
    return made


def names(loader: Loader) -> list[str]:
    return sorted(one.wanted.name for one in loader.residents())


async def use(loader: Loader, wanted: Wanted, keep_alive: float = 60, hold: float = 0.0) -> None:
    async with loader.use(wanted, keep_alive):
        await asyncio.sleep(hold)


async def test_memory_limits_before_the_number_does(files: dict[str, Wanted]) -> None:
    machine = Machine(2 * 512 + 350)
    loader = Loader(Settings(max_loaded_models=3), None, machine.runner, machine.available)
    await use(loader, files["a"])
    await use(loader, files["b"])
    assert names(loader) == ["a", "b"]
    await use(loader, files["c"])  # 50 MiB are free: a goes, which is not enough, then b
    assert names(loader) == ["c"]
    await loader.close()
    assert machine.free == machine.least + (512 + 300) * MEBI or machine.free == (2 * 512 + 350) * MEBI


async def test_two_that_fit_alone_do_not_load_at_once(files: dict[str, Wanted]) -> None:
    machine = Machine(512 + 400)
    loader = Loader(Settings(), None, machine.runner, machine.available)
    await asyncio.gather(*(use(loader, files[name]) for name in "abc"))
    assert machine.least >= 0
    assert len(names(loader)) == 1
    await loader.close()


FACTS = Facts(
    architecture="llama", title="", quantization="", parameters=1, file_bytes=1, tensor_bytes=2 << 30, packed_bytes=2 << 30, mapped_bytes=0,
    read_bytes=1, row_bytes=1, vocabulary=1000, merges=0, context_length=4096, kv=((10, 4, 64, 64),),
)  # fmt: skip


async def test_one_whose_header_says_that_it_does_not_fit_is_refused_with_the_numbers(files: dict[str, Wanted]) -> None:
    wanted = dataclasses.replace(files["a"], memory=FACTS)
    loader = Loader(Settings(), None, Machine(1000).runner, lambda: 1 << 30)
    with pytest.raises(LoadFailed, match=r"requires more system memory \(2\.\d GB\) than is available \(1\.1 GB\)"):
        await use(loader, wanted)
    assert names(loader) == []
    tried = Loader(Settings(overcommit=True), None, Machine(1000).runner, lambda: 1 << 30)
    await use(tried, wanted)
    assert names(tried) == ["a"]
    await tried.close()


async def test_one_that_does_not_fit_beside_another_takes_its_place(files: dict[str, Wanted]) -> None:
    machine = Machine(4000)
    loader = Loader(Settings(), None, machine.runner, lambda: (3 << 30) - sum((2 << 30) * bool(one.held) for one in machine.runners))
    await use(loader, dataclasses.replace(files["a"], memory=FACTS))
    await use(loader, dataclasses.replace(files["b"], memory=FACTS))
    assert names(loader) == ["b"]
    await loader.close()


async def test_one_of_unknown_needs_is_tried_when_it_is_alone(files: dict[str, Wanted]) -> None:
    machine = Machine(10)
    loader = Loader(Settings(), None, machine.runner, machine.available)
    await use(loader, files["c"])
    assert names(loader) == ["c"]
    await loader.close()


async def test_whoever_waits_may_leave(files: dict[str, Wanted]) -> None:
    machine = Machine(10_000)
    loader = Loader(Settings(max_loaded_models=1, max_queue=2), None, machine.runner, machine.available)
    async with loader.use(files["a"], 60):
        waiting = [asyncio.create_task(use(loader, files["b"])) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(Busy):
            await use(loader, files["b"])
        waiting[0].cancel()
        await asyncio.sleep(0)
        third = asyncio.create_task(use(loader, files["b"]))
        await asyncio.sleep(0.01)
        assert names(loader) == ["a"]
    await asyncio.gather(waiting[1], third)
    assert names(loader) == ["b"] and waiting[0].cancelled()
    await loader.close()


async def test_all_who_wait_hear_why_a_load_failed_and_it_leaves_nothing(files: dict[str, Wanted]) -> None:
    machine = Machine(10_000)
    loader = Loader(Settings(), None, machine.runner, machine.available)
    results = await asyncio.gather(*(use(loader, files["broken"]) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [LoadFailed] * 3 and len(machine.runners) == 1
    await asyncio.sleep(0.01)
    assert names(loader) == []
    await loader.close()


async def test_closing_ends_loads_and_turns_the_waiting_away(files: dict[str, Wanted]) -> None:
    machine = Machine(10_000)
    loader = Loader(Settings(max_loaded_models=1), None, machine.runner, machine.available)
    first = asyncio.create_task(use(loader, files["a"], hold=60))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(use(loader, files["b"]))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(loader.close(), 120)
    with pytest.raises(Busy):
        await asyncio.wait_for(second, 120)
    first.cancel()
    assert machine.free == 10_000 * MEBI


async def test_a_random_day(files: dict[str, Wanted]) -> None:
    """Whatever comes in whatever order: memory is never promised twice, a model in use never goes, and at the end all of it is back."""
    for seed in range(15):
        chance = random.Random(seed)
        machine = Machine(chance.choice([700, 1300, 2600]))
        loader = Loader(Settings(max_loaded_models=chance.randint(1, 3)), None, machine.runner, machine.available)

        async def visit(chance: random.Random = chance, loader: Loader = loader) -> None:
            await asyncio.sleep(chance.random() * 0.05)
            wanted = files[chance.choice(["a", "b", "c", "broken"])]
            if chance.random() < 0.3:
                wanted = Wanted(name=wanted.name, path=wanted.path, num_thread=chance.randint(1, 2))
            try:
                async with loader.use(wanted, chance.choice([0, 0.005, 60])) as resident:
                    runner = resident.runner
                    await asyncio.sleep(chance.random() * 0.01)
                    assert not runner.gone.is_set() and resident.wanted.path == wanted.path
                    assert wanted.num_thread in (0, resident.num_thread)
            except LoadFailed:
                assert wanted.name == "broken"

        visits = [asyncio.create_task(visit()) for _ in range(40)]
        for one in visits:
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.01)
                one.cancel()
        done = await asyncio.wait_for(asyncio.gather(*visits, return_exceptions=True), 120)
        assert not [result for result in done if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError)]
        before = machine.free + sum(runner.held for runner in machine.runners)
        await loader.close()
        assert machine.free == before and loader.residents() == [] and all(not runner.held for runner in machine.runners)
        assert machine.least >= 0 or machine.least >= before - max(512 + 300, 0) * MEBI
