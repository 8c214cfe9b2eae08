"""The table of recorded runs: made from recordings, and accurate between its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.lab.markets import make_site
from broker.lab.recorded_runs import RecordedMarket, list_markets, read_families, replay_markets, write_table
from broker.lab.replay import Case, replay
from broker.lab.traces import make_trace, write_trace
from broker.spot.policies import load_policy
from broker.spot.recorded_runs import interpolate_runs, parse_scenarios

HOURS = 10  # of submission in each market: single runs jump between nodes, but their mean does not


@pytest.mark.long
def test_runs_between_the_nodes_are_those_of_a_replay() -> None:
    """Monte Carlo at a work, deadline and start that are not nodes: the same markets, replayed."""
    markets = [RecordedMarket(family="made", traces=(make_trace("made", seed, hours=160.0),)) for seed in (1, 2)]
    scenarios = parse_scenarios(json.loads(write_table(replay_markets(markets, hours=HOURS), "made up")))
    work, start = 24.0, 0.15
    deadline = work * 1.5 + start
    runs = interpolate_runs(scenarios, work_hours=work, deadline_hours=deadline, start_hours=start)
    replayed = []
    for market in markets:
        case = Case(
            sites=tuple(make_site(trace, start_hours=start) for trace in market.traces),
            work_hours=work,
            deadline_hours=deadline,
        )
        longest = market.traces[0].hours
        replayed += [replay(case, load_policy("adaptive"), longest * (index + 0.5) / HOURS) for index in range(HOURS)]
    usd = sum(each.spot_hours / 3.1 + each.ondemand_hours for each in runs)
    assert usd == pytest.approx(sum(each.usd for each in replayed), rel=0.06)
    hours = sum(each.hours for each in runs)
    assert hours == pytest.approx(sum(each.hours for each in replayed), rel=0.06)


def test_a_folder_of_recordings_is_a_family_and_gives_groups_of_its_places(tmp_path: Path) -> None:
    for family, count in (("alpha", 4), ("beta", 2)):
        (tmp_path / family).mkdir()
        for index in range(count):
            trace = make_trace(f"zone-{index}", index, hours=10.0)
            (tmp_path / family / f"zone-{index}.json").write_text(write_trace(trace))
    markets = list_markets(read_families(tmp_path))
    sizes = sorted((each.family, len(each.traces)) for each in markets)
    assert sizes[:4] == [("alpha", 1)] * 4
    assert ("alpha", 3) in sizes
    assert [size for family, size in sizes if family == "beta"] == [1, 1, 3, 3, 6]
    assert len({each.name for each in markets}) == len(markets)
    assert {(each.family, len(each.traces)) for each in markets if each.is_assembled} == {
        ("alpha", 6), ("beta", 3), ("beta", 6),
    }  # fmt: skip


@pytest.mark.exhaustive
def test_copies_of_a_recording_begin_at_other_hours_and_stay_the_same_market(tmp_path: Path) -> None:
    (tmp_path / "beta").mkdir()
    recorded = make_trace("zone", 7, hours=100.0)
    (tmp_path / "beta" / "zone.json").write_text(write_trace(recorded))
    markets = [each for each in list_markets(read_families(tmp_path)) if each.is_assembled]
    assert [len(each.traces) for each in markets] == [3, 3, 6]
    for market in markets:
        counts = {each.counts for each in market.traces}
        assert len(counts) == len(market.traces), "no two places open at the same time"
        for each in counts:
            assert any(each == recorded.counts[k:] + recorded.counts[:k] for k in range(len(each)))
    table = json.loads(write_table(replay_markets(markets[:1], hours=1), "made up"))
    assert [each.is_assembled for each in parse_scenarios(table)] == [True]
