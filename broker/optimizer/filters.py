"""Named filters: each rejects offers for one reason and can report the nearest miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse

from broker.frozen import frozen
from broker.types import ORDINARY_GIB, Offer, Placement, Quantity, Rejection, Resources, Task

Test = Callable[[Offer], bool]
POOLS = frozenset(("ssh", "slurm", "kubernetes"))
OWN_CLOUDS = POOLS | {"local"}
# In SkyPilot's hosted catalogs, but without an adapter here: machines cannot be started there, so they are planned only
# by name, to compare prices.
PRICED_ONLY = frozenset(("hyperstack", "jarvislabs", "lium", "spheron"))
NAMED_ONLY = PRICED_ONLY | {"local"}  # the local cloud is for rehearsals
SHARED_CLOUDS = frozenset(("slurm", "kubernetes"))  # a node there is a part of a machine


@frozen
class Filter:
    """A filter.

    `make_test` returns the test for a request, None if it does not apply; `show` describes what a rejected offer has.

    `fields` are the fields of Resources that activate it: without them it keeps every offer. `measure` tells how far
    what a rejected offer has is from the request, if that is a matter of degree; of equally near ones, the nearest is
    the cheapest.
    """

    name: str
    fields: tuple[str, ...]
    make_test: Callable[[Resources], Test | None]
    show: Callable[[Offer], str]
    measure: Callable[[Resources, Offer], float] | None = None


def _test_cloud(resources: Resources) -> Test | None:
    if resources.cloud is None:
        return lambda offer: offer.cloud not in NAMED_ONLY
    cloud = resources.cloud.lower()
    return lambda offer: offer.cloud == cloud


def _test_accelerator(resources: Resources) -> Test | None:
    if resources.accelerator is None:
        return None
    name = resources.accelerator.lower()
    return lambda offer: offer.accelerator is not None and offer.accelerator.lower() == name


def _test_count(resources: Resources) -> Test | None:
    if resources.accelerator is None:
        return None
    count = resources.accelerator_count
    if count < 1:  # a fraction where a cloud sells fractions; else a whole one, which several runs share
        return lambda offer: offer.accelerator_count in (count, 1)
    return lambda offer: offer.accelerator_count == count


def _test_instance_type(resources: Resources) -> Test | None:
    if resources.instance_type is None:
        return None
    name = resources.instance_type.lower()
    if resources.accelerator is None:
        return lambda offer: offer.instance_type.lower() == name
    # The host of attached cards may be named alone, as in SkyPilot: `n1-standard-4` matches `n1-standard-4+1xT4`.
    return lambda offer: name in (offer.instance_type.lower(), offer.instance_type.lower().partition("+")[0])


def _test_region(resources: Resources) -> Test | None:
    if resources.region is None:
        return None
    region = resources.region.lower()
    return lambda offer: offer.region.lower() == region


def _test_zone(resources: Resources) -> Test | None:
    if resources.zone is None:
        return None
    zone = resources.zone.lower()
    return lambda offer: (offer.zone or "").lower() == zone


def _test_cpus(resources: Resources) -> Test | None:
    quantity = resources.cpus
    return None if quantity is None else lambda offer: _admits(quantity, offer, offer.vcpus)


def _test_memory(resources: Resources) -> Test | None:
    quantity, ratio = resources.memory_gib, resources.memory_gib_per_vcpu
    if ratio is not None:
        return lambda offer: offer.memory_gib >= ratio * offer.vcpus
    return None if quantity is None else lambda offer: _admits(quantity, offer, offer.memory_gib)


def _admits(quantity: Quantity, offer: Offer, amount: float) -> bool:
    """Return whether an amount satisfies the request; on pools of own machines, an exact size is a minimum (0459)."""
    return quantity.admits(amount) or (offer.cloud in POOLS and amount >= quantity.value)


def _find_least_gib(resources: Resources, offer: Offer) -> float:
    if resources.memory_gib_per_vcpu is not None:
        return resources.memory_gib_per_vcpu * offer.vcpus
    return resources.memory_gib.value if resources.memory_gib else 0.0


FILTERS: tuple[Filter, ...] = (
    Filter(name="cloud", fields=("cloud",), make_test=_test_cloud, show=lambda offer: offer.cloud),
    Filter(
        name="accelerator",
        fields=("accelerator", "accelerator_count"),
        make_test=_test_accelerator,
        show=lambda offer: offer.accelerator or "no accelerator",
    ),
    Filter(
        name="accelerator count",
        fields=("accelerator_count",),
        make_test=_test_count,
        show=lambda offer: f"{offer.accelerator}:{offer.accelerator_count:g} ({offer.instance_type})",
        measure=lambda resources, offer: abs(offer.accelerator_count - resources.accelerator_count),
    ),
    Filter(
        name="instance type",
        fields=("instance_type",),
        make_test=_test_instance_type,
        show=lambda offer: offer.instance_type,
    ),
    Filter(name="region", fields=("region", "zone"), make_test=_test_region, show=lambda offer: offer.region),
    Filter(name="zone", fields=("zone",), make_test=_test_zone, show=lambda offer: offer.zone or offer.region),
    Filter(
        name="cpus",
        fields=("cpus",),
        make_test=_test_cpus,
        show=lambda offer: f"{offer.vcpus:g} vCPU ({offer.instance_type})",
        measure=lambda resources, offer: abs(offer.vcpus - resources.cpus.value) if resources.cpus else 0.0,
    ),
    Filter(
        name="memory",
        fields=("memory_gib", "memory_gib_per_vcpu"),
        make_test=_test_memory,
        show=lambda offer: f"{offer.memory_gib:g} GiB ({offer.instance_type})",
        measure=lambda resources, offer: abs(offer.memory_gib - _find_least_gib(resources, offer)),
    ),
)


class OfferIndex:
    """Offers indexed by accelerator, so that each of many alternatives reads only its own."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._all = offers
        self._by_name = dict[str | None, list[Offer]]()
        for offer in offers:
            self._by_name.setdefault(offer.accelerator, []).append(offer)

    def pick(self, resources: Resources) -> Sequence[Offer]:
        """Return all offers that may fit.

        If none has the accelerator, return all of them, so that the filter can report the nearest misses.
        """
        if resources.accelerator is None:
            return self._all
        wanted = resources.accelerator.lower()
        names = [name for name in self._by_name if name is not None and name.lower() == wanted]
        return [offer for name in names for offer in self._by_name[name]] or self._all


