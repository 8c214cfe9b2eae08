"""The provisioner over Google: a cluster's whole life, with the real store and the real failover loop."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.clouds.gcp.names import instance_names
from broker.errors import BrokerError, CapacityError, UnknownOutcomeError
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import ClusterStatus, Estimate, Node, NodeState, Offer, Plan, Resources, Task
from tests.clouds.contract import make_request
from tests.tiers import spread

OWNER = "0123456789ab"


class Life:
    """A provisioner with Google as its only cloud."""

    def __init__(self, bed: Any, folder: Path) -> None:
        self.bed = bed
        self.store = Store(folder / "state.db", clock=bed.clock)
        self.provisioner = self.reopen()

    def reopen(self) -> Provisioner:
        """Make the provisioner of a later command, or one after a crash."""
        return Provisioner(
            {"gcp": self.bed.reopen()},
            self.store,
            clock=self.bed.clock,
            owner=OWNER,
            write_boot=lambda request: "#!/bin/sh\n",
        )

    def run(self, work: Any) -> Any:
        import asyncio

        return asyncio.run(work)

    @property
    def standing(self) -> list[str]:
        return list(self.bed.gce.list_names())


@pytest.fixture
def life(bed: Any, tmp_path: Path) -> Life:
    return Life(bed, tmp_path)


def make_plan(offer: Offer, zones: Sequence[str], *, is_spot: bool = True, node_count: int = 2) -> Plan:
    from dataclasses import replace

    from broker.types import Placement

    task = Task(num_nodes=node_count, resources=(Resources(use_spot=is_spot),))
    offers = [replace(offer, zone=zone, region=zone.rpartition("-")[0]) for zone in zones]
    estimates = tuple(
        Estimate(placement=Placement(offer=each, is_spot=is_spot, node_count=node_count)) for each in offers
    )
    return Plan(task=task, estimates=estimates, rejections=(), prices_as_of="2026-09-01", reason="it is cheapest")


@pytest.mark.parametrize("is_spot", [False, True])
def test_only_nodes_of_a_job_are_deleted_by_google_after_some_days(life: Life, is_spot: bool) -> None:
    """Google would delete the disk of a user's cluster, or of a server, in the middle of its work."""
    plan = make_plan(life.bed.offer, ["us-central1-a"], is_spot=is_spot, node_count=1)

    async def act() -> None:
        await life.provisioner.up("mine", plan)
        await life.provisioner.up("job-7-1", plan, job_id=7)

    life.run(act())
    limits = {
        json.loads(each["description"])["cluster"]: each["scheduling"].get("maxRunDuration")
        for each in map(life.bed.gce.find, life.standing)
    }
    assert limits == {"mine": None, "job-7-1": {"seconds": str(7 * 86400)}}


def test_restarted_nodes_are_billed_again(life: Life) -> None:
    plan = make_plan(life.bed.offer, ["us-central1-a"], is_spot=False)

    async def act() -> None:
        await life.provisioner.up("c", plan, hedge=1)
        await life.bed.clock.sleep(3600)
        await life.provisioner.stop("c")
        await life.bed.clock.sleep(36000)
        cluster = await life.provisioner.start("c")
        await life.bed.clock.sleep(3600)
        await life.provisioner.refresh(cluster)
        spent_usd = life.store.bills.spend_usd(cluster="c", now_s=life.bed.clock.now_s())
        assert spent_usd == pytest.approx(2 * plan.choice.placement.usd_hour, rel=0.02)

    life.run(act())


