"""Recording spot markets: the nodes of a task are asked for again and again, noted, and ended at once.

One cluster a place, brought up and taken down at every look: intents and tags as for any other. A look at which a cloud
says neither yes nor no counts as the one before it, so that an outage at night does not end a recording of days, and is
not taken for a full market.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from broker.clock import Clock
from broker.errors import AuthError, CapacityError, CloudError, InvalidRequestError, QuotaError
from broker.lab.traces import Trace, write_trace
from broker.provision.lifecycle import Provisioner
from broker.types import Estimate, Plan

LASTING = (AuthError, InvalidRequestError, QuotaError)  # no later look would be answered otherwise


class Recorder:
    """Of one place each of `chosen`, into a file each in the folder `out`."""

    def __init__(
        self,
        provisioner: Provisioner,
        plan: Plan,
        chosen: Sequence[Estimate],
        *,
        clock: Clock,
        owner: str,
        out: Path,
        every_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._provisioner, self._plan, self._chosen = provisioner, plan, chosen
        self._clock, self._owner = clock, owner
        self._out, self._every_s, self._tell = out, every_s, tell
        self._seen: list[list[bool]] = [[] for _ in chosen]
        self._begun_s = [clock.now_s()] * len(chosen)

    async def run(self, ticks: int) -> None:
        """Raises what no later look would change, as an AuthError; nodes are ended, and what was recorded is kept."""
        begun_s = self._clock.now_s()
        for tick in range(ticks):
            await self._clock.sleep(max(begun_s + tick * self._every_s - self._clock.now_s(), 0.0))
            for index in range(len(self._chosen)):
                await self._note(index)
            given = sum(seen[-1] for seen in self._seen if seen)
            self._tell(f"look {tick + 1} of {ticks}: {given} of {len(self._chosen)} places give the nodes")

    async def _note(self, index: int) -> None:
        seen, now_s = self._seen[index], self._clock.now_s()
        is_open = await self._look(index)
        if not seen:
            self._begun_s[index] = now_s
        if is_open is not None or seen:
            seen.append(seen[-1] if is_open is None else is_open)
            self._write(index)

    async def _look(self, index: int) -> bool | None:
        """Whether the place gives the nodes; None: it gave no clear answer."""
        name, estimate = f"broker-trace-{self._owner[:4]}-{index}", self._chosen[index]
        await self._end(name)  # what a killed recording left
        try:
            await self._provisioner.up(name, replace(self._plan, estimates=(estimate,)))
            return True
        except CapacityError as error:
            if isinstance(error.__cause__, CapacityError):
                return False
            if isinstance(error.__cause__, LASTING):
                raise error.__cause__ from None
            self._tell(f"no clear answer, taken to be as before: {'; '.join(error.details) or error.message}")
            return None
        finally:
            await self._end(name)

    async def _end(self, name: str) -> None:
        try:
            await self._provisioner.down(name)
        except CloudError as error:
            self._tell(f"{name} is not ended yet ({error.message}): the next look or `broker down {name}` will")

    def _write(self, index: int) -> None:
        """After every look, so that an end at any moment loses nothing."""
        offer, nodes, seen = self._chosen[index].placement.offer, self._plan.task.num_nodes, self._seen[index]
        name = f"{offer.cloud}-{offer.zone or offer.region}-{offer.instance_type}".replace("/", "-")
        trace = Trace(
            name=name,
            gap_hours=max(self._every_s, 1.0) / 3600,
            counts=tuple(nodes if is_open else 0 for is_open in seen),
            gang=nodes,
            prices=() if offer.spot_usd_hour is None else (offer.spot_usd_hour,) * len(seen),
            ondemand_usd_hour=offer.ondemand_usd_hour,
            started_s=self._begun_s[index],
        )
        target = self._out / f"{name}.json"
        aside = target.with_suffix(".part")
        aside.write_text(write_trace(trace))
        aside.replace(target)
