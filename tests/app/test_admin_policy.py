"""An administrator's policy sees each task before it is planned; without its approval nothing is planned or started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.admin_policy import govern, list_changed
from broker.app.container import Context
from broker.app.jobs import JobTarget
from broker.app.launching import ClusterTarget, LaunchTarget, prepare
from broker.app.planning import read_task
from broker.app.schedules import RunLauncher
from broker.app.verbs.account import plan_tasks
from broker.app.verbs.jobs import retry_job
from broker.config import find_admin_policy
from broker.errors import PolicyError, StateError, UsageError
from broker.types import JobSchedule, JobStatus, Payee, ScheduleSpec, Task

POLICY = """
from dataclasses import dataclass, replace

from broker import PolicyError

SEEN = []


@dataclass
class Rule:
    cloud: str


def govern(request):
    SEEN.append((request.user, request.project))
    if any(each.use_spot is False for each in request.task.resources):
        raise PolicyError("on-demand machines need an approval", hints=["write `use_spot: true`"])
    resources = tuple(
        replace(each, use_spot=True, cloud=Rule("aws").cloud, labels={**each.labels, "team": "research"})
        for each in request.task.resources
    )
    return replace(request.task, resources=resources)


def fail(request):
    raise KeyError("team")


def forget(request):
    return None


def spoil(request):
    return replace(request.task, num_nodes=0)


constant = 7
"""
Set = Callable[[str], Path]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "policy.py").write_text(POLICY)
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def choose(home: Path) -> Set:
    """Return a function that sets `admin_policy` to a function of the file."""

    def write(name: str) -> Path:
        (home / "config.toml").write_text(f'admin_policy = "{home.parent}/policy.py:{name}"\n')
        return home

    return write


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def context(home: Path, notes: list[str]) -> Iterator[Context]:
    context = Context(home, on_note=notes.append)
    yield context
    context.close()


def test_without_the_setting_the_task_stays_as_it_is(context: Context, notes: list[str]) -> None:
    task = read_task("resources: {cpus: 4}\nrun: 'true'\n")
    assert context.resolve(task) == task and notes == []


def test_policy_changes_what_is_planned(context: Context, choose: Set, notes: list[str]) -> None:
    choose("govern")
    task = read_task("resources: {accelerators: T4, labels: {run: one}}\nrun: 'true'\n")
    (plan,) = plan_tasks(context, tasks=(task,))
    assert {each.placement.offer.cloud for each in plan.estimates} == {"aws"}
    assert all(each.placement.is_spot for each in plan.estimates)
    assert dict(plan.task.resources[0].labels) == {"run": "one", "team": "research"}
    assert notes == ["note: the administrator's policy changed `resources`"]


@pytest.mark.parametrize("is_job", [False, True], ids=["cluster", "job"])
def test_every_launch_uses_the_task_as_the_policy_left_it(context: Context, choose: Set, is_job: bool) -> None:
    choose("govern")
    task = read_task("resources: {accelerators: T4}\nrun: 'true'\n")
    target: LaunchTarget = JobTarget(context=context) if is_job else ClusterTarget.of(context, task, name="dev")
    ready = prepare(context, [task], target, is_dryrun=True)
    assert ready.tasks[0].resources[0].labels == {"team": "research"}


def test_refusal_has_the_policy_s_words_and_nothing_is_planned(context: Context, choose: Set) -> None:
    choose("govern")
    task = read_task("resources: {accelerators: T4, use_spot: false}\nrun: 'true'\n")
    with pytest.raises(PolicyError, match="need an approval") as refused:
        prepare(context, [task], JobTarget(context=context))
    assert refused.value.exit_code == 2 and refused.value.hints == ("write `use_spot: true`",)
    with pytest.raises(PolicyError):
        plan_tasks(context, tasks=(task,))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fail", r"failed: KeyError: 'team'"),
        ("forget", "returned NoneType, not a task"),
        ("spoil", "made an invalid task: `num_nodes` must be a whole number"),
        ("constant", "is not a function"),
        ("missing", "cannot load .*no attribute 'missing'"),
    ],
)
def test_broken_policy_prevents_a_start(context: Context, choose: Set, name: str, reason: str) -> None:
    choose(name)
    with pytest.raises(StateError, match=reason) as failed:
        prepare(context, [read_task("run: 'true'\n")], JobTarget(context=context))
    assert any("ask your administrator" in hint for hint in failed.value.hints)


def test_missing_module_of_the_policy_prevents_a_start(context: Context, home: Path) -> None:
    (home / "config.toml").write_text('admin_policy = "no_such_package.rules:govern"\n')
    with pytest.raises(StateError, match="no_such_package"):
        context.resolve(Task())


@pytest.mark.parametrize("entry", ["rules", "rules.py:govern", "rules:", "rules:gov ern", "7:govern"])
def test_setting_that_names_no_function_is_refused(home: Path, entry: str) -> None:
    (home / "config.toml").write_text(f'admin_policy = "{entry}"\n')
    with pytest.raises(UsageError, match="admin_policy"):
        find_admin_policy(home)


def test_schedule_obeys_the_policy_of_its_due_time(context: Context, choose: Set) -> None:
    task = read_task("resources: {accelerators: T4, use_spot: false}\nrun: 'true'\n")
    schedule = JobSchedule(
        name="nightly", uid="u", spec=ScheduleSpec(cron="0 2 * * *"), user="ann", project="vision",
        created_s=0.0, hedge=1, is_paused=False, next_s=None,
    )  # fmt: skip
    choose("govern")
    with pytest.raises(PolicyError):
        RunLauncher(context).plan(schedule, task)


def test_retry_obeys_the_policy_of_its_time(context: Context, choose: Set) -> None:
    task = read_task("resources: {accelerators: T4, use_spot: false}\nrun: 'true'\n")
    job = context.store.jobs.add("train", task)
    context.store.jobs.set_status(job.id, JobStatus.CANCELLED)
    choose("govern")
    with pytest.raises(PolicyError):
        retry_job(context, job=str(job.id), secrets={}, request_id=None)
    assert context.store.jobs.count() == 1


def test_policy_receives_the_user_and_project_of_a_request(home: Path, choose: Set) -> None:
    import sys

    govern(choose("govern"), Task(), Payee(user="ann", project="vision"), note=lambda text: None)
    assert sys.modules["broker_admin_policy_policy"].SEEN[-1] == ("ann", "vision")


def test_changes_are_named_as_in_a_task_file() -> None:
    before = Task()
    after = replace(before, max_duration_s=60.0, num_nodes=2)
    assert list_changed(before, after) == ["num_nodes", "max_duration"]
