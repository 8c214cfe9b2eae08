"""The price book and the planner, with the user's own machines, and this machine for tasks that name `local`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from broker.errors import NoOfferError, NotImportedError, UnknownNameError
from broker.types import AcceleratorFigures, Notice, Offer, Origin, Placement, Plan, Resources, Task

if TYPE_CHECKING:
    from broker.catalog.book import Book
    from broker.optimizer.rating import History
    from broker.sites.offers import OwnOffers

FLAGS = Origin(file="command line", line=0, column=0)


class Market:
    """Rank offers of the price book, of the user's own machines, and of this machine for tasks that name `local`.

    `home`: the state folder whose SSH pools, Slurm and Kubernetes clusters are included; None includes none.
    """

    def __init__(
        self, cache: Path, *, home: Path | None = None, find_interval_factor: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._cache = cache
        self.home = home
        self._find_interval_factor = find_interval_factor
        self._stamp: tuple[int, int] | None = None

    @cached_property
    def interval_factor(self) -> float:
        """The factor that widens the intervals of forecasts, read once."""
        return self._find_interval_factor()

    @cached_property
    def book(self) -> Book:
        """The price book, opened on first use. Raises StateError."""
        from broker.catalog.bundle import open_book

        self._stamp = self._stamp_prices()
        return open_book(self._cache)

    def renew(self) -> None:
        """Read the prices again if they were replaced since they were opened, for processes that plan for days.

        A command keeps the prices that it has shown.
        """
        if "book" in self.__dict__ and self._stamp_prices() != self._stamp:
            for name in ("book", "figures"):
                self.__dict__.pop(name, None)

    def _stamp_prices(self) -> tuple[int, int] | None:
        """Return a value that changes when an update or an import replaces the prices; None without either."""
        from broker.catalog.bundle import locate_live_book

        try:
            found = locate_live_book(self._cache).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    @cached_property
    def figures(self) -> Mapping[str, AcceleratorFigures]:
        """Peak performance, memory and bandwidth of accelerators by name."""
        return self.book.read_figures()

    def resolve(self, task: Task) -> Task:
        """Name the task's accelerators as in the price book.

        Adds notices for accelerators that no cloud sells, and for alternatives on clouds without offers.
        """
        from broker.catalog.suggestions import SELLERS
        from broker.task.accelerators import resolve_accelerators

        names = self.book.list_accelerator_names()
        return self._note_unpriced(resolve_accelerators(task, self.figures, offered=names, sellers=SELLERS))

    def _note_unpriced(self, task: Task) -> Task:
        """Add a notice for each cloud without offers, if another alternative remains: plans cannot rank it."""
        unpriced = self._list_unpriced(task)
        if unpriced.issuperset({each.cloud for each in task.resources}):
            return task  # `plan` raises an error
        for cloud in sorted(unpriced):
            remedies = _list_remedies([cloud], self.home or Path("~/.broker"))
            notice = Notice(
                origin=next((each.origin for each in task.resources if each.cloud == cloud and each.origin), FLAGS),
                field="infra",
                message=f"`infra`: the catalog has no offers of {cloud}; ignoring the alternative",
                hint=f"run `broker check {cloud}`" if cloud in self._native else remedies[0],
            )
            if notice not in task.notices:
                task = replace(task, notices=(*task.notices, notice))
        return task

    def plan(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
        history: History | None = None,
        is_refused: Callable[[Placement], bool] | None = None,
    ) -> Plan:
        """Rank the placements of a resolved task, as `rank` does, with hints on failure.

        Raises NoOfferError with hints that were verified by planning, and NotImportedError if the task names only
        clouds whose offers the user has to import.
        """
        unpriced = self._list_unpriced(task)
        if task.resources and unpriced.issuperset({each.cloud for each in task.resources}):
            if undetected := sorted(unpriced & set(self._native)):
                raise NotImportedError(
                    f"the machines of {', '.join(undetected)} are not known yet",
                    hints=[f"run `broker check {cloud}`, which inspects them" for cloud in undetected],
                )
            raise NotImportedError(
                f"the catalog has no offers of {', '.join(sorted(unpriced))} yet, so placements there cannot be ranked",
                hints=_list_remedies(unpriced, self.home or Path("~/.broker")),
            )
        try:
            return self.rank(task, usable_clouds=usable_clouds, avoid=avoid, history=history, is_refused=is_refused)
        except NoOfferError as error:
            from broker.optimizer.infeasible import explain_infeasible, loosen_places

            try:
                named = frozenset(each.cloud.lower() for each in task.resources if each.cloud)
                wide = self._find_offers(loosen_places(task), named or usable_clouds)
            except UnknownNameError as unknown:
                raise UnknownNameError(unknown.message, details=_locate(task), hints=unknown.hints) from error

            def try_plan(changed: Task) -> Plan:
                return self.rank(
                    changed,
                    usable_clouds=usable_clouds,
                    avoid=avoid,
                    offers=[*(each for each in wide if each.cloud != "local"), *_list_local_offers(changed)],
                    history=history,
                    is_refused=is_refused,
                )

            try:
                return try_plan(task)
            except NoOfferError as wider:
                if isinstance(error, UnknownNameError) and not self._explain_unpriced(task):
                    summary = wider.message.partition("\n")[0]  # for a misspelled name, offer counts are useless
                    raise UnknownNameError(summary, details=[error.message], hints=error.hints) from error
                explained = explain_infeasible(wider, task, try_plan)
                raise NoOfferError(wider.message, hints=[*self._explain_unpriced(task), *explained.hints]) from error

    def _explain_unpriced(self, task: Task) -> Sequence[str]:
        """Return a hint for each requested cloud without published prices, such as a private Kubernetes cluster."""
        return [
            f"the price catalog has no offers of {cloud}: {hint}"
            for cloud in sorted(self._list_unpriced(task))
            for hint in _list_remedies([cloud], self.home or Path("~/.broker"))
        ]

    def _list_unpriced(self, task: Task) -> set[str]:
        named = {each.cloud for each in task.resources if each.cloud}
        own = {offer.cloud for offer in self.list_own_offers()}
        return named - {"local", *own, *self.book.clouds}

    def rank(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
        offers: Sequence[Offer] | None = None,
        history: History | None = None,
        is_refused: Callable[[Placement], bool] | None = None,
    ) -> Plan:
        """Rank the placements of a resolved task, cheapest first, among `offers` or all offers.

        `history` holds observed preemptions; `is_refused` returns whether spot was refused recently. Raises
        NoOfferError, without the slow search for hints.
        """
        from broker.optimizer.planner import make_plan

        return make_plan(
            task,
            self._find_offers(task, usable_clouds) if offers is None else offers,
            prices_as_of=self.book.as_of,
            usable_clouds=usable_clouds,
            avoid=avoid,
            figures=self.figures,
            egress=self.book.read_egress(),
            history=history,
            is_refused=is_refused,
            interval_factor=self.interval_factor,
        )

    def _find_offers(self, task: Task, usable_clouds: frozenset[str] | None) -> Sequence[Offer]:
        from broker.optimizer.abilities import find_able_clouds

        def find_reachable(resources: Resources) -> frozenset[str]:
            return find_able_clouds(task, resources, self.book.clouds if usable_clouds is None else usable_clouds)

        own = self.list_own_offers()
        found = self.book.find_offers(task, but=self._native, find_reachable=find_reachable)
        return [*found, *own, *_list_local_offers(task)]

    @cached_property
    def _native(self) -> tuple[str, ...]:
        from broker.sites import list_native

        return list_native(self.home) if self.home else ()

    def list_own_offers(self) -> Sequence[Offer]:
        """Return the offers of own machines, whose files may change."""
        return self._own_offers.list() if self._native else ()

    @cached_property
    def _own_offers(self) -> OwnOffers:
        from broker.sites.offers import OwnOffers

        assert self.home is not None, "without a folder no cloud is native"
        return OwnOffers(self.home)


def _locate(task: Task) -> Sequence[str]:
    """Return the position of the task's resources in its file, as an error detail; empty if set by flags."""
    found = next((each.origin for each in task.resources if each.origin), None)
    return [f"requested in {found.file}:{found.line}:{found.column}"] if found and found.line else []


