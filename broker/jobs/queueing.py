"""Decide which waiting jobs may start under a limit on live jobs. Pure: the live jobs in, an order out.

Jobs start by priority. Within a priority, the next job is always from the project with the fewest GPU-hours: those of
its jobs in the last week, plus one hour for each of its jobs earlier in the order. Within a project, the order is that
of submission. Example, with one GPU per job:

    project   used   waiting          order
    vision    0.0    1, 2, 3          1, 2, 4, 3, 5: after jobs 1 and 2, vision has 2 hours, so
    speech    1.5    4, 5             the next is job 4, because 1.5 < 2, and so on
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from broker.frozen import frozen

HOURS_AHEAD = 1.0  # assumed for each job in the order, because its duration is unknown
GPUS_MIN = 0.125  # for a job without accelerators, so that it counts at all


@frozen
class Waiting:
    """A job, or a job group as a whole, that waits for one of the limit's slots."""

    job_id: int  # of a group: its first job
    priority: int = 0
    project: str = ""
    gpus: float = 0.0
    submitted_s: float = 0.0


def order_queue(waiting: Sequence[Waiting], used_gpu_hours: Mapping[str, float]) -> tuple[int, ...]:
    """Return the IDs of the waiting jobs in the order in which they start."""
    order: list[int] = []
    hours = dict(used_gpu_hours)
    for priority in sorted({each.priority for each in waiting}, reverse=True):
        queues: dict[str, list[Waiting]] = {}
        for each in sorted(waiting, key=lambda each: (each.submitted_s, each.job_id), reverse=True):
            if each.priority == priority:
                queues.setdefault(each.project, []).append(each)  # the next one is last
        heap = [(hours.get(project, 0.0), queue[-1].submitted_s, project) for project, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            _, _, project = heapq.heappop(heap)
            queue = queues[project]
            chosen = queue.pop()
            order.append(chosen.job_id)
            hours[project] = hours.get(project, 0.0) + max(GPUS_MIN, chosen.gpus) * HOURS_AHEAD
            if queue:
                heapq.heappush(heap, (hours[project], queue[-1].submitted_s, project))
    return tuple(order)


def list_startable(
    ordered: Mapping[str, str], held: Mapping[str, str], *, total: int | None, by_project: Mapping[str, int]
) -> frozenset[str]:
    """Return the waiting units that may start: each takes a slot, and one of its project if that has a limit.

    Both mappings are from a unit to its project; `ordered` is in the order of the queue. A unit whose project is full
    does not block the units behind it.
    """
    free = len(ordered) if total is None else total - len(held)
    used = Counter(held.values())
    found: list[str] = []
    for unit, project in ordered.items():
        if len(found) >= free:
            break
        if used[project] < by_project.get(project, len(held) + len(ordered)):
            used[project] += 1
            found.append(unit)
    return frozenset(found)
