"""Scenes of job groups, each with one event (see `scenes.py`). Tests kill a broker at their every effect."""

from __future__ import annotations

import math
from dataclasses import replace

from broker.types import GroupRole, JobStatus, OnLoss
from tests.simulation import stories
from tests.simulation.groups import ENDLESS
from tests.simulation.mixes import JobSpec
from tests.simulation.scenes import NEVER_AGAIN, SCENES, Act, Scene, make_job, make_mix
from tests.simulation.universe import ZONES, Universe

DELAY_S = 20.0
ENDS_OF_A_RETRY = (JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.SUCCEEDED)


def make_task(
    index: int,
    *,
    nodes: int = 1,
    steps: int = 12,
    setup_s: float = 0.5,
    exit_codes: tuple[int, ...] = (),
    on_loss: OnLoss = OnLoss.KEEP_GOING,
    delay_s: float = 0.0,
    is_primary: bool = False,
    budget_usd: float | None = None,
) -> JobSpec:
    """Make a task of the group; the one with index 0 is primary, and one that is not works until it is ended."""
    is_primary = is_primary or index == 0
    steps = steps if is_primary else ENDLESS
    spec = make_job(nodes=nodes, steps=steps, exit_codes=exit_codes, recovery=NEVER_AGAIN, budget_usd=budget_usd)
    role = GroupRole(name="rl", is_primary=is_primary, on_loss=on_loss, termination_delay_s=delay_s)
    task = replace(spec.task, name=f"task-{index}", group=role, pipeline="rl")
    return replace(spec, task=task, program=replace(spec.program, setup_s=setup_s))


def make_pair(*, steps: int = 12, on_loss: OnLoss = OnLoss.KEEP_GOING, delay_s: float = 0.0) -> tuple[JobSpec, JobSpec]:
    return make_task(0, steps=steps, on_loss=on_loss), make_task(1, delay_s=delay_s, setup_s=4.0)


def lose_task(index: int) -> Act:
    """Return the act that preempts a node of the newest program of a task."""

    def act(universe: Universe) -> None:
        run = universe.gang.runs_by_job[universe.jobs_in[index]][-1]
        universe.note_fault("preempt", run.cluster)
        universe.cloud.preempt([run.ids[-1]])

    return act


def cancel_task(index: int) -> Act:
    def act(universe: Universe) -> None:
        work = stories.insist(universe, "cancel", lambda process: stories.cancel_job(universe, process, index))
        universe.begin(work)

    return act


def retry(universe: Universe) -> None:
    """Retry the group until the command has worked."""
    work = stories.insist(universe, "retry", lambda process: stories.retry(universe, process, universe.jobs_in[0]))
    universe.begin(work)


def fill_region_and_lose(index: int) -> Act:
    """Return the act that fills the region of a task, and then preempts it."""

    def act(universe: Universe) -> None:
        run = universe.gang.runs_by_job[universe.jobs_in[index]][-1]
        zone = universe.cloud.find([run.ids[0]])[0].zone
        assert zone is not None
        universe.cloud.full_zones.update({each: math.inf for each in ZONES if each[:-1] == zone[:-1]})
        lose_task(index)(universe)

    return act


MOVING = Scene(
    name="a running group moves to a region with capacity",
    mix=make_mix(*make_pair(steps=2000), heal_s=2500.0),
    acts=((15.0, fill_region_and_lose(1)),),
)
FOLLOWING = Scene(
    name="a group that has not started follows a task to another region",
    mix=make_mix(make_task(0), make_task(1, setup_s=3.0), heal_s=300.0),
    acts=((1.0, fill_region_and_lose(1)),),
    starts=4,
    machines=4,
)
GROUP_SCENES: tuple[Scene, ...] = (
    Scene(name="a group", mix=make_mix(*make_pair()), starts=2, machines=2),
    Scene(name="a group whose auxiliary task ends later", mix=make_mix(*make_pair(delay_s=DELAY_S)), starts=2),
    Scene(
        name="a group whose auxiliary task is lost",
        mix=make_mix(*make_pair(steps=400), heal_s=60.0),  # time enough to judge the addresses of the first task
        acts=((15.0, lose_task(1)),),
        starts=3,
    ),
    Scene(
        name="a group that restarts with its first task",
        mix=make_mix(*make_pair(steps=60, on_loss=OnLoss.RESTART_GROUP), make_task(2), heal_s=200.0),
        acts=((15.0, lose_task(0)),),
        starts=6,
    ),
    Scene(
        name="a group whose primary task is cancelled",
        mix=make_mix(*make_pair(steps=60), heal_s=200.0),
        acts=((15.0, cancel_task(0)),),
        ends=(JobStatus.CANCELLED,),
    ),
    Scene(
        name="a group whose auxiliary task is cancelled before its start",
        mix=make_mix(make_task(0), make_task(1, setup_s=60.0), heal_s=200.0),
        acts=((15.0, cancel_task(1)),),
        ends=(JobStatus.CANCELLED,),
    ),
    Scene(
        name="a group that restarts without a task that has ended",
        mix=make_mix(*make_pair(steps=60, on_loss=OnLoss.RESTART_GROUP), make_task(2), heal_s=200.0),
        acts=((15.0, cancel_task(2)), (30.0, lose_task(0))),
        ends=(JobStatus.SUCCEEDED, JobStatus.CANCELLED),
        starts=5,
    ),
    Scene(
        name="a group with two primary tasks, of which the second fails",
        mix=make_mix(
            make_task(0), make_task(1, steps=40, exit_codes=(1,), is_primary=True), make_task(2), heal_s=200.0
        ),
        ends=ENDS_OF_A_RETRY,
        starts=3,
        last=JobStatus.CANCELLED,
    ),
    Scene(
        name="a group with a budget for each task",
        mix=make_mix(make_task(0, budget_usd=0.009), make_task(1, budget_usd=0.009), heal_s=200.0),
        starts=2,
    ),
    Scene(
        name="a failed group is retried",
        mix=make_mix(make_task(0, exit_codes=(1,)), make_task(1), heal_s=200.0),
        acts=((60.0, retry),),
        ends=ENDS_OF_A_RETRY,
        starts=4,
        last=JobStatus.SUCCEEDED,
    ),
)  # fmt: skip
ALL_SCENES = (*SCENES, *GROUP_SCENES)
LONG_SCENES = (FOLLOWING, MOVING)  # not killed: it takes too long, or changes where the tasks meet
