"""`broker status --refresh` if one cloud does not respond: its clusters keep their last state, the others are
refreshed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Node, NodeState, Placement
from tests.cli.conftest import Shell
from tests.simulation.world import make_offer
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.tiers import spread

HELLO = "resources: {infra: local}\nrun: echo hi\n"
REASON = "could not query aws: clusters there show their last known state"


@pytest.fixture
def account(shell: Shell) -> Iterator[Account]:
    """Add AWS, and a cluster that is recorded there."""
    account = Account(clock=SystemClock())
    aws = FakeAws(account)
    shell.environment |= aws.environment
    shell.home.mkdir(exist_ok=True)
    (shell.home / "aws.toml").write_text('regions = ["us-east-1"]\n')
    offer = replace(make_offer("east1a"), cloud="aws", region="us-east-1", zone="us-east-1a")
    node = Node(
        id="i-1", cloud="aws", owner="me", cluster="far", attempt=1, rank=0, state=NodeState.RUNNING,
        region="us-east-1", zone="us-east-1a", token="t", created_s=1.0,
    )  # fmt: skip
    cluster = Cluster(
        name="far", status=ClusterStatus.UP, placement=Placement(offer=offer, is_spot=False, node_count=1), attempt=1,
        nodes=(node,), created_s=1.0,
    )  # fmt: skip
    store = Store(shell.home / "state.db", clock=SystemClock())
    store.clusters.put(cluster)
    store.close()
    yield account
    store = Store(shell.home / "state.db", clock=SystemClock())
    store.clusters.delete("far")  # its machine never existed
    store.close()
    aws.close()


def lose_a_node(shell: Shell) -> None:
    """Lose a node of the cluster on this machine, listed together with the one on AWS."""
    shell.run("launch", shell.write("hello.yaml", HELLO), "-c", "near", "--down")
    shell.wait_until(lambda: not shell.find_processes(), "its machine has ended itself")


@pytest.mark.parametrize("flaw", spread(["login", "forgotten"], every=0, more=2))
def test_other_clouds_are_still_queried_and_the_reason_is_shown(shell: Shell, account: Account, flaw: str) -> None:
    account.has_login = False
    lose_a_node(shell)
    if flaw == "forgotten":  # the environment has no login left
        shell.environment = {name: value for name, value in shell.environment.items() if not name.startswith("AWS_")}
        nowhere = str(shell.folder / "no-login")
        shell.environment |= {"AWS_CONFIG_FILE": nowhere, "AWS_SHARED_CREDENTIALS_FILE": nowhere}
    done = shell.run("status", "--refresh", code=5)
    (near,) = [line for line in done.stdout.splitlines() if line.startswith("near")]
    (far,) = [line for line in done.stdout.splitlines() if line.startswith("far")]
    assert "ENDED" in near and "UP" not in near and "lost" not in far and "UP" in far
    assert "`broker down near`" in done.stderr
    assert REASON in done.stderr and "hint: " in done.stderr
    found = json.loads(shell.run("status", "--refresh", "--json", code=5).stdout)
    assert list(found["not_asked"]) == ["aws"]
    assert {each["name"] for each in found["clusters"]} == {"near", "far"}
    assert REASON not in shell.run("status").stderr, "no cloud was queried"
    if flaw == "forgotten":
        refused = shell.run("down", "far", "--yes", code=5).stderr
        assert "aws is no longer set up here" in refused and "`broker check aws`" in refused


def test_answering_clouds_raise_no_error(shell: Shell, account: Account) -> None:
    found = json.loads(shell.run("status", "--refresh", "--json").stdout)
    assert found["not_asked"] == {}


def test_gc_names_a_cloud_that_it_could_not_search_and_still_collects_the_others(
    shell: Shell, account: Account
) -> None:
    account.has_login = False
    store = Store(shell.home / "state.db", clock=SystemClock())
    far = store.clusters.get("far")
    assert far is not None
    store.clusters.put(replace(far, name="dead", nodes=(), status=ClusterStatus.TERMINATING))
    store.close()
    done = shell.run("gc", code=5)
    assert "terminated cluster `dead`" in done.stdout and "Nothing to collect" not in done.stdout
    assert "aws may have nodes that cost money" in done.stderr and "hint: " in done.stderr
