"""Check the GPUs of a node before the first step of a gang. Standard library only.

The broker requests it through BROKER_HEALTH, a JSON object: `gpus` is the number that the node must have, `refused`
lists the serials of GPUs that failed an earlier check, `network_gbs` is the expected GB/s between two nodes of a gang,
which `agent_network` checks. A property that cannot be read is reported as unchecked, never as a fault: only evidence
against a GPU takes a node out of a gang.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from broker.agent import agent_files, agent_gpus, agent_peaks
else:
    import agent_files
    import agent_gpus
    import agent_peaks

VARIABLE = "BROKER_HEALTH"
KERNEL_LOG_VARIABLE = "BROKER_KERNEL_LOG"
KERNEL_LOG = agent_gpus.KERNEL_LOG
QUERY = ("uuid", "serial", "name", "ecc.errors.uncorrected.volatile.total")
NO_DEVICES = "No devices were found"
UNKNOWN = ("", "0", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]")
EX_UNHEALTHY = 69  # sysexits.h: EX_UNAVAILABLE
LIMIT_S = 25.0  # for the matrix products, including the import of torch; the whole check may take 30 s and more
PROBED = "health.json"  # the GPUs of this node that have passed: a node is not timed again for its next attempt
RESULT = "matmul.json"
SCRIPT = """\
command -v python3 >/dev/null || exit 0
exec python3 - "$(dirname "$BROKER_PROGRESS_FILE")/{result}" {limit_s:.0f} >/dev/null 2>&1 <<'BROKER_PROBE'
{source}
BROKER_PROBE"""
# Errors after which NVIDIA's catalogue of Xids has the GPU reset or replaced. Those that a program causes itself (13,
# 31, 43, 45) say nothing about the node.
XIDS = {
    "48": "double-bit ECC error", "62": "its microcontroller halted", "64": "row remapping failed",
    "74": "NVLink error", "79": "fell off the bus", "95": "uncontained ECC error", "119": "GSP timeout",
    "120": "GSP error", "140": "unrecovered ECC error",
}  # fmt: skip


class Card(NamedTuple):
    """A GPU as nvidia-smi lists it. `ecc_errors`: uncorrected ones since the driver was loaded; None: not reported."""

    uuid: str
    serial: str
    name: str
    ecc_errors: int | None

    @property
    def serials(self) -> list[str]:
        """Return an identifier of this GPU, the same on any machine."""
        return [each for each in (self.uuid, self.serial) if each not in UNKNOWN]


class HealthFinding(NamedTuple):
    """The result: `fault` is empty for a healthy node; `serials` identify the GPUs at fault, or all if none is."""

    fault: str
    serials: tuple[str, ...]
    unchecked: tuple[str, ...]


def read_order(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return what to check; None if the broker requests no check, or an invalid one."""
    try:
        order = json.loads(str(spec["envs"].get(VARIABLE) or "null"))
        known = {"gpus": float(order["gpus"]), "refused": [str(each) for each in order["refused"]]}
        expected_gbs = order.get("network_gbs")
        return known if expected_gbs is None else {**known, "network_gbs": float(expected_gbs)}
    except (ValueError, TypeError, KeyError):
        return None


