"""Users' commands in any order under faults: hypothesis finds a failing sequence and shortens it."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.types import JobStatus
from tests.clouds.simulated import FaultRates
from tests.simulation import scenes, stories
from tests.simulation.invariants import TERMINAL
from tests.simulation.runner import make_folder, watch_log
from tests.simulation.scenes import Scene
from tests.simulation.universe import Universe, pace
from tests.tiers import examples

ENDS = tuple(status for status in JobStatus if status.is_terminal)
PAUSES_S = st.sampled_from((0.0, 0.1, 1.0, 3.0, 10.0, 40.0, 150.0))
WHICH = st.integers(0, 3)
JOBS_MAX = 4
TROUBLES = ("stuck", "mute", "unknown_after", "late", "full", "partial", "forgotten", "blank", "ignored", "refused")


class Commands(RuleBasedStateMachine):
    """A broker and its users. After each command some time passes; every checker examines every effect meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.mix = replace(scenes.make_mix(), jobs=(), heal_s=float("inf"))
        self.universe: Universe = None  # type: ignore[assignment]

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        self.universe = Universe(self.stack.enter_context(make_folder()), seed, self.mix)
        self.stack.callback(self.universe.loop.close)
        self.stack.callback(self.universe.file.close)
        self.stack.enter_context(watch_log(self.universe))
        self.stack.enter_context(pace(self.mix.poll_s))
        random.seed(seed)  # the product's jitter
        self.universe.is_acting = True
        self.story = self.universe.loop.begin(stories.play(self.universe), None)
        self.launch_job(nodes=2, exit_codes=(), hedge=2, budget_usd=None, pause_s=3.0)

    def teardown(self) -> None:
        """Stop faults: then every job ends, and nothing is left."""
        if self.universe is None:
            return
        universe = self.universe
        try:
            universe.is_acting = False
            if not universe.is_healed:
                stories.heal(universe)
            universe.loop.run_until_complete(self.story)
            universe.loop.run_until_complete(universe.loop.begin(_settle(universe), None))
            assert universe.failure is None, universe.failure
            wrong = scenes.check_end(universe, Scene(name="commands", mix=self.mix, ends=ENDS, self_ends=None))
            assert not wrong, wrong
        finally:
            self.stack.close()

    @invariant()
    def nothing_that_must_hold_is_broken(self) -> None:
        assert self.universe is None or self.universe.failure is None, self.universe.failure

    # -- users ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.universe.mix.jobs) < JOBS_MAX)
    @rule(
        nodes=st.integers(1, 2),
        exit_codes=st.sampled_from(((), (3,), (3, 0))),
        hedge=st.integers(1, 3),
        budget_usd=st.sampled_from((None, None, 0.02)),
        pause_s=PAUSES_S,
    )
    def launch_job(
        self, nodes: int, exit_codes: tuple[int, ...], hedge: int, budget_usd: float | None, pause_s: float
    ) -> None:
        spec = scenes.make_job(nodes=nodes, exit_codes=exit_codes, hedge=hedge, budget_usd=budget_usd, steps=25)
        index = len(self.universe.mix.jobs)
        self.universe.mix = replace(self.universe.mix, jobs=(*self.universe.mix.jobs, spec))
        self._command("submit", lambda process: stories.submit_once(self.universe, process, index, spec), pause_s)

    @precondition(lambda self: self.universe.jobs_in)
    @rule(which=WHICH, pause_s=PAUSES_S)
    def launch_with_the_same_request_id(self, which: int, pause_s: float) -> None:
        index, _ = self._choose(which)
        spec = self.universe.mix.jobs[index]
        self._command("submit", lambda process: stories.submit_once(self.universe, process, index, spec), pause_s)

    @precondition(lambda self: self.universe.jobs_in)
    @rule(which=WHICH, pause_s=PAUSES_S)
    def cancel(self, which: int, pause_s: float) -> None:
        index, _ = self._choose(which)
        self._command("cancel", lambda process: stories.cancel_job(self.universe, process, index), pause_s)

    @precondition(lambda self: self._has_ended())
    @rule(which=WHICH, pause_s=PAUSES_S)
    def retry(self, which: int, pause_s: float) -> None:
        _, job_id = self._choose(which)
        self._command("retry", lambda process: stories.retry(self.universe, process, job_id), pause_s)

    @precondition(lambda self: self.universe.jobs_in)
    @rule(which=WHICH, pause_s=PAUSES_S)
    def take_its_cluster_down(self, which: int, pause_s: float) -> None:
        _, job_id = self._choose(which)
        self._command("down", lambda process: stories.take_down(self.universe, process, job_id), pause_s)

    @precondition(lambda self: self.universe.mix.jobs)
    @rule(pause_s=PAUSES_S)
    def launch_cluster(self, pause_s: float) -> None:
        """Launch a cluster, and take it down in the end."""
        self.universe.begin(stories.use_cluster(self.universe, "launch"))
        self._pass(pause_s)

    @precondition(lambda self: self._list_dev_nodes())
    @rule(pause_s=PAUSES_S)
    def autostop(self, pause_s: float) -> None:
        """Switch off nodes that were idle for long enough, as autostop does."""
        for node_id in self._list_dev_nodes():
            self.universe.cloud.end_by_itself(node_id, reason="autostop")
        self._pass(pause_s)

    @rule(pause_s=PAUSES_S)
    def collect(self, pause_s: float) -> None:
        self._command("gc", lambda process: stories.collect(self.universe, process), pause_s)

    # -- the universe -------------------------------------------------------------------------------------------------

    @rule(pause_s=PAUSES_S)
    def kill_the_controller(self, pause_s: float) -> None:
        stories.kill(self.universe)
        self._pass(pause_s)

    @rule(pause_s=PAUSES_S)
    def stop_the_controller(self, pause_s: float) -> None:
        """Stop the controller as a laptop's lid does; it resumes later, sure that it still leads."""
        stories.stop(self.universe)
        self._pass(pause_s)

    @precondition(lambda self: self.universe.list_live_nodes())
    @rule(pause_s=PAUSES_S)
    def preempt(self, pause_s: float) -> None:
        scenes.preempt(self.universe)
        self._pass(pause_s)

    @precondition(lambda self: self.universe.list_live_nodes())
    @rule(pause_s=PAUSES_S)
    def cut_a_node_off(self, pause_s: float) -> None:
        stories.partition(self.universe)
        self._pass(pause_s)

    @rule(name=st.sampled_from(TROUBLES), pause_s=PAUSES_S)
    def trouble_the_cloud(self, name: str, pause_s: float) -> None:
        """Make half of the cloud's answers fail in one way, until the next trouble."""
        self.universe.cloud.faults = FaultRates(**{name: 0.5})
        self._pass(pause_s)

    @rule(pause_s=PAUSES_S)
    def spare_the_cloud(self, pause_s: float) -> None:
        self.universe.cloud.faults = FaultRates()
        self._pass(pause_s)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _command(self, name: str, work: Any, pause_s: float) -> None:
        self.universe.begin(stories.insist(self.universe, name, work))
        self._pass(pause_s)

    def _pass(self, pause_s: float) -> None:
        if self.universe.failure is None:
            self.universe.loop.run_until_complete(self.universe.loop.begin(asyncio.sleep(pause_s), None))

    def _choose(self, which: int) -> tuple[int, int]:
        known = sorted(self.universe.jobs_in.items())
        return known[which % len(known)]

    def _has_ended(self) -> bool:
        return bool(self.universe.read(f"SELECT 1 FROM jobs WHERE status IN {TERMINAL}"))

    def _list_dev_nodes(self) -> list[str]:
        return [node.id for node in self.universe.list_live_nodes() if node.cluster == "dev"]


async def _settle(universe: Universe) -> None:
    """Settle the last commands, which belong to the universe and not to the story."""
    await asyncio.gather(*universe.side_tasks, return_exceptions=True)


TestCommands = Commands.TestCase
TestCommands.settings = settings(
    max_examples=examples(40), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
