"""A spot policy that changes its mind: its requests must be carried out correctly, however little sense they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from broker.jobs import policy_runner
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait

if TYPE_CHECKING:
    from tests.simulation.universe import Universe

POLL_S_MIN, POLL_S_MAX = 4.0, 12.0  # the product's are for programs that run for hours
SOON_HOURS = 5.0 / 3600


@contextmanager
def fickle_policy(universe: Universe) -> Iterator[None]:
    """Replace the policy of jobs with a deadline. Once faults have stopped, its job stays where it is."""

    def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
        is_held = view.current is not None
        drawn = 0.0 if universe.is_healed else universe.random.random()
        if is_held and drawn < 0.6:
            return Stay(hours=SOON_HOURS)
        if drawn > 0.9:
            return Wait(hours=SOON_HOURS)
        index = 0 if universe.is_healed else universe.random.randrange(len(candidates))
        return Move(target=candidates[index], hours=SOON_HOURS, reason="a change of mind")

    with ExitStack() as stack:
        if universe.follows_deadline:
            stack.enter_context(patch.object(policy_runner, "load_policy", lambda name: decide))
            stack.enter_context(patch.object(policy_runner, "POLL_S_MIN", POLL_S_MIN))
            stack.enter_context(patch.object(policy_runner, "POLL_S_MAX", POLL_S_MAX))
        yield