def test_a_machine_that_is_stopped_and_started_in_the_console_is_billed_while_it_runs(life: Life) -> None:
    plan = make_plan(life.bed.offer, ["us-central1-a"], is_spot=False, node_count=1)
    usd_hour = plan.choice.placement.usd_hour

    async def measure_usd(hours: float) -> float:
        await life.bed.clock.sleep(hours * 3600)
        cluster = life.store.clusters.get("c")
        assert cluster
        await life.provisioner.refresh(cluster)
        return life.store.bills.spend_usd(cluster="c", now_s=life.bed.clock.now_s())

    async def act() -> None:
        await life.provisioner.up("c", plan)
        machine = life.bed.gce.find(life.standing[0])
        await life.bed.clock.sleep(3600)
        life.bed.gce._halt(machine)
        assert await measure_usd(0.01) == pytest.approx(usd_hour, rel=0.02)
        assert await measure_usd(10) == pytest.approx(usd_hour, rel=0.02)
        life.bed.gce._run(machine)
        assert await measure_usd(1) == pytest.approx(2 * usd_hour, rel=0.02)
        assert await measure_usd(1) == pytest.approx(3 * usd_hour, rel=0.02)

    life.run(act())


def test_a_full_zone_is_skipped_and_leaves_nothing(life: Life) -> None:
    life.bed.gce.capacity["us-central1-a", "n1-standard-4"] = 1  # too few for a gang of two
    plan = make_plan(life.bed.offer, ["us-central1-a", "us-east4-b"])
    cluster = life.run(life.provisioner.up("c", plan, hedge=1))
    assert cluster.status is ClusterStatus.UP and {node.zone for node in cluster.nodes} == {"us-east4-b"}
    assert len(life.standing) == 2
    assert {name.rpartition("-")[2] for name in life.bed.gce.firewalls} == {"shut", "ssh", "nodes"}
    assert len(life.bed.gce.firewalls) == 3  # none of the refused gang


def refuse_gang_in_part(life: Life) -> None:
    """Google rolls a refused bulkInsert back by deleting what it has created, which may fail like any deletion."""
    life.bed.gce.capacity["us-central1-a", "n1-standard-4"] = 1
    life.bed.gce.rollback_failures.add("us-central1-a")


def make_region_plan(life: Life) -> Plan:
    """Return a plan with one placement, whose request tries the zones of its region with one token."""
    placement = make_plan(life.bed.offer, ["us-central1-a"]).choice.placement
    placement = dataclasses.replace(placement, offer=dataclasses.replace(placement.offer, zone=None))
    plan = make_plan(life.bed.offer, ["us-central1-a"])
    return dataclasses.replace(plan, estimates=(Estimate(placement=placement),))


def test_a_part_of_a_refused_gang_that_google_keeps_is_neither_used_nor_left(life: Life) -> None:
    refuse_gang_in_part(life)
    cluster = life.run(life.provisioner.up("c", make_region_plan(life), hedge=1))
    assert [(node.zone, node.rank) for node in cluster.nodes] == [("us-central1-b", 0), ("us-central1-b", 1)]
    assert all(node.state is NodeState.RUNNING for node in life.run(life.provisioner.refresh(cluster)).nodes)
    assert len(life.standing) == 2, "nothing else is paid for"


def test_a_part_of_a_refused_gang_that_cannot_be_deleted_at_once_is_deleted_before_the_launch_ends(life: Life) -> None:
    refuse_gang_in_part(life)
    life.bed.gce.fail("DELETE", "us-central1-a/instances", code="backendError", status=503, times=3)
    with pytest.raises(CapacityError):
        life.run(life.provisioner.up("c", make_region_plan(life), hedge=1))
    assert life.standing == [] and not life.store.intents.list_open()


@pytest.mark.parametrize(
    "code", ["INTERNAL_ERROR", "QUOTA_EXCEEDED", "RATE_LIMIT_EXCEEDED", "PERMISSIONS_ERROR", "CONDITION_NOT_MET"]
)
@pytest.mark.parametrize("is_undeletable", [False, True])
def test_a_gang_whose_creation_fails_after_its_first_node_is_whole_or_gone(
    life: Life, code: str, is_undeletable: bool
) -> None:
    """Whatever Google says, its rollback may fail, and so may the first deletion."""
    life.bed.gce.partial_refusals["us-central1-a"] = code
    life.bed.gce.rollback_failures.add("us-central1-a")
    if is_undeletable:
        life.bed.gce.fail("DELETE", "us-central1-a/instances", code="backendError", status=503, times=3)
    try:
        cluster = life.run(life.provisioner.up("c", make_region_plan(life), hedge=1))
    except BrokerError:
        assert life.standing == [] and not life.store.intents.list_open()
    else:
        assert all(node.state is NodeState.RUNNING for node in life.run(life.provisioner.refresh(cluster)).nodes)
        assert len(life.standing) == len(cluster.nodes) == 2, "nothing else is paid for"
    assert not life.bed.gce.partial_refusals, "the failure happened"


