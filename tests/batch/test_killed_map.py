"""`broker map` is killed at every action, and continues when it runs again."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app.container import Context
from broker.app.mapping import MapDriver, MapRequest, MapResult
from broker.app.verbs.batches import note_budget
from broker.errors import BrokerError, UsageError
from broker.task.loader import load_tasks_text
from broker.types import Job, JobStatus, Task
from tests.batch.killed_command import KilledError, Killer, World
from trainers.map_leases import Leases, read_plan
from trainers.map_places import open_place

ITEMS = 40
TEXT = "name: m\nresources: {infra: local}\nrun: python -m trainers.map_worker x.py\n"


def make_task(text: str = TEXT) -> Task:
    (task,) = load_tasks_text(text, "task.yaml")
    return task


class MapWorld(World):
    """A worker does two shards in each second; the first one of all is lost with its lease."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "home", self.work)
        self.folder = folder
        (folder / "in.jsonl").write_text("".join(f"{number}\n" for number in range(10, 10 + ITEMS)))

    def work(self, context: Context, job: Job) -> None:
        place = open_place(job.task.envs["BROKER_MAP"])
        leases = Leases(place, read_plan(place), worker=job.stem)
        for _ in range(2):
            lease = leases.acquire()
            if lease is None:
                context.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
                return
            if lease.number == 7 and lease.epoch == 1:  # its job ends without having finished the shard
                context.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
                leases.release(lease)
                return
            leases.commit(lease, f"{lease.number}\n".encode(), items=1)

    def run(self, killer: Killer, *, workers: int = 2) -> MapResult:
        """Run one command to its end."""
        context = self.open(killer)
        try:
            request = MapRequest(
                task=make_task(), input=str(self.folder / "in.jsonl"), output=str(self.folder / "out"),
                workers=workers, shard_bytes=12,
            )  # fmt: skip
            driver = MapDriver(context, request)
            killer.wrap(driver._output, "write", "write_if_absent", "delete")

            async def follow() -> MapResult:
                views = [view async for view in driver.follow()]
                return driver.finish(views[-1])

            driver.begin()
            return asyncio.run(follow())
        finally:
            context.close()

    def check(self, result: MapResult) -> None:
        shards = result.view.tally.shards
        parts = sorted((self.folder / "out").glob("part-*"))
        assert [part.read_text() for part in parts] == [f"{number}\n" for number in range(shards)]
        assert result.items == shards > 5 and not result.failures
        manifest = json.loads((self.folder / "out/_map/manifest.json").read_text())
        assert [each["part"] for each in manifest["parts"]] == [part.name for part in parts]
        context = Context(self.home)
        try:
            jobs = context.store.jobs.list()
        finally:
            context.close()
        assert len({job.pipeline for job in jobs}) == 1
        assert len(jobs) <= 4, "no worker was submitted twice"


def test_an_uninterrupted_map_needs_few_actions(tmp_path: Path) -> None:
    world, killer = MapWorld(tmp_path), Killer(None)
    world.check(world.run(killer))
    assert 8 <= killer.actions <= 40


def kill_at(folder: Path, action: int) -> bool:
    """Kill the first command at an action; return whether it got that far."""
    world, killer = MapWorld(folder), Killer(action)
    try:
        world.run(killer)
    except KilledError:
        pass
    world.check(world.run(Killer(None)))
    return killer.actions >= action


@pytest.mark.parametrize("action", [0, 1, 3, 5])
def test_a_map_killed_at_one_action_is_continued_by_the_same_command(tmp_path: Path, action: int) -> None:
    assert kill_at(tmp_path, action)


@pytest.mark.long
def test_a_map_killed_at_any_action_is_continued_by_the_same_command(tmp_path: Path) -> None:
    for action in range(100):
        folder = tmp_path / str(action)
        folder.mkdir()
        if not kill_at(folder, action):
            assert action >= 8
            return
    raise AssertionError("a map has fewer actions")


