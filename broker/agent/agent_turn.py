"""When a run may begin on a node, and which accelerators it has there. Standard library only.

Runs begin in the order of their ids, and none overtakes one that waits: a stream of small runs cannot starve a large
one. A run reserves whole accelerators, a part of one, or the whole node, and begins as soon as that is free. What is
reserved is recorded in the run's own `state.json` and counts until the run is over, so that it is true after any kill.
The head decides for all nodes of a cluster: if each node decided for itself, two runs that reach the nodes in different
orders could wait for each other.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from broker.agent import agent_files as files

    Held = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files as files

UNITS = 10_000  # of one accelerator: shares are added up as whole numbers
WHOLE_NODE = {"cards": None, "share": 1.0}
PENDING = "PENDING"


def take(run_id: int, spec: Mapping[str, Any], record: Callable[..., None], told: Held | None = None) -> Held | None:
    """Reserve what the run asks for and return it as `{"cards": [index, ...] or None, "share"}`; None: not yet.

    `record` writes it down while no other run here can decide. `told`: what the head has reserved, to be the same here.
    """
    lock = files.try_lock(files.STATE / "turn.lock")
    if lock is None:
        return None  # another run is deciding: asked again at the next tick
    try:
        waiting, held = read_others(run_id)
        if told is not None:
            found = told if fits(told, held) else None
        elif any(other < run_id for other in waiting):
            return None
        else:
            queue = spec.get("queue") or {}
            found = choose(queue.get("count"), int(queue.get("card_count") or 0), held)
        if found is not None:
            record(held=found)
        return found
    finally:
        os.close(lock)


def read_others(run_id: int) -> tuple[list[int], list[Held]]:
    """Ids of the other runs that wait, and what those have that do not."""
    waiting: list[int] = []
    held: list[Held] = []
    for other in files.list_run_ids():
        if other == run_id or files.is_over(other):
            continue
        state = files.read_json(files.run_folder(other) / "state.json") or {}
        if state.get("status", PENDING) == PENDING:
            waiting.append(other)
        else:
            held.append(read_held(state.get("held")))
    return waiting, held


def read_held(value: Any) -> Held:
    """The whole node where nothing that can be read is recorded, as by an older agent: it knew whole nodes only."""
    try:
        if value["cards"] is not None:
            return {"cards": [int(card) for card in value["cards"]], "share": float(value["share"])}
    except (TypeError, KeyError, ValueError):
        pass
    return dict(WHOLE_NODE)


def choose(count: float | None, card_count: int, held: Sequence[Held]) -> Held | None:
    """Return what a run gets that asks for `count` of so many cards, None for the whole node; None where it must wait.

    A part goes to the fullest card that has room, so that whole ones stay free: of two cards with 0.5 and 0 in use,
    0.5 more is put on the first, 0.7 on the second, and 2 must wait.
    """
    if count is None:
        return None if held else dict(WHOLE_NODE)
    used = add_up(held)
    if used is None:
        return None
    cards = range(card_count)
    if count < 1:
        having_room = [card for card in cards if used.get(card, 0) + to_units(count) <= UNITS]
        if not having_room:
            return None
        return {"cards": [max(having_room, key=lambda card: (used.get(card, 0), -card))], "share": count}
    free, wanted = [card for card in cards if not used.get(card)], min(int(count), card_count)
    return {"cards": free[:wanted], "share": 1.0} if len(free) >= wanted else None


def fits(asked: Held, held: Sequence[Held]) -> bool:
    """Whether these very cards are free."""
    if asked["cards"] is None:
        return not held
    used = add_up(held)
    return used is not None and all(used.get(card, 0) + to_units(asked["share"]) <= UNITS for card in asked["cards"])


def add_up(held: Sequence[Held]) -> dict[int, int] | None:
    """Units in use by card; None where a run has the whole node."""
    used: dict[int, int] = {}
    for each in held:
        if each["cards"] is None:
            return None
        for card in each["cards"]:
            used[card] = used.get(card, 0) + to_units(each["share"])
    return used


def to_units(share: float) -> int:
    return round(share * UNITS)


def name_cards(held: Held | None, spec: Mapping[str, Any], around: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows the program its accelerators and no others.

    Where `around`, the agent's own environment, is limited to some of the machine's, the run's are among those; one
    that names too few of them is left as it is.
    """
    variable = (spec.get("queue") or {}).get("variable")
    if not variable or held is None or held["cards"] is None:
        return {}
    cards = [int(card) for card in held["cards"]]
    if variable not in around:
        return {variable: ",".join(map(str, cards))}
    names = [name.strip() for name in around[variable].split(",") if name.strip()]
    return {variable: ",".join(names[card] for card in cards)} if max(cards) < len(names) else {}
