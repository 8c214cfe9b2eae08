"""broker from Python: tasks in, plans out. The command line's `plan` is a thin layer over this.

import broker
plan = broker.plan("train.yaml")            # or YAML text, a mapping, or a Task
plan.choice.placement.offer.region, plan.choice.expected_usd
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.errors import NoOfferError, NotImportedError, UnknownNameError, UsageError
from broker.types import AcceleratorFigures, Offer, Placement, Plan, Task

if TYPE_CHECKING:
    from broker.catalog.book import Book
    from broker.optimizer.rating import History

TaskLike = Task | Mapping[str, Any] | str | Path


def plan(task: TaskLike, *, clouds: Collection[str] | None = None, cache: Path | None = None) -> Plan:
    """Rank every placement that fits, cheapest to finish first (per hour where no work is given). Starts nothing.

    `task` is as `read_task` takes it. `clouds` limits the plan to some clouds. Prices come from the book in `cache`, by
    default the one that the command line uses. Money is USD, time is hours.

    Raises TaskError for a wrong task, NoOfferError (with hints that were tried) where nothing fits, StateError where
    the price book does not open.
    """
    return Market(cache or find_cache()).plan(
        read_task(task), usable_clouds=None if clouds is None else frozenset(clouds)
    )


def read_task(task: TaskLike) -> Task:
    """A task from a file (Path, or a string of one line), YAML text (a string of several lines), or a mapping as the
    file would hold it. Raises TaskError, or UsageError for a pipeline of several tasks."""
    if isinstance(task, Task):
        from broker.task.checking import check_task

        return check_task(task)
    from broker.task.loader import load_tasks, load_tasks_text

    if isinstance(task, Mapping):
        found = load_tasks_text(_write_yaml(task), "task")
    elif isinstance(task, str) and "\n" in task:
        found = load_tasks_text(task, "task")
    else:
        found = load_tasks(Path(task))
    if len(found) > 1:
        raise UsageError(f"expected one task, found a pipeline of {len(found)}", hints=["plan the tasks one by one"])
    return found[0]


def _write_yaml(task: Mapping[str, Any]) -> str:
    """JSON, which is YAML but for two things: YAML escapes no pairs of surrogates, and takes C1 controls escaped only.

    Raises UsageError for what JSON cannot hold.
    """
    import json
    import re

    try:
        text = json.dumps(task, indent=1, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"invalid task: {error}") from None
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


class Market:
    """The price book, and this machine where a task names `local`."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    @cached_property
    def book(self) -> Book:
        from broker.catalog.bundle import open_book

        return open_book(self._cache)

    @cached_property
    def figures(self) -> Mapping[str, AcceleratorFigures]:
        return self.book.read_figures()

    def resolve(self, task: Task) -> Task:
        """The task with its accelerators named as in the price book, and notices of those that nobody sells."""
        from broker.task.accelerators import resolve_accelerators

        return resolve_accelerators(task, self.figures)

    def plan(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
        history: History | None = None,
    ) -> Plan:
        """As `rank`; raises NoOfferError with hints, each of which was tried, NotImportedError where the task names
        only clouds whose offers the user has to import."""
        unpriced = self._list_unpriced(task)
        if task.resources and unpriced.issuperset({each.cloud for each in task.resources}):
            raise NotImportedError(
                f"the catalog has no offers of {', '.join(sorted(unpriced))} yet, so placements there cannot be ranked",
                hints=["import offers with `broker catalog import DIR`; docs/CATALOG.md describes the files in DIR"],
            )
        task = self.resolve(task)
        try:
            return self.rank(task, usable_clouds=usable_clouds, avoid=avoid, history=history)
        except NoOfferError as error:
            from broker.optimizer.infeasible import explain_infeasible, loosen_places

            wide = self._find_offers(loosen_places(task))

            def try_plan(changed: Task) -> Plan:
                return self.rank(changed, usable_clouds=usable_clouds, avoid=avoid, offers=wide)

            try:
                return try_plan(task)
            except NoOfferError as wider:
                if isinstance(error, UnknownNameError) and not self._say_unpriced(task):
                    asked = wider.message.partition("\n")[0]  # counts of offers tell nothing about a misspelt name
                    raise UnknownNameError(asked, details=[error.message], hints=error.hints) from error
                explained = explain_infeasible(wider, task, try_plan)
                raise NoOfferError(wider.message, hints=[*self._say_unpriced(task), *explained.hints]) from error

    def _say_unpriced(self, task: Task) -> Sequence[str]:
        """For clouds that nobody publishes prices of, such as one's own Kubernetes."""
        return [
            f"the price book has no offers of {cloud}: `broker catalog import DIR` takes in what it offers you"
            for cloud in sorted(self._list_unpriced(task))
        ]

    def _list_unpriced(self, task: Task) -> set[str]:
        return {each.cloud for each in task.resources if each.cloud} - {"local", *self.book.clouds}

    def rank(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
        offers: Sequence[Offer] | None = None,
        history: History | None = None,
    ) -> Plan:
        """Placements cheapest first, among `offers` or all there are. Raises NoOfferError, quickly.

        `history` is what was seen of preemptions; it is mixed with the price book's bands.
        """
        from broker.optimizer.planner import make_plan

        task = self.resolve(task)
        return make_plan(
            task,
            self._find_offers(task) if offers is None else offers,
            prices_as_of=self.book.as_of,
            usable_clouds=usable_clouds,
            avoid=avoid,
            figures=self.figures,
            egress=self.book.read_egress(),
            history=history,
        )

    def _find_offers(self, task: Task) -> Sequence[Offer]:
        offers = self.book.find_offers(task)
        if any(each.cloud == "local" for each in task.resources):
            from broker.catalog.local import list_local_offers

            return [*offers, *list_local_offers(*measure_machine())]
        return offers


def find_cache() -> Path:
    """Where unpacked prices lie; they are public, and shared by all state folders."""
    return Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache") / "broker"


def measure_machine() -> tuple[int, float]:
    """This machine's vCPUs and memory in GiB."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return os.cpu_count() or 1, round(pages * page / 2**30, 1)
