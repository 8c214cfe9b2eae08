"""Small universes with one event each, played without chance, for killing a broker at its every effect.

A scene's acts are timed from the first start of a program, so that they hit the same moment whichever process was
killed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from broker.errors import CapacityError
from broker.types import CheckpointSpec, Goal, JobRecovery, JobStatus, NodeRequest, NodeState, Resources, Task
from tests.clouds.simulated import CloudTimings, FaultRates
from tests.simulation import host, stories
from tests.simulation.machines import Program
from tests.simulation.mixes import JobSpec, Mix
from tests.simulation.universe import ZONES, Universe
from tests.simulation.world import OWNER

MARKET = CloudTimings(boot_s=2.0, boot_s_max=4.0, list_lag_s=2.0, terminate_s=1.0)
Act = Callable[[Universe], None]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A scene.

    `acts`: seconds after the first start, and what happens then. `ends`: how each job may end. `self_ends`: the reasons
    for which nodes end themselves; None: any. `starts`: of programs in all; `machines`: nodes that were made in all;
    None: any number. `last`: how the newest job must end.
    """

    name: str
    mix: Mix
    acts: tuple[tuple[float, Act], ...] = ()
    full_zones: tuple[str, ...] = ()
    ends: tuple[JobStatus, ...] = (JobStatus.SUCCEEDED,)
    seed: int = 0
    self_ends: tuple[str, ...] | None = ()
    starts: int | None = None
    machines: int | None = None
    last: JobStatus | None = None


def make_job(
    *,
    nodes: int = 2,
    steps: int = 12,
    exit_codes: tuple[int, ...] = (),
    hangs: int = 0,
    breaks: int = 0,
    unfit: int = 0,
    sick: int = 0,
    deaths: tuple[tuple[int, int], ...] = (),
    budget_usd: float | None = None,
    recovery: JobRecovery = JobRecovery(),
    submit_s: float = 0.5,
    hedge: int = 2,
    needs: tuple[int, ...] = (),
    deadline_s: float | None = None,
    unattended_s: float | None = None,
    has_bucket: bool = False,
    kinds: tuple[str, ...] = (),
) -> JobSpec:
    task = Task(
        name="train",
        run="python train.py",
        resources=tuple(Resources(accelerator=kind, accelerator_count=8) for kind in kinds) or (Resources(),),
        num_nodes=nodes,
        recovery=recovery,
        goal=make_goal(steps, budget_usd, deadline_s),
        checkpoint=CheckpointSpec(to="s3://bucket" if has_bucket else None),
        unattended_s=unattended_s,
    )
    program = Program(
        steps=steps,
        setup_s=0.5,
        exit_codes=exit_codes,
        hang_at=6,
        hangs=hangs,
        breaks=breaks,
        deaths=deaths,
        unfit=unfit,
        sick=sick,
    )
    return JobSpec(submit_s=submit_s, task=task, program=program, hedge=hedge, needs=needs)


def make_goal(steps: int, budget_usd: float | None, deadline_s: float | None) -> Goal | None:
    if deadline_s is not None:
        return Goal(work_hours=steps / 3600, deadline_hours=deadline_s / 3600, budget_usd=budget_usd)
    return Goal(work_hours=1.0, budget_usd=budget_usd) if budget_usd else None


def make_mix(*jobs: JobSpec, cloud: FaultRates = FaultRates(), market: CloudTimings = MARKET, **more: object) -> Mix:
    mix = Mix(jobs=jobs or (make_job(),), cloud=cloud, market=market, heal_s=60.0, poll_s=2.0, end_s_max=7200.0)
    return replace(mix, **more)  # type: ignore[arg-type]


# -- what happens in them -----------------------------------------------------------------------------------------


def preempt(universe: Universe) -> None:
    """Preempt the newest node of a working program."""
    working = [run for run in universe.gang.runs.values() if universe.gang.is_working(run)]
    if working:
        universe.note_fault("preempt", working[-1].cluster)
        universe.cloud.preempt([working[-1].ids[-1]])


