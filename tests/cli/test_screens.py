"""Complete output of commands as snapshots: plans, lists, histories and errors. See `screens.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from broker.catalog.history import remember_changes
from broker.cli.rehearse_show import show_rehearsal
from broker.jobs.submission import submit_tasks
from broker.jobs.summary import RunSummary
from broker.rehearsal.report import Comparison, Line, Measures, ReportedAttempt, Resume
from broker.rehearsal.result import Rehearsal
from broker.task.loader import load_tasks_text
from broker.types import (
    CheckpointSpec,
    Cluster,
    ClusterStatus,
    JobStatus,
    Node,
    NodeState,
    Placement,
    Resources,
    Run,
    RunStatus,
    Task,
)
from tests.cli.screens import NOW_S, OFFERS, OWNER, Screen, TextExtension, make_book, open_screen
from tests.simulation.test_crashes import run_to_end
from tests.simulation.world import World

TRAIN = """\
name: train
resources: {accelerators: "H100:8"}
num_nodes: 2
goal: {work: 100h, deadline: 8d, budget: 20000}
checkpoint: {stall: 10s, restart: 6m, size: 80GB}
run: python train.py
"""
HELLO = "name: hello\nresources: {infra: local}\nrun: echo hello\n"
PIPELINE = """\
name: nightly
---
name: prepare
resources: {cpus: 4}
goal: {work: 2h}
outputs: {estimated_size_gigabytes: 200}
run: python prepare.py
---
name: train
resources: {accelerators: "H100:8"}
goal: {work: 10h}
run: python train.py
"""
QUICK = ("--starts", "2", "--optima", "0", "--policy", "greedy,uniform-progress")


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(TextExtension)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    make_book(folder / "broker")
    return folder


@pytest.fixture
def screen(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    with pytest.MonkeyPatch.context() as patch:
        screen = open_screen(tmp_path, cache, capsys, patch)
        for name, text in (("train.yaml", TRAIN), ("hello.yaml", HELLO), ("pipe.yaml", PIPELINE)):
            screen.write(name, text)
        yield screen
    time.tzset()  # restore the environment's zone


def show_all(screen: Screen, *lines: Sequence[str]) -> str:
    return "\n".join(screen.show(*line) for line in lines)


PLANS: dict[str, tuple[Sequence[str], ...]] = {
    "plan": (("plan", "train.yaml"),),
    "plan-explain": (("plan", "train.yaml", "--explain", "--top", "3"),),
    "plan-what-if": (("plan", "train.yaml", "--what-if", "deadline=5d", "--what-if", "region=mars-1"),),
    "plan-pareto": (("plan", "train.yaml", "--top", "1", "--pareto"),),
    "plan-options": (("plan", "--gpus", "A100-80GB:8", "--use-spot"),),
    "plan-pipeline": (("plan", "pipe.yaml"),),
    "launch-dryrun": (("launch", "train.yaml", "--dryrun"), ("launch", "nvidia-smi", "--gpus", "A10", "--dryrun")),
    "jobs-launch-dryrun": (("jobs", "launch", "train.yaml", "--dryrun"),),
    "gpus": (("gpus",), ("gpus", "h100:8", "--spot"), ("gpus", "H100:3")),
    "prices": (("prices", "p5.48xlarge"),),
    "catalog-info": (("catalog", "info"),),
    "simulate": (("simulate", "train.yaml", *QUICK),),
    "traces-info": (("traces", "info"),),
    "advise": (("advise", "--params", "7B", "--tokens", "20B", "--gpus", "H100", "--top", "2"),),
}
EMPTY: dict[str, tuple[Sequence[str], ...]] = {
    "empty": (
        ("status",), ("jobs", "queue"), ("cost",), ("gc", "--dryrun"), ("jobs", "cancel"), ("cancel", "x"), ("down",),
    ),
    "check": (("check",), ("check", "gpc")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, screen: Screen, snapshot: SnapshotAssertion) -> None:
    assert show_all(screen, *PLANS[name]) == snapshot


@pytest.mark.parametrize("name", EMPTY)
def test_without_a_cluster(name: str, screen: Screen, snapshot: SnapshotAssertion) -> None:
    assert show_all(screen, *EMPTY[name]) == snapshot


def test_history(screen: Screen, snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = screen.show("history", "p5.48xlarge")
    known = [each for each in OFFERS["aws"] if each.instance_type == "p5.48xlarge"]
    monkeypatch.setattr("broker.cli.prices.find_cache", lambda: tmp_path / "prices")
    for day, factor in (("2026-11-29", 1.1), ("2026-11-30", 0.9)):
        moved = [replace(each, spot_usd_hour=(each.spot_usd_hour or 0) * factor) for each in known]
        remember_changes(tmp_path / "prices", moved, known, day=day)
    after = screen.show("history", "p5.48xlarge")
    assert f"{before}\n{after}" == snapshot
    assert screen.show("history", "P5.48xlarge") == after.replace("history p5", "history P5")


def test_state_file(screen: Screen, snapshot: SnapshotAssertion) -> None:
    before = screen.show("state", "info")
    screen.open_store().close()
    assert before + show_all(screen, ("state", "info"), ("state", "drop", "jobs", "7")) == snapshot


ERRORS: dict[str, tuple[str, Sequence[str]]] = {
    "bad-yaml": ("name: train\nresources: {accelerators: H100\nrun: x\n", ("plan", "t.yaml")),
    "unknown-field": ("resources:\n  acelerators: H100:8\nrun: x\n", ("plan", "t.yaml")),
    "wrong-values": (
        "num_nodes: 0\nresources:\n  cpus: many\n  memory: -1\n  use_spot: maybe\n  ports: 99999\nrun: x\n",
        ("plan", "t.yaml"),
    ),
    "missing-file": ("", ("plan", "nowhere.yaml")),
    "nothing-fits": ("", ("plan", "train.yaml", "--max-price", "3")),
    "unknown-region": ("", ("plan", "--infra", "aws/us-eest-1", "--gpus", "H100:8")),
    "unknown-accelerator": ("", ("plan", "--gpus", "H1000:8")),
    "unknown-instance-type": ("", ("prices", "p5.48xlage")),
    "no-login": ("", ("launch", "train.yaml", "--infra", "aws", "--yes")),
    "unknown-flag": ("", ("plan", "--gpu", "H100")),
    "unknown-command": ("", ("lanch", "train.yaml")),
    "plan-of-nothing": ("", ("plan",)),
    "bad-flag-values": ("", ("launch", "echo", "--name", "a b", "--infra", "local")),
    "unset-env": ("", ("launch", "echo", "--env", "NOT_SET_ANYWHERE")),
    "unknown-cluster": ("", ("logs", "ghost")),
    "unknown-job": ("", ("jobs", "why", "ghost")),
    "unknown-state": ("", ("jobs", "wait", "1", "--for", "DONE")),
    "pipeline-on-a-cluster": ("", ("launch", "pipe.yaml")),
    "job-without-run": ("resources: {infra: local}\n", ("jobs", "launch", "t.yaml")),
    "cluster-name": ("", ("launch", "hello.yaml", "-c", "-x")),
    "what-if-key": ("", ("plan", "train.yaml", "--what-if", "deadlin=5d")),
    "unknown-policy": ("", ("simulate", "train.yaml", "--policy", "gredy")),
    "advise-amount": ("", ("advise", "--params", "sevenB", "--tokens", "20B")),
}


ADVISE_REFUSED = (
    ("--params", "7B"),
    ("--tokens", "1B"),
    ("--params", "1M", "--tokens", "1B"),
    ("--hidden", "512", "--tokens", "1B"),
    ("--layers", "2", "--hidden", "500", "--heads", "3", "--tokens", "1B"),
    ("--params", "7B", "--heads", "3", "--tokens", "1B"),
    ("--params", "7B", "--tokens", "1B", "--deadline", "soon"),
    ("--params", "7B", "--tokens", "1B", "--gpus", "H1000"),
    ("--params", "70B", "--tokens", "1B", "--max-gpus", "1"),
    ("--params", "70B", "--tokens", "1B", "--gpus", "H100", "--deadline", "1h", "--max-gpus", "8"),
    ("--params", "7B", "--tokens", "20B", "--gpus", "H100", "--budget", "1"),
    ("--tokens", "1B", "--active-params", "3B"),
    ("--params", "7B", "--tokens", "1B", "--active-params", "8B"),
)


def test_advise_refuses_invalid_requests(screen: Screen, snapshot: SnapshotAssertion) -> None:
    assert show_all(screen, *(("advise", *arguments) for arguments in ADVISE_REFUSED)) == snapshot


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str, screen: Screen, snapshot: SnapshotAssertion) -> None:
    text, arguments = ERRORS[name]
    if text:
        screen.write("t.yaml", text)
    if name == "unknown-state":
        screen.open_store().jobs.add("train", Task())
    assert screen.show(*arguments) == snapshot


def add_clusters(screen: Screen) -> None:
    """Add one on Lambda that is up, and one on AWS that is stopped and lost a node."""
    store = screen.open_store()
    for name, cloud, count, status in (
        ("dev", "lambda", 1, ClusterStatus.UP),
        ("big", "aws", 2, ClusterStatus.STOPPED),
    ):
        placement = Placement(offer=OFFERS[cloud][0], is_spot=False, node_count=count)
        nodes = tuple(
            Node(
                id=f"{name}-{rank}", cloud=cloud, owner=OWNER, cluster=name, attempt=1, rank=rank, token="t",
                state=NodeState.TERMINATED if rank else NodeState.RUNNING, region=placement.offer.region,
                usd_hour=placement.usd_hour / count, created_s=NOW_S - 7200, ended_s=NOW_S - 3600 if rank else None,
            )
            for rank in range(count)
        )  # fmt: skip
        store.clusters.put(
            Cluster(
                name=name, status=status, placement=placement, attempt=1, nodes=nodes, created_s=NOW_S - 7200
            )
        )  # fmt: skip
        for node in nodes:
            store.bills.record(node)
    store.close()


def test_clusters(screen: Screen, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    add_clusters(screen)

    async def list_runs(gang: Any, cluster: Cluster) -> Sequence[Run]:
        return [
            Run(id=1, cluster="dev", name="hello", status=RunStatus.FAILED, started_s=NOW_S - 5400,
                ended_s=NOW_S - 5000, returncode=3),
            Run(id=2, cluster="dev", name="train", status=RunStatus.RUNNING, started_s=NOW_S - 4000),
        ]  # fmt: skip

    monkeypatch.setattr("broker.runtime.gang.Gang.list_runs", list_runs)
    lines = (
        ("status",), ("queue", "dev"), ("cost", "--by", "cloud"), ("exec", "big", "true"), ("logs", "dev"),
        ("cancel", "dev", "7"), ("down", "ghost"), ("ssh", "dev-3"),
    )  # fmt: skip
    assert show_all(screen, *lines) == snapshot


@pytest.mark.parametrize("story", ["preemption", "cancel", "restart"])
def test_job(story: str, screen: Screen, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that the real controller leaves in virtual time, shown by every command about jobs."""
    screen.open_store().close()
    world = World(screen.home, exit_codes=(3,) if story == "restart" else ())
    run_to_end(world, "plain" if story == "restart" else story)
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: world.clock.now_s() + 3600)
    world.store.close()
    lines = (("jobs", "queue"), ("jobs", "why", "1"), ("jobs", "events", "1"), ("cost",), ("jobs", "cancel", "1"))
    assert show_all(screen, *lines) == snapshot


