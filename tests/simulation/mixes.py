"""Kinds and rates of faults for a seed: each seed mixes its own (swarm testing), and many omit most kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random

from broker.types import CheckpointSpec, Goal, JobRecovery, Resources, Task
from tests.clouds.simulated import CloudTimings, FaultRates
from tests.simulation.machines import Program

CLOUD_RATES_MAX = {
    "transient": 0.15, "throttled": 0.15, "unknown_before": 0.15, "unknown_after": 0.25, "late": 0.25, "full": 0.3,
    "quota": 0.1, "auth": 0.03, "partial": 0.15, "never_boots": 0.1, "forgotten": 0.3, "blank": 0.25,
    "blackout": 0.02, "stale": 0.2, "behind": 0.2, "repeated": 0.2, "silent": 0.1, "ignored": 0.2, "refused": 0.1,
    "stuck": 0.2, "mute": 0.2,
}  # fmt: skip
assert set(CLOUD_RATES_MAX) == {each.name for each in fields(FaultRates)}


END_S_MAX = 3 * 3600.0  # a place that refused for quota is not requested again for hours


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    submit_s: float
    task: Task
    program: Program
    cancel_s: float = math.inf
    hedge: int = 2  # places that may be requested at once
    needs: tuple[int, ...] = ()  # indexes of jobs that have to succeed before
    project: str = ""  # for which a server admits it


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mean seconds between two faults of each kind, over the whole universe; infinite means never."""

    jobs: tuple[JobSpec, ...]
    cloud: FaultRates = field(default_factory=FaultRates)
    market: CloudTimings = field(default_factory=CloudTimings)
    heal_s: float = 0.0
    preempt_chance: float = 0.0  # of each node, within its first `preempt_s_max`
    preempt_s_max: float = 60.0
    notice_s: float = 0.0
    is_notice_lost: bool = False
    partition_every_s: float = math.inf
    silence_s: float = 0.0
    skew_s: float = 0.0
    points_between_kills: float = math.inf
    kill_every_s: float = math.inf
    stop_every_s: float = math.inf
    stopped_s: float = 40.0  # of a scene's stop: long enough for another leader to take over
    sqlite_every_s: float = math.inf
    jump_every_s: float = math.inf
    command_every_s: float = math.inf
    cut_off_every_s: float = math.inf  # all nodes of a gang out of reach at once
    power_every_s: float = math.inf
    disk_every_s: float = math.inf  # full, for a while
    suspend_every_s: float = math.inf
    owner_every_s: float = math.inf  # the owner file is lost, and restored
    login_every_s: float = math.inf  # the next start is with a login for another account
    offset_s: float = 0.0  # of the broker's wall clock to the cloud's
    bucket_silence: float = 0.0  # chance that a read of a bucket gets no answer
    drift: float = 0.0  # seconds that it gains in one
    is_doubled: bool = False  # a second broker keeps trying to lead
    restart_s_max: float = 5.0
    poll_s: float = 0.5  # of the product's own pace; coarser ones play more histories in the same time
    end_s_max: float = END_S_MAX  # after the last fault every job has ended and nothing is left
    leaves_broker_dead: bool = False  # the broker is never started again: nodes must end by themselves
    away_at_s: float = math.inf  # the machine of the brokers is closed then,
    away_s: float = 0.0  # for this many seconds
    retries_group: bool = False  # a user retries the job group once it has ended without success

    @property
    def may_lose_power(self) -> bool:
        return not math.isinf(self.power_every_s)

    @property
    def is_clock_true(self) -> bool:
        """Return whether the broker's clock measures elapsed time; a constant offset affects no measurement."""
        return math.isinf(self.jump_every_s) and self.drift == 0.0


def draw_mix(random: Random) -> Mix:
    intensity = random.choice((0.2, 0.5, 1.0))

    def maybe(value: float, chance: float = 0.4) -> float:
        return value if random.random() < chance else math.inf

    rates = {
        name: random.uniform(0.1, 1.0) * intensity * rate if random.random() < 0.4 else 0.0
        for name, rate in CLOUD_RATES_MAX.items()
    }
    boot_s = random.choice((2.0, 10.0, 20.0))
    market = CloudTimings(
        boot_s=boot_s,
        boot_s_max=2 * boot_s,
        list_lag_s=random.choice((0.0, 5.0)),
        terminate_s=random.choice((0.5, 3.0, 20.0)),
        vanish_s=random.choice((0.0, 30.0, math.inf, math.inf)),
        refused_s=random.choice((60.0, 180.0)),
        silent_s=random.choice((5.0, 30.0, 200.0)),
        hang_s=random.choice((15.0, 60.0, 200.0, math.inf)),
    )
    away_s = random.choice((600.0, 1500.0, 5000.0)) if random.random() < 0.1 else 0.0
    away_at_s = random.uniform(5.0, 60.0) if away_s else math.inf
    return Mix(
        jobs=draw_jobs(random),
        cloud=FaultRates(**rates),
        market=market,
        heal_s=random.uniform(60.0, 240.0) + away_s,
        away_at_s=away_at_s,
        away_s=away_s,
        preempt_chance=random.choice((0.0, 0.2, 0.5, 0.9)) * intensity,
        notice_s=random.choice((0.0, 5.0, 30.0)),
        is_notice_lost=random.random() < 0.3,
        partition_every_s=maybe(random.uniform(30.0, 120.0) / intensity),
        silence_s=random.choice((0.0, 3.0, 30.0)),
        skew_s=random.choice((0.0, -3600.0, 3600.0)),
        points_between_kills=maybe(random.uniform(10.0, 120.0) / intensity),
        kill_every_s=maybe(random.uniform(20.0, 100.0) / intensity),
        stop_every_s=maybe(random.uniform(20.0, 100.0) / intensity),
        sqlite_every_s=maybe(random.uniform(5.0, 60.0) / intensity),
        jump_every_s=maybe(random.uniform(60.0, 200.0) / intensity, 0.2),
        command_every_s=maybe(random.uniform(20.0, 100.0), 0.5),
        cut_off_every_s=maybe(random.uniform(30.0, 150.0) / intensity, 0.2),
        power_every_s=maybe(random.uniform(20.0, 120.0) / intensity, 0.2),
        disk_every_s=maybe(random.uniform(30.0, 150.0) / intensity, 0.2),
        suspend_every_s=maybe(random.uniform(40.0, 150.0) / intensity, 0.2),
        owner_every_s=maybe(random.uniform(20.0, 100.0) / intensity, 0.2),
        login_every_s=maybe(random.uniform(30.0, 150.0) / intensity, 0.2),
        offset_s=random.choice((0.0, 0.0, -25.0, 25.0, 400.0)),
        drift=random.choice((0.0, 0.0, 0.0, -0.01, 0.01)),
        bucket_silence=random.choice((0.0, 0.0, 0.5)),
        is_doubled=random.random() < 0.35,
        restart_s_max=random.choice((1.0, 10.0, 40.0)),
        poll_s=random.choice((0.5, 2.0, 4.0, 4.0)),
        leaves_broker_dead=random.random() < 0.04,
    )


