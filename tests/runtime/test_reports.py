"""Answers of nodes' agents become one report of a gang; a program's statements about itself are not trusted."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from broker.agent import FILES
from broker.clock import SystemClock
from broker.errors import FencedError, TransientError
from broker.runtime.gang import Gang, list_live, sort_nodes
from broker.runtime.packing import pack_agent
from broker.runtime.reports import (
    find_checkpoints,
    find_faults,
    find_head,
    find_newest_progress,
    find_own_times,
    find_setups,
    find_slow_network,
    find_unfit,
    gather_runs,
    parse_progress,
)
from broker.sites.openssh import Completed
from broker.types import (
    Autostop,
    Cluster,
    ClusterStatus,
    GangHead,
    Node,
    NodeState,
    ObservedCheckpoints,
    OwnTime,
    Placement,
    Progress,
    RunStatus,
    Task,
)
from tests.simulation.world import make_offer


class Agents:
    """A transport whose agents give fixed answers; None: no answer."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[int, str, Any]] = []

    async def run(
        self, node: Node, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", **_: object
    ) -> Completed:
        self.asked.append((node.rank, argv[-1], json.loads(stdin)))
        answer = self.answers[node.rank]
        if answer is None:
            raise TransientError("no way there")
        if isinstance(answer, str):
            return Completed(returncode=1, stdout=b"", stderr=answer.encode())
        return Completed(returncode=0, stdout=json.dumps(answer).encode(), stderr=b"")


def make_cluster(*states: NodeState) -> Cluster:
    nodes = tuple(
        Node(id=f"n{rank}", cloud="x", owner="me", cluster="c", attempt=1, rank=rank, state=state)
        for rank, state in enumerate(states)
    )
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=len(nodes))
    return Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes[::-1])


TWO = make_cluster(NodeState.RUNNING, NodeState.RUNNING)


