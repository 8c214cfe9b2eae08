"""Judge the network between the nodes of a gang before its program starts. Standard library only.

The coordinator lets all nodes measure at the same time (`agent_allreduce`), once their setups have ended, and gets
GB/s for each pair of neighbours on a ring. Only a node that is slow with both neighbours, while other pairs are not, is
at fault: a single slow pair does not show which end is slow, and if all are slow, so is the network.

    expected 3.1 GB/s    0-1 0.2    1-2 0.3    2-3 2.9    3-0 2.8    -> rank 1 is at fault
    expected 3.1 GB/s    0-1 0.2    1-2 2.9    2-3 2.9    3-0 2.8    -> a slow link, reported only
    expected 3.1 GB/s    0-1 0.2    (two nodes)                      -> a slow link, reported only
"""

from __future__ import annotations

import secrets
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from broker.agent import agent_allreduce, agent_files

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
    Pair = tuple[int, int]
else:
    import agent_allreduce
    import agent_files

LIMIT_S = 30.0  # of the whole check before the first step, with the GPUs'
TIME_S_MIN = 5.0  # with less than this left, the network is not measured
SLACK_S = 3.0  # until the answers of all nodes have arrived
SHARE_MIN = 0.25  # of the expected figure: a pair below is slow
SHARE_REPORTED = agent_allreduce.SHARE_FAST  # a pair below is reported
SHARE_OF_OTHERS = 0.5  # of the median of the other pairs: a node at fault is below on both sides
# One TCP connection, without torch or with gloo. AWS limits a single flow outside of a placement group to 5 Gbit/s
# ("Amazon EC2 instance network bandwidth", EC2 user guide), whatever the instance has.
TCP_GBS = 0.625
PASSED = "network.json"  # in the node's state: the gang's GPUs between which the network has passed
GBS_MAX = 1e5
NEIGHBOURS = 2
TEXT_MAX = 300
SCRIPT = """\
command -v python3 >/dev/null || exit 0
exec python3 "$(dirname "$BROKER_PROGRESS_FILE")/allreduce.py" "$(dirname "$BROKER_PROGRESS_FILE")" >/dev/null 2>&1"""


class NetworkFinding(NamedTuple):
    """Faults by rank, and whether the network is slow without one: then it is only reported."""

    faults: dict[int, str]
    is_slow: bool


class NetworkSurvey:
    """One measurement by all nodes of a gang; the coordinator calls it with its lock held."""

    def __init__(self, addresses: list[str], order: dict[str, Any], folder: Path) -> None:
        self._addresses, self._order, self._folder = addresses, order, folder
        self._ready: dict[int, Message] = {}  # rank -> what it sent with `setup`
        self._answers: dict[int, Message] = {}
        self._is_begun = self.is_over = False

    def note(self, rank: int, offer: Any) -> None:
        """Record the port at which a node will listen, the time that its GPUs' check took, and its GPUs."""
        if isinstance(offer, dict) and is_port(offer.get("port")) and is_figure(offer.get("took_s")):
            cards = offer.get("cards")
            self._ready[rank] = {**offer, "cards": cards if isinstance(cards, list) else []}

    def begin(self) -> Message | None:
        """Return what to send to all nodes; None if there is nothing to measure, or it has begun."""
        if self._is_begun:
            return None
        self._is_begun = True
        left_s = LIMIT_S - max((offer["took_s"] for offer in self._ready.values()), default=0.0)
        if len(self._ready) < len(self._addresses) or self._has_passed() or left_s < TIME_S_MIN:
            self.is_over = True
            return None
        ranks = range(len(self._addresses))
        return {
            "addresses": self._addresses,
            "ports": [self._ready[rank]["port"] for rank in ranks],
            "token": secrets.token_hex(16),
            "gpus": self._order["gpus"],
            "gbs": self._order["network_gbs"],
            "limit_s": left_s,
        }

    def take(self, rank: int, answer: Message) -> bool:
        """Record what a node has measured; return whether that was the last one."""
        self._answers[rank] = answer
        return len(self._answers) == len(self._addresses)

    def close(self) -> tuple[dict[int, str], str]:
        """Judge what has arrived; return the faults by rank and the line of the log. Called once."""
        self.is_over = True
        size = len(self._addresses)
        links = join_links(self._answers, size)
        backends = sorted({str(each.get("backend")) for each in self._answers.values() if each.get("backend")})
        expected_gbs = self._order["network_gbs"] if backends == ["nccl"] else min(self._order["network_gbs"], TCP_GBS)
        figures: list[Any] = [each.get("gang_gbs") for each in self._answers.values()]
        gang_gbs = min((float(each) for each in figures if is_figure(each)), default=None)
        report = {
            "backend": "+".join(backends),
            "expected_gbs": expected_gbs,
            "gang_gbs": gang_gbs,
            "pair": list(find_slowest(links) or ()),
            "pair_gbs": min(links.values(), default=None),
            "unmeasured": self._explain_gap() or ("" if links or gang_gbs is not None else "no result"),
        }
        judgement = judge(links, expected_gbs, gang_gbs)
        agent_files.note_json(self._folder / agent_files.NETWORK_REPORT, {**report, "is_slow": judgement.is_slow})
        if not (judgement.faults or judgement.is_slow or report["unmeasured"]):
            agent_files.note_json(agent_files.STATE / PASSED, {"gang": self._list_cards()})
        return judgement.faults, describe(report, size)

    def _explain_gap(self) -> str:
        """Return why a part was not measured; empty if nothing is missing."""
        missing = sorted(set(range(len(self._addresses))) - set(self._answers))
        if missing:
            return f"no answer from rank {missing[0]}"
        reasons = (str(self._answers[rank].get("unmeasured") or "")[:TEXT_MAX] for rank in sorted(self._answers))
        return next(filter(None, reasons), "")

    def _has_passed(self) -> bool:
        """Return whether the network between these GPUs has passed: it is not measured again for the next attempt."""
        cards = self._list_cards()
        return all(cards) and (agent_files.read_json(agent_files.STATE / PASSED) or {}).get("gang") == cards

    def _list_cards(self) -> list[Any]:
        return [self._ready[rank]["cards"] if rank in self._ready else [] for rank in range(len(self._addresses))]