def draw_jobs(random: Random) -> tuple[JobSpec, ...]:
    """Draw jobs; occasionally one needs the one before it."""
    jobs = [draw_job(random) for _ in range(random.choice((1, 1, 2, 2, 3, 4)))]
    return tuple(
        replace(job, needs=(index - 1,)) if index and random.random() < 0.2 else job for index, job in enumerate(jobs)
    )


def draw_deaths(random: Random, steps: int) -> tuple[tuple[int, int], ...]:
    """Draw the deaths of a third of all programs: ranks are killed, abort or fail, at one step or while progressing."""
    if random.random() < 0.67:
        return ()
    same = random.randrange(steps)
    at = [same if random.random() < 0.5 else random.randrange(steps) for _ in range(random.choice((1, 2, 5)))]
    return tuple((step, random.choice((137, 134, 1))) for step in at)


def draw_goal(random: Random, steps: int, budget_usd: float | None) -> Goal | None:
    """Draw an occasional deadline: then a spot policy says where the job runs, and moves it."""
    if random.random() < 0.15:
        work_hours = steps / 3600
        return Goal(work_hours=work_hours, deadline_hours=random.choice((2.0, 10.0)) * work_hours)
    return Goal(work_hours=1.0, budget_usd=budget_usd) if budget_usd else None


def with_kinds(mix: Mix) -> Mix:
    """Return the mix with jobs that accept machines of two kinds, under a policy that moves them between both."""
    kinds = tuple(Resources(accelerator=name, accelerator_count=8) for name in ("A100", "H100"))

    def change(spec: JobSpec) -> JobSpec:
        goal = spec.task.goal
        if goal is None or goal.budget_usd is None:
            work_hours = spec.program.steps / 3600
            goal = Goal(work_hours=work_hours, deadline_hours=10.0 * work_hours)
        recovery = replace(spec.task.recovery, strategy=None)
        return replace(spec, task=replace(spec.task, resources=kinds, goal=goal, recovery=recovery))

    return replace(mix, jobs=tuple(change(spec) for spec in mix.jobs))


def draw_job(random: Random) -> JobSpec:
    recovery = JobRecovery(
        max_restarts_on_errors=random.choice((None, 0, 2)),
        stall_timeout_s=random.choice((None, None, 40.0)),
        strategy=random.choice((None, "failover", "eager_next_region", "cheapest")),
        nodes_min=random.choice((None, None, None, 1, 2)),
    )
    steps = random.choice((12, 25, 45, 45, 400))
    program = Program(
        steps=steps,
        setup_s=random.choice((0.5, 4.0)),
        exit_codes=random.choice(((), (), (), (), (7,), (1, 0, 7))),
        hang_at=max(1, steps // 2),
        hangs=random.choice((0, 1)) if recovery.stall_timeout_s else 0,
        break_at=random.choice((0, 7)),
        breaks=random.choice((0, 0, 0, 1, 2)),
        deaths=draw_deaths(random, steps),
        sick=random.choice((0, 0, 0, 0, 1, 2)),
    )
    budget_usd = random.choice((None, None, None, None, None, 0.05))
    task = Task(
        name="train",
        run="python train.py",
        num_nodes=random.choice((1, 1, 2, 2, 3)),
        recovery=recovery,
        goal=draw_goal(random, steps, budget_usd),
        checkpoint=CheckpointSpec(to=random.choice((None, "s3://bucket"))),
        unattended_s=random.choice((None, 900.0, 900.0, 3600.0)),
    )
    cancel_s = random.uniform(1.0, 120.0) if random.random() < 0.2 else math.inf
    return JobSpec(
        submit_s=random.uniform(0.0, 30.0),
        task=task,
        program=program,
        cancel_s=cancel_s,
        hedge=random.choice((1, 2, 2, 3)),
    )


def calm(jobs: Sequence[JobSpec], **changes: object) -> Mix:
    """Return a mix without faults, apart from `changes`."""
    return replace(Mix(jobs=tuple(jobs)), **changes)  # type: ignore[arg-type]