def make_run(status: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    run = {
        "id": 1, "name": "j", "status": status, "returncode": None, "started_s": 5.0, "ended_s": None, "reason": "",
        "progress": None,
    }  # fmt: skip
    return {"runs": [{**run, **fields}], "idle_s": 90.0, "is_advised": False}


def open_gang(*answers: Any) -> tuple[Gang, Agents]:
    agents = Agents(answers)
    return Gang(agents, clock=SystemClock()), agents  # type: ignore[arg-type]


def test_the_heads_progress_counts_for_the_gang() -> None:
    progress = {"step": 3, "total": 9}
    gang, agents = open_gang(
        make_run("FAILED", returncode=7, reason="preempted", progress=progress), {**make_run(), "is_advised": True}
    )
    report = asyncio.run(gang.poll(TWO, 1))
    assert (report.status, report.returncode, report.reason, report.run_id) == (RunStatus.FAILED, 7, "preempted", 1)
    assert report.statuses == (RunStatus.FAILED, RunStatus.RUNNING)
    assert (report.unreachable, report.advised) == ((), (1,))
    assert report.progress == Progress(step=3, total=9)
    assert sorted(agents.asked) == [(0, "status", {"run_id": 1}), (1, "status", {"run_id": 1})]


def test_another_node_that_reports_alone_is_not_lost() -> None:
    line = {"step": 8, "loss": 1.5}
    measured = make_run(progress={"step": 9, "own_s": 0.2})
    gang, _ = open_gang(make_run(), make_run(progress=line))
    assert asyncio.run(gang.poll(TWO, 1)).progress == Progress(step=8, loss=1.5)
    gang, _ = open_gang(make_run(), measured)  # that measurement is about this node only
    assert asyncio.run(gang.poll(TWO, 1)).progress is None
    gang, _ = open_gang(make_run(progress={"step": 3}), make_run(progress=line))
    assert asyncio.run(gang.poll(TWO, 1)).progress == Progress(step=3)


def test_runs_are_listed_as_the_current_head_knows_them() -> None:
    moved = {"head_epoch": 1, "head_rank": 1}
    ended = make_run("SUCCEEDED", returncode=0, ended_s=9.0, **moved)
    for first in (None, make_run("RUNNING", head_epoch=0, head_rank=0), make_run("RUNNING", **moved)):
        gang, agents = open_gang(first, ended)
        (run,) = asyncio.run(gang.list_runs(TWO))
        is_moved = first is None or first["runs"][0]["head_epoch"]
        assert run.status is (RunStatus.SUCCEEDED if is_moved else RunStatus.RUNNING)
        assert len(agents.asked) == (2 if is_moved else 1)  # the others are asked only where it matters
    gang, _ = open_gang(None, None)
    with pytest.raises(TransientError, match="no way there"):
        asyncio.run(gang.list_runs(TWO))


def test_another_node_reports_for_a_silent_head_without_progress() -> None:
    gang, _ = open_gang(None, make_run("FAILED", returncode=3, progress={"step": 8}))
    report = asyncio.run(gang.poll(TWO, 1))
    assert (report.status, report.returncode, report.unreachable, report.progress) == (RunStatus.FAILED, 3, (0,), None)
    assert report.statuses == (None, RunStatus.FAILED)


def test_a_rank_that_answered_before_its_end_is_queried_again_after_the_head_succeeded() -> None:
    gang, agents = open_gang(make_run("SUCCEEDED", returncode=0), make_run())
    answer = agents.run

    async def run(node: Node, argv: Sequence[str], **rest: Any) -> Completed:
        done = await answer(node, argv, **rest)
        agents.answers = [agents.answers[0], make_run("SUCCEEDED", returncode=0)]  # it ends just after it answered
        return done

    agents.run = run  # type: ignore[method-assign]
    report = asyncio.run(gang.poll(TWO, 1))
    assert report.statuses == (RunStatus.SUCCEEDED,) * 2


def test_a_run_that_no_agent_knows_of_yet_is_being_set_up() -> None:
    gang, _ = open_gang({"runs": [], "is_advised": False}, {"runs": [], "is_advised": False})
    report = asyncio.run(gang.poll(TWO, 1))
    assert (report.status, report.statuses, report.unreachable) == (RunStatus.SETTING_UP, (None, None), ())


def test_nodes_that_are_confirmed_gone_are_not_queried() -> None:
    cluster = make_cluster(NodeState.RUNNING, NodeState.TERMINATED)
    gang, agents = open_gang(make_run(), None)
    report = asyncio.run(gang.poll(cluster, 1))
    assert report.unreachable == () and [rank for rank, *_ in agents.asked] == [0]
    assert [node.rank for node in list_live(cluster.nodes)] == [0]
    assert [node.rank for node in sort_nodes(cluster)] == [0, 1]


def test_every_node_gets_a_request_even_if_one_fails_and_the_failure_is_raised() -> None:
    gang, agents = open_gang("first line\nout of room " + "x" * 500, make_run())
    with pytest.raises(TransientError, match=r"`n0` failed at `cancel`: out of room x+$") as caught:
        asyncio.run(gang.cancel(TWO, 4))
    assert len(caught.value.message) < 300
    assert sorted(agents.asked) == [(0, "cancel", {"run_id": 4}), (1, "cancel", {"run_id": 4})]


def test_leases_and_autostop_go_to_all_nodes() -> None:
    gang, agents = open_gang({}, {})
    asyncio.run(gang.renew_lease(TWO, lease_s=900.0))
    asyncio.run(gang.set_autostop(TWO, Autostop(idle_minutes=5, is_down=True)))
    asyncio.run(gang.set_autostop(TWO, None))
    head = [(verb, request) for rank, verb, request in agents.asked if rank == 0]
    assert head == [
        ("lease", {"lease_s": 900.0}), ("autostop", {"idle_minutes": 5, "is_down": True}), ("autostop", {}),
    ]  # fmt: skip
    assert len(agents.asked) == 6


def test_the_head_is_asked_how_long_it_is_idle_and_what_it_ran() -> None:
    gang, _ = open_gang(make_run("SUCCEEDED", ended_s=9.0, returncode=0), None)
    assert asyncio.run(gang.idle_minutes(TWO)) == 1.5
    (run,) = asyncio.run(gang.list_runs(TWO))
    assert (run.id, run.cluster, run.name, run.status) == (1, "c", "j", RunStatus.SUCCEEDED)
    assert (run.started_s, run.ended_s, run.returncode) == (5.0, 9.0, 0)
    silent, _ = open_gang(None, make_run())
    assert asyncio.run(silent.idle_minutes(TWO)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_progress_can_be_stored_whatever_numbers_a_program_reports(value: float) -> None:
    """The store would read NaN back as null, which is no time: the job's row would count as damaged."""
    names = ("total", "tokens_per_s", "checkpoint_step", "time_s", "time", "busy_s")
    progress = parse_progress({"step": 3} | dict.fromkeys(names, value))
    assert progress == Progress(step=3) == msgspec.json.decode(msgspec.json.encode(progress), type=Progress)
    assert parse_progress({"step": value}) == Progress()
    diverged = parse_progress({"step": 3, "loss": value})
    assert diverged == Progress(step=3, is_diverged=isinstance(value, float))
    assert diverged == msgspec.json.decode(msgspec.json.encode(diverged), type=Progress)


def test_a_loss_that_is_no_number_counts_as_one_when_ranks_are_compared() -> None:
    runs = [{"head_epoch": 1, "progress": {"step": 3} | loss} for loss in ({}, {"loss": float("nan")})]
    newest = find_newest_progress(runs, 1)
    assert newest is not None and newest.is_diverged


def test_invalid_fields_of_a_progress_line_are_ignored() -> None:
    assert parse_progress(None) is None
    assert parse_progress({}) == Progress()
    line = {"step": 3.9, "total": "9", "loss": 1, "tokens_per_s": True, "checkpoint_step": None, "time": 5}
    assert parse_progress(line) == Progress(step=3, loss=1.0, time_s=5.0)
    assert parse_progress({"step": 2**63, "total": -(2.0**63), "checkpoint_step": 2**62}) == Progress(
        checkpoint_step=2**62
    )
    unknown = {"step": 3, "total": -1, "checkpoint_step": -1}  # "unknown", and "none yet"
    assert parse_progress(unknown) == parse_progress({"step": 3, "total": 0}) == Progress(step=3)
    full = {"step": 3, "total": 9, "loss": 0.5, "tokens_per_s": 7, "checkpoint_step": 2, "time_s": 6, "time": 5}
    assert parse_progress(full) == Progress(
        step=3, total=9, loss=0.5, tokens_per_s=7.0, checkpoint_step=2, time_s=6.0
    )  # fmt: skip


def test_observed_checkpoints_are_absent_in_reports_of_older_agents_and_ignored_if_invalid() -> None:
    valid = {"number": 100, "unnumbered_s": 5.0, "time_s": 6.5}
    assert find_checkpoints({"checkpoints": valid}) == ObservedCheckpoints(number=100, unnumbered_s=5.0, time_s=6.5)
    wrong: list[dict[str, object]] = [{"number": -1}, {"time_s": "x"}, {"unnumbered_s": float("nan")}, {"number": True}]
    damaged = [*({**valid, **fields} for fields in wrong), {}, [1], None]
    assert [find_checkpoints({"checkpoints": each}) for each in damaged] == [None] * 7
    assert find_checkpoints({}) is None


def test_the_packed_agent_contains_all_its_files_and_their_digest() -> None:
    digest, data = pack_agent()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert tuple(archive.getnames()) == FILES
        for name in FILES:
            member = archive.extractfile(name)
            assert member is not None and b"from __future__ import annotations" in member.read()
    assert digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "fault",
    [None, 3, [], {}, {"reason": 7}, {"serials": ["GPU-a"]}],
)
def test_invalid_fault_is_ignored(fault: Any) -> None:
    assert find_faults([None, {"fault": fault}]) == ()


def test_fault_keeps_what_is_valid_and_is_bounded() -> None:
    fault = {"reason": "x" * 1000, "serials": ["GPU-a", 7, *["s"] * 100]}
    (found,) = find_faults([None, {"fault": fault}])
    assert (found.rank, len(found.reason), found.serials[0]) == (1, 300, "GPU-a") and len(found.serials) <= 32
    assert find_faults([{"fault": {"reason": "x", "serials": "GPU"}}])[0].serials == ()


INVALID_LINES = [
    None,
    [],
    {"step": 1},
    {"own_s": 1},
    {"step": True, "own_s": 1},
    *({"step": 1, "own_s": each} for each in (True, "1", -1, 0, 0.0, 1e9)),
]


@pytest.mark.parametrize("line", INVALID_LINES)
def test_invalid_own_time_is_ignored(line: Any) -> None:
    assert find_own_times([None, {"progress": line}, {"progress": {"step": 3, "own_s": 0.5}}]) == (
        OwnTime(rank=2, step=3, own_s=0.5),
    )


@pytest.mark.parametrize(
    ("heads", "head"),
    [
        ([None, None], 0),
        ([(0, 0), (0, 0)], 0),
        ([(0, 0), (2, 1), (1, 2)], 1),  # the newest move that a node has heard of
        ([None, (1, 2), (1, 2)], 2),
        ([(1, 3), (0, 0), (0, 0)], 0),  # no such node
        ([(1, -1), (0, 0)], 0),
        ([(1, "1"), ("2", 1)], 0),
        ([(None, None), (1, 1)], 1),
    ],
)
def test_the_head_is_the_one_of_the_newest_move(heads: list[tuple[Any, Any] | None], head: int) -> None:
    assert find_head([each and {"head_epoch": each[0], "head_rank": each[1]} for each in heads]) == head


def test_without_its_head_a_run_is_as_the_node_of_the_lowest_rank_knows_it() -> None:
    answers = {rank: make_run(status, head_epoch=1, head_rank=3) for rank, status in ((1, "RUNNING"), (2, "FAILED"))}
    (run,) = gather_runs("c", {3: None, **answers})
    assert run.status is RunStatus.RUNNING
    (run,) = gather_runs("c", {2: answers[2], 1: answers[1]})
    assert run.status is RunStatus.RUNNING, "in whatever order they answered"


def test_nodes_whose_setup_failed_are_unfit_only_while_the_others_work() -> None:
    failed = {"status": "FAILED_SETUP", "reason": "no disk"}
    assert find_unfit([{"status": "RUNNING"}, failed, None]) == ((1, "no disk"),)
    assert find_unfit([{"status": "SETTING_UP"}, failed]) == ()
    assert find_unfit([failed, {"status": "RUNNING"}], head=1) == ((0, "no disk"),)
    assert find_unfit([None, failed]) == find_unfit([]) == ()


SLOW = {"is_slow": True, "backend": "gloo", "expected_gbs": 10.0, "gang_gbs": 1.0, "pair": [0, 3], "pair_gbs": 0.5}


def test_slow_network_is_reported_with_its_slowest_pair() -> None:
    found = find_slow_network({"network": SLOW})
    assert found is not None and (found.expected_gbs, found.gang_gbs, found.pair, found.pair_gbs) == (
        10.0, 1.0, (0, 3), 0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"is_slow": False}, {"is_slow": 1}, {"is_slow": "yes"}, {"expected_gbs": None}, {"expected_gbs": -1.0},
        {"gang_gbs": None, "pair_gbs": None}, {"gang_gbs": True, "pair_gbs": "1"},
    ],
)  # fmt: skip
def test_invalid_report_of_a_slow_network_is_ignored(change: dict[str, Any]) -> None:
    assert find_slow_network({"network": {**SLOW, **change}}) is None
    assert find_slow_network({"network": "slow"}) is None


