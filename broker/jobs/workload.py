"""A daemon's workload: the jobs and services of a state folder that it leads, or those claimed in a shared store."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from broker.clock import Clock
from broker.errors import FencedError, StateError
from broker.jobs.monitor import is_due
from broker.state.claims import HOUSEKEEPING, LEASE_S, hold_claim
from broker.state.daemon_stats import DaemonStats
from broker.state.store import Store

log = logging.getLogger(__name__)

BEAT_EVERY_S = 2.0
CLAIMS_MAX = 200  # per call, so that processes that start together share the jobs
SKEW_S_MAX = 5.0  # difference between this machine's clock and the store's that causes a warning
SHARE_S = 3.0  # time for which a free job is left to processes with fewer jobs; one of them may just have been lost
REST_S = 5.0  # time for which a job that was given up (for balance, or after an unexpected end) is left to others


Key = int | str  # a job's ID, or a service's name


def list_keys(store: Store) -> Sequence[Key]:
    """List the jobs and services that need a controller."""
    return [*store.jobs.list_unfinished_ids(), *store.services.list_names()]


class Workload(Protocol):
    """The jobs and services that this process may drive now."""

    def refresh(self, stats: DaemonStats | None = None) -> Sequence[Key]:
        """Return the jobs to drive; heartbeats carry `stats`. Raises FencedError for a replaced leader, StateError."""
        ...

    def is_mine(self, key: Key) -> bool:
        """Return whether this process may start the next step of this job or service."""
        ...

    def is_lost(self, key: Key) -> bool:
        """Return whether another process may already drive this job or service."""
        ...

    def list_cancelled(self) -> Sequence[int]:
        """Return the live jobs whose cancellation was requested."""
        ...

    def does_housekeeping(self) -> bool:
        """Return whether this process collects machines and prunes records."""

    def hold(self, key: Key) -> AbstractContextManager[None]:
        """Allow writes for this job, service or `HOUSEKEEPING` in the block. Raises FencedError if it is not ours."""
        ...

    def finish(self, key: Key) -> None:
        """Record that this process has stopped driving this job or service."""

    def resign(self) -> None:
        """Leave the jobs to other processes at once."""


class LeaderWorkload:
    """Every unfinished job of a state folder: one daemon leads, and an epoch fences its predecessor."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._beat_s = self.turn_s = clock.now_s()  # another thread reads the last turn (`lease_keeper.py`)

    def refresh(self, stats: DaemonStats | None = None) -> Sequence[Key]:
        """Renew the leadership when due, and return every unfinished job and service."""
        self.turn_s = self._clock.now_s()
        if is_due(self._beat_s, BEAT_EVERY_S, self._clock.now_s()):
            self._store.leader.beat(stats)
            self._beat_s = self._clock.now_s()
        return list_keys(self._store)

    def is_mine(self, key: Key) -> bool:
        """Return True: the leader drives every job."""
        return True

    def is_lost(self, key: Key) -> bool:
        """Return False: a leader that was replaced fails at its next write instead."""
        return False

    def list_cancelled(self) -> Sequence[int]:
        """Return the live jobs whose cancellation was requested, using one query."""
        return self._store.jobs.list_cancel_requested_ids()

    def does_housekeeping(self) -> bool:
        """Return True: only the leader runs."""
        return True

    def hold(self, key: Key) -> AbstractContextManager[None]:
        """Return an empty context: the leader's epoch already guards each write."""
        return nullcontext()

    def finish(self, key: Key) -> None:
        """Do nothing: the next leader drives it again."""

    def extend(self, store: Store) -> bool:
        """Renew the leadership through another connection, unless it has ended; return whether it is still ours."""
        epoch = self._store.epoch
        return epoch is not None and store.leader.extend(epoch)

    def resign(self) -> None:
        """Give up the leadership, so that the next daemon starts without waiting."""
        self._store.leader.resign()