def test_an_output_of_another_program_or_with_other_files_is_refused(tmp_path: Path) -> None:
    world = MapWorld(tmp_path)
    world.run(Killer(None))
    context = world.open(Killer(None))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    source, out = str(tmp_path / "in.jsonl"), str(tmp_path / "out")
    other = make_task(TEXT.replace("x.py", "y.py"))
    with pytest.raises(UsageError, match="another program"):
        MapDriver(context, MapRequest(task=other, input=source, output=out)).begin()
    with pytest.raises(UsageError, match="not empty"):
        MapDriver(context, MapRequest(task=make_task(), input=source, output=str(folder))).begin()
    with pytest.raises(UsageError, match="does not start a map worker"):
        MapDriver(context, MapRequest(task=make_task("run: python x.py\n"), input=source, output=out))
    with pytest.raises(UsageError, match="unsupported storage"):
        MapDriver(context, MapRequest(task=make_task(), input=source, output="ftp://x/y"))
    with pytest.raises(UsageError, match="no lines"):
        MapDriver(context, MapRequest(task=make_task(), input=str(folder), output=out))
    with pytest.raises(UsageError, match=r"`.*missing\.jsonl` does not exist"):
        MapDriver(context, MapRequest(task=make_task(), input=str(tmp_path / "missing.jsonl"), output=out))
    context.close()


def test_a_map_is_continued_with_another_path_to_the_same_files(tmp_path: Path) -> None:
    world = MapWorld(tmp_path)
    world.run(Killer(None))
    (tmp_path / "elsewhere").mkdir()
    context = world.open(Killer(None))
    source, out = (str(tmp_path / "elsewhere" / ".." / name) for name in ("in.jsonl", "out"))
    assert not MapDriver(context, MapRequest(task=make_task(), input=source, output=out, shard_bytes=12)).begin()
    inside = str(tmp_path / "elsewhere" / ".." / "out")
    with pytest.raises(UsageError, match="inside the input folder"):
        MapDriver(context, MapRequest(task=make_task(), input=str(tmp_path), output=inside))
    context.close()


def test_an_input_that_was_written_again_with_the_same_size_is_refused(tmp_path: Path) -> None:
    world = MapWorld(tmp_path)
    world.run(Killer(None))
    source = tmp_path / "in.jsonl"
    source.write_text(source.read_text().replace("1", "2"))
    os.utime(source, (1e9, 1e9))
    with pytest.raises(UsageError, match=r"before `in\.jsonl` was written again"):
        world.run(Killer(None))


def test_a_map_whose_workers_all_fail_reports_it_and_restarts_with_the_same_command(tmp_path: Path) -> None:
    world = MapWorld(tmp_path)
    work, world._live = world._live, lambda context, job: _fail(context, job)
    with pytest.raises(BrokerError, match="shards remain") as error:
        world.run(Killer(None))
    assert any("exit code 1" in detail for detail in error.value.details)
    world._live = work
    world.check(world.run(Killer(None)))


def _fail(context: Context, job: Job) -> None:
    context.store.jobs.set_status(job.id, JobStatus.FAILED, "exit code 1")


def test_a_budget_that_each_worker_has_is_noted_with_the_sum() -> None:
    notes: list[str] = []
    context: Any = SimpleNamespace(note=notes.append)
    task = make_task(TEXT + "goal: {work: 1h, budget: 50}\n")
    note_budget(context, task, 20, "worker")
    assert notes == ["the budget of 50.00 USD limits each worker, so 20 workers may cost up to 1,000.00 USD together"]
    note_budget(context, task, 1, "worker")
    note_budget(context, make_task(), 20, "worker")
    assert len(notes) == 1


def test_changed_file_of_the_program_is_named_when_a_map_is_continued(tmp_path: Path) -> None:
    world = MapWorld(tmp_path)
    (tmp_path / "x.py").write_text("def process(items): return items\n")
    context = world.open(Killer(None))
    task = replace(make_task(), workdir=str(tmp_path))
    request = MapRequest(task=task, input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out"))
    for text, changed in (("", []), ("", []), ("# fixed\n", ["x.py"])):
        with (tmp_path / "x.py").open("a") as file:
            file.write(text)
        driver = MapDriver(context, request)
        driver.begin()
        assert list(driver.changed_files) == changed
    context.close()
