from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from local_gang import Rig, make_task, processes_of, wait_for

from broker.errors import TransientError
from broker.types import Autostop, Cluster, JobRecovery, NodeState, RunStatus, Secret
from tests.tiers import spread

CATCHER = """
trap 'echo caught; [ -e "$BROKER_PREEMPTION_FILE" ] && echo noticed; touch ~/../caught-$SKYPILOT_NODE_RANK; exit 3' TERM
echo ready; while true; do sleep 0.05; done
"""


def test_two_nodes_set_up_then_run_with_their_environment(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        where = '$SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES $(echo "$SKYPILOT_NODE_IPS" | wc -l)'
        run = f'echo "run {where} $OMP_NUM_THREADS $A $B"'
        secrets = {"B": Secret(value="hush")}
        setup = "echo setup $SKYPILOT_NODE_RANK; pwd"
        await rig.start(cluster, make_task(run, setup=setup, num_nodes=2, envs={"A": "a"}, secrets=secrets))
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.SUCCEEDED, 0), report
        # The head waits 5 s for the others' outcomes (`LEAVE_S`): on a busy machine one may come later than that.
        report = await rig.finish_all(cluster)
        assert report.statuses == (RunStatus.SUCCEEDED,) * 2 and report.unreachable == ()
        log = await rig.read_log(cluster)
        assert "run 0/2 2 1 a hush\n" in log
        assert "(rank1) run 1/2 2 1 a hush\n" in log
        lines = log.splitlines()
        setups = [i for i, line in enumerate(lines) if "setup" in line or line.endswith("/sky_workdir")]
        assert len(setups) == 4
        assert max(setups) < min(i for i, line in enumerate(lines) if "run " in line)

    asyncio.run(act())


def test_a_line_of_64_kib_whose_end_comes_later_stays_one_line(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(1)
        await rig.start(cluster, make_task("head -c 65536 /dev/zero | tr '\\0' x; sleep 0.3; echo y; echo end"))
        await rig.finish(cluster)
        await rig.wait_log(cluster, "end")
        assert "x" * 65536 + "y\n" in await rig.read_log(cluster)

    asyncio.run(act())


@pytest.mark.parametrize("phase", ["run", "setup"])
def test_one_failing_rank_ends_the_others_and_gives_its_code(rig: Rig, phase: str) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        script = '[ "$SKYPILOT_NODE_RANK" = 1 ] && exit 7; sleep 1000'
        task = make_task(script if phase == "run" else "true", setup=script if phase == "setup" else None, num_nodes=2)
        await rig.start(cluster, task)
        report = await rig.finish(cluster)
        expected = RunStatus.FAILED if phase == "run" else RunStatus.FAILED_SETUP
        assert (report.status, report.returncode, report.failed_rank) == (expected, 7, 1), report

    asyncio.run(act())


def test_cancel_ends_every_process_of_the_run(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        evil = "trap '' TERM; (trap '' TERM; setsid sleep 4321 &) ; echo ready; sleep 4321"
        await rig.start(cluster, make_task(evil, num_nodes=2))
        await rig.wait_log(cluster, "(rank1) ready")
        await rig.gang.cancel(cluster, 1)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.CANCELLED, None)
        await wait_for(lambda: not any("4321" in cmdline(pid) for n in cluster.nodes for pid in processes_of(n)))

    asyncio.run(act())


def test_a_task_of_a_group_is_ready_when_all_are_set_up_and_starts_with_its_peers(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        wait = "[ $SKYPILOT_NODE_RANK = 0 ] || until [ -e ~/go ]; do sleep 0.02; done"
        setup = f"echo rank $SKYPILOT_NODE_RANK is here; {wait}"
        task = make_task("echo beside $BROKER_GROUP_LEARNER_IPS", setup=setup, num_nodes=2)
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs={"BROKER_GROUP_NAME": "g"})
        await rig.wait_log(cluster, "rank 1 is here")
        await rig.wait_log(cluster, "rank 0 is here")
        for _ in range(8):
            assert not (await rig.gang.poll(cluster, 1)).is_ready, "rank 1 is not done"
            await asyncio.sleep(0.1)
        (Path(cluster.nodes[1].handle) / "home/go").touch()

        async def is_ready() -> bool:
            report = await rig.gang.poll(cluster, 1)
            assert report.status is RunStatus.SETTING_UP
            return report.is_ready

        await wait_for(is_ready)
        assert "beside" not in await rig.read_log(cluster)
        peers = {"tasks": {"learner": {"addresses": ["10.0.0.1"], "port": None}}, "hosts": {}}
        await rig.gang.send_peers(cluster, 1, peers)
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        assert "beside 10.0.0.1\n" in await rig.read_log(cluster)

    asyncio.run(act())


@pytest.mark.parametrize(("run", "stays"), [("true", True), ("exit 3", False)])
def test_processes_that_setup_left_outlive_only_a_success(rig: Rig, run: str, stays: bool) -> None:
    """A service that setup starts remains for the next run; nothing of a failed run does."""

    async def act() -> None:
        cluster = await rig.make_cluster(1)
        await rig.start(cluster, make_task(run, setup="sleep 4322 >/dev/null 2>&1 &"))
        await rig.finish(cluster)
        assert any("4322" in cmdline(pid) for pid in processes_of(cluster.nodes[0])) is stays

    asyncio.run(act())


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_notice_lets_every_rank_catch_sigterm_before_the_node_goes(rig: Rig, tmp_path: Path) -> None:
    """The ranks end when all have caught it: the end of one leaves the others only some seconds (`GRACE_S`)."""
    gate = tmp_path / "gate"

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        run = CATCHER.replace("exit", f"until [ -e {gate} ]; do sleep 0.05; done; exit")
        await rig.start(cluster, make_task(run, num_nodes=2))
        await rig.wait_log(cluster, "(rank1) ready")
        await rig.cloud.preempt_nodes([cluster.nodes[1].id], notice_s=1000)
        for node in cluster.nodes:
            await wait_for((Path(node.handle) / f"caught-{node.rank}").exists)
        await rig.wait_log(cluster, "(rank1) noticed")
        gate.touch()
        report = await rig.finish(cluster)
        assert (report.status, report.returncode, report.reason) == (RunStatus.FAILED, None, "preempted")
        for node in cluster.nodes:
            assert (await rig.state_of(node)).state is NodeState.RUNNING

    asyncio.run(act())


def test_lost_node_without_notice_fails_the_gang(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task(CATCHER, num_nodes=2))
        await rig.wait_log(cluster, "(rank1) ready")
        await rig.cloud.preempt_nodes([cluster.nodes[1].id], notice_s=0)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode, report.unreachable) == (RunStatus.FAILED, None, (1,)), report
        assert not (Path(cluster.nodes[1].handle) / "caught-1").exists()

    asyncio.run(act())