def list_cards() -> tuple[list[Card] | None, str]:
    """Return the GPUs, or None and why they cannot be listed; with GPUs, the tool's complaint about a missing one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi is missing"
    try:
        process = subprocess.Popen(
            [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        return None, f"nvidia-smi cannot be started: {error.strerror}"
    try:
        text = process.communicate(timeout=agent_gpus.ANSWER_S)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()  # not awaited: a call that hangs in the driver cannot be ended
        return None, f"nvidia-smi did not answer within {agent_gpus.ANSWER_S:g} s"
    cards = parse_cards(text)
    complaint = text.strip().splitlines()[-1][:200] if text.strip() and process.returncode else ""
    if cards or NO_DEVICES in text:
        return cards, complaint
    return None, f"nvidia-smi failed: {complaint or 'no output'}"


def parse_cards(text: str) -> list[Card]:
    """Parse the lines of nvidia-smi; lines of another form are its complaints."""
    cards = []
    for line in text.splitlines()[: 4 * agent_gpus.GPUS_MAX]:
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY) and words[0].startswith("GPU-"):
            cards.append(Card(words[0], words[1], words[2], int(words[3]) if words[3].isdigit() else None))
    return cards


def find_fault(cards: list[Card], complaint: str, order: dict[str, Any]) -> tuple[str, list[Card]]:
    """Return the first fault that nvidia-smi shows, and the GPUs to remember for it: all if it names none. Pure."""
    for index, card in enumerate(cards):
        if any(each in order["refused"] for each in card.serials):
            return f"GPU {index} ({card.uuid}) has failed an earlier check", [card]
        if card.ecc_errors:
            return f"GPU {index} ({card.uuid}) has {card.ecc_errors} uncorrected ECC errors", [card]
    if len(cards) < order["gpus"]:
        more = f": {complaint}" if complaint else ""
        return f"{len(cards)} of {order['gpus']:g} GPUs are present{more}", cards
    return "", cards


def find_xid(counts: dict[str, int]) -> str:
    """Return the first error in the kernel log that only a broken GPU causes; empty if there is none."""
    return next((f"Xid {key} in the kernel log ({XIDS[key]})" for key in counts if key in XIDS), "")


def inspect(order: dict[str, Any], kernel_log: str) -> tuple[HealthFinding, list[Card]]:
    """Read nvidia-smi and the kernel log; return the finding, and the GPUs that are worth timing."""
    cards, complaint = list_cards()
    if cards is None:
        return HealthFinding("", (), (complaint,)), []
    fault, suspects = find_fault(cards, complaint, order)
    unchecked = [] if any(card.ecc_errors is not None for card in cards) else ["ECC errors: not reported"]
    log = agent_gpus.Xids(kernel_log)
    fault = fault or find_xid(log.count())
    if not log.is_read:
        unchecked.append("Xid errors: the kernel log cannot be read")
    log.close()
    return HealthFinding(fault, tuple(each for card in suspects for each in card.serials), tuple(unchecked)), cards


def is_probe_due(order: dict[str, Any], cards: list[Card]) -> bool:
    """Return whether to time matrix products: on whole GPUs whose peak is known, unless they have passed here."""
    passed = agent_files.read_json(agent_files.STATE / PROBED) or {}
    is_known = any(agent_peaks.find_tflops(card.name) for card in cards)
    return is_known and order["gpus"] >= 1 and passed.get("cards") != [card.uuid for card in cards]


def make_script() -> str:
    """Return the shell script that times matrix products in the task's own environment, for `RESULT`."""
    source = Path(__file__).resolve().with_name("agent_matmul.py").read_text(encoding="utf-8")
    return SCRIPT.format(result=RESULT, limit_s=LIMIT_S, source=source)


def judge(finding: HealthFinding, cards: list[Card], result: dict[str, Any] | None) -> HealthFinding:
    """Add the result of the matrix products; if the program could not time them, they stay unchecked."""
    measured = result.get("tflops") if result else None
    if not isinstance(measured, dict):
        why = str((result or {}).get("unchecked") or "no result")[:200]
        return finding._replace(unchecked=(*finding.unchecked, f"matrix products: {why}"))
    untimed = []
    for index, card in enumerate(cards):
        peak = agent_peaks.find_tflops(card.name)
        found = measured.get(card.uuid, measured.get(str(index)))
        if found is None:  # hidden by the task (CUDA_VISIBLE_DEVICES), or a card that torch cannot start
            untimed.append(f"matrix product of GPU {index}: torch does not see it")
        if peak and isinstance(found, (int, float)) and found < peak * agent_peaks.SHARE_MIN:
            fault = f"GPU {index} ({card.uuid}) reaches {found:.1f} of {peak:g} TFLOP/s"
            return finding._replace(fault=fault, serials=tuple(card.serials))
    agent_files.note_json(agent_files.STATE / PROBED, {"cards": [card.uuid for card in cards]})
    return finding._replace(unchecked=(*finding.unchecked, *untimed))


def describe(finding: HealthFinding, card_count: int) -> list[str]:
    """Return the lines of the run's log."""
    first = finding.fault or (f"{card_count} GPUs without a fault" if card_count else "")
    unchecked = f"not checked: {', '.join(finding.unchecked)}" if finding.unchecked else ""
    return [each for each in (first, unchecked) if each]
