"""Play of one seed from nothing: the same seed is the same history on every machine and under every hash seed."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from broker.errors import BrokerError
from tests.simulation.events import Violation
from tests.simulation.groups import draw_group_mix
from tests.simulation.mixes import Mix, draw_mix, with_kinds
from tests.simulation.processes import Crash
from tests.simulation.scenes import Scene, act_out, check_end
from tests.simulation.stories import play
from tests.simulation.universe import Universe, run_universe


@dataclass(frozen=True, kw_only=True)
class Result:
    seed: int
    failure: str
    digest: str
    trace: Sequence[str]
    unowned_s: float
    points: int
    kills: Counter[str]
    virtual_s: float
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


def play_seed(seed: int, *, trace: bool = False) -> Result:
    return play_mix(seed, draw_mix(Random(f"{seed}/mix")), trace=trace)


def play_group(seed: int, *, trace: bool = False) -> Result:
    """Play the history of a job group under the faults of a seed."""
    return play_mix(seed, draw_group_mix(Random(f"{seed}/group")), trace=trace)


def play_kinds(seed: int, *, trace: bool = False) -> Result:
    """Play the history of a seed with machines of two kinds, and with a deadline for each job that has no budget."""
    return play_mix(seed, with_kinds(draw_mix(Random(f"{seed}/mix"))), trace=trace)


def play_mix(seed: int, mix: Mix, *, trace: bool = False) -> Result:
    return play_story(seed, mix, play, trace=trace)


def play_scene(scene: Scene, *, kill_at: int | None = None, stop_at: int | None = None, trace: bool = False) -> Result:
    """Play one scene; with `kill_at` or `stop_at`, kill or stop the process that reaches that effect or commit."""

    async def act(universe: Universe) -> None:
        universe.begin(act_out(universe, scene))
        await play(universe)
        if wrong := check_end(universe, scene):
            universe.fail(Violation("S11", wrong))

    return play_story(scene.seed, scene.mix, act, kill_at=kill_at, stop_at=stop_at, trace=trace)


def play_story(
    seed: int,
    mix: Mix,
    story: Callable[[Universe], Awaitable[None]],
    *,
    kill_at: int | None = None,
    stop_at: int | None = None,
    trace: bool = False,
) -> Result:
    with make_folder() as folder:
        universe = Universe(folder, seed, mix, kill_at=kill_at, stop_at=stop_at, trace=trace)
        with watch_log(universe):
            run_universe(universe, story)
        return Result(
            seed=seed,
            failure=f"{universe.failure!s}" if universe.failure else "",
            digest=universe.digest.hexdigest(),
            trace=universe.trace_lines or (),
            unowned_s=universe.unowned_s,
            points=universe.points,
            kills=universe.kills,
            virtual_s=universe.loop.time() - universe.start_s,
            cells=universe.cells,
            faults=universe.cloud.fault_counts,
        )


@contextmanager
def make_folder() -> Iterator[Path]:
    """Make a folder, in memory where possible: these commits need not outlive a power cut."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="broker-simulation-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class _Listener(logging.Handler):
    """A daemon in which an unexpected error of one job is a failure, although the product's survives it."""

    def __init__(self, universe: Universe) -> None:
        super().__init__(logging.WARNING)
        self._universe = universe

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._universe.say(f"log {record.getMessage()}".replace(str(self._universe.folder), "HOME"))
        if error is not None and not isinstance(error, BrokerError | Crash):
            self._universe.fail(error)


@contextmanager
def watch_log(universe: Universe) -> Iterator[None]:
    logger = logging.getLogger("broker")
    listener = _Listener(universe)
    was_propagated, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.propagate = was_propagated
