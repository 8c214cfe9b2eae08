"""List offers of your own machines from files alone: the user's entries and the results of `broker check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.sites import find_file, kubernetes, pools, slurm
from broker.sites.facts import find_facts
from broker.types import Offer


def list_own_offers(home: Path) -> Sequence[Offer]:
    """Return the offers of every native cloud of this state folder. Raises TaskError for an invalid file."""
    offers: list[Offer] = []
    if path := find_file("ssh", home):
        offers += pools.list_offers(pools.read_hosts(path, find_facts("ssh", home)))
    if path := find_file("slurm", home):
        offers += slurm.list_offers(slurm.read_clusters(path), find_facts("slurm", home))
    if path := find_file("kubernetes", home):
        facts = find_facts("kubernetes", home)
        offers += kubernetes.list_offers(kubernetes.read_contexts(path, facts), facts)
    return offers