def test_lost_head_ends_the_others(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task(CATCHER, num_nodes=2))
        await rig.wait_log(cluster, "(rank1) ready")
        await rig.cloud.preempt_nodes([cluster.nodes[0].id], notice_s=0)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode, report.unreachable) == (RunStatus.FAILED, None, (0,)), report

    asyncio.run(act())


def test_runs_take_turns_and_a_waiting_one_can_be_cancelled(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task("until [ -e ~/go ]; do sleep 0.05; done; echo one >> ~/order"), 1)
        await rig.start(cluster, make_task("echo two >> ~/order"), 2)
        await rig.start(cluster, make_task("echo three >> ~/order"), 3)
        await rig.gang.cancel(cluster, 2)
        assert (await rig.finish(cluster, 2)).status is RunStatus.CANCELLED
        assert await rig.gang.idle_minutes(cluster) == 0
        home = Path(cluster.nodes[0].handle) / "home"
        (home / "go").touch()
        assert (await rig.finish(cluster, 3)).status is RunStatus.SUCCEEDED
        assert (home / "order").read_text() == "one\nthree\n"
        runs = await rig.gang.list_runs(cluster)
        expected = [RunStatus.SUCCEEDED, RunStatus.CANCELLED, RunStatus.SUCCEEDED]
        assert [(run.id, run.status) for run in runs] == list(enumerate(expected, 1))

    asyncio.run(act())


