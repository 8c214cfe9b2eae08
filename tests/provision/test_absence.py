"""Absence of a node from lists: it is believed gone after a number of lists and a time, as observed by the polls."""

from __future__ import annotations

from broker.provision.nodes import GAP_S_MAX, MISSES_MIN, MISSING_S_MIN, Absence

EVERY_S = 10.0


def look(absence: Absence, *, at_s: float, is_listed: bool = False, node_id: str = "n") -> bool:
    return absence.note(node_id, is_listed=is_listed, now_s=1000.0 + at_s)


def find_first(absence: Absence, every_s: float) -> int:
    """Return the number of the poll at which the node is believed gone."""
    return next(count for count in range(1, 200) if look(absence, at_s=every_s * (count - 1)))


def test_short_poll_intervals_wait_for_the_time_limit_and_long_ones_for_the_count() -> None:
    assert find_first(Absence(10.0), EVERY_S) == 1 + MISSING_S_MIN / EVERY_S
    assert find_first(Absence(10.0), GAP_S_MAX) == MISSES_MIN == 4


def test_an_hour_without_polls_counts_as_one_gap() -> None:
    absence = Absence(10.0)
    looks = [look(absence, at_s=at_s) for at_s in (0.0, 1.0, 2.0, 3600.0, 3601.0)]
    assert looks == [False] * 5
    assert look(absence, at_s=3601.0 + MISSING_S_MIN)


def test_one_list_with_the_node_resets_its_count() -> None:
    absence = Absence(10.0)
    last_s = EVERY_S * (find_first(Absence(10.0), EVERY_S) - 2)
    for count in range(int(last_s / EVERY_S) + 1):
        assert not look(absence, at_s=EVERY_S * count)
    assert not look(absence, at_s=last_s + 1.0, is_listed=True)
    assert not look(absence, at_s=last_s + EVERY_S)
    assert not look(absence, at_s=last_s + MISSING_S_MIN)


def test_absences_are_counted_per_node() -> None:
    absence = Absence(10.0)
    for count in range(13):
        assert look(absence, at_s=EVERY_S * count, node_id="a") is (count == 12)
        look(absence, at_s=EVERY_S * count, is_listed=True, node_id="b")
    assert not look(absence, at_s=121.0, node_id="b") and look(absence, at_s=121.0, node_id="a")


def test_two_absences_in_a_row_suffice_if_lists_never_lag() -> None:
    absence = Absence(0.0)
    assert [look(absence, at_s=at_s) for at_s in (0.0, 0.1)] == [False, True]
