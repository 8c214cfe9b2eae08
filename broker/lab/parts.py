"""The parts of a study: replays of one policy, or optima, over some scenes, in this process or in several."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.lab.offline_optimum import find_optimum
from broker.lab.replay import Case, ReplayOutcome, replay
from broker.spot.policies import MEMORYLESS, ORACLES, load_policy

# The share by which the plan found may exceed the optimum. The search is ten times as fast as at 0.02 %.
OPTIMUM_TOLERANCE = 0.003
OPTIMUM = "optimum"
# A process of its own costs 0.3 s, and `adaptive` solves its value functions again in each.
REPLAYS_PART, OPTIMA_PART = 200, 8
REPLAYS_SHARED_MIN = 400  # with fewer, processes of their own cost more time than they save


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A case and the hour of its recordings at which the job is submitted."""

    case: Case
    from_hour: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """Scenes to replay under a policy, or to find the optimum of (`name` is then `OPTIMUM`)."""

    name: str
    indices: tuple[int, ...]


Found = Sequence[ReplayOutcome] | Sequence[float | None]  # one for each scene of a part


def run_part(scenes: Sequence[Scene], part: Part) -> Found:
    """Return the outcome, or the optimum in USD, of each scene; None if no plan is in time."""
    if part.name == OPTIMUM:
        return [_find_optimum(scenes[index]) for index in part.indices]
    policy, is_oracle, is_learner = load_policy(part.name), part.name in ORACLES, part.name not in MEMORYLESS
    return [
        replay(scene.case, policy, scene.from_hour, is_oracle=is_oracle, is_learner=is_learner)
        for scene in (scenes[index] for index in part.indices)
    ]


def _find_optimum(scene: Scene) -> float | None:
    best = find_optimum(
        scene.case.sites, work_hours=scene.case.work_hours, deadline_hours=scene.case.deadline_hours,
        from_hour=scene.from_hour, tolerance=OPTIMUM_TOLERANCE,
    )  # fmt: skip
    return best if math.isfinite(best) else None


def run_parts(
    scenes: Sequence[Scene],
    policies: Sequence[str],
    optima: Sequence[int],
    *,
    workers: int,
    on_step: Callable[[int, int, str], None],
) -> Iterator[tuple[Part, Found]]:
    """Yield the results of every policy on every scene, and of the optima of the chosen ones, in any order.

    `on_step` gets (completed steps, all steps, name of the next step). Results do not depend on `workers`; more than
    one starts processes, so the main module of the program must be guarded by `if __name__ == "__main__"`.
    """
    every = range(len(scenes))
    total = len(policies) * len(scenes) + len(optima)
    if workers > 1 and total >= REPLAYS_SHARED_MIN:
        parts = [part for name in reversed(policies) for part in _split(name, every, REPLAYS_PART)]
        parts[1:1] = _split(OPTIMUM, optima, OPTIMA_PART)  # the longest first: `adaptive` is the last policy
        yield from _share(scenes, parts, workers, total, on_step)
        return
    parts = [part for name in policies for part in _split(name, every, 1)] + _split(OPTIMUM, optima, 1)
    for completed, part in enumerate(parts):
        on_step(completed, total, part.name)
        yield part, run_part(scenes, part)


def _split(name: str, indices: Sequence[int], size: int) -> list[Part]:
    return [Part(name=name, indices=tuple(indices[begin : begin + size])) for begin in range(0, len(indices), size)]


def _share(
    scenes: Sequence[Scene],
    parts: Sequence[Part],
    workers: int,
    total: int,
    on_step: Callable[[int, int, str], None],
) -> Iterator[tuple[Part, Found]]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    completed = 0
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of a progress display
    with ProcessPoolExecutor(
        min(workers, len(parts)), mp_context=context, initializer=_begin_worker, initargs=(tuple(scenes),)
    ) as pool:
        running = {pool.submit(_run_in_worker, part): part for part in parts}
        try:
            on_step(0, total, parts[0].name)
            for done in as_completed(running):
                part = running[done]
                completed += len(part.indices)
                on_step(completed, total, part.name)
                yield part, done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_scenes: tuple[Scene, ...] = ()  # the scenes of this worker process


def _begin_worker(scenes: tuple[Scene, ...]) -> None:
    global _scenes
    _scenes = scenes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the study, with one message


def _run_in_worker(part: Part) -> Found:
    return run_part(_scenes, part)
