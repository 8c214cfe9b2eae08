"""Results of a trainer's undisturbed run, and their bitwise comparison with a disturbed one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.torture.workloads import ROOT, Training

RUN_S_MAX = 900.0  # a hang, on any machine
TRIES = 3
ELASTIC_TOLERANCE = 1e-3  # of losses whose sums were taken in another order
NUMBERS = ("loss", "validation_loss")


class References:
    """Undisturbed runs without a broker, one for each requested training, kept below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Training, Path] = {}

    def find(self, training: Training) -> Path:
        """Return the folder of the run, with `metrics.jsonl` and `checkpoints`; run it now if it is new."""
        if training not in self._known:
            kind = "elastic" if training.nodes_min else training.strategy
            place = self._folder / f"{kind}-{training.nodes}-{training.seed}-{training.steps}"
            for left in reversed(range(TRIES)):
                try:
                    if not place.exists():
                        run_undisturbed(training, place)
                    break
                except RuntimeError:  # ranks that a busy machine starts minutes apart do not find each other
                    if not left:
                        raise
                    place.rename(place.with_name(f"{place.name}-failed-{left}"))
            self._known[training] = place
        return self._known[training]

    def compare(self, training: Training, metrics: Path) -> list[str]:
        """Describe in sentences how reports differ from the undisturbed run; empty where all is equal."""
        wanted = read_numbers(self.find(training) / "metrics.jsonl")
        return compare_numbers(wanted, read_numbers(metrics), is_exact=training.nodes_min is None)

    def compare_tensors(self, places: Mapping[str, Training], environment: Mapping[str, str]) -> dict[str, str]:
        """Describe differences for each place of checkpoints that ended otherwise than the undisturbed run.

        `environment` holds the login of the bucket, where a place is one.
        """
        wanted = {training: str(self.find(training) / "checkpoints") for training in set(places.values())}
        found = digest([*wanted.values(), *places], environment)
        pairs = {place: (found.get(place, "unreadable"), found.get(wanted[places[place]])) for place in places}
        return {
            place: f"the tensors of the last checkpoint are {actual}, undisturbed {right}"
            for place, (actual, right) in pairs.items()
            if actual != right
        }


def run_undisturbed(training: Training, place: Path) -> None:
    """Run one process a rank, as the broker's nodes would start them. Raise RuntimeError for a run that fails."""
    place.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BROKER_", "SKYPILOT_"))}
    common = {
        **kept,
        "BROKER_CHECKPOINT_DIR": str(place / "checkpoints"),
        "BROKER_ATTEMPT": "1",
        "BROKER_MASTER_PORT": str(random.randint(20000, 32000)),
        "SKYPILOT_NUM_NODES": str(training.nodes),
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * training.nodes),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "trainers.lm", *training.flags, "--log.metrics", str(place / "metrics.jsonl")]
    with (place / "output.log").open("wb") as output:
        ranks = [
            subprocess.Popen(
                command, env={**common, "SKYPILOT_NODE_RANK": str(rank)}, stdout=output, stderr=output, cwd=place
            )
            for rank in range(training.nodes)
        ]
        try:
            codes = [rank.wait(RUN_S_MAX) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGKILL)
    if any(codes):
        raise RuntimeError(f"the undisturbed run {training} exited with {codes}: see {place / 'output.log'}")


def read_numbers(metrics: Path) -> list[tuple[int, str, float]]:
    """Read step, name and value, in the order they were written; a line torn by a kill is left out."""
    numbers = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        numbers += [
            (int(values["step"]), name, float(values[name])) for name in NUMBERS if values.get(name) is not None
        ]
    return numbers


def compare_numbers(
    wanted: Sequence[tuple[int, str, float]], found: Sequence[tuple[int, str, float]], *, is_exact: bool
) -> list[str]:
    """Compare every value of every attempt with the undisturbed one; the last step must be there.

    Steps between may be missing: an attempt may be killed after a checkpoint and before it reported its last steps.
    """
    expected = {(step, name): value for step, name, value in wanted}
    problems, differing = [], []
    for step, name, value in found:
        right = expected.get((step, name))
        same = right is not None and (
            value.hex() == right.hex() if is_exact else math.isclose(value, right, rel_tol=ELASTIC_TOLERANCE)
        )
        if not same:
            differing.append(f"{name} of step {step} is {value!r}, undisturbed {right!r}")
    if differing:
        problems.append(f"{differing[0]}; {len(differing)} of {len(found)} values differ")
    last = max(expected, default=None)
    if last is None or last not in {(step, name) for step, name, _ in found}:
        problems.append(f"the last step was not reported: {last}")
    return problems


def digest(places: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Hash all tensors in each place's newest complete checkpoint, in a separate process: this one imports no torch."""
    command = [sys.executable, "-m", "tests.torture.digest", *places]
    variables = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=RUN_S_MAX, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the checkpoints cannot be compared: {done.stderr[-2000:]}")
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())
