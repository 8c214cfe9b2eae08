"""The read model of a server's people: roles, jobs, the spending of the month, and the audit."""

from __future__ import annotations

import pytest

from broker.dashboard.people import AUDIT_MAX, list_audit, read_people
from broker.dashboard.people_page import show_people
from broker.server.tokens import create_token
from broker.state.people import Owned, Role
from broker.types import JobStatus
from tests.dashboard.conftest import Story


@pytest.fixture
def owned(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """The story at one moment: ada owns job 1 and its two attempts, ben the cluster `dev`."""
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    monkeypatch.setattr("broker.dashboard.people.find_starts", lambda now_s: (0.0, story.now_s - 1800))
    story.store.owners.put(Owned.JOB, "1", "ada")
    story.store.owners.put(Owned.CLUSTER, "dev", "ben")
    create_token(story.store, user="ada", role=Role.USER, days=1)
    create_token(story.store, user="ada", role=Role.ADMIN, days=1)
    story.store.tokens.revoke(create_token(story.store, user="ben", role=Role.USER, days=1).id)
    story.store.audit.add(user="ada", verb="launch_jobs", target="1", outcome="done")
    return story


def test_people_have_their_jobs_and_their_share_of_the_month(owned: Story) -> None:
    rows = {row.user: row for row in read_people(owned.context)}
    assert set(rows) == {"ada", "ben", None}
    ada, ben, server = rows["ada"], rows["ben"], rows[None]
    assert (ada.role, ada.token_count, ada.jobs, ada.live_jobs, ada.clusters) == (Role.ADMIN, 2, 1, 1, 0)
    assert (ben.role, ben.token_count, ben.jobs, ben.clusters, ben.changed_s) == (None, 0, 0, 1, None)
    assert (server.jobs, server.live_jobs, server.clusters) == (2, 0, 0), "clusters of jobs are counted as jobs"
    spent = [row.month_usd for row in read_people(owned.context)]
    assert spent == sorted(spent, reverse=True) and spent[0] > spent[-1]
    since_s = owned.now_s - 1800  # the fixture's month
    assert ada.month_usd == pytest.approx(2 * 1700 / 3600)  # the first attempt ended before
    assert ben.month_usd == pytest.approx(2 * 0.5)
    assert ada.month_usd + ben.month_usd == pytest.approx(
        owned.store.bills.sum_spend(midnight_s=since_s, month_s=since_s, now_s=owned.now_s).month_usd
    )
    shown = show_people(list(rows.values()), owned.now_s)
    assert "ada" in shown and "(started on the server itself)" in shown


def test_an_ended_job_is_not_live_and_the_audit_is_bounded(owned: Story) -> None:
    owned.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    (ada,) = [row for row in read_people(owned.context) if row.user == "ada"]
    assert ada.live_jobs == 0 and ada.jobs == 1
    for number in range(AUDIT_MAX + 5):
        owned.store.audit.add(user="ben", verb="exec_task", target=str(number), outcome="done")
    events = list_audit(owned.context, user="ben", verb="", outcome="")
    assert len(events) == AUDIT_MAX and events[0].target == str(AUDIT_MAX + 4)