def make_survey(spec: dict[str, Any], order: dict[str, Any] | None, folder: Path) -> NetworkSurvey | None:
    """Return the measurement of a gang; None for a single node, or if the broker does not ask for it."""
    addresses = [str(each) for each in spec["node_ips"]]
    is_asked = order is not None and is_figure(order.get("network_gbs")) and len(addresses) > 1
    return NetworkSurvey(addresses, order or {}, folder) if is_asked else None


def list_pairs(size: int) -> list[Pair]:
    """Return the neighbours on the ring, the lower rank first."""
    return sorted((min(pair), max(pair)) for pairs in agent_allreduce.list_rounds(size) for pair in pairs)


def join_links(answers: dict[int, Message], size: int) -> dict[Pair, float]:
    """Return GB/s of each pair, the lower figure of its two ends; invalid figures count as none. Pure."""
    links: dict[Pair, float] = {}
    known = set(list_pairs(size))
    for rank, answer in answers.items():
        found = answer.get("links")
        for peer, gbs in found.items() if isinstance(found, dict) else ():
            pair = (min(rank, int(peer)), max(rank, int(peer))) if str(peer).isdigit() else (-1, -1)
            if pair in known and is_figure(gbs):
                links[pair] = min(gbs, links.get(pair, gbs))
    return links


def find_slowest(links: dict[Pair, float]) -> Pair | None:
    """Return the slowest pair, of equal ones the first; None without any."""
    return min(links, key=lambda pair: (links[pair], pair)) if links else None


def judge(links: dict[Pair, float], expected_gbs: float, gang_gbs: float | None) -> NetworkFinding:
    """Return the nodes that are slow with both neighbours while the other pairs are not. Pure."""
    faults = {}
    for rank in sorted({rank for pair in links for rank in pair}):
        own = {pair: gbs for pair, gbs in links.items() if rank in pair}
        others = [gbs for pair, gbs in links.items() if rank not in pair]
        best_gbs = max(own.values())
        is_slow = len(own) == NEIGHBOURS and best_gbs < expected_gbs * SHARE_MIN
        if is_slow and others and best_gbs < statistics.median(others) * SHARE_OF_OTHERS:
            peers = " and ".join(f"{a + b - rank}" for a, b in sorted(own))
            speeds = " and ".join(format_gbits(own[pair]) for pair in sorted(own))
            expected = format_gbits(expected_gbs)
            faults[rank] = f"the network to ranks {peers} reaches {speeds} of {expected} Gbit/s"
    figures = [*links.values(), *([] if gang_gbs is None else [gang_gbs])]
    return NetworkFinding(faults, not faults and any(gbs < expected_gbs * SHARE_REPORTED for gbs in figures))


def describe(report: dict[str, Any], size: int) -> str:
    """Return the line of the run's log."""
    parts = []
    if report["gang_gbs"] is not None:
        parts.append(f"an all-reduce over {size} nodes reaches {format_gbits(report['gang_gbs'])}")
    if report["pair"]:
        a, b = report["pair"]
        parts.append(f"the slowest pair, ranks {a} and {b}, reaches {format_gbits(report['pair_gbs'])}")
    if parts:
        parts[-1] += f" of {format_gbits(report['expected_gbs'])} Gbit/s ({report['backend']})"
    if report["unmeasured"]:
        parts.append(f"not measured: {report['unmeasured']}")
    return f"network check: {'; '.join(parts)}"


def format_gbits(gbs: float) -> str:
    """Return GB/s as Gbit/s with three digits."""
    return f"{gbs * 8:.3g}" if gbs * 8 < 1000 else f"{gbs * 8:,.0f}"


def is_figure(value: Any) -> bool:
    """Return whether a value from another node is a finite positive number, or zero."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < GBS_MAX


def is_port(value: Any) -> bool:
    """Return whether a value from another node is a port."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16