def take_first_kind(universe: Universe) -> None:
    """Preempt the newest gang, and refuse the first kind of machines from now on."""
    preempt(universe)
    refuse = universe.cloud._refuse_if_full

    def refuse_first_kind(request: NodeRequest) -> None:
        if request.placement.alternative == 0:
            raise CapacityError(f"no more {request.placement.offer.instance_type}", scope="zone")
        refuse(request)

    universe.cloud._refuse_if_full = refuse_first_kind  # type: ignore[method-assign]


def end_rank_1(universe: Universe) -> None:
    """End rank 1 of the newest gang, whatever its program does."""
    run = list(universe.gang.runs.values())[-1]
    universe.note_fault("preempt", run.cluster)
    universe.cloud.preempt([run.ids[1]])


def end_rank_0(universe: Universe) -> None:
    run = list(universe.gang.runs.values())[-1]
    universe.note_fault("preempt", run.cluster)
    universe.cloud.preempt([run.ids[0]])


def fill_place(universe: Universe) -> None:
    """Fill the zone of the newest gang, so that it has no room for another node."""
    run = list(universe.gang.runs.values())[-1]
    zone = universe.cloud.find(run.ids)[0].zone
    assert zone is not None
    universe.cloud.full_zones[zone] = math.inf


def cut_off(universe: Universe) -> None:
    """Make the head of every program unreachable for half a minute."""
    universe.note_fault("partition")
    now_s = universe.loop.time()
    for run in universe.gang.runs.values():
        universe.gang.unreachable.setdefault(run.ids[0], []).append((now_s, now_s + 30.0))


def stop_leader(universe: Universe) -> None:
    """Send SIGSTOP for long enough that another broker takes over; then resume."""
    for process in universe.processes:
        if process.store is not None and process.store.epoch is not None:
            universe.stop(process, universe.mix.stopped_s)


def black_out(universe: Universe) -> None:
    """Return empty lists from the cloud for most of a minute, though all is well."""
    universe.note_fault("list:blackout")
    universe.cloud.black_out(50.0)


def black_out_for_long(universe: Universe) -> None:
    """Return empty lists for ten minutes, while every agent answers."""
    universe.note_fault("list:blackout")
    universe.cloud.black_out(600.0)


def silence_region(universe: Universe) -> None:
    """Leave the place of the newest program out of every list for two minutes."""
    run = list(universe.gang.runs.values())[-1]
    universe.note_fault("list:silent", run.cluster)
    universe.cloud.silence(universe.cloud.find(run.ids)[0].region, 120.0)


def cut_off_shortly(universe: Universe) -> None:
    """Make every node of every program unreachable for most of a minute."""
    universe.note_fault("partition:gang")
    now_s = universe.loop.time()
    for run in universe.gang.runs.values():
        for node_id in run.ids:
            universe.gang.unreachable.setdefault(node_id, []).append((now_s, now_s + 45.0))


def cut_off_gang(universe: Universe) -> None:
    """Make every node of every program unreachable for most of ten minutes; their cloud lists them as RUNNING."""
    universe.note_fault("partition:gang")
    now_s = universe.loop.time()
    for run in universe.gang.runs.values():
        for node_id in run.ids:
            universe.gang.unreachable.setdefault(node_id, []).append((now_s, now_s + 500.0))


def cut_off_for_good(universe: Universe) -> None:
    """Make every node of every program unreachable until the end of faults; their cloud lists them as RUNNING."""
    universe.note_fault("partition:gang")
    now_s = universe.loop.time()
    for run in universe.gang.runs.values():
        for node_id in run.ids:
            universe.gang.unreachable.setdefault(node_id, []).append((now_s, math.inf))


def log_in_elsewhere(universe: Universe) -> None:
    universe.note_fault("account:other")
    host.log_in(universe, host.AWAY)