class SharedWorkload:
    """The jobs and services that this process has claimed, about as many as every other process."""

    def __init__(self, store: Store, clock: Clock, *, name: str | None = None) -> None:
        self._store = store
        self._clock = clock
        self.name = name or f"{socket.gethostname()}/{os.getpid()}/{store.draw_uid()}"
        self._epochs: Mapping[int, int] = {}
        self._services: Mapping[int, str] = {}  # their names by the numbers of their claims
        self._driven: set[Key] = set()  # returned by `refresh` and not finished yet
        self._given_up: dict[int, float] = {}  # jobs to leave to others, and until when
        self._free_since_s: dict[int, float] = {}  # free jobs beyond the fair share
        # jobs claimed beyond the fair share, which are not given up earlier
        self._spared_until_s: dict[int, float] = {}
        self._cancelled: Sequence[int] = ()
        self._beat_s = -math.inf
        self.turn_s = clock.now_s()  # the last turn of the event loop, which another thread reads (`lease_keeper.py`)
        self._is_cut_off = self._is_skewed = False

    def refresh(self, stats: DaemonStats | None = None) -> Sequence[Key]:
        """Renew the lease if it is due, give up surplus jobs, claim free ones. No failure of the store is fatal.

        Until the store responds again, the jobs continue: their next write shows whether they are still ours.
        """
        self.turn_s = self._clock.now_s()
        try:
            self._renew(stats)
            self._release_idle()
            self._claim()
            self._name_services()
            self._cancelled = self._store.jobs.list_cancel_requested_ids()
        except FencedError:
            raise
        except StateError as error:
            if not self._is_cut_off:
                log.warning("%s; trying again", error.message)
            self._is_cut_off = True
        else:
            if self._is_cut_off:
                log.info("the store answers again")
            self._is_cut_off = False
        found = [each for each in self._epochs if each != HOUSEKEEPING and each not in self._given_up]
        keys = [self._services[each] if each < 0 else each for each in found if each > 0 or each in self._services]
        self._driven.update(keys)
        return keys

    def _name_services(self) -> None:
        """Read the names of the claimed services, and release the claims of those that are down."""
        claimed = [each for each in self._epochs if each < 0]
        if not claimed:
            return
        self._services = self._store.services.list_claims()
        if gone := [each for each in claimed if each not in self._services]:
            self._store.claims.release(self.name, gone)
            self._epochs = {each: epoch for each, epoch in self._epochs.items() if each not in gone}

    def _find_number(self, key: Key) -> int | None:
        """Return the number under which a job or a service is claimed; None for a service that is not ours."""
        if isinstance(key, int):
            return key
        return next((number for number, name in self._services.items() if name == key), None)

    def _renew(self, stats: DaemonStats | None) -> None:
        now_s = self._clock.now_s()
        if not is_due(self._beat_s, BEAT_EVERY_S, now_s):
            return
        self._epochs = self._store.claims.renew(self.name, stats)
        self._beat_s = now_s
        skew_s = now_s - self._store.read_time_s()
        if abs(skew_s) > SKEW_S_MAX and not self._is_skewed:
            log.warning("this machine's clock differs by %.0f s from the store's, and so do costs and budgets", skew_s)
        self._is_skewed = abs(skew_s) > SKEW_S_MAX
        self._given_up = {
            job_id: until_s for job_id, until_s in self._given_up.items() if now_s < until_s <= now_s + REST_S
        }
        load = self._store.claims.measure_load()
        fair = math.ceil(load.job_count / max(1, load.controller_count))
        kept = [job_id for job_id in self._epochs if job_id != HOUSEKEEPING and job_id not in self._given_up]
        movable = [job_id for job_id in kept if not now_s < self._spared_until_s.get(job_id, 0.0) <= now_s + LEASE_S]
        for job_id in movable[fair:]:
            self._given_up[job_id] = now_s + REST_S

    def _release_idle(self) -> None:
        """Release claims that were given up and are not being driven, because the end of a step will not release them.

        The store did not respond when the claim was released, or the claim was granted and the response was lost.
        """
        idle = [
            each
            for each in self._given_up
            if each in self._epochs and self._services.get(each, each) not in self._driven
        ]
        if idle:
            self._store.claims.release(self.name, idle)
            self._epochs = {number: epoch for number, epoch in self._epochs.items() if number not in idle}

    def _claim(self) -> None:
        """Claim free jobs up to the fair share, and any that the other processes have left for `SHARE_S`.

        The share counts every process with a lease, even one that was just lost. Jobs claimed beyond it are kept until
        such a lease has ended, which increases the share.
        """
        free = [job_id for job_id in self._store.claims.find_free(CLAIMS_MAX) if job_id not in self._given_up]
        now_s = self._clock.now_s()
        self._free_since_s = {job_id: min(now_s, self._free_since_s.get(job_id, now_s)) for job_id in free}
        if not free:
            return
        load = self._store.claims.measure_load()
        room = math.ceil(load.job_count / max(1, load.controller_count)) - len(set(self._epochs) - {HOUSEKEEPING})
        wanted = [job_id for job_id in free if job_id == HOUSEKEEPING]
        wanted += [job_id for job_id in free if job_id != HOUSEKEEPING][: max(0, room)]
        left = [job_id for job_id in free if job_id not in wanted and now_s - self._free_since_s[job_id] >= SHARE_S]
        if wanted or left:
            claimed = self._store.claims.claim(self.name, [*wanted, *left])
            self._epochs = {**self._epochs, **claimed}
            spared = {job_id: until_s for job_id, until_s in self._spared_until_s.items() if job_id in self._epochs}
            self._spared_until_s = spared | {job_id: now_s + LEASE_S for job_id in left if job_id in claimed}

    def is_mine(self, key: Key) -> bool:
        """Return whether this process holds the claim and has not given it up."""
        number = self._find_number(key)
        return number in self._epochs and number not in self._given_up

    def is_lost(self, key: Key) -> bool:
        """Return whether this process no longer holds the claim."""
        return self._find_number(key) not in self._epochs

    def list_cancelled(self) -> Sequence[int]:
        """Return the claimed jobs whose cancellation was requested, as of the last refresh."""
        return self._cancelled

    def does_housekeeping(self) -> bool:
        """Return whether this process holds the claim for housekeeping."""
        return HOUSEKEEPING in self._epochs

    def hold(self, key: Key) -> AbstractContextManager[None]:
        """Fence the block's writes by the claim's epoch. Raises FencedError if another controller claimed the job."""
        number = self._find_number(key)
        epoch = None if number is None else self._epochs.get(number)
        if number is None or epoch is None:
            noun = "job" if isinstance(key, int) else "service"
            raise FencedError(f"{noun} {key} is claimed by another controller")
        return hold_claim(number, epoch)

    def finish(self, key: Key) -> None:
        """Release the job; leave it to others for a while if it is not finished."""
        self._driven.discard(key)
        number = self._find_number(key)
        if number is None:
            return  # a service that is down
        self._epochs = {other: epoch for other, epoch in self._epochs.items() if other != number}
        self._given_up[number] = self._clock.now_s() + REST_S
        try:
            self._store.claims.release(self.name, [number])
        except StateError as error:
            log.warning("%s; %s stays claimed until the store answers", error.message, key)

    def extend(self, store: Store) -> bool:
        """Extend the lease through another connection, unless it has ended; return whether there is one now."""
        return store.claims.extend(self.name)

    def resign(self) -> None:
        """Release all claims at once. If the store is unreachable, they expire with their lease."""
        try:
            self._store.claims.resign(self.name)
        except StateError as error:
            log.warning("%s; other controllers take over when the lease ends", error.message)