@pytest.mark.parametrize("pair", [[0], [0, 1, 2], [0, True], "01", None])
def test_invalid_pair_of_nodes_is_left_out(pair: Any) -> None:
    found = find_slow_network({"network": {**SLOW, "pair": pair}})
    assert found is not None and found.pair is None


def test_results_of_setup_archives_are_by_rank_and_invalid_ones_are_ignored() -> None:
    good = {"result": "kept", "setup_s": 90, "took_s": 4.5, "size_bytes": 1000, "reason": None}
    bad = [{**good, "result": "lost"}, {**good, "setup_s": -1}, {**good, "took_s": True}, {**good, "size_bytes": "9"}]
    runs = [{"setup": each} for each in bad] + [None, {"setup": 3}, {"setup": good}]
    (found,) = find_setups(runs)
    assert (found.rank, found.result, found.setup_s, found.took_s, found.size_bytes, found.reason) == (
        6, "kept", 90.0, 4.5, 1000, "",
    )  # fmt: skip


def test_start_sends_the_lease_and_the_port_of_the_head_to_every_node() -> None:
    gang, agents = open_gang({"coordinator_port": 4000, "credential": "kept"}, {"coordinator_port": None})
    asyncio.run(gang.start(TWO, Task(run="true", num_nodes=2), run_id=3, envs={"BROKER_JOB_ID": "1"}, lease_s=90.0))
    assert [(rank, verb) for rank, verb, _ in agents.asked] == [(0, "submit"), (1, "submit")], "the head comes first"
    first, second = (spec for _, _, spec in agents.asked)
    for rank, spec in enumerate((first, second)):
        assert (spec["rank"], spec["run_id"], spec["lease_s"], spec["num_nodes"]) == (rank, 3, 90.0, 2)
        assert spec["envs"]["BROKER_JOB_ID"] == "1"
    assert second["head"]["coordinator_port"] == 4000
    assert second["head"]["credential"] == "kept", "that of the first call, which the head has kept"


