"""Renew ssh access to running nodes that cannot be reached: this machine's address may have changed since the launch.

The firewall of a node admits ssh from one address. From another network, a healthy gang would look unreachable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from broker.clock import Clock
from broker.clouds.base import Cloud, RenewsAccess
from broker.errors import CloudError
from broker.types import Node

log = logging.getLogger(__name__)

RENEW_EVERY_S = 30.0  # for the nodes of one create call, however many calls fail
WAIT_S_MAX = 15.0  # limit for a caller; the renewal continues for the next caller


class AccessRenewer:
    """Renew access for transports before they give up on a node. Reads clouds on first use: creating them takes 1 s."""

    def __init__(self, clouds: Mapping[str, Cloud], *, clock: Clock) -> None:
        self._clouds = clouds
        self._clock = clock
        self._started_s: dict[tuple[str, str, str], float] = {}
        self._running: dict[tuple[str, str, str], asyncio.Task[bool | CloudError]] = {}

    async def renew(self, node: Node) -> bool:
        """Return whether a rule was just changed, so that another connection is worth trying.

        Raises CloudError if the cloud refuses to change it, also within RENEW_EVERY_S of the refusal.
        """
        cloud = self._clouds.get(node.cloud)
        if not isinstance(cloud, RenewsAccess):
            return False
        key = (node.cloud, node.cluster, node.token)
        running = self._running.get(key)
        if running is None or running.done():
            if 0.0 <= self._clock.now_s() - self._started_s.get(key, float("-inf")) < RENEW_EVERY_S:
                _read(running)
                return False
            self._started_s[key] = self._clock.now_s()
            running = self._running[key] = asyncio.ensure_future(self._renew(cloud, node))
        timer = asyncio.ensure_future(self._clock.sleep(WAIT_S_MAX))
        try:
            await asyncio.wait({running, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return _read(running)

    async def _renew(self, cloud: RenewsAccess, node: Node) -> bool | CloudError:
        try:
            has_changed = await cloud.renew_access([node])
        except CloudError as error:
            log.info("cannot check the firewall of %s: %s", node.id, error.message)
            return error
        if has_changed:
            log.info("ssh to %s is now allowed from this machine's current address", node.cluster)
        return has_changed


def _read(renewal: asyncio.Task[bool | CloudError] | None) -> bool:
    """Return whether a renewal has ended and changed a rule. Raises CloudError if it was refused."""
    if renewal is None or not renewal.done() or renewal.cancelled():
        return False
    outcome = renewal.result()
    if isinstance(outcome, CloudError):
        raise outcome
    return outcome