def apply_filters(resources: Resources, offers: Sequence[Offer]) -> tuple[list[Offer], list[Rejection]]:
    """Return the offers that fit, and what each filter rejected."""
    kept, rejections = list(offers), list[Rejection]()
    for each in FILTERS:
        test = each.make_test(resources)
        if test is None:
            continue
        passed = list(filter(test, kept))
        if len(passed) < len(kept):
            nearest = _find_nearest(each, resources, filterfalse(test, kept))
            rejections.append(Rejection(filter=each.name, count=len(kept) - len(passed), nearest=each.show(nearest)))
        kept = passed
    return _leave_large_shares(resources, _leave_small_machines(resources, kept)), rejections


def _leave_large_shares(resources: Resources, offers: list[Offer]) -> list[Offer]:
    """Return the smallest share of each pool of shared machines, if the task requests an exact size."""
    if not any(each and not each.is_minimum for each in (resources.cpus, resources.memory_gib)):
        return offers
    smallest = dict[tuple[object, ...], Offer]()
    for each in offers:
        if each.cloud in SHARED_CLOUDS:
            is_spot = each.ondemand_usd_hour is None
            key = (each.cloud, each.region, each.zone, is_spot, each.accelerator, each.accelerator_count)
            found = smallest.setdefault(key, each)
            if (each.vcpus, each.memory_gib) < (found.vcpus, found.memory_gib):
                smallest[key] = each
    kept = {id(each) for each in smallest.values()}
    return [each for each in offers if each.cloud not in SHARED_CLOUDS or id(each) in kept]


def _leave_small_machines(resources: Resources, offers: list[Offer]) -> list[Offer]:
    """Return the offers with an ordinary amount of memory, if there are any and the task chose none itself."""
    if not resources.has_ordinary_memory:
        return offers
    return [each for each in offers if each.memory_gib >= ORDINARY_GIB or each.cloud in OWN_CLOUDS] or offers


def _find_nearest(each: Filter, resources: Resources, missed: Iterable[Offer]) -> Offer:
    measure = each.measure
    if measure is None:
        return min(missed, key=find_least_usd)
    return min(missed, key=lambda offer: (measure(resources, offer), find_least_usd(offer)))


def find_alternative(task: Task, placement: Placement) -> int:
    """Return the index of the first alternative that admits a placement of another task's plan.

    0 if none does: a task may run on a cluster of another shape.
    """
    for index, resources in enumerate(task.resources):
        if resources.use_spot in (None, placement.is_spot) and apply_filters(resources, [placement.offer])[0]:
            return index
    return 0


def find_least_usd(offer: Offer) -> float:
    """Return the lowest price per instance-hour, spot or on-demand."""
    spot, ondemand = offer.spot_usd_hour, offer.ondemand_usd_hour
    if spot is None:
        return float("inf") if ondemand is None else ondemand
    return spot if ondemand is None or spot < ondemand else ondemand