def test_queue_of_pipelines(screen: Screen, snapshot: SnapshotAssertion) -> None:
    store = screen.open_store()
    submit_tasks(store, [Task(name="single", resources=(Resources(cloud="local"),))])
    first, _ = submit_tasks(store, load_tasks_text(PIPELINE, "pipe.yaml"))
    store.jobs.set_status(first.id, JobStatus.SUCCEEDED)
    store.close()
    assert show_all(screen, ("jobs", "queue"), ("jobs", "why", "3"), ("jobs", "cancel", "1"), ("status",)) == snapshot


def make_rehearsal(**changes: Any) -> Rehearsal:
    def make_trial(number: int, begin: int, end: int) -> ReportedAttempt:
        lines = tuple(Line(step=step, total=100, loss=1.0, checkpoint_step=begin, time_s=None) for step in (begin, end))
        return ReportedAttempt(number=number, lines=lines, start_s=1.5)

    fields: dict[str, Any] = {
        "status": JobStatus.SUCCEEDED, "failure": "",
        "summary": RunSummary(
            steps=100, steps_total=100, steps_lost=3, recoveries=1, recovery_s=420.0, total_s=9000.0, useful_s=8300.0,
            paid_usd=56.5, ondemand_usd=137.6,
        ),
        "trials": (make_trial(1, 0, 43), make_trial(2, 40, 100)),
        "resumes": (Resume(number=2, last_step=43, saved_step=40, begin_step=40),),
        "repeats": Comparison(steps=3, equal=3),
        "measures": Measures(total=100, last_step=100, step_s=0.08, start_s=1.5, stall_s=0.2, checkpoint_steps=10),
        "preemptions": 1, "refusals": 0, "notices": 1, "notices_ignored": 0, "places": ("aws us-east-1a",),
        "work_hours": 2.0, "hazard": 0.01, "checkpoint": CheckpointSpec(), "interval": None, "forecast": None,
        "real_s": 14.0,
    }  # fmt: skip
    return Rehearsal(**{**fields, **changes})


@pytest.mark.parametrize("ending", ["resumed", "from-scratch"])
def test_rehearsal(ending: str, snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {}
    if ending == "from-scratch":
        changes = {
            "resumes": (Resume(number=2, last_step=43, saved_step=40, begin_step=0),), "notices_ignored": 1,
            "has_saved": False, "repeats": Comparison(steps=3, equal=1, first=(41, 1.0, 1.25)),
        }  # fmt: skip
    show_rehearsal(make_rehearsal(**changes))
    assert capsys.readouterr().out == snapshot
