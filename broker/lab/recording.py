"""Recorder of spot markets: request the nodes of a task periodically, record the answer, terminate them at once.

Each place has one cluster, brought up and taken down at every sample, with intents and tags like any other. A sample
without a clear answer repeats the previous one, so that an outage at night does not end a recording of several days and
is not mistaken for a full market.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from broker.clock import Clock
from broker.errors import AuthError, CapacityError, CloudError, InvalidRequestError, QuotaError, UsageError
from broker.lab.traces import Trace, write_trace
from broker.provision.lifecycle import Provisioner
from broker.types import Estimate, Offer, Plan

LASTING = (AuthError, InvalidRequestError, QuotaError)  # errors that later samples would repeat


class Recorder:
    """A recorder of each place in `chosen` to its own file in the folder `out`."""

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
        on_message: Callable[[str], None],
    ) -> None:
        self._provisioner, self._plan, self._chosen = provisioner, plan, chosen
        self._clock, self._owner = clock, owner
        self._out, self._every_s, self._on_message = out, every_s, on_message
        self._seen: list[list[bool]] = [[] for _ in chosen]
        self._begun_s = [clock.now_s()] * len(chosen)

    async def run(self, ticks: int) -> None:
        """Record `ticks` samples. Raise permanent errors such as AuthError; nodes are terminated and traces kept."""
        begun_s, tick = self._clock.now_s(), 0
        while tick < ticks:
            await self._clock.sleep(max(begun_s + tick * self._every_s - self._clock.now_s(), 0.0))
            for index in range(len(self._chosen)):
                await self._record(index)
            given = sum(seen[-1] for seen in self._seen if seen)
            self._on_message(f"sample {tick + 1} of {ticks}: {given} of {len(self._chosen)} locations have capacity")
            tick = self._skip_missed(tick + 1, self._clock.now_s() - begun_s)

    def _skip_missed(self, tick: int, passed_s: float) -> int:
        """Return the sample that is due next.

        Those whose time has passed repeat the previous one: otherwise the file would be shorter than the time that it
        records.
        """
        due = max(tick, int(passed_s / self._every_s)) if self._every_s > 0 else tick
        if due > tick:
            self._on_message(f"samples took longer than the time between them: {due - tick} assumed unchanged")
            for seen in self._seen:
                seen.extend(seen[-1:] * (due - tick))
        return due

    async def _record(self, index: int) -> None:
        seen, now_s = self._seen[index], self._clock.now_s()
        is_open = await self._sample(index)
        if not seen:
            self._begun_s[index] = now_s
        if is_open is not None or seen:
            seen.append(seen[-1] if is_open is None else is_open)
            self._write(index)

    async def _sample(self, index: int) -> bool | None:
        """Return whether the place has capacity; None without a clear answer."""
        name, estimate = f"broker-trace-{self._owner[:4]}-{index}", self._chosen[index]
        await self._end(name)  # nodes of a killed recording
        try:
            await self._provisioner.up(name, replace(self._plan, estimates=(estimate,)))
            return True
        except CapacityError as error:
            if isinstance(error.__cause__, CapacityError):
                return False
            if isinstance(error.__cause__, LASTING):
                raise error.__cause__ from None
            self._on_message(f"no clear answer, assumed unchanged: {'; '.join(error.details) or error.message}")
            return None
        finally:
            await self._end(name)

    async def _end(self, name: str) -> None:
        try:
            await self._provisioner.down(name)
        except CloudError as error:
            self._on_message(f"cannot terminate {name} ({error.message}): retried; or run `broker down {name}`")

    def _write(self, index: int) -> None:
        """Write the trace after every sample, so that an interruption at any time loses nothing."""
        offer, nodes, seen = self._chosen[index].placement.offer, self._plan.task.num_nodes, self._seen[index]
        name = name_recording(offer)
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
        temporary = target.with_suffix(".part")
        temporary.write_text(write_trace(trace))
        temporary.replace(target)


def name_recording(offer: Offer) -> str:
    """Return the name of a place's recording; its file has the ending `.json`."""
    return f"{offer.cloud}-{offer.zone or offer.region}-{offer.instance_type}".replace("/", "-")


def check_folder(out: Path, chosen: Sequence[Estimate]) -> None:
    """Raise UsageError if the folder has a recording of one of the places: the first sample would replace it."""
    for each in chosen:
        file = out / f"{name_recording(each.placement.offer)}.json"
        if file.exists():
            raise UsageError(
                f"`{file}` already exists", hints=["pass `--out` with a new folder, or move the recording"]
            )


def choose_places(plan: Plan, count: int) -> list[Estimate]:
    """Choose the cheapest spot estimate of each zone, for `count` zones. Raises UsageError if there is none."""
    found = dict[tuple[str, str], Estimate]()
    for estimate in plan.estimates:
        offer = estimate.placement.offer
        if estimate.placement.is_spot:
            found.setdefault((offer.cloud, offer.zone or offer.region), estimate)
        if len(found) == count:
            break
    if not found:
        raise UsageError("no spot offer fits the task", hints=["see what fits: `broker plan TASK.yaml`"])
    return list(found.values())
