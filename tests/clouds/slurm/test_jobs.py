"""Nodes of Slurm's jobs: addresses that Slurm does not show or gives again, job numbers used twice, federations."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from broker.clock import SystemClock
from broker.clouds.slurm.check import parse_partitions
from broker.clouds.slurm.cloud import SlurmCloud
from broker.clouds.slurm.script import find_partition, make_comment, name_job
from broker.errors import QuotaError, TransientError, UnknownOutcomeError
from broker.sites.facts import Machine
from broker.sites.openssh import Completed
from broker.sites.slurm import Partition, SlurmCluster
from broker.types import Node, NodeRequest, NodeState
from tests.clouds.beds import OWNER, make_request

MACHINE = Machine(vcpus=1, memory_gib=1)
SELF = "Federation: union\nSelf:       alpha:10.0.0.1:6817 ID:1 FedState:ACTIVE Features:\nSibling:    beta:\n"


def ask(token: str) -> NodeRequest:
    offer = MACHINE.make_offer("slurm", "here", zone="low", ondemand_usd_hour=0.1)
    bed = SimpleNamespace(offer=replace(offer, spot_usd_hour=0.1))
    return replace(make_request(bed), token=token)  # type: ignore[arg-type]


def show_comment(request: NodeRequest) -> str:
    return json.dumps(make_comment(request, now_s=0.0))


class Controller:
    """A Slurm that starts a job at once, on node `n0`; `jobs` are `(number, state, request)`."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, str, NodeRequest]] = []
        self.submitted: list[Sequence[str]] = []
        self.script = ""
        self.shown_node = Completed(returncode=0, stdout=b"NodeName=n0 NodeAddr=10.0.0.7 State=MIXED\n", stderr=b"")
        self.federation = ""
        self.reason = "None"
        self.cancelled: list[str] = []
        self.cancellations: list[Sequence[str]] = []
        self.trials: list[Sequence[str]] = []
        self.trial = self.submission = Completed(returncode=0, stdout=b"", stderr=b"")
        self.is_submission_lost = False
        self.node_list, self.end = "n0", "2"
        self.next_request = ask("first")
        files = {"here": SlurmCluster(name="here")}, {"here": [Partition(name="low", machine=MACHINE, node_count=1)]}
        self.cloud = SlurmCloud(lambda: files, clock=SystemClock(), run=self.run)

    async def run(self, cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        text = ""
        if "squeue" in argv:
            assert "--local" in argv, "other clusters of a federation have jobs with the same name"
            assert "--noconvert" in argv, "1024 nodes would be `1K`, which is no number"
            text = "".join(
                f"{number}|{state}|{self.reason}|1|{self.node_list}|1|{self.end}|low|{show_comment(request)}\n"
                for number, state, request in self.jobs
            )
        elif argv[0] == "sbatch" and "--test-only" in argv:
            self.trials.append(argv)
            return self.trial
        elif argv[0] == "sbatch":
            self.submitted.append(argv)
            if self.is_submission_lost:
                raise TransientError("the connection was lost")
            if self.submission.returncode:
                return self.submission
            self.script = stdin.decode()
            self.jobs.append((7, "RUNNING", self.next_request))
        elif argv[0] == "scancel":
            self.cancellations.append(argv)
            if "--signal=USR1" in argv:
                return Completed(returncode=0, stdout=b"", stderr=b"")
            self.cancelled.append(argv[-1])
            self.jobs = [(number, "CANCELLED", request) for number, _, request in self.jobs if str(number) == argv[-1]]
        elif argv[-2:] == ["show", "federation"]:
            text = self.federation
        elif "node" in argv:
            return self.shown_node
        elif "hostnames" in argv:
            text = f"{self.node_list}\n"
        elif "job" in argv:
            text = "JobId=7 ExitCode=72:0\n"
        return Completed(returncode=0, stdout=text.encode(), stderr=b"")

    def list_nodes(self) -> Sequence[Node]:
        found = asyncio.run(self.cloud.list_nodes(OWNER))
        assert not found.unseen
        return found.nodes


def test_node_that_slurm_does_not_show_has_its_name_as_address() -> None:
    """With `PrivateData=nodes`, and after it left the configuration; the other jobs of the cluster are listed, too."""
    controller = Controller()
    controller.shown_node = Completed(returncode=1, stdout=b"Node n0 not found\n", stderr=b"")
    controller.jobs = [(1, "RUNNING", ask("first")), (2, "PENDING", ask("second"))]
    assert [(node.state, node.address) for node in controller.list_nodes()] == [
        (NodeState.RUNNING, "n0"), (NodeState.PENDING, ""),
    ]  # fmt: skip


def test_busy_controller_leaves_the_cluster_unseen() -> None:
    controller = Controller()
    controller.shown_node = Completed(
        returncode=1, stdout=b"", stderr=b"slurm_load_node error: Socket timed out on send/recv operation\n"
    )
    controller.jobs = [(1, "RUNNING", ask("first"))]
    with pytest.raises(TransientError):
        asyncio.run(controller.cloud.list_nodes(OWNER))


def test_node_of_a_cloud_has_the_address_of_its_last_start() -> None:
    controller = Controller()
    controller.jobs = [(1, "RUNNING", ask("first"))]
    assert [node.address for node in controller.list_nodes()] == ["10.0.0.7"]
    controller.shown_node = Completed(returncode=0, stdout=b"NodeName=n0 NodeAddr=10.0.0.8 State=MIXED\n", stderr=b"")
    controller.jobs = [(2, "RUNNING", ask("second"))]
    assert [node.address for node in controller.list_nodes()] == ["10.0.0.8"]


def test_job_with_the_number_of_an_earlier_one_has_its_own_end() -> None:
    controller = Controller()
    controller.jobs = [(7, "PREEMPTED", ask("first"))]
    assert [node.reason for node in controller.list_nodes()] == ["preempted"]
    controller.jobs = []
    assert not controller.list_nodes()
    controller.jobs = [(7, "FAILED", ask("second"))]
    assert [node.reason for node in controller.list_nodes()] == ["done"], "by its exit code"


@pytest.mark.parametrize(("federation", "expected"), [("", []), (SELF, ["--clusters=alpha"])])
def test_gang_is_submitted_to_no_other_cluster_of_a_federation(federation: str, expected: list[str]) -> None:
    controller = Controller()
    controller.federation = federation
    asyncio.run(controller.cloud.create_nodes(controller.next_request))
    ((*_, last),) = controller.submitted
    assert [word for word in controller.submitted[0] if word.startswith("--clusters")] == expected, last


@pytest.mark.parametrize("reason", ["QOSMaxWallDurationPerJobLimit", "AssocMaxGRESPerJob", "PartitionTimeLimit"])
def test_job_that_slurm_never_starts_ends_with_the_reason(reason: str) -> None:
    """It would wait for 45 minutes, and so would the next one."""
    controller = Controller()
    controller.jobs, controller.reason = [(1, "PENDING", ask("first"))], reason
    controller.list_nodes()
    assert controller.cancelled == ["1"]
    (node,) = controller.list_nodes()
    assert (node.state, node.reason) == (NodeState.TERMINATED, f"Slurm never starts it: {reason}")


def test_program_of_a_node_is_sent_with_everything_that_it_calls() -> None:
    controller = Controller()
    asyncio.run(controller.cloud.create_nodes(controller.next_request))
    packed = max(re.findall(r"[A-Za-z0-9+/=]{500,}", controller.script), key=len)
    program = zlib.decompress(base64.b64decode(packed)).decode().rpartition("\nSETTINGS = ")[0]
    names: dict[str, object] = {"__name__": "node"}
    exec(compile(program, "node", "exec"), names)  # noqa: S102 - as on a node
    assert {"main", "find_path"} <= set(names)


def test_job_that_another_cluster_of_the_federation_took_is_cancelled_and_not_gone() -> None:
    """It may have been moved there by hand; counted as ended, its attempt would run twice."""
    controller = Controller()
    controller.jobs = [(1, "REVOKED", ask("first"))]
    assert [node.state for node in controller.list_nodes()] == [NodeState.PENDING]
    assert controller.cancelled == ["1"]
    (node,) = controller.list_nodes()
    assert (node.state, node.reason) == (NodeState.TERMINATED, "another cluster of the federation took it")


@pytest.mark.parametrize("reason", ["Resources", "Priority", "AssocGrpGRES", "QOSMaxGRESPerUser", "PartitionNodeLimit"])
def test_job_that_waits_for_others_stays_in_the_queue(reason: str) -> None:
    controller = Controller()
    controller.jobs, controller.reason = [(1, "PENDING", ask("first"))], reason
    assert [node.state for node in controller.list_nodes()] == [NodeState.PENDING] and not controller.cancelled


def test_jobs_of_another_owner_are_left_alone() -> None:
    controller = Controller()
    controller.jobs, controller.reason = [(1, "PENDING", ask("first"))], "PartitionTimeLimit"
    asyncio.run(controller.cloud.list_nodes("another-owner"))
    asyncio.run(controller.cloud.check())
    assert not controller.cancelled


def refuse(text: str) -> Completed:
    return Completed(returncode=1, stdout=b"", stderr=f"sbatch: error: Batch job submission failed: {text}\n".encode())


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


def test_trial_is_of_the_same_job() -> None:
    controller = Controller()
    asyncio.run(controller.cloud.create_nodes(controller.next_request))
    (trial,), (submitted,) = controller.trials, controller.submitted
    assert list(trial[:2]) == ["sbatch", "--test-only"] and list(submitted[:2]) == ["sbatch", "--parsable"]
    assert list(trial[2:]) == list(submitted[2:])


def test_job_that_slurm_refuses_is_not_waited_for() -> None:
    controller = Controller()
    controller.trial = refuse(POLICY)
    with pytest.raises(QuotaError):
        asyncio.run(controller.cloud.create_nodes(controller.next_request))
    assert not controller.submitted
    controller.trial, controller.submission = Completed(returncode=0, stdout=b"", stderr=b""), refuse(POLICY)
    with pytest.raises(QuotaError):
        asyncio.run(controller.cloud.create_nodes(controller.next_request))


def test_submission_without_an_answer_may_have_been_accepted() -> None:
    controller = Controller()
    controller.is_submission_lost = True
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(controller.cloud.create_nodes(controller.next_request))


def test_of_two_jobs_with_one_token_the_first_stays() -> None:
    controller = Controller()
    controller.jobs = [(9, "PENDING", ask("first")), (7, "RUNNING", ask("first"))]
    (node,) = asyncio.run(controller.cloud.create_nodes(ask("first")))
    assert node.handle.startswith("slurm://here/7/") and controller.cancelled == ["9"] and not controller.submitted


def test_job_is_only_cancelled_by_its_number_and_its_name() -> None:
    """A controller that lost its state gives numbers again, perhaps to another job of the user."""
    controller = Controller()
    controller.jobs = [(1, "RUNNING", ask("first"))]
    asyncio.run(controller.cloud.terminate_nodes(controller.list_nodes()))
    name = name_job(OWNER, "first")
    assert controller.cancelled == ["1"] and len(controller.cancellations) == 2
    assert all(f"--name={name}" in words for words in controller.cancellations)


def test_nodes_of_another_owner_are_not_listed() -> None:
    controller = Controller()
    controller.jobs = [(1, "RUNNING", ask("first"))]
    assert not asyncio.run(controller.cloud.list_nodes("another-owner")).nodes and controller.list_nodes()


def test_job_that_slurm_moved_has_the_address_of_its_host_now() -> None:
    controller = Controller()
    controller.jobs = [(1, "RUNNING", ask("first"))]
    assert [node.address for node in controller.list_nodes()] == ["10.0.0.7"]
    controller.node_list = "n1"
    controller.shown_node = Completed(returncode=0, stdout=b"NodeName=n1 NodeAddr=10.0.0.9 State=MIXED\n", stderr=b"")
    assert [node.address for node in controller.list_nodes()] == ["10.0.0.9"]


def test_nodes_share_the_price_of_their_gang_and_ended_in_the_past() -> None:
    controller = Controller()
    request = ask("first")
    gang = replace(request, placement=replace(request.placement, node_count=2))
    controller.jobs, controller.end = [(1, "CANCELLED", gang)], "99999999999"
    nodes = controller.list_nodes()
    assert sum(node.usd_hour for node in nodes) == pytest.approx(gang.placement.usd_hour)
    assert all(node.ended_s is not None and node.ended_s <= SystemClock().now_s() for node in nodes)
    controller.jobs, controller.end = [(2, "CANCELLED", ask("second"))], "500"
    assert [node.ended_s for node in controller.list_nodes()] == [500.0]


def test_one_cluster_that_answers_is_enough() -> None:
    controller, silent = Controller(), {"gone"}

    async def run(cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        if cluster.name in silent:
            raise TransientError(f"`{cluster.name}` does not answer")
        return await controller.run(cluster, argv, stdin)

    clusters = {name: SlurmCluster(name=name) for name in ("gone", "here")}
    cloud = SlurmCloud(lambda: (clusters, {}), clock=SystemClock(), run=run)
    asyncio.run(cloud.check())
    assert list(asyncio.run(cloud.list_nodes(OWNER)).unseen) == ["gone"]
    silent.add("here")
    with pytest.raises(TransientError, match="gone"):
        asyncio.run(cloud.check())


def test_partition_of_an_offer_is_the_one_that_has_its_processors() -> None:
    small, large = (Partition(name="low", machine=replace(MACHINE, vcpus=count), node_count=1) for count in (2, 64))
    request = ask("first")
    wide = replace(request.placement.offer, vcpus=32)
    wanted = replace(request, placement=replace(request.placement, offer=wide))
    assert find_partition([small, large], wanted) is large and find_partition([large, small], wanted) is large


@pytest.mark.parametrize("availability", ["drain", "inact", "down"])
def test_partition_that_takes_no_jobs_is_not_offered(availability: str) -> None:
    rules = "PartitionName=low PriorityTier=1\nPartitionName=high PriorityTier=1\n"
    nodes = f"low|4|4000|(null)|2|{availability}|infinite\nhigh|4|4000|(null)|2|up|infinite\n"
    assert [each.name for each in parse_partitions(nodes, rules)] == ["high"]
