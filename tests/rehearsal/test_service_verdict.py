"""The verdict on a rehearsed service, from its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.rehearsal.request_load import RequestTally
from broker.rehearsal.service_verdict import (
    EXIT_HINT,
    PORT_HINT,
    Orphans,
    format_percent,
    judge_availability,
    judge_recoveries,
    judge_requests,
    judge_start,
    judge_teardown,
    judge_warned,
)
from broker.rehearsal.uptime import Recovery, ReplicaLoss, Uptime


def make_recovery(recovery_s: float | None, *replicas: int) -> Recovery:
    return Recovery(
        loss=ReplicaLoss(time_s=0, replicas=replicas or (1,), place="aws a", announced=1, counted=1),
        recovery_s=recovery_s,
    )


UPTIME = Uptime(wanted=2, start_s=60.0, served_s=7200.0, kept_share=0.99, shares={1: 1.0, 2: 0.99})


def test_a_start_that_failed_names_the_reason() -> None:
    def judge(*, has_exited: bool, missing_module: str = "") -> list[tuple[str, str]]:
        found = judge_start(
            Uptime(wanted=1), failure="the probe failed", has_exited=has_exited, last_words="no model",
            missing_module=missing_module,
        )  # fmt: skip
        return [(each.level, each.hint) for each in found]

    assert judge(has_exited=False) == [("bad", PORT_HINT), ("note", "")]
    assert judge(has_exited=True) == [("bad", EXIT_HINT), ("note", "")]
    ((level, hint),) = judge(has_exited=True, missing_module="torch")
    assert level == "bad" and "intercloud-broker[train]" in hint
    assert not judge_start(UPTIME, failure="", has_exited=False, last_words="", missing_module="")


def test_recoveries_are_judged_by_whether_replicas_came_back() -> None:
    def judge(*recoveries: Recovery, has_spot: bool = True) -> tuple[str, str]:
        (found,) = judge_recoveries(replace(UPTIME, recoveries=recoveries), has_spot=has_spot)
        return found.level, found.text

    assert judge() == ("note", "not tested: there was no preemption")
    assert judge(has_spot=False)[1].startswith("not tested: all replicas were on-demand")
    assert judge(make_recovery(70, 1, 2), make_recovery(0.0, 3)) == (
        "good",
        "2 preemptions took 3 replicas; as many as before were ready again after 1m 10s; 1 of the preemptions left "
        "enough others",
    )
    assert judge(make_recovery(0.0)) == (
        "good",
        "1 preemption took 1 replica; the other replicas were enough each time",
    )
    level, text = judge(make_recovery(70), make_recovery(None, 4))
    assert level == "bad" and "replica 4 was not replaced before the end" in text


def test_availability_is_compared_with_the_wanted_one() -> None:
    def judge(share: float, availability: float | None, *recoveries: Recovery) -> tuple[str, str]:
        uptime = replace(UPTIME, kept_share=share, recoveries=recoveries)
        (found,) = judge_availability(uptime, availability=availability, hazard=0.1)
        return found.level, found.text

    assert judge(0.995, 0.99) == ("good", "2 or more replicas were ready 99.5% of 2h 00m; the task requires 99%")
    assert judge(0.99, 0.99)[0] == "good"  # not less than required
    level, text = judge(0.98, 0.99, make_recovery(144))
    assert level == "note" and "98% of 2h 00m, less than the 99% that the task requires" in text
    assert "here, preemptions were 2h 00m apart, and the market model expects one per replica every 10h 00m" in text
    assert "here, preemptions were 1h 00m apart" in judge(0.98, 0.99, make_recovery(144), make_recovery(60))[1]
    assert judge(1.0, None)[0] == "good" and judge(0.98, None)[0] == "note"
    assert not judge_availability(Uptime(wanted=2), availability=0.99, hazard=0.1)


def test_failed_and_slow_requests_are_counted_with_a_hint() -> None:
    def judge(tally: RequestTally, shares: dict[int, float]) -> tuple[str, str, str]:
        (found,) = judge_requests(tally, replace(UPTIME, shares=shares), availability=None)
        return found.level, found.text, found.hint

    quiet = RequestTally(sent=100, answered=100, wait_s_max=0.2)
    assert judge(quiet, {1: 1.0}) == ("good", "100 requests, all answered", "")
    assert judge(replace(quiet, wait_s_max=42), {1: 1.0})[1] == "100 requests, all answered; the slowest waited 42s"
    some = RequestTally(sent=100, answered=95, late=2, failures={"502": 1, "503": 2})
    level, text, hint = judge(some, {1: 0.98})
    assert level == "note" and some.failed == 5
    assert text == ("5 of 100 requests failed: 2 x 503; 1 x 502; 2 would have waited longer than the balancer's minute")
    assert hint.startswith("no replica was ready at times: use more replicas")
    assert judge(some, {1: 1.0})[2] == ""
    assert judge(RequestTally(sent=3, failures={"500": 3}), {1: 1.0})[0] == "bad"
    assert not judge_requests(RequestTally(), UPTIME, availability=None)


def test_an_ignored_warning_does_not_fail_a_service() -> None:
    assert [each.level for each in judge_warned(given=1, ignored=1, grace_s=20)] == ["note"]
    assert [each.level for each in judge_warned(given=1, ignored=0, grace_s=20)] == ["good"]


def test_orphans_of_a_teardown_are_named() -> None:
    assert [each.level for each in judge_teardown(Orphans())] == ["good"]
    (found,) = judge_teardown(Orphans(machines=1, processes=3, has_balancer=True))
    assert found.level == "bad" and found.text.endswith("1 machine, 3 processes, the balancer")
    (found,) = judge_teardown(Orphans(has_balancer=True))
    assert (found.level, found.text) == ("bad", "still running after the end: the balancer")


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100%"), (0.99999, "99.99%"), (0.9985, "99.85%"), (0.995, "99.5%"), (0.99, "99%"), (0.0, "0%")],
)
def test_a_share_below_one_is_never_rounded_up_to_one_hundred_percent(share: float, text: str) -> None:
    assert format_percent(share) == text
