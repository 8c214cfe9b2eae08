"""List offers of your own machines from files alone: the user's entries and the results of `broker check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from broker.sites import FILES, find_file, kubernetes, pools, slurm
from broker.sites.facts import find_facts
from broker.types import Offer
from broker.user_files import UserFile


def list_own_offers(home: Path) -> Sequence[Offer]:
    """Return the offers of every native cloud of this state folder. Raises TaskError for an invalid file."""
    return OwnOffers(home).list()


class OwnOffers:
    """The offers of the native clouds of a state folder, for a process in which their files may change."""

    def __init__(self, home: Path) -> None:
        self._files = [
            UserFile(home / FILES[cloud], partial(_read_offers, cloud, home), beside=[find_facts(cloud, home)])
            for cloud in READERS
        ]

    def list(self) -> Sequence[Offer]:
        """Return the offers; raise TaskError for a file that is invalid and was never valid."""
        return [offer for file in self._files for offer in file.read()]


def _read_offers(cloud: str, home: Path) -> Sequence[Offer]:
    path = find_file(cloud, home)
    return READERS[cloud](path, find_facts(cloud, home)) if path else ()


READERS: Mapping[str, Callable[[Path, Path], Sequence[Offer]]] = {
    "ssh": lambda path, facts: pools.list_offers(pools.read_hosts(path, facts)),
    "slurm": lambda path, facts: slurm.list_offers(slurm.read_clusters(path), facts),
    "kubernetes": lambda path, facts: kubernetes.list_offers(kubernetes.read_contexts(path, facts), facts),
}