def test_head_without_a_port_starts_no_other_node() -> None:
    gang, agents = open_gang({"coordinator_port": None}, {"coordinator_port": None})
    with pytest.raises(TransientError, match="does not coordinate the gang yet"):
        asyncio.run(gang.start(TWO, Task(run="true", num_nodes=2), run_id=3, envs={}))
    assert [rank for rank, _, _ in agents.asked] == [0]


def test_start_of_a_gang_that_has_lost_a_node_leaves_it_alone_and_counts_it() -> None:
    """An elastic gang continues without the node, whose replacement gets its rank."""
    cluster = make_cluster(NodeState.RUNNING, NodeState.TERMINATED, NodeState.RUNNING)
    port: dict[str, Any] = {"coordinator_port": 4000}
    gang, agents = open_gang(port, None, port)
    asyncio.run(gang.start(cluster, Task(run="true", num_nodes=3), run_id=1, envs={}))
    assert [rank for rank, _, _ in agents.asked] == [0, 2]
    assert {(spec["num_nodes"], len(spec["node_ips"])) for _, _, spec in agents.asked} == {(3, 3)}


def test_moved_head_is_called_first_and_members_learn_its_port_only_if_it_has_taken_over() -> None:
    three = make_cluster(NodeState.TERMINATED, NodeState.RUNNING, NodeState.RUNNING)
    for answer, is_moved in (
        ({"epoch": 2, "port": 7}, True),
        ({"epoch": 3, "port": 7}, False),
        ({"epoch": 2, "port": None}, False),
    ):
        gang, agents = open_gang(None, answer, {"epoch": 2})
        move = gang.move_head(three, 1, GangHead(epoch=2, rank=1), members=[2], log_bytes=9)
        assert asyncio.run(move) is is_moved
        assert [rank for rank, _, _ in agents.asked] == ([1, 2] if is_moved else [1])
        assert agents.asked[-1][2].get("port") == (7 if is_moved else None)


