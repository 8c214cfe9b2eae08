"""Decide which running job returns its slot to a waiting job of higher priority. Pure.

A slot is taken from the preemptible job with the lowest priority; among equals, from the newest. Example: job 5
(high, 100) has waited long enough.

    running   priority   checkpoint   last displaced
    1         -100       no           never            not preemptible: it would start from scratch
    2         0          yes          20 min ago       displaced less than an hour ago
    3         0          yes          never            chosen
    4         100        yes          never            its priority is not lower
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.frozen import frozen

AGAIN_S = 3600.0  # a job is displaced at most once in this time


@frozen
class Holder:
    """A running job with a slot. `is_preemptible`: its program has a checkpoint to resume from."""

    job_id: int
    priority: int
    project: str = ""
    is_preemptible: bool = False
    displaced_by: int | None = None
    displaced_s: float | None = None


def choose_victim(
    waiting_id: int, priority: int, holders: Sequence[Holder], *, now_s: float, project: str | None = None
) -> int | None:
    """Return the job that must return its slot; None if there is none, or if one already does so for the waiting job.

    `project`: the project whose limit blocks the job, so that only a slot of this project helps; None for any project.
    """
    if any(each.displaced_by == waiting_id for each in holders):
        return None
    found = [
        each for each in holders
        if each.priority < priority and each.is_preemptible and each.displaced_by is None
        and (project is None or each.project == project)
        and (each.displaced_s is None or abs(now_s - each.displaced_s) >= AGAIN_S)  # clocks of controllers differ
    ]  # fmt: skip
    return min(found, key=lambda each: (each.priority, -each.job_id)).job_id if found else None
