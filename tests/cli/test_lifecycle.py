"""`broker down` with several names: terminate those that exist, report the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.verbs.services import preview_services_down
from broker.cli.main import main
from broker.clock import SystemClock
from broker.errors import TransientError
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Placement, Run, RunStatus, Task
from tests.simulation.world import make_offer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    store = Store(tmp_path / "state.db", clock=SystemClock())
    yield store
    store.close()


def add_clusters(store: Store, *names: str, job_id: int | None = None) -> None:
    placement = Placement(offer=replace(make_offer("here"), cloud="local"), is_spot=False, node_count=1)
    for name in names:
        store.clusters.put(
            Cluster(name=name, status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(), job_id=job_id)
        )


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    assert isinstance(leave.value.code, int)
    return leave.value.code


def list_names(store: Store) -> list[str]:
    return [each.name for each in store.clusters.list()]


def test_unknown_name_leaves_no_known_cluster_up(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    add_clusters(store, "a", "b", "other")
    assert run("down", "a", "b", "ghost", "x-*", "--yes") == 1
    assert list_names(store) == ["other"]
    shown = capsys.readouterr()
    assert "terminated cluster `a`" in shown.out and "terminated cluster `b`" in shown.out
    assert "`ghost`" in shown.err and "`x-*`" in shown.err
    assert "known clusters: `other`\n" in shown.err, "those that were just terminated are not suggested"


def test_only_unknown_names_are_a_usage_error(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("down", "ghost", "--yes") == 2
    assert run("down", "phantom", "shade", "--yes") == 2
    assert "`phantom`" in (told := capsys.readouterr().err) and "`shade`" in told


def test_unknown_job_keeps_no_known_one_from_being_cancelled(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    jobs = [store.jobs.add(name, Task()) for name in ("train", "other")]
    assert run("jobs", "cancel", "train", "ghost") == 1
    assert [store.jobs.is_cancel_requested(job.id) for job in jobs] == [True, False]
    assert "unknown managed job `ghost`" in capsys.readouterr().err
    assert run("jobs", "cancel", "trian") == 2
    assert "did you mean `train`?" in capsys.readouterr().err


def test_what_is_named_twice_is_ended_once(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    job = store.jobs.add("train", Task())
    assert run("jobs", "cancel", str(job.id), "train", "--yes") == 0
    assert capsys.readouterr().out == f"Cancelling job {job.id} (train)\n"
    store.services.add("chat", Task(), host="127.0.0.1", port=30001, wanted=1)
    context = Context(tmp_path)
    try:
        assert preview_services_down(context, names=("chat", "chat")) == ("chat",)
    finally:
        context.close()


def test_cancelling_all_of_no_jobs_says_so(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("jobs", "cancel", "--all", "--yes") == 0
    assert capsys.readouterr().out == "no live jobs to cancel\n"
    assert run("jobs", "cancel", "--all", "--yes", "--json") == 0
    assert capsys.readouterr().out == "[]\n"


class Keyboard(StringIO):
    """A terminal on which the user has typed this."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "flags", "is_cancelled"), [("n\n", (), False), ("y\n", (), True), ("", ("--yes",), True)]
)
def test_jobs_are_cancelled_on_a_terminal_only_after_a_yes(
    typed: str, flags: tuple[str, ...], is_cancelled: bool, store: Store,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    job = store.jobs.add("train", Task())
    assert run("jobs", "cancel", "train", *flags) == (0 if is_cancelled else 1)
    assert store.jobs.is_cancel_requested(job.id) is is_cancelled
    shown = capsys.readouterr()
    assert ("Cancel train?" in shown.err) is not bool(flags) and "Cancel train?" not in shown.out


def test_runs_are_cancelled_on_a_terminal_only_after_a_yes(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def cancel_runs(context: Context, **given: object) -> tuple[int, ...]:
        asked.append(given)
        return ()

    monkeypatch.setattr("broker.cli.clusters.cancel_runs", cancel_runs)
    for typed, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", Keyboard(typed))
        assert run("cancel", "dev", "2", "3") == code
        assert "Cancel run 2, 3 on dev?" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Keyboard(""))
    assert run("cancel", "dev", "--all", "--yes") == 0
    assert asked == [{"cluster": "dev", "run_ids": (2, 3)}, {"cluster": "dev", "run_ids": None}]


def test_without_an_id_the_newest_running_run_is_cancelled(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {1: RunStatus.SUCCEEDED, 2: RunStatus.RUNNING, 3: RunStatus.RUNNING, 4: RunStatus.PENDING}
    cancelled: list[int] = []

    async def list_runs(gang: object, cluster: Cluster) -> list[Run]:
        return [Run(id=each, cluster="dev", name="x", status=status, started_s=1.0) for each, status in states.items()]

    async def cancel(gang: object, cluster: Cluster, run_id: int) -> None:
        cancelled.append(run_id)

    monkeypatch.setattr("broker.runtime.gang.Gang.list_runs", list_runs)
    monkeypatch.setattr("broker.runtime.gang.Gang.cancel", cancel)
    add_clusters(store, "dev")
    assert run("cancel", "dev", "--yes") == 0
    assert "cancelled run 3" in capsys.readouterr().out and cancelled == [3]


def test_cluster_of_a_live_job_stays_and_the_others_go(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    job = store.jobs.add("train", Task())
    add_clusters(store, "job-1-1", job_id=job.id)
    add_clusters(store, "a")
    assert run("down", "--all", "--yes") == 1
    assert list_names(store) == ["job-1-1"]
    assert f"`broker jobs cancel {job.id}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (("stop",), "stopped cluster `{}`"),
        (("start",), "cluster `{}` is up"),
        (("autostop", "-i", "5"), "`{}` will stop"),
    ],
)
def test_several_clusters_have_their_turn_though_one_is_refused(
    words: tuple[str, ...], done: str, store: Store,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As in SkyPilot, `stop`, `start` and `autostop` take several names."""
    asked: list[str] = []

    def act(context: Context, *, cluster: str, rule: object = None) -> None:
        asked.append(cluster)
        if cluster == "b":
            raise TransientError("the region gives no answer")

    for name in ("stop_cluster", "start_cluster", "set_autostop"):
        monkeypatch.setattr(f"broker.cli.lifecycle.{name}", act)
    assert run(*words, "a", "b", "c", "a") == 1
    assert asked == ["a", "b", "c"]
    shown = capsys.readouterr()
    assert done.format("a") in shown.out and done.format("c") in shown.out and "`b`" not in shown.out
    assert "could not" in shown.err and "the region gives no answer" in shown.err
    assert run(*words, "b") == TransientError.exit_code


def test_cloud_that_refuses_keeps_only_its_own_cluster(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_clusters(store, "a", "b", "c")
    end = Provisioner.down

    async def down(provisioner: Provisioner, name: str) -> None:
        if name == "a":
            raise TransientError("the region gives no answer")
        await end(provisioner, name)

    monkeypatch.setattr(Provisioner, "down", down)
    assert run("down", "a", "b", "c", "--yes") == 1
    assert list_names(store) == ["a"]
    assert "the region gives no answer" in capsys.readouterr().err


def test_check_of_the_local_cloud_says_that_it_is_this_machine(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "local") == 0
    assert "`local` is this machine" in capsys.readouterr().out