def log_in_at_home(universe: Universe) -> None:
    host.log_in(universe, host.HOME)


def leave(duration_s: float) -> Act:
    """Close the laptop."""
    return lambda universe: stories.leave(universe, duration_s)


def cancel(universe: Universe) -> None:
    universe.begin(
        stories.insist(universe, "cancel", lambda process: stories.cancel_job(universe, process, 0)),
    )


def take_down(universe: Universe) -> None:
    job_id = universe.jobs_in[0]
    universe.begin(stories.insist(universe, "down", lambda process: stories.take_down(universe, process, job_id)))


def submit_again(universe: Universe) -> None:
    """Submit again with the same request id."""
    spec = universe.mix.jobs[0]
    universe.begin(stories.insist(universe, "submit", lambda process: stories.submit_once(universe, process, 0, spec)))


def kill(universe: Universe) -> None:
    """Kill every current broker and command."""
    stories.kill(universe)


def retry(universe: Universe) -> None:
    job_id = universe.jobs_in[0]
    universe.begin(stories.insist(universe, "retry", lambda process: stories.retry(universe, process, job_id)))


def collect(universe: Universe) -> None:
    universe.begin(stories.run_command(universe, "gc", lambda process: stories.collect(universe, process)))


def use_cluster(universe: Universe) -> None:
    universe.begin(stories.use_cluster(universe, "launch"))


def sleep(universe: Universe) -> None:
    """Close the lid for most of a quarter of an hour."""
    host.suspend_for(universe, 700.0)


def cut_power(universe: Universe) -> None:
    host.cut_power(universe)


def fill_disk(universe: Universe) -> None:
    """Fill the disk for most of a minute."""
    universe.note_fault("disk:full")
    universe.file.is_full = True
    universe.loop.call_world(50.0, host.free_disk, universe)


def expire_login(universe: Universe) -> None:
    """Refuse every call to the cloud for most of a minute, though all is well."""
    universe.note_fault("list:auth")
    universe.cloud.lock_out(50.0)


def repeat_call(universe: Universe) -> None:
    """Make the first job's nodes once more, minutes late, with no caller waiting for them."""
    rows = universe.read("SELECT body FROM intents WHERE outcome IS NOT NULL ORDER BY rowid")
    if rows:
        request = msgspec.json.decode(rows[0][0], type=NodeRequest)
        universe.cloud._make_gang(request, universe.cloud.clock.now_s())


async def act_out(universe: Universe, scene: Scene) -> None:
    """Perform acts in turn, even if no program has started within the wait."""
    universe.is_acting = True
    for zone in scene.full_zones:
        universe.cloud.full_zones[zone] = float("inf")
    begun_s = universe.loop.time()
    while not universe.gang.runs and universe.loop.time() < begun_s + 30.0:
        await asyncio.sleep(0.5)
    started_s = universe.loop.time()
    for after_s, act in scene.acts:
        await asyncio.sleep(max(0.0, started_s + after_s - universe.loop.time()))
        act(universe)
    await asyncio.gather(*universe.side_tasks[1:])  # but for this one
    universe.is_acting = False


