"""Check a node before the first step of its gang: its GPUs, then the network to its neighbours.

Standard library only.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.agent import agent_allreduce, agent_files, agent_health, agent_network

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
    RunPhase = Callable[[str, str, float], int]
else:
    import agent_allreduce
    import agent_files
    import agent_health
    import agent_network

START_S = 1.5  # for a Python to start, of the time to measure the network


class Preflight:
    """The check of one node. `run_phase(phase, script, limit_s)` runs a script in the task's environment."""

    def __init__(self, spec: Message, folder: Path, run_phase: RunPhase, log: Callable[[str], None]) -> None:
        self._spec, self._folder, self._run_phase, self._log = spec, folder, run_phase, log
        self._order = agent_health.read_order(spec)
        self._cards: list[agent_health.Card] = []
        self._took_s = 0.0
        self._request: Message | None = None
        self.fault: agent_health.HealthFinding | None = None

    def check_gpus(self) -> int:
        """Check this node's GPUs if the broker asks for it; a fault ends the gang before its first step."""
        if self._order is None:
            return 0
        begin_s = time.monotonic()
        kernel_log = self._spec["envs"].get(agent_health.KERNEL_LOG_VARIABLE) or agent_health.KERNEL_LOG
        finding, self._cards = agent_health.inspect(self._order, kernel_log)
        if not finding.fault and agent_health.is_probe_due(self._order, self._cards):
            self._run_phase("health", agent_health.make_script(), agent_health.LIMIT_S)
            result = agent_files.read_json(self._folder / agent_health.RESULT)
            finding = agent_health.judge(finding, self._cards, result)
        self._log(f"health check: {'; '.join(agent_health.describe(finding, len(self._cards)))}")
        self.fault = finding if finding.fault else None
        self._took_s = time.monotonic() - begin_s
        return agent_health.EX_UNHEALTHY if finding.fault else 0

    def describe(self) -> Message:
        """Return the fields of `setup`: a fault, and what the coordinator needs to have the network measured."""
        fields: Message = {"fault": self.fault.fault if self.fault else ""}
        if self._order and "network_gbs" in self._order:
            cards = [card.uuid for card in self._cards]
            fields["network"] = {"port": find_port(), "took_s": self._took_s, "cards": cards}
        return fields

    def request(self, message: Message) -> None:
        """Note the coordinator's request, in its thread."""
        self._request = {name: value for name, value in message.items() if name != "type"}

    def measure(self) -> Message | None:
        """Measure the network if that was requested since the last call, and return the answer."""
        request, self._request = self._request, None
        if request is None:
            return None
        limit_s = float(request["limit_s"])
        order = {**request, "rank": int(self._spec["rank"]), "tcp_gbs": agent_network.TCP_GBS}
        order["limit_s"] = max(1.0, limit_s - START_S)
        program = Path(__file__).resolve().with_name("agent_allreduce.py").read_text(encoding="utf-8")
        try:
            (self._folder / "allreduce.py").write_text(program, encoding="utf-8")
            agent_files.write_json(self._folder / agent_allreduce.ORDER, order)
        except OSError as error:
            return {"unmeasured": f"rank {order['rank']}: {error}"}
        self._run_phase("network", agent_network.SCRIPT, limit_s)
        found = agent_files.read_json(self._folder / agent_allreduce.RESULT)
        return found or {"unmeasured": f"no result on rank {order['rank']}"}

    def take_verdict(self, message: Message) -> None:
        """Take the coordinator's verdict that the network of this node is at fault; all its GPUs are remembered."""
        reason = (message.get("faults") or {}).get(str(self._spec["rank"]))
        if reason and not self.fault:
            serials = tuple(each for card in self._cards for each in card.serials)
            self.fault = agent_health.HealthFinding(str(reason), serials, ())


def find_port() -> int:
    """Return a port of this node that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