def test_members_of_a_group_are_told_before_their_head_which_starts_the_program() -> None:
    gang, agents = open_gang({}, {})
    asyncio.run(gang.send_peers(TWO, 1, {"a": "10.0.0.1"}))
    assert [rank for rank, _, _ in agents.asked] == [1, 0]


def test_uploads_are_summed_over_the_nodes_and_silent_ones_are_named() -> None:
    def report(*pending: tuple[int, int], sent: int) -> dict[str, Any]:
        files = [{"file_count": count, "size_bytes": size, "url": f"s3://{size}"} for count, size in pending]
        return {"runs": [], "idle_s": 0.0, "uploads": {"pending": files, "sent_bytes": sent}}

    three = make_cluster(*[NodeState.RUNNING] * 3)
    gang, _ = open_gang(report((2, 10), (1, 5), sent=3), report((4, 10), sent=4), None)
    found = asyncio.run(gang.read_uploads(three, timeout_s=5.0))
    assert (found.file_count, found.size_bytes, found.sent_bytes) == (7, 25, 7)
    assert (found.urls, found.has_mounts, found.silent) == (("s3://10", "s3://5"), True, ("n2",))


def test_every_request_has_the_epoch_of_the_server_and_a_node_of_a_newer_one_fences_it() -> None:
    agents = Agents([{}, {}])
    gang = Gang(agents, clock=SystemClock(), find_epoch=lambda: 4)  # type: ignore[arg-type]
    asyncio.run(gang.cancel(TWO, 1))
    assert [request for _, _, request in agents.asked] == [{"run_id": 1, "server_epoch": 4}] * 2

    async def refuse(*_: object, **__: object) -> Completed:
        return Completed(returncode=77, stdout=b"", stderr=b"")

    agents.run = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(FencedError, match="restored from this server's backups"):
        asyncio.run(gang.cancel(TWO, 1))


