"""What clusters leave behind besides nodes: firewall groups, templates, disks; deleted where a cloud has those."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from broker.clock import Clock
from broker.clouds.base import CanSweep, Cloud
from broker.errors import CloudError
from broker.state.store import Store

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 3600.0  # with no cluster gone: what was still in use the last time


class ResourceSweeper:
    def __init__(self, clouds: Mapping[str, Cloud], store: Store, *, clock: Clock, owner: str) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._swept: dict[str, tuple[float, frozenset[str]]] = {}  # cloud -> when, and which clusters there were

    async def sweep(self) -> int:
        """Delete what belongs to no cluster of ours; returns how many things. A sweep takes dozens of calls: it is left
        out while no cluster has gone since the last. What a cloud refuses now is for the next one."""
        keep = self._list_names()
        now_s = self._clock.now_s()
        count = 0
        for name, cloud in self._clouds.items():
            swept_s, before = self._swept.get(name, (-SWEEP_EVERY_S, frozenset()))
            if not isinstance(cloud, CanSweep) or (now_s - swept_s < SWEEP_EVERY_S and before <= keep):
                continue
            try:
                count += await cloud.sweep(self._owner, keep)
            except CloudError as error:
                log.warning("%s cannot be swept now: %s", name, error.message)
                continue
            self._swept[name] = (now_s, keep)
        return count

    def _list_names(self) -> frozenset[str]:
        """Every cluster that is there, or may be coming up."""
        coming = (intent.request.cluster for intent in self._store.intents.list_open())
        return frozenset((*coming, *(cluster.name for cluster in self._store.clusters.list())))
