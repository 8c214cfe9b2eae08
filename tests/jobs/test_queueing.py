"""The order in which waiting jobs start: pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from broker.jobs.queueing import GPUS_MIN, HOURS_AHEAD, Waiting, order_queue


def wait(job_id: int, project: str = "", priority: int = 0, gpus: float = 1.0) -> Waiting:
    return Waiting(job_id=job_id, project=project, priority=priority, gpus=gpus, submitted_s=float(job_id))


QUEUES = st.lists(
    st.builds(
        Waiting,
        job_id=st.integers(1, 1000),
        priority=st.sampled_from([-100, 0, 0, 0, 100]),
        project=st.sampled_from(["", "vision", "speech"]),
        gpus=st.sampled_from([0.0, 0.5, 1.0, 8.0]),
        submitted_s=st.floats(0.0, 100.0),
    ),
    max_size=30,
    unique_by=lambda each: each.job_id,
)
USAGE = st.dictionaries(st.sampled_from(["", "vision", "speech", "other"]), st.floats(0.0, 1e4))


def test_queue_of_the_docstring_starts_in_the_stated_order() -> None:
    jobs = [wait(1, "vision"), wait(2, "vision"), wait(3, "vision"), wait(4, "speech"), wait(5, "speech")]
    assert order_queue(jobs, {"speech": 1.5}) == (1, 2, 4, 3, 5)


def test_one_project_starts_in_the_order_of_submission() -> None:
    assert order_queue([wait(3), wait(1), wait(2)], {}) == (1, 2, 3)


def test_higher_priority_starts_first_whatever_its_project_has_used() -> None:
    assert order_queue([wait(1, "a"), wait(2, "b", priority=1)], {"b": 1e6}) == (2, 1)


def test_project_that_used_less_starts_first() -> None:
    assert order_queue([wait(1, "a"), wait(2, "b")], {"a": 5.0}) == (2, 1)


@given(QUEUES, USAGE)
def test_every_job_has_one_position(jobs: list[Waiting], usage: dict[str, float]) -> None:
    assert sorted(order_queue(jobs, usage)) == sorted(each.job_id for each in jobs)


@given(QUEUES, USAGE)
def test_no_job_precedes_one_of_higher_priority_or_an_older_equal_of_its_project(
    jobs: list[Waiting], usage: dict[str, float]
) -> None:
    by_id = {each.job_id: each for each in jobs}
    order = [by_id[job_id] for job_id in order_queue(jobs, usage)]
    assert all(first.priority >= second.priority for first, second in pairwise(order))
    for index, first in enumerate(order):
        for second in order[index + 1 :]:
            if (first.priority, first.project) == (second.priority, second.project):
                assert (first.submitted_s, first.job_id) < (second.submitted_s, second.job_id)


@given(QUEUES, USAGE)
def test_next_job_is_of_a_project_with_the_least_hours(jobs: list[Waiting], usage: dict[str, float]) -> None:
    by_id = {each.job_id: each for each in jobs}
    hours, left = dict(usage), dict(by_id)
    for job_id in order_queue(jobs, usage):
        chosen = left.pop(job_id)
        rivals = [each.project for each in left.values() if each.priority == chosen.priority]
        assert all(hours.get(chosen.project, 0.0) <= hours.get(rival, 0.0) for rival in rivals)
        hours[chosen.project] = hours.get(chosen.project, 0.0) + max(GPUS_MIN, chosen.gpus) * HOURS_AHEAD


@given(QUEUES, USAGE, st.data())
def test_raising_a_priority_never_moves_a_job_back(
    jobs: list[Waiting], usage: dict[str, float], data: st.DataObject
) -> None:
    if not jobs:
        return
    chosen = data.draw(st.sampled_from(jobs))
    raised = [replace(each, priority=each.priority + 1000) if each is chosen else each for each in jobs]
    before, after = order_queue(jobs, usage), order_queue(raised, usage)
    assert after.index(chosen.job_id) <= before.index(chosen.job_id)


@given(st.permutations([wait(1, "a"), wait(2, "b"), wait(3, "a"), wait(4, "b", 5)]))
def test_order_does_not_depend_on_the_order_of_reading(jobs: list[Waiting]) -> None:
    assert order_queue(jobs, {"a": 1.0}) == order_queue(sorted(jobs, key=lambda each: each.job_id), {"a": 1.0})