def _list_local_offers(task: Task) -> Sequence[Offer]:
    """List the offers of this machine, which only a task that names the local cloud may use."""
    if all(each.cloud != "local" for each in task.resources):
        return ()
    from broker.catalog.local import list_local_offers

    return list_local_offers(*measure_machine())


def find_cache() -> Path:
    """Return the folder of the unpacked prices, which are public and shared by all state folders."""
    return Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache") / "broker"


def measure_machine() -> tuple[int, float]:
    """Measure the vCPUs and the memory, in GiB, of this machine."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return os.cpu_count() or 1, round(pages * page / 2**30, 1)


def _list_remedies(clouds: Iterable[str], home: Path) -> list[str]:
    """Return how to add the offers of each cloud: inspect own machines, fetch its prices, or import them."""
    from broker.catalog.sources.skypilot import SkyPilotSource
    from broker.sites import FILES

    hints = []
    for cloud in sorted(clouds):
        if cloud in FILES:
            content = " (an empty file means kubectl's current context)" if cloud == "kubernetes" else ""
            hints.append(
                f"create `{home / FILES[cloud]}`{content} and run `broker check {cloud}`, which inspects your machines"
            )
        if cloud in SkyPilotSource.clouds:
            hints.append(f"add its prices with `broker catalog update --cloud {cloud}`")
        else:
            hints.append("import offers with `broker catalog import DIR`; docs/CATALOG.md describes the files in DIR")
    return list(dict.fromkeys(hints))
