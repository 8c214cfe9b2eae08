"""Figures, units and counts in the sentences for users."""

from __future__ import annotations

import pytest

from broker.types import Event, EventKind, JobWait, Offer, Outcome, OutcomeKind, Placement, WaitReason, make_event
from broker.wording import (
    describe_event,
    describe_outcome,
    describe_place,
    describe_slow_node,
    describe_wait,
    explain_budget,
    explain_exit,
    explain_max_duration,
    explain_stall,
    explain_unhealthy,
    make_place,
)

OFFER = Offer(
    cloud="aws", region="us-east-1", zone="us-east-1a", instance_type="g5.xlarge", vcpus=4, memory_gib=16.0,
    ondemand_usd_hour=1.0, spot_usd_hour=0.4,
)  # fmt: skip
PLACE = make_place(Placement(offer=OFFER, is_spot=True, node_count=2, other_zones=("us-east-1b",)))


def test_place_names_count_type_pricing_and_zones() -> None:
    assert describe_place(PLACE) == "2 x g5.xlarge spot in us-east-1a,b (aws)"
    alone = make_place(Placement(offer=OFFER, is_spot=False, node_count=1))
    assert describe_place(alone) == "1 x g5.xlarge on-demand in us-east-1a (aws)"


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (JobWait(reason=WaitReason.LIMIT, position=3, limit=2), "for one of 2 slots (`max_live_jobs`), at position 3"),
        (
            JobWait(reason=WaitReason.LIMIT, position=1, limit=4, project="vision"),
            "for one of 4 slots of project vision (`max_live_jobs_by_project`), at position 1",
        ),
        (JobWait(reason=WaitReason.CAPACITY, until_s=130.0), "for capacity; next request in 30 s"),
        (JobWait(reason=WaitReason.CAPACITY, until_s=90.0), "for capacity; next request in 0 s"),
        (JobWait(reason=WaitReason.CAPACITY), "for capacity; next request in 0 s"),
        (JobWait(reason=WaitReason.NEEDS), "for the jobs that it depends on"),
        (JobWait(reason=WaitReason.START), ""),
    ],
)
def test_reason_of_a_wait(wait: JobWait, text: str) -> None:
    assert describe_wait(wait, now_s=100.0) == text


def test_failures_name_how_often_and_where_they_happened() -> None:
    assert explain_exit(3) == "`run` exited with code 3"
    assert explain_exit(137, cause="out of memory") == "`run` exited with code 137 (out of memory)"
    assert explain_exit(3, times=3, step=7) == "`run` exited with code 3, 3 times at step 7"
    assert explain_exit(3, times=3, checkpoint=9) == "`run` exited with code 3, 3 times after checkpoint 9"
    assert explain_exit(3, times=3) == "`run` exited with code 3, 3 times without a reported step"
    assert explain_stall(600.0) == "no new step for 600 s"
    assert explain_stall(600.0, times=3, step=7) == "no new step for 600 s, 3 times at step 7"
    assert explain_unhealthy("XID 79", times=5).startswith(
        "5 nodes failed the check of their GPUs, the last one: XID 79"
    )


def test_limits_name_what_was_allowed_and_what_was_used() -> None:
    assert explain_budget(10.0, 10.25).startswith("the budget of 10.00 USD is used up (10.25 USD spent)")
    assert explain_max_duration(7200.0).startswith("its `max_duration` of 2h 00m has passed")
    slow = describe_slow_node(own_s=1.5, usual_s=0.5, saved_s=7200.0)
    assert slow.startswith("1.5 s for its own part of a step, 0.5 s on the others") and slow.endswith(
        "about 2h 00m less"
    )


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (
            Outcome(kind=OutcomeKind.PREEMPTED, detail="the cloud gave notice", step=7),
            "preempted: the cloud gave notice after step 7",
        ),
        (Outcome(kind=OutcomeKind.NODE_LOST, step=0), "node lost after step 0"),
        (Outcome(kind=OutcomeKind.PROGRAM_FAILED, exit_code=3), "failed with exit code 3"),
        (Outcome(kind=OutcomeKind.STALLED, step=4), "stalled at step 4"),
        (
            Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail="12 h", step=4),
            "the unattended allowance of 12 h expired after step 4",
        ),
    ],
)
def test_outcome_of_an_attempt(outcome: Outcome, text: str) -> None:
    assert describe_outcome(outcome) == text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            make_event(
                EventKind.PLACE_HEDGED, place=PLACE, usd_hour=2.0, late=PLACE, late_s=20.0, at_stake_usd_hour=4.0
            ),
            "has not responded for 20 s; also requesting 2 x g5.xlarge spot in us-east-1a,b (aws) at 2.00 USD/h, "
            "up to 4.00 USD/h at once",
        ),
        (
            make_event(
                EventKind.NETWORK_SLOW, number=1, backend="nccl", expected_gbs=10.0, gang_gbs=1.0, pair=[0, 3],
                pair_gbs=0.5,
            ),
            "an all-reduce reaches 8 Gbit/s, nodes 0 and 3 reach 4 Gbit/s, not 80 (nccl)",
        ),
        (make_event(EventKind.PLACE_RETURNED, place=PLACE, took_s=2.0, usd=1.5), "in 2.0 s (cost 1.50 USD)"),
        (make_event(EventKind.CALL_FAILED, place=PLACE, error="no answer", wait_s=1.5), "no answer; retrying in 1.5 s"),
        (make_event(EventKind.CALL_FAILED, place=PLACE, error="no answer"), "no answer; giving up"),
        (make_event(EventKind.SHRUNK, rank=1, left=3, node_count=4), "node 1 gone; continuing on 3 of 4 nodes"),
        (make_event(EventKind.RECOVERED, step=7, took_s=12.5), "recovered at step 7, 12.5 s after the loss"),
        (
            make_event(EventKind.ATTEMPT_LOST, outcome="preempted", detail="", step=7, kept_count=3, node_count=4),
            "preempted after step 7; keeping 3 of 4 nodes while replacing the rest",
        ),
    ],
)  # fmt: skip
def test_event_names_its_figures(event: Event, text: str) -> None:
    assert describe_event(event).endswith(text)


def test_damaged_event_is_shown_as_it_is() -> None:
    damaged = Event(kind=EventKind.SHRUNK, data={"rank": 1, "more": 2})
    assert describe_event(damaged) == "shrunk: {'rank': 1, 'more': 2}"