def test_run_that_is_submitted_twice_runs_once(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        task = make_task("echo x >> ~/count; until [ -e ~/go ]; do sleep 0.05; done", num_nodes=2)
        await rig.start(cluster, task)
        await rig.start(cluster, task)
        for node in cluster.nodes:
            (Path(node.handle) / "home/go").touch()
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        await rig.start(cluster, task)
        for node in cluster.nodes:
            assert (Path(node.handle) / "home/count").read_text() == "x\n"

    asyncio.run(act())


@pytest.mark.parametrize(
    ("rule", "state", "reason"),
    spread(
        [
            ("lease", NodeState.TERMINATED, "lease"),
            ("down", NodeState.TERMINATED, "autostop"),
            ("stop", NodeState.STOPPED, "stopped"),
        ],
        every=3,
    ),
)
def test_node_shuts_down_at_the_end_of_its_lease_or_autostop(
    rig: Rig, rule: str, state: NodeState, reason: str
) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        if rule == "lease":
            await rig.start(cluster, make_task("sleep 1000"), lease_s=1000)
            with contextlib.suppress(TransientError):  # it may end before it answers
                await rig.gang.renew_lease(cluster, lease_s=0.1)
        else:
            await rig.gang.prepare(cluster, make_task(None))
            await rig.gang.set_autostop(cluster, Autostop(idle_minutes=0, is_down=rule == "down"))
        ended = await rig.wait_state(cluster.nodes[0], state)
        assert ended.reason == reason
        await wait_for(lambda: not processes_of(cluster.nodes[0]))  # the machine records its end, then exits

    asyncio.run(act())


def test_only_the_first_start_and_renewals_set_the_lease(rig: Rig) -> None:
    """A start that a suspended broker repeats late carries a lease from before its suspension."""

    async def act() -> None:
        cluster = await rig.make_cluster()
        lease = Path(cluster.nodes[0].handle) / "home/.broker/lease.json"
        for given_s in (1000, 9000):
            await rig.start(cluster, make_task("sleep 1000"), lease_s=given_s)
            assert json.loads(lease.read_text())["lease_s"] == 1000
        await rig.gang.renew_lease(cluster, lease_s=9000)
        assert json.loads(lease.read_text())["lease_s"] == 9000

    asyncio.run(act())


def test_runner_killed_from_outside_is_a_failure(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task("echo ready; sleep 5434"))
        await rig.wait_log(cluster, "ready")
        for pid in processes_of(cluster.nodes[0]):
            if "_run" in cmdline(pid).split("\0"):
                os.kill(pid, signal.SIGKILL)
        report = await rig.finish(cluster)
        assert (report.status, report.reason) == (RunStatus.FAILED, "the runner died")
        await wait_for(lambda: not any("5434" in cmdline(pid) for pid in processes_of(cluster.nodes[0])))

    asyncio.run(act())


@pytest.mark.long
def test_failed_setup_of_a_new_node_is_reported_while_the_others_work(rig: Rig, tmp_path: Path) -> None:
    fit = tmp_path / "fit"
    fit.touch()
    recovery = JobRecovery(nodes_min=1)
    task = replace(make_task("sleep 1000", setup=f"[ -e {fit} ] || exit 3", num_nodes=2), recovery=recovery)

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, task)
        await wait_for(lambda: is_running(cluster))
        await rig.cloud.preempt_nodes([cluster.nodes[1].id], notice_s=0)
        fit.unlink()
        (new,) = (await rig.make_cluster()).nodes
        changed = replace(cluster, nodes=(cluster.nodes[0], replace(new, rank=1)))

        async def has_joined() -> bool:
            """Return whether it has joined: the head admits the rank once it has noticed the loss of the old node."""
            await rig.start(changed, task)
            return bool((await rig.gang.poll(changed, 1)).unfit)

        await wait_for(has_joined)
        report = await rig.gang.poll(changed, 1)
        assert report.unfit == ((1, "setup exited with 3 on rank 1"),) and report.status is RunStatus.RUNNING
        assert report.statuses == (RunStatus.RUNNING, RunStatus.FAILED_SETUP)

    async def is_running(cluster: Cluster) -> bool:
        return (await rig.gang.poll(cluster, 1)).statuses == (RunStatus.RUNNING, RunStatus.RUNNING)

    asyncio.run(act())


def test_progress_is_the_newest_whole_line(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        script = """printf '{"step":1}\\n{"step":2,"total":9,"loss":"bad"}\\n{"st' >> "$BROKER_PROGRESS_FILE" """
        await rig.start(cluster, make_task(script))
        progress = (await rig.finish(cluster)).progress
        assert progress is not None
        assert (progress.step, progress.total, progress.loss) == (2, 9, None)

    asyncio.run(act())


def test_secrets_stay_in_private_files(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task("echo ok", secrets={"KEY": Secret(value="s3cr3t-value")}))
        await rig.finish(cluster)
        for path in Path(cluster.nodes[0].handle).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the agent replaces files meanwhile
                if path.is_file() and b"s3cr3t-value" in path.read_bytes():
                    assert path.name == "spec.json"
                    assert stat.S_IMODE(path.stat().st_mode) == 0o600
        broker = Path(cluster.nodes[0].handle) / "home/.broker/runs"
        assert stat.S_IMODE(broker.stat().st_mode) == 0o700

    asyncio.run(act())


def test_log_is_read_from_an_offset(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task("seq 1 20000"))
        await rig.finish(cluster)
        whole, offset = b"", 0
        while True:
            chunk, offset = await rig.gang.read_log(cluster, 1, offset=offset)
            if not chunk:
                break
            whole += chunk
        assert whole == b"".join(b"%d\n" % i for i in range(1, 20001))
        assert offset == len(whole)

    asyncio.run(act())


def test_unreachable_nodes_are_reported_not_raised(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task("sleep 1000"))
        await rig.cloud.terminate_nodes([cluster.nodes[0]])
        report = await rig.gang.poll(cluster, 1)
        assert (report.unreachable, report.statuses) == ((0,), (None,))
        assert await rig.gang.idle_minutes(cluster) is None

    asyncio.run(act())


@pytest.mark.long
def test_advice_to_leave_a_node_is_reported_and_ends_nothing(rig: Rig) -> None:
    """EC2's rebalance recommendation, as the node's listener records it; most such nodes live on."""

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task("echo up; until [ -e ~/go ]; do sleep 0.05; done", num_nodes=2))
        await rig.wait_log(cluster, "(rank1) up")
        assert (await rig.gang.poll(cluster, 1)).advised == ()
        home = Path(cluster.nodes[1].handle) / "home"
        (home / ".broker" / "rebalance").write_text('{"time_s": 1.0}')
        report = await rig.gang.poll(cluster, 1)
        assert (report.status, report.advised) == (RunStatus.RUNNING, (1,))
        for node in cluster.nodes:
            (Path(node.handle) / "home" / "go").touch()
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED

    asyncio.run(act())
