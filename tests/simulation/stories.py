"""Events of a history besides the brokers: users, faults, and a final fault-free phase that must end well."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from broker.errors import BrokerError
from broker.jobs.submission import retry_group, retry_job, submit_tasks
from broker.state.people import Owned
from broker.types import Job, JobStatus
from tests.simulation import host
from tests.simulation.disk import SQLITE_FAULTS, SimulatedStore
from tests.simulation.events import Violation
from tests.simulation.invariants import find_allowance_s
from tests.simulation.mixes import JobSpec
from tests.simulation.processes import Process
from tests.simulation.universe import CALM_TICK_S, TICK_S, Universe, make_plan

COMMANDS = ("cancel", "down", "gc", "retry", "launch", "submit again")
TRIES_MAX = 40
END_S_MAX = 24 * 3600.0


async def play(universe: Universe) -> None:
    """Play faults until `heal_s`, or until nothing is left to disturb; then run without faults until all is done."""
    mix = universe.mix
    tasks = [universe.loop.begin(work, None) for work in list_actors(universe)]
    try:
        while universe.failure is None:
            universe.emit("tick")
            now_s = universe.loop.time() - universe.start_s
            is_done = universe.is_quiet() and not universe.is_acting
            if not universe.is_healed and (now_s >= mix.heal_s or (is_done and universe.are_jobs_in())):
                heal(universe)
            elif now_s > END_S_MAX:
                universe.fail(Violation("L2", "the history has no end"))
            elif universe.is_healed:
                if mix.leaves_broker_dead:
                    if universe.loop.time() > universe.healed_s + measure_allowance_s(universe) + 4 * CALM_TICK_S:
                        return
                elif is_done:
                    return
            await asyncio.sleep(CALM_TICK_S if universe.is_healed else TICK_S)
    finally:
        universe.is_over = True
        for process in universe.processes:
            process.kill()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        left = [task for process in universe.processes for task in process.tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def measure_allowance_s(universe: Universe) -> float:
    """Return the time without a broker after which no node may be left."""
    return max(find_allowance_s(universe, job_id) for job_id in universe.tasks) if universe.tasks else 0.0


def list_actors(universe: Universe) -> list[Awaitable[None]]:
    mix = universe.mix
    actors = [universe.keep_broker("broker-1")]
    if mix.is_doubled:
        actors.append(universe.keep_broker("broker-2"))
    actors += [submit(universe, index, spec) for index, spec in enumerate(mix.jobs)]
    every: list[tuple[float, Callable[[Universe], None]]] = [
        (mix.partition_every_s, partition),
        (mix.kill_every_s, kill),
        (mix.stop_every_s, stop),
        (mix.sqlite_every_s, fail_statement),
        (mix.jump_every_s, jump),
        (mix.cut_off_every_s, cut_off_gang),
        (mix.power_every_s, host.cut_power),
        (mix.disk_every_s, host.fill_disk),
        (mix.suspend_every_s, host.suspend),
        (mix.owner_every_s, host.lose_owner),
        (mix.login_every_s, host.switch_login),
        (mix.command_every_s, command),
    ]
    actors.append(host.visit_accounts(universe))
    if mix.away_s:
        actors.append(close(universe))
    if mix.retries_group and not mix.leaves_broker_dead:
        actors.append(retry_ended_group(universe))
    actors += [repeat(universe, mean_s, act) for mean_s, act in every if not math.isinf(mean_s)]
    return actors


async def repeat(universe: Universe, mean_s: float, act: Callable[[Universe], None]) -> None:
    while True:
        await asyncio.sleep(universe.random.expovariate(1 / mean_s))
        if universe.is_healed:
            return
        act(universe)


def heal(universe: Universe) -> None:
    universe.say("healed")
    universe.is_healed = True
    universe.healed_s = universe.loop.time()
    universe.cloud.recover()
    universe.gang.unreachable = {
        node_id: [(since_s, min(until_s, universe.healed_s)) for since_s, until_s in windows]
        for node_id, windows in universe.gang.unreachable.items()
    }
    host.mend(universe)
    for process in universe.processes:
        process.statements_left = None
        process.release()
        if universe.mix.leaves_broker_dead:
            process.kill()


# -- users --------------------------------------------------------------------------------------------------------


async def submit(universe: Universe, index: int, spec: JobSpec) -> None:
    """Submit as a script would: with one request id, again and again until it works."""
    await asyncio.sleep(spec.submit_s)
    if spec.task.group is not None and index:  # the first task submits the whole group
        while index not in universe.jobs_in:
            await asyncio.sleep(1.0)
    while not all(other in universe.jobs_in for other in spec.needs):
        await asyncio.sleep(1.0)
    for _ in range(200):
        if await run_command(universe, f"submit-{index}", lambda process: submit_once(universe, process, index, spec)):
            break
        await asyncio.sleep(universe.random.uniform(0.5, 3.0))
    if math.isinf(spec.cancel_s):
        return
    await asyncio.sleep(spec.cancel_s)
    await run_command(universe, f"cancel-{index}", lambda process: cancel_job(universe, process, index))


async def submit_once(universe: Universe, process: Process, index: int, spec: JobSpec) -> None:
    store = universe.open_store(process)
    if spec.task.group is not None:
        submit_group(universe, store)
        return
    request_id = f"request-{index}"
    universe.requests.add(request_id)
    universe.expect_job(request_id, spec)
    needs = [universe.jobs_in[other] for other in spec.needs]
    with store.transaction():
        job = store.jobs.add(f"train-{index}", spec.task, request_id, hedge=spec.hedge, needs=needs)
        own_job(store, job, spec.project)
    universe.jobs_in[index] = job.id
    store.close()


def own_job(store: SimulatedStore, job: Job, project: str) -> None:
    """Record the project of a job, as a server does."""
    if project:
        given = {"user": "ana", "project": project, "kind": Owned.JOB}
        store.commitments.add(names=[str(job.id)], usd=None, usd_hour=1.0, gpus=0.0, **given)


def submit_group(universe: Universe, store: SimulatedStore) -> None:
    """Submit all tasks of the group in one transaction; nothing if they were submitted before."""
    for place, spec in enumerate(universe.mix.jobs):
        universe.requests.add(f"group/{place}")
        universe.expect_job(f"group/{place}", spec, place=place)
    jobs = submit_tasks(store, [spec.task for spec in universe.mix.jobs], request_id="group")
    universe.jobs_in.update(enumerate(job.id for job in jobs))
    store.close()


async def cancel_job(universe: Universe, process: Process, index: int) -> None:
    if index in universe.jobs_in:
        universe.open_store(process).jobs.request_cancel(universe.jobs_in[index])


async def run_command(universe: Universe, name: str, work: Callable[[Process], Awaitable[None]]) -> bool:
    """Run a command as a process of its own; return whether it ended well: not killed, no error reported."""
    process = universe.spawn(name, work)
    is_whole = await universe.wait_for(process) is None and not process.was_killed
    universe.say(f"{name} {'ends' if is_whole else 'fails'}")
    return is_whole


async def insist(universe: Universe, name: str, work: Callable[[Process], Awaitable[None]]) -> None:
    """Repeat until it has worked."""
    for _ in range(TRIES_MAX):
        if await run_command(universe, name, work):
            return
        await asyncio.sleep(universe.random.uniform(1.0, 10.0))


def command(universe: Universe) -> None:
    name = universe.random.choice(COMMANDS)
    known = sorted(universe.jobs_in.items())
    universe.note_fault(f"command:{name}")
    if name == "gc":
        universe.begin(run_command(universe, "gc", lambda process: collect(universe, process)))
    elif name == "launch":
        for each in ("launch-1", "launch-2"):
            universe.begin(use_cluster(universe, each))
    elif known:
        index, job_id = universe.random.choice(known)
        if name == "cancel" and universe.random.random() < 0.3:
            universe.begin(run_command(universe, name, lambda process: cancel_job(universe, process, index)))
        elif name == "down":
            universe.begin(run_command(universe, name, lambda process: take_down(universe, process, job_id)))
        elif name == "retry":
            universe.begin(run_command(universe, name, lambda process: retry(universe, process, job_id)))
        elif name == "submit again":
            spec = universe.mix.jobs[index]
            universe.begin(run_command(universe, name, lambda process: submit_once(universe, process, index, spec)))


async def collect(universe: Universe, process: Process) -> None:
    await universe.make_provisioner(universe.open_store(process)).collect()


async def use_cluster(universe: Universe, name: str) -> None:
    """Run `broker launch` for a cluster called dev, and `broker down` until it works; occasionally omit the latter."""
    await run_command(universe, name, lambda process: launch(universe, process))
    await asyncio.sleep(5.0)
    sql = "SELECT 1 FROM clusters WHERE name = 'dev' AND json_array_length(body, '$.nodes')"
    is_recorded = bool(universe.read(sql))
    if not is_recorded and universe.random.random() < 0.1:
        return  # `up` was cut short: the collector ends what it began
    universe.asked_down.add("dev")
    await insist(universe, "down-dev", lambda process: down(universe, process, "dev"))


async def launch(universe: Universe, process: Process) -> None:
    plan = make_plan(replace(universe.mix.jobs[0].task, goal=None))
    await universe.make_provisioner(universe.open_store(process)).up("dev", plan, timeout_s=120)


async def down(universe: Universe, process: Process, name: str) -> None:
    await universe.make_provisioner(universe.open_store(process)).down(name)


async def take_down(universe: Universe, process: Process, job_id: int) -> None:
    store = universe.open_store(process)
    names = [cluster.name for cluster in store.clusters.list() if cluster.job_id == job_id]
    if names:
        universe.asked_down.add(names[0])
        await universe.make_provisioner(store).down(names[0])


async def retry(universe: Universe, process: Process, job_id: int) -> None:
    store = universe.open_store(process)
    job = store.jobs.get(job_id)
    if job is not None and job.task.group is not None:
        retry_whole_group(universe, store, job.pipeline)
        return
    if job is None or not job.status.is_terminal:
        return
    index = next(index for index, known in universe.jobs_in.items() if known == job_id)
    universe.retries += 1
    spec = universe.mix.jobs[index]
    universe.expect_retry(job_id, spec)
    retry_job(store, job, secrets={}, on_added=lambda jobs: own_job(store, jobs[0], spec.project))


async def retry_ended_group(universe: Universe) -> None:
    """Retry the group a while after its end; one that has succeeded is left alone."""
    universe.is_acting = True
    while not (universe.are_jobs_in() and universe.has_ended(universe.jobs_in.values())):
        await asyncio.sleep(1.0)
    await asyncio.sleep(universe.random.uniform(0.0, 20.0))
    await insist(universe, "retry", lambda process: retry(universe, process, universe.jobs_in[0]))
    universe.is_acting = False


def retry_whole_group(universe: Universe, store: SimulatedStore, pipeline: str) -> None:
    """Retry a group with one request id, so that a repeated command submits nothing."""
    members = store.jobs.list_pipeline(pipeline)
    primaries = [each for each in members if each.task.group and each.task.group.is_primary]
    has_ended = all(each.status.is_terminal for each in members)
    if not has_ended or all(each.status is JobStatus.SUCCEEDED for each in primaries):
        return
    request_id = f"retry-{pipeline}"
    specs = {job_id: universe.mix.jobs[index] for index, job_id in universe.jobs_in.items()}
    for place, member in enumerate(members):
        universe.requests.add(f"{request_id}/{place}")
        universe.expect_retry(member.id, specs[member.id], request_id=f"{request_id}/{place}", place=place)
    retry_group(store, members, secrets={}, request_id=request_id)


# -- faults -------------------------------------------------------------------------------------------------------


def partition(universe: Universe) -> None:
    """Make a node unreachable for the broker while it lives and works."""
    live = universe.list_live_nodes()
    if not live:
        return
    node = universe.random.choice(live)
    universe.note_fault("partition", node.cluster)
    now_s = universe.loop.time()
    window = (now_s, now_s + universe.random.choice((3.0, 20.0, 60.0, 200.0)))
    universe.gang.unreachable.setdefault(node.id, []).append(window)


def cut_off_gang(universe: Universe) -> None:
    """Make every node of a cluster unreachable (a blocked broker address, say); its cloud reports each as RUNNING."""
    clusters = sorted({node.cluster for node in universe.list_live_nodes()})
    if not clusters:
        return
    name = universe.random.choice(clusters)
    universe.note_fault("partition:gang", name)
    now_s = universe.loop.time()
    window = (now_s, now_s + universe.random.choice((20.0, 90.0, 300.0)))
    for node in universe.list_live_nodes():
        if node.cluster == name:
            universe.gang.unreachable.setdefault(node.id, []).append(window)


def kill(universe: Universe) -> None:
    living = [process for process in universe.processes if process.is_alive]
    if living:
        universe._kill(universe.random.choice(living), "kill:anytime")


def stop(universe: Universe) -> None:
    """Send SIGSTOP; the broker resumes much later, sure that it still leads."""
    going = [process for process in universe.processes if process.is_alive and not process.is_stopped]
    if not going:
        return
    process = universe.random.choice(going)
    universe.stop(process, universe.random.choice((1.0, 10.0, 30.0, 100.0)))


async def close(universe: Universe) -> None:
    """Close the machine of all brokers and commands for a while."""
    await asyncio.sleep(universe.mix.away_at_s)
    if not universe.is_healed:
        leave(universe, universe.mix.away_s)


def leave(universe: Universe, duration_s: float) -> None:
    """Remove every broker and command; no broker comes back before a set time."""
    universe.note_fault("away")
    universe.away_until_s = universe.loop.time() + duration_s
    for process in list(universe.processes):
        process.kill()


def fail_statement(universe: Universe) -> None:
    living = [process for process in universe.processes if process.is_alive]
    if living:
        process = universe.random.choice(living)
        process.statements_left = universe.random.randrange(0, 12)
        process.statement_fault = universe.random.choice(sorted(SQLITE_FAULTS))
        process.is_fault_sticky = universe.random.random() < 0.1
        if process.is_fault_sticky:
            universe.loop.call_world(5.0, process.mend)


def jump(universe: Universe) -> None:
    universe.note_fault("clock:jump")
    universe.jumps += 1
    universe.clock.offset_s += universe.random.choice((-3600.0, -20.0, 20.0, 3600.0))


__all__ = ["BrokerError", "play"]
