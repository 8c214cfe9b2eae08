"""Scenes of services. Tests kill the broker, its commands and the balancer at their every effect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.clouds.simulated import FaultRates
from tests.simulation.events import Violation
from tests.simulation.mixes import Mix
from tests.simulation.runner import Result, play_story
from tests.simulation.scenes import FAST
from tests.simulation.services import POLL_S, ServiceBed, check_service_end, make_task
from tests.simulation.stories import play
from tests.simulation.universe import Universe

READY = 2
MIX = Mix(jobs=(), cloud=FaultRates(), market=FAST, poll_s=2.0, restart_s_max=2.0)


@dataclass(frozen=True, kw_only=True)
class ServiceScene:
    name: str
    story: Callable[[ServiceBed], Awaitable[None]]


async def _begin(bed: ServiceBed, **policy: float) -> None:
    await bed.up(make_task(READY, **policy))
    await bed.until_serving(READY, version=1)
    bed.least = READY


async def come_and_go(bed: ServiceBed) -> None:
    await _begin(bed)


async def update(bed: ServiceBed) -> None:
    await _begin(bed)
    await bed.update(make_task(READY, run="b"))
    await bed.until_serving(READY, version=2)


async def grow_and_shrink(bed: ServiceBed) -> None:
    await _begin(bed, replicas_max=4, target_in_flight=10.0, upscale_delay_s=0.0, downscale_delay_s=5.0)
    bed.demand = 35
    await bed.until_serving(4, version=1)
    bed.demand = 0
    await bed.until_serving(READY, version=1)


async def lose_a_replica(bed: ServiceBed) -> None:
    await _begin(bed)
    bed.preempt()
    await bed.until_serving(READY, version=1)


async def update_while_one_is_lost(bed: ServiceBed) -> None:
    await _begin(bed)
    bed.preempt()
    await bed.update(make_task(READY, run="b"))
    await bed.until_serving(READY, version=2)


SERVICE_SCENES = (
    ServiceScene(name="a service", story=come_and_go),
    ServiceScene(name="a service that is updated", story=update),
    ServiceScene(name="a service that grows and shrinks", story=grow_and_shrink),
    ServiceScene(name="a service that loses a replica", story=lose_a_replica),
    ServiceScene(name="a service that is updated while a replica is lost", story=update_while_one_is_lost),
)


def play_service(scene: ServiceScene, *, kill_at: int | None = None, seed: int = 0, trace: bool = False) -> Result:
    """Play one scene of a service; with `kill_at`, kill the process that reaches that effect."""

    async def act(universe: Universe) -> None:
        universe.services = bed = ServiceBed(universe)
        universe.is_acting = True

        async def run_story() -> None:
            try:
                await scene.story(bed)
                await bed.down()
            except Exception as error:
                universe.fail(error)
            universe.is_acting = False

        with bed.watched():
            universe.begin(run_story())
            await play(universe)
        if universe.failure is None:
            try:
                check_service_end(universe)
            except Violation as violation:
                universe.fail(violation)

    return play_story(seed, MIX, act, kill_at=kill_at, trace=trace)


__all__ = ["POLL_S", "SERVICE_SCENES", "ServiceScene", "play_service"]