def check_end(universe: Universe, scene: Scene) -> str:
    """Return what is wrong with the end; empty when all is well."""
    rows = universe.read("SELECT id, status, failure FROM jobs ORDER BY id")
    wrong = [f"job {job_id} is {status} ({failure})" for job_id, status, failure in rows if status not in scene.ends]
    foreign = universe.cloud.find(["foreign-1"])[0]
    if foreign.state is not NodeState.RUNNING:
        wrong.append("a node of another owner was terminated")
    # The bill of the cloud and ours agree, whichever process was killed: the cloud reports a node's end to the second.
    ours_usd = universe.measure_recorded_usd(None)
    theirs_usd = universe.cloud.bill_usd()
    self_ends = {node.reason for node in universe.cloud.observe()} & {"lease", "done"}
    if scene.self_ends is not None and self_ends != set(scene.self_ends):
        wrong.append(f"nodes end themselves by {sorted(self_ends)}, not by {sorted(scene.self_ends)}")
    if scene.last is not None and rows[-1][1] != scene.last:
        wrong.append(f"job {rows[-1][0]} is {rows[-1][1]} ({rows[-1][2]}), not {scene.last}")
    starts = len(universe.gang.runs)
    if scene.starts is not None and starts != scene.starts:
        wrong.append(f"{starts} programs were started, not {scene.starts}")
    machines = sum(1 for node in universe.cloud.observe() if node.owner == OWNER)
    if scene.machines is not None and machines != scene.machines:
        wrong.append(f"{machines} machines were made, not {scene.machines}")
    if not wrong and not scene.mix.leaves_broker_dead and abs(ours_usd - theirs_usd) > 0.05 * theirs_usd + 0.01:
        wrong.append(f"the bill is {theirs_usd:.4f} USD and the store says {ours_usd:.4f}")
    return "; ".join(wrong)


