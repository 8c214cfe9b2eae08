"""The part of its nodes that a run reserves, as sent to the node's agent."""

from __future__ import annotations

from broker.runtime.reserving import Reservation, describe_turn


def test_a_run_without_accelerators_waits_for_its_turn_too() -> None:
    """The agent lets a gang's head decide for all ranks of a run that has a turn: otherwise gangs block each other."""
    assert describe_turn(None) == {"count": None}


def test_a_reservation_names_its_share_and_the_variable_that_limits_the_program() -> None:
    reserved = Reservation(count=0.5, card_count=8, variable="CUDA_VISIBLE_DEVICES", text="T4:0.5")
    assert describe_turn(reserved) == {"count": 0.5, "card_count": 8, "variable": "CUDA_VISIBLE_DEVICES"}