def test_a_created_gang_that_cannot_be_queried_is_no_refusal(life: Life) -> None:
    """The login may expire at that moment: after a refusal, no one would look for the nodes."""
    request = make_request(life.bed, node_count=2)
    life.bed.gce.fail("GET", instance_names(request)[1], code="forbidden", status=403)
    with pytest.raises(UnknownOutcomeError):
        life.run(life.bed.reopen().create_nodes(request))
    assert len(life.standing) == 2


def test_an_answer_lost_after_the_effect_creates_one_gang(life: Life) -> None:
    life.bed.gce.fail("POST", "bulkInsert", has_effect=True)
    cluster = life.run(life.provisioner.up("c", make_plan(life.bed.offer, ["us-central1-a"])))
    assert sorted(node.id.rpartition("/")[2] for node in cluster.nodes) == life.standing
    assert life.bed.gce.fault_counts


def test_a_call_lost_before_its_effect_is_repeated(life: Life) -> None:
    life.bed.gce.fail("POST", "bulkInsert")
    cluster = life.run(life.provisioner.up("c", make_plan(life.bed.offer, ["us-central1-a"])))
    assert len(cluster.nodes) == len(life.standing) == 2


def test_the_next_command_sees_a_preemption_and_takes_the_rest_down(life: Life) -> None:
    cluster = life.run(life.provisioner.up("c", make_plan(life.bed.offer, ["us-central1-a"])))
    life.bed.gce.preempt(cluster.nodes[0].id.rpartition("/")[2])
    later = life.reopen()
    seen = life.run(later.refresh(cluster))
    assert [(node.state, node.reason) for node in seen.nodes] == [
        (NodeState.TERMINATED, "preempted"),
        (NodeState.RUNNING, ""),
    ]
    started_s = life.bed.clock.now_s()
    life.run(life.reopen().down("c"))
    assert life.standing == [] and life.store.clusters.get("c") is None
    assert life.bed.clock.now_s() - started_s < 60  # reported by Google, not inferred after a long silence
    assert [name for name in life.bed.gce.firewalls if not name.endswith("-shut")] == []


def test_stopped_node_can_be_started_again(life: Life) -> None:
    plan = make_plan(life.bed.offer, ["us-central1-a"], is_spot=False)
    first = life.run(life.provisioner.up("c", plan))
    life.run(life.reopen().stop("c"))
    assert len(life.standing) == 2
    again = life.run(life.reopen().start("c"))
    assert {node.id for node in again.nodes} == {node.id for node in first.nodes}
    assert all(node.state is NodeState.RUNNING for node in life.run(life.provisioner.refresh(again)).nodes)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_gang_that_starts_in_part_is_stopped_again(life: Life, is_refused: bool) -> None:
    """Google starts machines one by one. The record says STOPPED, so that no one would look for the part that runs."""
    life.run(life.provisioner.up("c", make_plan(life.bed.offer, ["us-central1-a"], is_spot=False)))
    life.run(life.reopen().stop("c"))
    life.bed.gce.capacity["us-central1-a", "n1-standard-4"] = 1
    if is_refused:
        life.bed.gce.fail("POST", "/stop", code="forbidden", status=403, times=9)
    with pytest.raises(CapacityError) as caught:
        life.run(life.reopen().start("c"))
    assert any("broker stop c" in hint for hint in caught.value.hints) == is_refused
    states = [node.state for node in life.run(life.bed.reopen().list_nodes(OWNER))]
    assert states.count(NodeState.STOPPED) == (1 if is_refused else 2)


