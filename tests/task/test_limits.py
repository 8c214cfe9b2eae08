"""The limits of a task file: what is just within each is read, and what is just beyond it is refused."""

from __future__ import annotations

import pytest

from broker.app.planning import check_place
from broker.errors import TaskError
from broker.task.loader import load_tasks_text
from broker.task.resources import ALTERNATIVES_MAX
from broker.task.sbatch import ARRAY_RUNS_MAX, import_sbatch
from broker.task.yaml_reader import DEPTH_MAX
from broker.types import Task


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


def find_message(text: str) -> str:
    with pytest.raises(TaskError) as caught:
        load(text)
    return str(caught.value)


def test_as_many_alternatives_as_the_limit_are_planned_and_one_more_is_refused() -> None:
    def write(count: int) -> str:
        return "resources:\n  any_of:\n" + "".join(f"  - {{cpus: {each}}}\n" for each in range(1, count + 1))

    assert len(load(write(ALTERNATIVES_MAX)).resources) == ALTERNATIVES_MAX
    assert "1,001 alternatives; the limit is 1,000" in find_message(write(ALTERNATIVES_MAX + 1))


@pytest.mark.parametrize("is_deep_first", [True, False])
@pytest.mark.parametrize("is_list", [True, False])
def test_an_alias_counts_with_all_that_is_nested_below_it(is_list: bool, is_deep_first: bool) -> None:
    """A part of 40 levels and a flat one under one anchor: the deep one counts, wherever it stands."""

    def write(levels: int) -> str:
        deep = "[" * 40 + "]" * 40
        parts = [deep, "1"] if is_deep_first else ["1", deep]
        held = f"[{', '.join(parts)}]" if is_list else f"{{a: {parts[0]}, b: {parts[1]}}}"
        return f"experimental:\n  first: &deep {held}\n  second: {'[' * levels}*deep{']' * levels}\n"

    most = DEPTH_MAX - 42  # two of `experimental`, 41 of the alias, and this many lists around it
    load(write(most - 1))
    assert f"nested more than {DEPTH_MAX} levels deep" in find_message(write(most + 1))


@pytest.mark.parametrize(
    ("policy", "replicas_min", "targets"),
    [
        ("replicas: 3", 3, {}),
        ("load_balancing_policy: round_robin", 1, {}),
        ("replica_policy: {min_replicas: 0, target_qps_per_replica: 2, max_replicas: 4}", 0, {"": 2}),
        ("replica_policy: {min_replicas: 2}", 2, {}),
    ],
)
def test_a_service_has_one_replica_unless_the_file_says_otherwise(
    policy: str, replicas_min: int, targets: dict[str, float]
) -> None:
    task = load(f"resources: {{ports: 8080}}\nservice:\n  readiness_probe: /\n  {policy}")
    assert task.service is not None
    assert (task.service.policy.replicas_min, task.service.policy.target_qps) == (replicas_min, targets)


def test_as_many_replicas_at_most_as_at_least_are_valid_and_fewer_are_not() -> None:
    text = "resources: {ports: 8080}\nservice:\n  readiness_probe: /\n  replica_policy: {min_replicas: 3, %s}"
    scaled = "target_qps_per_replica: 1, max_replicas: %d"
    task = load(text % (scaled % 3))
    assert task.service is not None and task.service.policy.replicas_max == 3
    assert "`max_replicas` is less than `min_replicas`" in find_message(text % (scaled % 2))


def test_a_pool_grows_from_one_waiting_job_on() -> None:
    text = "pool: {min_workers: 1, max_workers: 2, queue_length_threshold: %d}"
    load(text % 1)
    assert "queue_length_threshold" in find_message(text % 0)


def test_settings_of_a_cloud_are_read_and_have_no_effect() -> None:
    task = load("config: {slurm: {partition: mine}}")
    (notice,) = task.notices
    assert "Slurm settings have no effect in a task" in notice.message and not notice.blocks_launch
    assert "~/.sky/config.yaml" in (notice.hint or "")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("setup: [pip install x, pip install y]", "write it as one text: `|` after the colon"),
        ("resources: {region: [a]}", "write each one as an alternative: `any_of: ["),
        ("resources: {region: 7}", "put it in quotes"),
        ("name: {a: b}", "write a single text after the colon, not a mapping"),
        ("name:\n  train: x", "write a single text after the colon, not a mapping"),
        ("name: [a, b]", "write a single text after the colon, not a list"),
    ],
)
def test_a_value_that_should_be_text_gets_the_advice_that_helps(text: str, hint: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(text)
    (issue,) = caught.value.issues
    assert (issue.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("cloud", "message"),
    [
        ("kubernetes", "the node's disk is used, and a pod requests at most its share of it"),
        ("slurm", "the existing disk is used"),
        ("aws", None),
    ],
)
def test_disk_size_is_noted_with_its_place_where_disks_cannot_be_sized(cloud: str, message: str | None) -> None:
    (task,) = load_tasks_text(f"resources:\n  infra: {cloud}\n  disk_size: 500GB\nrun: x\n", "train.yaml")
    notes: list[str] = []
    check_place(task, {cloud}, is_launch=True, note=notes.append)
    assert notes == ([f"note: train.yaml:3:3: `disk_size` on {cloud}: {message}"] if message else [])


def test_an_array_of_as_many_runs_as_the_limit_is_imported_and_a_longer_one_is_refused() -> None:
    script = "#!/bin/bash\n#SBATCH --array=0-%d\npython train.py\n"
    assert str(ARRAY_RUNS_MAX) in " ".join(import_sbatch(script % ARRAY_RUNS_MAX).notes)
    with pytest.raises(ValueError, match="not a list of indices"):
        import_sbatch(script % (ARRAY_RUNS_MAX + 1))