SLOW_END = replace(MARKET, terminate_s=20.0, refused_s=60.0)
SLOW_LISTS = replace(MARKET, list_s=1.5)
SLOW_BOOT = replace(MARKET, boot_s=30.0, boot_s_max=40.0)
MIDDLE_BOOT = replace(MARKET, boot_s=12.0, boot_s_max=14.0)
LONG_END = replace(MARKET, terminate_s=30.0)
SILENT = replace(MARKET, silent_s=100.0)
HANGING = replace(MARKET, hang_s=120.0)
LONG_HANGING = replace(MARKET, hang_s=200.0)
NEVER = replace(MARKET, hang_s=math.inf)
CHEAPEST = JobRecovery(strategy="cheapest")
FAST = replace(MARKET, boot_s=0.5, boot_s_max=1.5, list_lag_s=0.0)
COLLECTING = tuple((3.5 + 0.5 * count, collect) for count in range(7))
LOGINS = ((5.0, log_in_elsewhere), (6.0, cut_off_gang), (305.0, log_in_at_home))
STALL = JobRecovery(stall_timeout_s=20.0)
AGAIN = JobRecovery(max_restarts_on_errors=1)
NEVER_AGAIN = JobRecovery(max_restarts_on_errors=0)
KILLED = ((4, 137), (8, 134), (8, 1), (11, 139))  # a step, and the exit code there, of each start
ELASTIC = JobRecovery(nodes_min=2)
CANCELLED = (JobStatus.CANCELLED,)
SCENES: tuple[Scene, ...] = (
    Scene(name="plain", mix=make_mix()),
    Scene(name="two jobs at once", mix=make_mix(make_job(nodes=1), make_job(nodes=1, submit_s=3.0))),
    Scene(name="preemption", mix=make_mix(), acts=((5.0, preempt),), starts=2, machines=3),
    Scene(name="the first node of a gang is lost", mix=make_mix(), acts=((5.0, end_rank_0),), starts=2, machines=3),
    Scene(
        name="a node is lost where no other is given",
        mix=make_mix(make_job(hedge=1), heal_s=600.0),
        acts=((5.0, fill_place), (5.0, end_rank_1)),
        starts=2,
        machines=4,
    ),
    Scene(
        name="the rest of a gang is lost while a node is replaced",
        mix=make_mix(market=MIDDLE_BOOT),
        acts=((5.0, end_rank_1), (16.0, end_rank_0)),
    ),
    Scene(
        name="taken down while a node is replaced",
        mix=make_mix(market=MIDDLE_BOOT),
        acts=((5.0, end_rank_1), (16.0, take_down)),
    ),
    Scene(
        name="cancelled while a node is replaced",
        mix=make_mix(market=MIDDLE_BOOT),
        acts=((5.0, end_rank_1), (16.0, cancel)),
        ends=CANCELLED,
    ),
    Scene(name="two preemptions", mix=make_mix(make_job(nodes=1, steps=20)), acts=((4.0, preempt), (20.0, preempt))),
    Scene(name="cancel", mix=make_mix(), acts=((5.0, cancel),), ends=(*CANCELLED, JobStatus.SUCCEEDED)),
    Scene(
        name="three jobs and slow lists",
        mix=make_mix(*(make_job(nodes=1, submit_s=0.5 + each) for each in range(3)), market=SLOW_LISTS),
    ),
    Scene(
        name="cancel in recovery",
        mix=make_mix(),
        acts=((5.0, preempt), (6.5, cancel)),
        ends=(*CANCELLED, JobStatus.SUCCEEDED),
    ),
    Scene(name="full zones", mix=make_mix(end_s_max=300.0), full_zones=("east1a", "east1b")),
    Scene(name="all zones full for a minute", mix=make_mix(end_s_max=3600.0), full_zones=ZONES),
    Scene(name="lost answers", mix=make_mix(cloud=FaultRates(unknown_after=0.7)), seed=11),
    Scene(name="part of a gang", mix=make_mix(cloud=FaultRates(partial=0.7)), seed=1),
    Scene(
        name="a node that never boots",
        mix=make_mix(make_job(hedge=1), cloud=FaultRates(never_boots=0.4), heal_s=900.0),
        seed=1,
    ),
    Scene(
        name="a place that has room again",
        mix=make_mix(make_job(nodes=1, steps=720, recovery=CHEAPEST), poll_s=10.0),
        full_zones=("east1a", "east1b"),
        acts=((660.0, preempt),),
    ),
    Scene(
        name="mute calls and a long program",
        mix=make_mix(make_job(nodes=1, steps=600), cloud=FaultRates(mute=0.7), market=HANGING, poll_s=10.0),
        seed=3,
    ),
    Scene(name="stuck calls", mix=make_mix(cloud=FaultRates(stuck=0.7), market=HANGING), seed=1),
    Scene(name="mute calls", mix=make_mix(cloud=FaultRates(mute=0.7), market=HANGING), seed=1),
    Scene(
        name="mute calls and no hedge",
        mix=make_mix(make_job(hedge=1), cloud=FaultRates(mute=0.7), market=NEVER),
        seed=1,
    ),
    Scene(
        name="taken down while its call hangs",
        mix=make_mix(make_job(hedge=1), cloud=FaultRates(stuck=0.7), market=LONG_HANGING, heal_s=300.0),
        acts=((5.0, take_down),),
        seed=8,
    ),
    Scene(
        name="stuck calls, three asked",
        mix=make_mix(make_job(hedge=3), cloud=FaultRates(stuck=0.7), market=NEVER),
        seed=3,
    ),
    Scene(name="lists that are empty for a while", mix=make_mix(make_job(steps=80)), acts=((6.0, black_out),)),
    Scene(
        name="lists that are empty while no node answers",
        mix=make_mix(make_job(steps=120), heal_s=200.0),
        acts=((6.0, black_out), (6.0, cut_off_shortly)),
    ),
    Scene(name="late nodes", mix=make_mix(cloud=FaultRates(late=0.7)), seed=1),
    Scene(name="blank lists", mix=make_mix(cloud=FaultRates(blank=0.5)), acts=((5.0, preempt),)),
    Scene(name="program fails once", mix=make_mix(make_job(nodes=1, exit_codes=(3,), recovery=AGAIN))),
    Scene(
        name="program fails",
        mix=make_mix(make_job(nodes=1, exit_codes=(3,), recovery=NEVER_AGAIN)),
        ends=(JobStatus.FAILED,),
    ),
    Scene(
        name="retry of a failed job",
        mix=make_mix(make_job(nodes=1, exit_codes=(3,), recovery=NEVER_AGAIN), heal_s=90.0),
        acts=((60.0, retry),),
        ends=(JobStatus.FAILED, JobStatus.SUCCEEDED),
        last=JobStatus.SUCCEEDED,
    ),
    # The second death at step 8 shows that another start does not help on these nodes.
    Scene(name="killed ranks and headway", mix=make_mix(make_job(deaths=KILLED)), starts=5, machines=4),
    Scene(name="a killed rank and two brokers", mix=make_mix(make_job(deaths=KILLED[:2]), is_doubled=True), machines=2),
    Scene(
        name="a node lost under a restart in place",
        mix=make_mix(make_job(deaths=KILLED[:1])),
        acts=((5.0, end_rank_1),),
    ),
    Scene(
        name="taken down under a restart in place",
        mix=make_mix(make_job(deaths=KILLED[:1])),
        acts=((6.5, take_down),),
    ),
    Scene(
        name="cancelled under a restart in place",
        mix=make_mix(make_job(deaths=KILLED[:1])),
        acts=((6.0, cancel),),
        ends=CANCELLED,
        machines=2,
    ),
    Scene(
        name="ranks killed at one step",
        mix=make_mix(make_job(deaths=((7, 137),) * 9), end_s_max=600.0),
        ends=(JobStatus.FAILED,),
        starts=3,
    ),
    Scene(name="a typo", mix=make_mix(make_job(nodes=1, deaths=((0, 1),))), ends=(JobStatus.FAILED,), starts=1),
    Scene(name="hung program", mix=make_mix(make_job(nodes=1, hangs=1, recovery=STALL)), starts=2, machines=1),
    Scene(
        name="hung program on nodes that refuse to end",
        mix=make_mix(make_job(nodes=1, hangs=1, recovery=STALL), cloud=FaultRates(refused=0.7), market=SLOW_END),
    ),
    Scene(  # the second hang follows a restart in place: then new nodes come
        name="program that hangs again",
        mix=make_mix(make_job(nodes=1, hangs=2, recovery=STALL), market=SLOW_END),
        starts=3,
        machines=2,
    ),
    Scene(
        name="hung program and forgotten terminates",
        mix=make_mix(make_job(nodes=1, hangs=1, recovery=STALL), cloud=FaultRates(ignored=0.7), market=SLOW_END),
    ),
    Scene(name="head out of reach for a while", mix=make_mix(make_job(steps=60)), acts=((5.0, cut_off),)),
    Scene(name="node lost after success", mix=make_mix(poll_s=8.0), acts=((13.5, end_rank_1),)),
    Scene(
        name="a deadline and a policy that changes its mind",
        mix=make_mix(make_job(nodes=1, steps=60, deadline_s=600.0), heal_s=120.0),
    ),
    Scene(
        name="machines of two kinds and a policy that changes its mind",
        mix=make_mix(make_job(nodes=1, steps=60, deadline_s=600.0, kinds=("A100", "H100")), heal_s=120.0),
    ),
    Scene(
        name="machines of two kinds, the first of which is taken",
        mix=make_mix(make_job(nodes=1, steps=60, kinds=("A100", "H100"), recovery=JobRecovery(strategy="failover"))),
        acts=((15.0, take_first_kind),),
        starts=2,
    ),
    Scene(
        name="a pipeline",
        mix=make_mix(make_job(nodes=1), make_job(nodes=1, needs=(0,))),
    ),
    Scene(
        name="a pipeline whose first job fails",
        mix=make_mix(make_job(nodes=1, exit_codes=(3,), recovery=NEVER_AGAIN), make_job(nodes=1, needs=(0,))),
        ends=(JobStatus.FAILED, JobStatus.CANCELLED),
    ),
    Scene(name="a leader that sleeps", mix=make_mix(make_job(steps=60), is_doubled=True), acts=((5.0, stop_leader),)),
    Scene(
        name="a leader that sleeps while nodes boot",
        mix=make_mix(make_job(nodes=1), cloud=FaultRates(transient=0.5), market=SLOW_BOOT, is_doubled=True),
        seed=4,
    ),
    Scene(
        name="a call that is carried out again after its job, collected at once",
        mix=make_mix(make_job(nodes=1), market=FAST, heal_s=400.0),
        acts=(
            (60.0, repeat_call),
            *((60.5 + 0.5 * count, collect) for count in range(30)),
            *((115.0 + 15.0 * count, collect) for count in range(12)),
        ),
    ),
    Scene(name="a laptop that sleeps", mix=make_mix(make_job(steps=800), heal_s=900.0), acts=((8.0, sleep),)),
    Scene(name="a power cut", mix=make_mix(power_every_s=1e9), acts=((6.5, cut_power),)),
    Scene(
        name="a disk that is full for a while", mix=make_mix(make_job(steps=60), heal_s=120.0), acts=((5.0, fill_disk),)
    ),
    Scene(
        name="a login that expires under a program",
        mix=make_mix(make_job(steps=150), heal_s=120.0),
        acts=((5.0, expire_login),),
    ),
    Scene(name="a login for another account", mix=make_mix(make_job(steps=400), heal_s=900.0), acts=LOGINS),
    Scene(
        name="a region that is silent",
        mix=make_mix(make_job(steps=60), heal_s=300.0),
        acts=((5.0, silence_region), (20.0, preempt)),
    ),
    Scene(
        name="lost answers of regions that are silent",
        mix=make_mix(cloud=FaultRates(unknown_after=0.7, silent=0.5), market=SILENT, heal_s=300.0),
        seed=3,
    ),
    Scene(
        name="lists that are empty for ten minutes",
        mix=make_mix(make_job(steps=700), heal_s=900.0),
        acts=((6.0, black_out_for_long),),
    ),
    Scene(
        name="a gang out of reach for minutes",
        mix=make_mix(make_job(steps=400), heal_s=600.0),
        acts=((5.0, cut_off_gang),),
    ),
    Scene(  # each restart observes less than the ten minutes of silence after which a gang is given up
        name="a gang without power under a broker that restarts",
        mix=make_mix(make_job(steps=720), heal_s=1300.0),
        acts=((5.0, cut_off_for_good), (300.0, kill), (600.0, kill), (900.0, kill)),
        starts=2,
        machines=4,
    ),
    Scene(name="submitted twice", mix=make_mix(), acts=((3.0, submit_again),)),
    Scene(name="elastic", mix=make_mix(make_job(nodes=3, steps=60, recovery=ELASTIC)), acts=((7.0, preempt),)),
    Scene(
        name="elastic, setup fails on a node that replaces a lost one",
        mix=make_mix(make_job(nodes=3, steps=90, recovery=ELASTIC, unfit=1)),
        acts=((7.0, preempt),),
        machines=5,
    ),
    Scene(
        name="elastic, taken down while a node is on its way",
        mix=make_mix(make_job(nodes=3, steps=60, recovery=ELASTIC)),
        acts=((7.0, preempt), (9.0, take_down)),
    ),
    Scene(
        name="elastic, collected while a node is on its way",
        mix=make_mix(make_job(nodes=3, steps=90, recovery=ELASTIC), market=MIDDLE_BOOT),
        acts=((7.0, preempt), *((9.0 + 2.0 * count, collect) for count in range(8))),
    ),
    Scene(
        name="elastic, its answers lost",
        mix=make_mix(make_job(nodes=3, steps=90, recovery=ELASTIC), cloud=FaultRates(unknown_after=0.5)),
        acts=((14.0, preempt), (40.0, preempt)),
        seed=2,
    ),
    Scene(name="a broken GPU", mix=make_mix(make_job(nodes=3, sick=1)), starts=2, machines=4),
    Scene(name="broken GPUs in two gangs", mix=make_mix(make_job(nodes=1, sick=2)), starts=3, machines=3),
    Scene(name="broken GPUs everywhere", mix=make_mix(make_job(sick=9)), ends=(JobStatus.FAILED,)),
    Scene(name="a gang that falls apart", mix=make_mix(make_job(breaks=2))),
    Scene(name="a gang that always falls apart", mix=make_mix(make_job(breaks=9)), ends=(JobStatus.FAILED,)),
    Scene(name="budget", mix=make_mix(make_job(nodes=1, steps=90, budget_usd=0.01)), ends=(JobStatus.FAILED,)),
    Scene(
        name="budget over several attempts",
        mix=make_mix(make_job(nodes=1, steps=150, budget_usd=0.03), heal_s=300.0),
        acts=((38.0, preempt), (80.0, preempt), (122.0, preempt)),
        ends=(JobStatus.FAILED,),
    ),
    Scene(
        name="a budget that is spent while its leader sleeps",
        mix=make_mix(make_job(nodes=1, steps=90, budget_usd=0.004, hedge=1), market=LONG_END, is_doubled=True),
        ends=(JobStatus.FAILED,),
    ),
    Scene(
        name="nodes that never boot",
        mix=make_mix(make_job(nodes=1, budget_usd=0.02), cloud=FaultRates(never_boots=1.0)),
        ends=(JobStatus.FAILED,),
    ),
    Scene(name="taken down by a user", mix=make_mix(), acts=((5.0, take_down),)),
    Scene(name="a cluster beside a job", mix=make_mix(make_job(nodes=1)), acts=((1.0, use_cluster),)),
    Scene(name="collecting while nodes come up", mix=make_mix(market=FAST), acts=((3.0, preempt), *COLLECTING)),
    Scene(name="long program", mix=make_mix(make_job(nodes=1, steps=1000, unattended_s=900.0), poll_s=10.0)),
    Scene(
        name="no broker any more",
        mix=make_mix(make_job(steps=5000, unattended_s=1800.0), heal_s=30.0, leaves_broker_dead=True),
        ends=tuple(JobStatus),
        self_ends=("lease",),
    ),
    Scene(
        name="no broker any more, and a bucket",
        mix=make_mix(make_job(steps=100, unattended_s=1800.0, has_bucket=True), heal_s=30.0, leaves_broker_dead=True),
        ends=tuple(JobStatus),
        self_ends=("done",),
    ),
    Scene(
        name="broker away for an hour",
        mix=make_mix(make_job(steps=3000), poll_s=10.0),
        acts=((5.0, leave(3600.0)),),
        starts=1,
    ),
    Scene(
        name="broker away while its job succeeds, with a bucket",
        mix=make_mix(make_job(steps=300, has_bucket=True), poll_s=10.0),
        acts=((5.0, leave(1800.0)),),
        self_ends=("done",),
        starts=1,
    ),
    Scene(
        name="broker away while its job fails, with a bucket",
        mix=make_mix(make_job(steps=300, exit_codes=(3,), recovery=NEVER_AGAIN, has_bucket=True), poll_s=10.0),
        acts=((5.0, leave(1800.0)),),
        ends=(JobStatus.FAILED,),
        self_ends=("done",),
        starts=1,
    ),
    Scene(
        name="a preemption while the broker is away, with a bucket",
        mix=make_mix(make_job(steps=300, has_bucket=True), poll_s=10.0),
        acts=((5.0, leave(1800.0)), (20.0, end_rank_1)),
        self_ends=("done",),
        starts=2,
    ),
    Scene(
        name="broker away for longer than allowed",
        mix=make_mix(make_job(steps=2000, unattended_s=900.0), poll_s=10.0),
        acts=((5.0, leave(1500.0)),),
        self_ends=("lease",),
        starts=2,
    ),
    Scene(
        name="broker away with little money left",
        mix=make_mix(make_job(nodes=1, steps=3000, budget_usd=0.3), poll_s=10.0),
        acts=((5.0, leave(3600.0)),),
        ends=(JobStatus.FAILED,),
        self_ends=("lease",),
        starts=1,
    ),
    Scene(name="two brokers", mix=make_mix(make_job(nodes=1), is_doubled=True), acts=((5.0, preempt),)),
)
