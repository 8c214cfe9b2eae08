"""Grants for a task's nodes: checked before money is spent, delivered at the start, renewed with the lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.access import GRANTERS, find_granter
from broker.access.base import CanSweepGrants, Grant, Granter, Need
from broker.access.kept import SweepMark, name_needs
from broker.access.needs import group_needs, list_needs
from broker.clock import Clock
from broker.config import Config, has_own_bucket_access
from broker.errors import AuthError, CloudError
from broker.types import Cluster, Event, EventKind, Plan, Task, make_event

HERE = "local"  # its nodes are processes on this machine: nothing is paid for, so nothing is refused
CLUSTERS_MAX = 20_000  # whose times of renewal are kept
USABLE_S_MIN = 900.0  # minimum remaining validity of an older grant that is used if a new one cannot be made
OPT_OUT = 'if nodes have access by other means (their cloud identity): `bucket_access = "own"` in `config.toml`'
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}
Deliver = Callable[[Mapping[str, Any]], Awaitable[object]]


class Grants:
    """Make, deliver and renew grants.

    `find_task` returns the task of a managed job's cluster, with its mounts, or None for other clusters. `record_event`
    records an event.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        find_task: Callable[[Cluster], Task | None] = lambda cluster: None,
        record_event: Callable[[Cluster, Event], None] = lambda cluster, event: None,
        granters: Mapping[str, Granter] | None = None,
    ) -> None:
        self._config, self._clock, self._find_task, self._record_event = config, clock, find_task, record_event
        self._granters: dict[str, Granter] = dict(granters or {})
        self._known: dict[tuple[tuple[Need, ...], str], Grant] = {}
        self._sweep_mark, self._swept = SweepMark(config.home), ""  # `_known` holds no grant that was made before it
        # cluster -> when its nodes' files were replaced, and when they are due. A clock that shows an earlier time was
        # set back, and credentials expire by the clock of their issuer.
        self._renew_s: dict[str, tuple[float, float]] = {}
        self._recorded: dict[str, str] = {}
        self._lock = threading.Lock()  # one thread at a time makes grants, so that jobs with the same needs share them

    def check(self, plans: Sequence[Plan], *, allowances_s: Sequence[float] | None = None) -> Sequence[str]:
        """Describe, for the user, the access that nodes get. Makes the grants and uses them once.

        `allowances_s`: how long each plan's nodes may run unattended. Raises AuthError or InvalidRequestError if nodes
        would have no access, and TransientError if that cannot be determined.
        """
        found: dict[str, None] = {}
        if has_own_bucket_access(self._config):
            return []
        for index, plan in enumerate(plans):
            clouds = sorted({estimate.placement.offer.cloud for estimate in plan.estimates} - {HERE})
            for scheme, needs in group_needs(list_needs(plan.task, self._config.owner)).items():
                granter = self._get_granter(scheme)
                lacking = [cloud for cloud in clouds if not granter.find_own(plan.task, cloud)]
                required = [need for need in needs if not need.is_optional]
                if not lacking or not required:
                    continue
                grant = self._try_out(granter, scheme, needs, plan.task, lacking)
                allowance_s = allowances_s[index] if allowances_s else None
                found[self._describe(required, grant, allowance_s)] = None
        return list(found)

    async def grant(self, cluster: Cluster, task: Task) -> Mapping[str, Any] | None:
        """Return the agent's request with files and variables; None if the nodes need none. Raises CloudError."""
        grant = await asyncio.to_thread(self._issue, cluster, task)
        self._note_renewal(cluster, grant)
        return None if grant is None else _make_request(grant)

    async def renew(self, cluster: Cluster, deliver: Deliver) -> None:
        """Deliver a newer grant when it is due. Never raises: the next renewal of the lease retries."""
        replaced_s, due_s = self._renew_s.get(cluster.name, (0.0, 0.0))
        if replaced_s <= self._clock.now_s() < due_s:
            return
        task = self._find_task(cluster)
        if task is None:
            return
        try:
            grant = await asyncio.to_thread(self._issue, cluster, task, is_renewal=True)
            if grant is not None:
                await deliver(_make_request(grant))
        except CloudError as error:
            self._record_once(cluster, "; ".join([error.message, *error.hints[:1]]))
            return
        self._recorded.pop(cluster.name, None)
        self._note_renewal(cluster, grant)

    def _note_renewal(self, cluster: Cluster, grant: Grant | None) -> None:
        now_s = self._clock.now_s()
        due_s = float("inf") if grant is None else max(grant.renew_s, now_s + 60.0)
        self._renew_s.pop(cluster.name, None)  # the oldest come first
        if len(self._renew_s) >= CLUSTERS_MAX:  # of ended clusters; one that is not known is renewed at once
            self._renew_s = dict(list(self._renew_s.items())[CLUSTERS_MAX // 2 :])
            self._recorded = {name: error for name, error in self._recorded.items() if name in self._renew_s}
        self._renew_s[cluster.name] = (float("-inf") if grant is None else now_s, due_s)

    def sweep(self) -> int:
        """Delete the accounts and users behind the grants; return their number.

        Call this only if none of our nodes remain. Every process forgets the grants that it holds. Raises CloudError.
        """
        granters = (self._get_granter(scheme) for scheme in GRANTERS)
        try:
            return sum(granter.sweep() for granter in granters if isinstance(granter, CanSweepGrants))
        finally:
            self._sweep_mark.renew()

    def _issue(self, cluster: Cluster, task: Task, *, is_renewal: bool = False) -> Grant | None:
        cloud = cluster.placement.offer.cloud
        if has_own_bucket_access(self._config):
            return None
        found = []
        all_needs = list_needs(task, self._config.owner)
        for scheme, needs in group_needs(all_needs).items():
            granter = self._get_granter(scheme)
            if granter.find_own(task, cloud):
                continue
            try:
                found.append(self._make(granter, scheme, needs, task, is_renewal=is_renewal))
            except CloudError:
                if cloud != HERE and not all(need.is_optional for need in needs):
                    raise
        return replace(join_grants(found), scope=name_needs(self._config.owner, "", all_needs)) if found else None

    def _make(
        self, granter: Granter, scheme: str, needs: tuple[Need, ...], task: Task, *, is_renewal: bool = False
    ) -> Grant:
        """Return a cached grant if it is fresh enough, else a new one, else an older one with enough remaining time.

        `is_renewal`: the nodes have the older one, and a login error is raised while there is time to mend it.
        """
        endpoint = _find_endpoint(scheme, task)
        with self._lock:
            # Swept by `broker gc` while a launch waited for its price, or since a daemon last had a job.
            if (swept := self._sweep_mark.read()) != self._swept:
                self._known, self._swept = {}, swept
            known = self._known.get((needs, endpoint))
            now_s = self._clock.now_s()
            if known is not None and known.issued_s <= now_s < known.renew_s:
                return known
            try:
                grant = granter.issue(needs, endpoint=endpoint)
            except CloudError as error:
                is_mendable = is_renewal and isinstance(error, AuthError)
                if known is None or known.expires_s - now_s < USABLE_S_MIN or is_mendable:
                    raise
                return known
            # A daemon runs for months, and the credentials of ended jobs must not stay in its memory.
            self._known = {key: each for key, each in self._known.items() if now_s < each.expires_s}
            self._known[needs, endpoint] = grant
            return grant

    def _try_out(
        self, granter: Granter, scheme: str, needs: tuple[Need, ...], task: Task, clouds: Sequence[str]
    ) -> Grant:
        try:
            grant = self._make(granter, scheme, needs, task)
            for need in needs:
                if not need.is_optional and not need.is_made_later:
                    granter.prove(need, grant)
        except CloudError as error:
            with self._lock:
                self._known.pop((needs, _find_endpoint(scheme, task)), None)  # the next call makes another
            where, urls = " and ".join(clouds[:3]), ", ".join(f"`{need.url}`" for need in needs if not need.is_optional)
            message = f"nodes on {where} would have no access to {urls}: {error.message}"
            raise type(error)(message, hints=(*error.hints, OPT_OUT)) from error
        return grant

    def _describe(self, needs: Sequence[Need], grant: Grant, allowance_s: float | None) -> str:
        urls = ", ".join(f"{need.url}*" if need.is_open else need.url for need in needs)
        life_s = grant.expires_s - grant.issued_s
        period = f"{_show_hours(life_s)} at a time"
        sentence = f"nodes get access to {urls} by {grant.by}, for {period}, renewed by this machine"
        if allowance_s is not None and life_s - (grant.renew_s - grant.issued_s) < allowance_s:
            sentence += (
                f"; without this machine, access ends before the nodes do ({_show_hours(allowance_s)}): after that, "
                "neither checkpoints nor the outcome reach the bucket (docs/BUCKET_ACCESS.md)"
            )
        return sentence

    def _get_granter(self, scheme: str) -> Granter:
        if scheme not in self._granters:
            self._granters[scheme] = find_granter(scheme)(self._config, clock=self._clock)
        return self._granters[scheme]

    def _record_once(self, cluster: Cluster, error: str) -> None:
        if self._recorded.get(cluster.name) != error:
            self._recorded[cluster.name] = error
            self._record_event(cluster, make_event(EventKind.ACCESS_NOT_RENEWED, error=error))


def join_grants(grants: Sequence[Grant]) -> Grant:
    """Join the grants of all schemes; the result is valid as long as the shortest of them."""
    return Grant(
        files={name: content for grant in grants for name, content in grant.files.items()},
        envs={name: value for grant in grants for name, value in grant.envs.items()},
        secrets={name: value for grant in grants for name, value in grant.secrets.items()},
        issued_s=min(grant.issued_s for grant in grants),
        expires_s=min(grant.expires_s for grant in grants),
        renew_s=min(grant.renew_s for grant in grants),
        by=", ".join(grant.by for grant in grants),
    )


def _make_request(grant: Grant) -> Mapping[str, Any]:
    """Make the request. Secrets are only unwrapped here, on the way to the agent's stdin."""
    files = {name: secret.value for name, secret in grant.files.items()}
    envs = {**grant.envs, **{name: secret.value for name, secret in grant.secrets.items()}}
    return {"files": files, "envs": envs, "scope": grant.scope}


def _find_endpoint(scheme: str, task: Task) -> str:
    """Return the endpoint of the service, if the task's program is configured to use a different one; otherwise ""."""
    return next((task.envs[name] for name in ENDPOINTS.get(scheme, ()) if task.envs.get(name)), "")


def _show_hours(duration_s: float) -> str:
    hours = duration_s / 3600
    return f"{hours / 24:.3g} days" if hours >= 72 else f"{hours:.3g} h"
