"""A service whose controller is killed at every effect, and whose balancer is killed at every step of it.

An effect is a write to the store, a file, or a start of a balancer. No replica is doubled, none is forgotten, and what
was ready before an update or a smaller number of replicas serves until it may be replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.serve import controller
from broker.serve.files import Routing, read_file
from tests.serve.test_controller import World, make_task
from tests.tiers import exhaustive, long

STEPS_MAX = 90
READY = 2  # replicas that each story begins and ends with, at least
WRITERS = ("write_file", "ensure_credentials", "remove_canary", "remove_folder")


class Killed(BaseException):
    """A kill at an effect."""


def begin(folder: Path, story: str) -> World:
    """Return the world at the beginning of a story."""
    folder.mkdir()
    if story == "scale_down":
        world = World(folder, make_task(READY, replicas_max=4, target_in_flight=1.0, downscale_delay_s=20.0))
        world.store.services.set_wanted("web", 4)
        world.settle(10)
        assert len(world.list_ready()) == 4
        return world
    world = World(folder)
    if story != "up":
        world.settle(6)
    if story == "update":
        world.store.services.add_version("web", make_task(version="b"))
    if story == "down":
        world.store.services.request_down("web")
    return world


def is_done(world: World, story: str) -> bool:
    if story == "down":
        return world.store.services.get("web") is None
    rows = world.store.services.list_replicas("web")
    return world.list_ready() == [2 if story == "update" else 1] * READY and len(rows) == READY


@contextmanager
def counted_effects(world: World, monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> Iterator[Callable[[], int]]:
    """Count the effects of the controller; raise instead of the one at `kill_at`."""
    count = 0

    def guard(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            is_read = (
                bool(arguments) and isinstance(arguments[0], str) and arguments[0].lstrip()[:6].upper() == "SELECT"
            )
            if not is_read:
                count += 1
                if count == kill_at:
                    raise Killed
            return do(*arguments, **options)

        return done

    with monkeypatch.context() as patches:
        patches.setattr(world.store, "execute", guard(world.store.execute))
        for name in WRITERS:
            patches.setattr(controller, name, guard(getattr(controller, name)))
        patches.setattr(world, "launch_balancer", guard(world.launch_balancer))
        yield lambda: count


def run(
    world: World, story: str, monkeypatch: pytest.MonkeyPatch, *, kill_at: int | None = None, dead_at: int | None = None
) -> tuple[int, int]:
    """Step to the end of the story; return the numbers of effects and steps.

    `dead_at` is a step before which the balancer is killed: none has the lock until the controller starts another.
    """
    effects = 0
    for step in range(STEPS_MAX):
        with counted_effects(world, monkeypatch, None if kill_at is None else kill_at - effects) as read_count:
            try:
                started = world.balancers
                if step == dead_at and world.store.services.get("web") is not None:
                    asyncio.run(world.controller.step())
                    assert story == "down" or world.balancers == started + 1, "the balancer was not started again"
                elif world.is_locked_run():
                    return effects + read_count(), step
            except Killed:
                world.controller = world.make_controller()
            effects += read_count()
        if step != dead_at:  # a dead balancer adopts no file, and reports nothing
            world.play()
        else:
            world.folder.load.unlink(missing_ok=True)
        world.check()
        check_serves(world, story)
        if is_done(world, story):
            return effects, step + 1
        world.clock.now += 1
    raise AssertionError("the story does not end")


def check_serves(world: World, story: str) -> None:
    """Check that as many replicas as before run and are not drained in the file that the balancer reads."""
    if story in ("up", "down"):
        return
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and not routing.is_stopped
    running = {
        row.number for row in world.store.services.list_replicas("web")
        if (job := world.store.jobs.get(row.job_id)) and job.status.name == "RUNNING"
    }  # fmt: skip
    assert len([each for each in routing.backends if not each.is_draining and each.number in running]) >= READY


def check_end(world: World, story: str) -> None:
    assert is_done(world, story)
    if story == "down":
        assert not world.store.jobs.list_unfinished_ids() and not world.folder.path.exists()
    world.store.close()


STORIES = ("up", "update", "scale_down", "down")
stories = pytest.mark.parametrize("story", STORIES)


def kill_at_effects(tmp_path: Path, story: str, monkeypatch: pytest.MonkeyPatch, *, every: int) -> None:
    total, _ = run(whole := begin(tmp_path / "whole", story), story, monkeypatch)
    whole.store.close()
    assert total >= (3 if story == "down" else 8)
    for kill_at in range(1, total + 1, every):
        world = begin(tmp_path / str(kill_at), story)
        run(world, story, monkeypatch, kill_at=kill_at)
        check_end(world, story)


@pytest.mark.parametrize("every", [14, pytest.param(4, marks=long), pytest.param(1, marks=exhaustive)])
@stories
def test_kill_at_an_effect_doubles_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str, every: int
) -> None:
    kill_at_effects(tmp_path, story, monkeypatch, every=every)


@pytest.mark.long
@stories
def test_balancer_that_is_killed_before_any_step_is_replaced_and_no_replica_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str
) -> None:
    _, steps = run(whole := begin(tmp_path / "whole", story), story, monkeypatch)
    whole.store.close()
    for dead_at in range(steps):
        world = begin(tmp_path / str(dead_at), story)
        numbers = {row.number for row in world.store.services.list_replicas("web")}
        run(world, story, monkeypatch, dead_at=dead_at)
        if story == "scale_down":
            assert {row.number for row in world.store.services.list_replicas("web")} < numbers
        check_end(world, story)
