"""All wiring: makes the objects and joins them. Everything is made on first use, so a command pays for what it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from broker.config import Config, load_config
from broker.types import Placement, Plan, Task

if TYPE_CHECKING:
    from broker.catalog.book import Book


class Context:
    """One command's objects."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home

    @cached_property
    def config(self) -> Config:
        return load_config(self._home)

    @cached_property
    def book(self) -> Book:
        from broker.catalog.book import open_book

        return open_book(find_cache())

    def plan(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
    ) -> Plan:
        """Rank placements from the price book, and from this machine where the task names `local`."""
        from broker.catalog.local import list_local_offers
        from broker.optimizer.planner import make_plan

        offers = list(self.book.find_offers(task))
        if any(each.cloud == "local" for each in task.resources):
            offers += list_local_offers(*measure_machine())
        needs_speed = task.goal is not None and task.goal.work_on is not None
        tflops = self.book.list_training_tflops() if needs_speed else {}
        return make_plan(
            task, offers, prices_as_of=self.book.as_of, usable_clouds=usable_clouds, avoid=avoid, tflops=tflops
        )


def find_cache() -> Path:
    """Where unpacked prices lie; they are public, and shared by all state folders."""
    return Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache") / "broker"


def measure_machine() -> tuple[int, float]:
    """This machine's vCPUs and memory in GiB."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return os.cpu_count() or 1, round(pages * page / 2**30, 1)