def test_unrecorded_resources_are_collected(life: Life) -> None:
    async def make_lost() -> Sequence[Node]:
        nodes: Sequence[Node] = await life.bed.reopen().create_nodes(make_request(life.bed))
        return nodes

    life.run(make_lost())
    life.run(life.bed.clock.sleep(3600.0))
    life.store.meta.mark_adopted("gcp")
    assert life.run(life.reopen().collect()) == 1
    life.bed.gce.list_names()
    assert life.standing == []


def test_lack_of_capacity_everywhere_is_reported_and_leaves_nothing(life: Life) -> None:
    for letter in "ab":
        life.bed.gce.capacity[f"us-central1-{letter}", "n1-standard-4"] = 0
    with pytest.raises(CapacityError):
        life.run(life.provisioner.up("c", make_plan(life.bed.offer, ["us-central1-a", "us-central1-b"])))
    assert life.standing == [] and life.store.clusters.get("c") is None


SCRIPT = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from broker.clock import SystemClock
from broker.clouds.gcp.cloud import make_cloud
from broker.config import Config
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from tests.clouds.gcp.test_life import make_plan
from tests.clouds.gcp.conftest import make_offer
home = Path({home!r})
clock = SystemClock()
cloud = make_cloud(Config(home=home, owner={owner!r}), clock=clock)
real = cloud._launcher._insert_in
async def dying(*arguments):
    if {when!r} == "after":
        await real(*arguments)
    os._exit(137)
cloud._launcher._insert_in = dying
provisioner = Provisioner({{"gcp": cloud}}, Store(home / "state.db", clock=clock), clock=clock, owner={owner!r})
asyncio.run(provisioner.up("c", make_plan(make_offer("n1-standard-4+1xT4"), ["us-central1-a"])))
"""


@pytest.mark.parametrize("when", spread(["after", "before"], every=2))
def test_nodes_of_a_process_that_died_in_its_create_call_are_found_by_the_next(
    bed: Any, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPT.format(path=sys.path, home=str(tmp_path), owner=OWNER, when=when)
    environment = {
        "PATH": "/usr/bin:/bin",
        "BROKER_GCP_ENDPOINT": bed.login.endpoint,
        "GOOGLE_CLOUD_PROJECT": "pretend",
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 137, done.stderr
    life = Life(bed, tmp_path)
    assert len(life.standing) == (2 if when == "after" else 0)
    before = life.standing
    cluster = life.run(life.provisioner.up("c", make_plan(bed.offer, ["us-central1-a"])))
    assert sorted(node.id.rpartition("/")[2] for node in cluster.nodes) == life.standing
    assert len(life.standing) == 2 and before in ([], life.standing)


@pytest.mark.long
def test_the_library_is_imported_in_the_background(bed: Any, tmp_path: Path) -> None:
    """`prepare` returns before the import is done, and the first call waits for it instead of importing again."""
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path; from broker.clock import SystemClock; from broker.config import Config\n"
        "from broker.clouds.base import CanPrepare; from broker.clouds.gcp.cloud import make_cloud\n"
        f"cloud = make_cloud(Config(home=Path({str(tmp_path)!r}), owner='me'), clock=SystemClock())\n"
        "assert isinstance(cloud, CanPrepare)\n"
        "cloud.prepare(); cloud.prepare()\n"
        "assert cloud._sdk._clients is None\n"
        "assert not asyncio.run(cloud.list_nodes('me')).nodes\n"
    )
    environment = {
        **{"PATH": "/usr/bin:/bin", "GOOGLE_CLOUD_PROJECT": "pretend"},
        **{"BROKER_GCP_ENDPOINT": bed.login.endpoint, "PYTHONPATH": ":".join(sys.path)},
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
