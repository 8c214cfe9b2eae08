"""Bugs planted into the controller of services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from broker.serve import controller, reconciling
from broker.serve.controller import ServiceController
from broker.serve.reconciling import ReplicaView
from broker.state.services import ServiceRows
from broker.types import Replica, UpdateMode
from tests.simulation.mutants.provisioning import Patches


def replica_is_recorded_after_its_job() -> Patches:
    """Commit a replica's job before its row, so that a kill in between forgets the job."""
    start = ServiceController._start

    def start_in_two_commits(self: Any, *arguments: Any) -> None:
        rows: list[Replica] = []
        with patch.object(ServiceRows, "put_replica", lambda self, replica: rows.append(replica)):
            start(self, *arguments)
        with self._store.transaction():
            self._store.services.put_replica(rows[0])

    return (patch.object(ServiceController, "_start", start_in_two_commits),)


def drained_replica_is_ended_at_once() -> Patches:
    """End a drained replica as soon as it is drained, whatever it answers."""

    def end(self: Any, seen: Any, replica: Replica, load: Any) -> None:
        self._store.jobs.request_cancel(replica.job_id)

    return (patch.object(ServiceController, "_end_drained", end),)


def old_version_is_drained_with_the_first_new_replica() -> Patches:
    def choose_all(count: int, old: Sequence[ReplicaView], new: Sequence[ReplicaView], mode: UpdateMode) -> list[int]:
        return [each.number for each in old] if any(each.is_ready for each in new) else []

    return (patch.object(reconciling, "_choose_old", choose_all),)


def service_is_forgotten_before_its_replicas_are_gone() -> Patches:
    """Delete the rows of a service that goes down without waiting for its jobs."""

    def take_down(self: Any, service: Any, folder: Any, seen: Sequence[Any]) -> float:
        for each in seen:
            self._store.services.delete_replica(each.replica)
        controller.remove_folder(folder)
        self._store.services.delete(service.name)
        return float("inf")

    return (patch.object(ServiceController, "_take_down", take_down),)


def replica_that_is_not_ready_is_not_counted() -> Patches:
    """Start one more replica for each that starts."""
    rows = ServiceRows.list_replicas

    def list_ready(self: Any, name: str) -> Sequence[Replica]:
        return [each for each in rows(self, name) if each.ready_s is not None or each.drained_s is not None]

    return (patch.object(ServiceRows, "list_replicas", list_ready),)


def balancer_is_started_once() -> Patches:
    """Do not start a balancer again."""
    ensure = ServiceController._ensure_balancer

    def ensure_once(self: Any, folder: Any) -> None:
        if not folder.load.exists():
            ensure(self, folder)

    return (patch.object(ServiceController, "_ensure_balancer", ensure_once),)
