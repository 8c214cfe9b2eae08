"""A trial launch on virtual time: outcome, note and cost of each step, and the steps that always run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import AuthError, BrokerError, TransientError, UnreachedError
from broker.provision.trial import CONNECT_S_MAX, MARK, RUN_S_MAX, StepOutcome, Trial, choose_places
from broker.runtime.reports import GangReport
from broker.types import Autostop, Cluster, NodeState, Plan, RunStatus, Task
from tests.clouds.simulated import CloudTimings
from tests.provision.test_lifecycle import Stage, Stopping
from tests.simulation.world import OWNER, make_plan

NAME = f"{MARK}-me"
LOG = f"(node 0) {MARK}\n(node 0) Linux 6.8.0\n\n(node 0) Python 3.12.3\n"


class FakeGang:
    """A gang that is reachable after a number of calls, and whose command ends after a given time."""

    def __init__(self, stage: Stage, *, failures: int = 0, failure: BrokerError | None = None) -> None:
        self._stage, self.failures, self.failure = stage, failures, failure
        self.status, self.log, self.ends_after_s, self.started_s = RunStatus.SUCCEEDED, LOG, 5.0, 0.0
        self.autostop: Autostop | None = None
        self.run_ids: set[int] = set()
        self.prepared_s: list[float] = []
        self.envs: dict[str, str] = {}

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        self.prepared_s.append(self._stage.world.clock.now_s())
        if self.failure and len(self.prepared_s) <= self.failures:
            raise self.failure

    async def set_autostop(self, cluster: Cluster, autostop: Autostop | None) -> None:
        self.autostop = autostop

    async def start(self, cluster: Cluster, task: Task, *, run_id: int, envs: Any) -> None:
        self.run_ids.add(run_id)
        self.envs = dict(envs)
        self.started_s = self._stage.world.clock.now_s()

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        has_ended = self._stage.world.clock.now_s() >= self.started_s + self.ends_after_s
        return GangReport(
            status=self.status if has_ended else RunStatus.RUNNING, returncode=3, statuses=(), unreachable=(),
            progress=None, run_id=run_id,
        )  # fmt: skip

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        return self.log.encode()[offset:], len(self.log)


def make_trial(
    stage: Stage, gang: FakeGang, *, plan: Plan | None = None, spend_usd_max: float = 9.0, bucket_url: str = ""
) -> Trial:
    used: Any = gang
    return Trial(
        NAME, plan or make_plan(stage.world.task, "east1a", node_count=1), stage.cloud, gang=used,
        provisioner=stage.provisioner, store=stage.world.store, clock=stage.world.clock, owner=OWNER,
        spend_usd_max=spend_usd_max, bucket_url=bucket_url,
    )  # fmt: skip


def play(stage: Stage, gang: FakeGang, **more: Any) -> dict[str, tuple[str, str]]:
    """Run a trial, check that nothing is left, and return outcome and note of each step."""
    trial = make_trial(stage, gang, **more)
    steps = list(stage.run(trial.run))
    assert not stage.world.list_live_nodes() and not stage.world.store.clusters.list()
    assert steps == trial.steps and [step.name for step in steps][-2:] == ["terminate", "leaks"]
    return {step.name: (step.outcome.value, step.note) for step in steps}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_successful_trial_reports_its_findings_and_its_cost(stage: Stage) -> None:
    gang = FakeGang(stage)
    trial = make_trial(stage, gang)
    steps = {step.name: step for step in stage.run(trial.run)}
    outcomes = {name: step.outcome for name, step in steps.items()}
    assert outcomes.pop("bucket") == outcomes.pop("bucket from the node") == StepOutcome.SKIPPED
    assert set(outcomes.values()) == {StepOutcome.OK}
    assert steps["login"].note == "account account-1" and steps["run"].note == "Linux 6.8.0, Python 3.12.3"
    assert "1 x big spot in east1a" in steps["create"].note and "sim-" in steps["create"].note
    again_s = float(steps["stop"].note.removeprefix("stopped, and up again after ").removesuffix(" s"))
    assert stage.cloud.lag_s <= again_s < stage.cloud.lag_s + 6.0
    assert steps["leaks"].note == "nothing remains"
    assert gang.run_ids == {1} and gang.autostop == Autostop(idle_minutes=10, is_down=True)
    assert 5.0 <= steps["run"].took_s <= 7.0 and steps["login"].spent_usd == 0.0
    assert steps["leaks"].spent_usd == pytest.approx(stage.world.store.bills.spend_usd(now_s=stage.world.clock.now_s()))
    again = {step.name: step for step in stage.run(make_trial(stage, gang).run)}
    assert again["login"].spent_usd == pytest.approx(0.0), "earlier trials are not billed to it"


@pytest.mark.parametrize(
    ("error", "pause_s"), [(UnreachedError("ssh: no route", node_id="n"), 3.0), (TransientError("the agent"), 1.0)]
)
def test_connect_waits_for_a_booting_node_and_fails_with_a_hint_if_it_never_answers(
    stage: Stage, error: BrokerError, pause_s: float
) -> None:
    gang = FakeGang(stage, failures=3, failure=error)
    assert play(stage, gang)["connect"][0] == "ok"
    assert gang.prepared_s[1] - gang.prepared_s[0] == pytest.approx(pause_s, abs=0.1)
    gang = FakeGang(stage, failures=10**6, failure=error)
    trial = make_trial(stage, gang)
    steps = {step.name: step for step in stage.run(trial.run)}
    assert steps["connect"].outcome is StepOutcome.FAILED and steps["connect"].note == error.message
    assert "`show sim-" in steps["connect"].hints[0]
    assert CONNECT_S_MAX <= steps["connect"].took_s < CONNECT_S_MAX + 10.0
    assert steps["run"].note == "`connect` failed" and steps["terminate"].outcome is StepOutcome.OK


def test_the_command_gets_the_bucket_if_one_is_given(stage: Stage, tmp_path: Path) -> None:
    gang = FakeGang(stage)
    assert play(stage, gang)["bucket"][0] == "skipped" and gang.envs == {}
    results = play(stage, gang, bucket_url=f"file://{tmp_path}/bucket")
    folder = gang.envs["BROKER_CHECKPOINT_DIR"]
    assert folder.startswith(f"file://{tmp_path}/bucket/{OWNER}-") and gang.envs["BROKER_ATTEMPT"] == "1"
    assert results["bucket"] == ("ok", f"{folder}: written, read, deleted from this machine")
    assert results["bucket from the node"][0] == "skipped", "a node has none of this machine's folders"


def test_connect_fails_at_once_if_the_node_ends(stage: Stage) -> None:
    gang = FakeGang(stage, failures=10**6, failure=TransientError("ssh"))
    prepare = gang.prepare

    async def lose(cluster: Cluster, task: Task) -> None:
        stage.cloud.preempt([cluster.nodes[0].id])
        await prepare(cluster, task)

    gang.prepare = lose  # type: ignore[method-assign]
    assert play(stage, gang)["connect"] == ("failed", "the node ended while it booted: preempted")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"status": RunStatus.FAILED}, "the command ended with status FAILED: (node 0) Python 3.12.3"),
        ({"status": RunStatus.FAILED, "log": ""}, "the command ended with status FAILED"),
        ({"log": "(node 0) Linux\n"}, "the command ran, but its output was not received"),
        ({"ends_after_s": 1e9}, f"the command has not ended after {RUN_S_MAX:g} s"),
    ],
)
def test_a_failed_command_reports_its_cause(stage: Stage, change: dict[str, Any], expected: str) -> None:
    gang = FakeGang(stage)
    for name, value in change.items():
        setattr(gang, name, value)
    found = play(stage, gang)
    assert found["run"] == ("failed", expected)
    assert found["stop"] == ("skipped", "`run` failed") and found["terminate"][0] == "ok"


def test_the_spending_limit_ends_the_trial_within_one_poll_and_the_node_is_terminated(stage: Stage) -> None:
    gang = FakeGang(stage)
    gang.ends_after_s = 1e9
    found = play(stage, gang, spend_usd_max=0.05)
    assert found["run"] == ("failed", "the spending limit of 0.0500 USD is reached")
    assert found["terminate"] == ("ok", "the cloud confirmed that the node is gone")
    assert 0.05 <= stage.world.store.bills.spend_usd(now_s=stage.world.clock.now_s()) < 0.06


def test_a_refused_login_costs_nothing(stage: Stage) -> None:
    async def refuse() -> None:
        raise AuthError("the login has expired")

    stage.cloud.check = refuse  # type: ignore[method-assign]
    found = play(stage, FakeGang(stage))
    assert found["login"] == ("failed", "the login has expired") and found["create"][0] == "skipped"
    assert found["terminate"] == ("skipped", "nothing was created") and not stage.world.cloud.asked_s


def test_a_node_that_is_not_confirmed_gone_is_reported_as_a_leak(stage: Stage) -> None:
    stage.cloud.timings = CloudTimings(terminate_s=1e6)
    steps = {step.name: step for step in stage.run(make_trial(stage, FakeGang(stage)).run)}
    assert steps["terminate"].outcome is steps["leaks"].outcome is StepOutcome.FAILED
    assert f"try again with `broker down {NAME}`" in steps["terminate"].hints[0]
    (node,) = stage.world.list_live_nodes()
    assert steps["leaks"].note == f"nodes remain: {node.id}" and node.state is NodeState.RUNNING


def test_nodes_of_an_earlier_trial_are_terminated_first_and_stop_is_skipped_if_not_supported(stage: Stage) -> None:
    stage.up(NAME, make_plan(stage.world.task, "east1a", node_count=1))
    (left,) = stage.world.list_live_nodes()
    stage.cloud.__class__ = Stopping.__base__  # type: ignore[assignment]
    found = play(stage, FakeGang(stage))
    assert found["stop"] == ("skipped", "simulated cannot stop nodes") and left.id not in found["create"][1]


def test_each_region_comes_once_before_one_comes_again() -> None:
    """Some of the cheapest regions are disabled in most accounts."""
    plan = make_plan(Task(), "east1a", "east1b", "west1a")
    first, second, other = plan.estimates
    found = choose_places(plan, per_region=2, usd_hour_max=100.0)
    assert found == replace(plan, estimates=(first, other, second))
    assert choose_places(plan, per_region=1, usd_hour_max=100.0).estimates == (first, other)
    dearest_usd = max(each.placement.usd_hour for each in plan.estimates)
    kept = choose_places(plan, per_region=2, usd_hour_max=dearest_usd * 0.999).estimates
    assert all(each.placement.usd_hour < dearest_usd for each in kept)
    assert choose_places(plan, per_region=2, usd_hour_max=0.0).estimates == ()
