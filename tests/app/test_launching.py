"""Every kind of launch prepares its tasks in the same order, and nothing is sent before the price is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context, load_entry
from broker.app.jobs import JobTarget
from broker.app.launching import Callbacks, ClusterTarget, LaunchTarget, match_alternative, prepare, start_cluster
from broker.app.lazy_clouds import LazyClouds
from broker.app.planning import read_task
from broker.clouds.base import NeedsPrograms
from broker.errors import StateError, UsageError
from broker.types import Cluster, ClusterStatus, Goal, Plan, StorageMount, Task

KINDS: tuple[Callable[[Context, Task], LaunchTarget], ...] = (
    lambda context, task: ClusterTarget.of(context, task, name="dev"),
    lambda context, task: JobTarget(context=context),
)


class Refused(Exception):
    pass


class Recorder:
    """Callbacks that record what they are called for."""

    def __init__(self, *, agrees: bool = True) -> None:
        self.calls: list[str] = []
        self._agrees = agrees

    def show(self, plans: Sequence[Plan]) -> None:
        self.calls.append("show")

    def confirm(self, plans: Sequence[Plan]) -> None:
        self.calls.append("confirm")
        if not self._agrees:
            raise Refused

    @contextmanager
    def track(self, url: str) -> Iterator[Callable[[int, int], None]]:
        self.calls.append(f"upload to {url}")
        yield lambda done, total: None

    def make(self) -> Callbacks:
        return Callbacks(show=self.show, confirm=self.confirm, track_upload=self.track)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text('checkpoints = "/shared/checkpoints"\n')
    context = Context(home)
    yield context
    context.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    mount = StorageMount(target="~/data", source=(str(tmp_path / "data"),), name="a-bucket", store="s3")
    task = read_task({"name": "t", "resources": {"infra": "local"}, "run": "true", "workdir": "."})
    return replace(task, storage_mounts=(mount,))


@pytest.mark.parametrize("make_target", KINDS)
def test_price_is_confirmed_before_anything_is_sent(
    context: Context, task: Task, make_target: Callable[[Context, Task], LaunchTarget]
) -> None:
    recorder = Recorder(agrees=False)
    with pytest.raises(Refused):
        prepare(context, [task], make_target(context, task), callbacks=recorder.make())
    assert recorder.calls == ["show", "confirm"]


@pytest.mark.parametrize("make_target", KINDS)
def test_defaults_are_settled_before_the_plan_and_paths_are_absolute(
    context: Context, task: Task, make_target: Callable[[Context, Task], LaunchTarget]
) -> None:
    bare = replace(task, storage_mounts=())
    ready = prepare(context, [bare], make_target(context, bare))
    assert ready.tasks[0].checkpoint.to == ready.plans[0].task.checkpoint.to == "/shared/checkpoints"
    assert ready.tasks[0].workdir == str(Path.cwd())


@pytest.mark.parametrize("make_target", KINDS)
def test_a_dry_run_ends_after_the_plan(
    context: Context, task: Task, make_target: Callable[[Context, Task], LaunchTarget]
) -> None:
    recorder = Recorder()
    prepare(context, [task], make_target(context, task), callbacks=recorder.make(), is_dryrun=True)
    assert recorder.calls == ["show"]


def test_a_running_cluster_adds_no_cost(context: Context, task: Task) -> None:
    bare = replace(task, storage_mounts=())
    target = ClusterTarget.of(context, bare, name="dev")
    (plan,) = prepare(context, [bare], target).plans
    context.store.clusters.put(
        Cluster(name="dev", status=ClusterStatus.UP, placement=plan.choice.placement, attempt=1, nodes=())
    )
    recorder = Recorder()
    prepare(context, [bare], target, callbacks=recorder.make())
    assert recorder.calls == ["show"]


@pytest.mark.parametrize("status", [ClusterStatus.STOPPED, None])
def test_a_cluster_that_ends_during_a_launch_is_not_replaced_without_a_price(
    context: Context, task: Task, status: ClusterStatus | None
) -> None:
    bare = replace(task, storage_mounts=())
    target = ClusterTarget.of(context, bare, name="dev")
    (plan,) = prepare(context, [bare], target).plans
    cluster = Cluster(name="dev", status=ClusterStatus.UP, placement=plan.choice.placement, attempt=1, nodes=())
    context.store.clusters.put(cluster)
    ready = prepare(context, [bare], target)
    if status is None:
        context.store.clusters.delete("dev")
    else:
        context.store.clusters.put(replace(cluster, status=status))
    with pytest.raises(UsageError, match="`dev` ended while the launch was prepared"):
        asyncio.run(start_cluster(context, target, ready, hedge=1))
    assert not context.store.intents.list_open("dev")


def test_a_name_that_no_cluster_can_have_is_refused(context: Context, task: Task) -> None:
    recorder = Recorder()
    target = ClusterTarget.of(context, task, name="two words")
    with pytest.raises(UsageError, match="invalid cluster name `two words`"):
        prepare(context, [task], target, callbacks=recorder.make())
    assert recorder.calls == ["show"]


def test_a_launch_on_one_cloud_imports_no_other(context: Context, task: Task) -> None:
    bare = replace(task, storage_mounts=())
    made: list[str] = []
    clouds = context.clouds
    assert isinstance(clouds, LazyClouds)

    def make(name: str) -> object:
        made.append(name)
        return clouds.get(name)

    context.__dict__["clouds"] = LazyClouds(("local", "aws", "gcp"), make)  # type: ignore[arg-type]
    prepare(context, [bare], ClusterTarget.of(context, bare, name="dev"))
    assert set(made) == {"local"}
    assert "none" not in context.clouds and "local" in list(context.clouds) and "aws" in made


def test_a_task_on_a_cluster_of_another_is_matched_with_its_own_alternative(context: Context, task: Task) -> None:
    bare = replace(task, storage_mounts=())
    (plan,) = prepare(context, [bare], ClusterTarget.of(context, bare, name="dev")).plans
    cluster = Cluster(name="dev", status=ClusterStatus.UP, placement=plan.choice.placement, attempt=1, nodes=())
    other = read_task({"resources": {"any_of": [{"infra": "aws"}, {"infra": "local"}]}, "run": "true"})
    assert match_alternative(cluster, other).placement.alternative == 1
    assert match_alternative(cluster, bare).placement.alternative == 0


@pytest.mark.parametrize(
    ("make_target", "limit_s", "expected"),
    [
        (lambda context, task: ClusterTarget.of(context, task, name="dev"), 3600.0, "`max_duration` has no effect on"),
        (lambda context, task: ClusterTarget.of(context, task, name="dev"), None, None),
        (lambda context, task: JobTarget(context=context), 3600.0, None),
    ],
)
def test_max_duration_that_limits_nothing_is_noted_once(
    tmp_path: Path, task: Task, make_target: Callable[[Context, Task], LaunchTarget], limit_s: float | None,
    expected: str | None,
) -> None:  # fmt: skip
    notes: list[str] = []
    context = Context(tmp_path / "state", on_note=notes.append)
    limited = replace(task, storage_mounts=(), max_duration_s=limit_s)
    try:
        prepare(context, [limited], make_target(context, limited), is_dryrun=True)
    finally:
        context.close()
    told = [each for each in notes if "max_duration" in each]
    assert told == [] if expected is None else len(told) == 1 and told[0].startswith(expected)


@pytest.mark.parametrize(
    ("make_target", "budget_usd", "count"),
    [
        (lambda context, task: ClusterTarget.of(context, task, name="dev"), 5000.0, 1),
        (lambda context, task: ClusterTarget.of(context, task, name="dev"), None, 0),
        (lambda context, task: JobTarget(context=context), 5000.0, 0),
    ],
)
def test_a_budget_that_does_not_end_a_cluster_is_noted(
    tmp_path: Path,
    task: Task,
    make_target: Callable[[Context, Task], LaunchTarget],
    budget_usd: float | None,
    count: int,
) -> None:
    notes: list[str] = []
    context = Context(tmp_path / "state", on_note=notes.append)
    limited = replace(task, storage_mounts=(), goal=Goal(budget_usd=budget_usd))
    try:
        prepare(context, [limited], make_target(context, limited), is_dryrun=True)
    finally:
        context.close()
    told = [each for each in notes if "`budget`" in each]
    assert len(told) == count
    assert all("is enforced for managed jobs only" in each and "broker jobs launch" in each for each in told)


def test_a_workdir_around_the_state_folder_is_noted_once_that_it_is_not_sent(tmp_path: Path, task: Task) -> None:
    notes: list[str] = []
    context = Context(tmp_path / "state", on_note=notes.append)
    around = replace(task, workdir=str(tmp_path), file_mounts={"~/again": str(tmp_path)}, storage_mounts=())
    beside = replace(task, workdir=str(tmp_path / "data"), storage_mounts=())
    try:
        prepare(context, [beside, around], JobTarget(context=context), is_dryrun=True)
    finally:
        context.close()
    assert [each for each in notes if "state folder" in each] == [
        f"`workdir` contains broker's state folder {tmp_path / 'state'}, which is not uploaded"
    ]


@pytest.mark.parametrize("make_target", KINDS)
def test_missing_ssh_is_reported_before_the_price_is_confirmed(
    context: Context, task: Task, make_target: Callable[[Context, Task], LaunchTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a cloud would be created and paid for, and nothing could reach them."""
    local = context.clouds["local"]
    assert not isinstance(local, NeedsPrograms)
    monkeypatch.setattr(type(local), "programs", ("ssh",), raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    recorder = Recorder()
    with pytest.raises(StateError, match="`ssh` is not installed on this machine") as caught:
        prepare(context, [task], make_target(context, task), callbacks=recorder.make())
    assert recorder.calls == ["show"] and "openssh-client" in caught.value.hints[0]


@pytest.mark.parametrize(
    "path", ["aws.cloud:AwsCloud", "gcp.cloud:GcpCloud", "sky.cloud:SkyCloud", "sky.tpus:TpuCloud"]
)
def test_clouds_whose_nodes_are_reached_by_ssh_say_so(path: str) -> None:
    assert load_entry(f"broker.clouds.{path}").programs == ("ssh",)