def test_log_is_read_on_from_the_next_offset() -> None:
    agents = Agents([])

    async def read(node: Node, argv: Sequence[str], *, stdin: bytes, **_: object) -> Completed:
        return Completed(returncode=0, stdout=b"0123456789"[json.loads(stdin)["offset"] :][:4], stderr=b"")

    agents.run = read  # type: ignore[method-assign, assignment]
    gang, parts, offset = Gang(agents, clock=SystemClock()), list[bytes](), 0  # type: ignore[arg-type]
    for _ in range(4):
        part, offset = asyncio.run(gang.read_log(TWO, 1, offset=offset))
        parts.append(part)
    assert (parts, offset) == ([b"0123", b"4567", b"89", b""], 10)


class Access:
    """Grants every node access to the buckets of its task."""

    async def grant(self, cluster: Cluster, task: Task) -> dict[str, Any]:
        return {"files": {"aws.json": "key"}}

    async def renew(self, cluster: Cluster, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"files": {"aws.json": "later"}})


def test_nodes_get_bucket_access_before_their_program_and_again_with_each_lease() -> None:
    port = {"coordinator_port": 4000}
    agents = Agents([port, port])
    gang = Gang(agents, clock=SystemClock(), access=Access())  # type: ignore[arg-type]
    asyncio.run(gang.start(TWO, Task(run="true", num_nodes=2), run_id=3, envs={}))
    assert [verb for _, verb, _ in agents.asked] == ["access", "access", "submit", "submit"]
    assert agents.asked[0][2] == {"files": {"aws.json": "key"}, "run_id": 3}
    agents.asked.clear()
    asyncio.run(gang.renew_lease(TWO, lease_s=60.0))
    assert [(verb, request) for _, verb, request in agents.asked] == [
        *[("lease", {"lease_s": 60.0})] * 2, *[("access", {"files": {"aws.json": "later"}})] * 2,
    ]  # fmt: skip
