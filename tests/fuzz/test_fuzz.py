"""Every target survives a short, seeded run in the default tests; `make fuzz` runs each for ten minutes."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import __main__ as program
from tests.fuzz import engine, registry
from tests.fuzz.engine import HangError, make_inputs, try_input
from tests.fuzz.registry import MODULES, TARGETS, load_target
from tests.tiers import spread

ROOT = Path(__file__).parent.parent.parent
# Inputs in addition to the seeds: a few seconds each.
COUNTS = {
    "yaml": 150, "arguments": 60, "agent": 40, "agent-files": 60, "store": 150, "catalog": 1500, "coordinator": 12,
    "rendezvous": 12,
}  # fmt: skip


@pytest.mark.parametrize("name", spread(list(TARGETS), every=4))
def test_target_survives_a_seeded_run(name: str) -> None:
    target, seeds = load_target(name)
    for number, data in enumerate(itertools.islice(make_inputs(seeds, seed=13), len(seeds) + COUNTS[name])):
        try:
            try_input(target, data)
        except Exception as error:
            pytest.fail(f"input {number} of seed 13: {data[:200]!r}: {error!r}", pytrace=True)


def test_registry_lists_every_target_of_every_module() -> None:
    modules = {f"tests.fuzz.{path.stem}" for path in (ROOT / "tests" / "fuzz").glob("targets_*.py")}
    assert modules == set(MODULES)
    for module, names in MODULES.items():
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert all(f'"{name}":' in text for name in names), module
        assert ast.parse(text)


def test_same_seed_makes_the_same_inputs() -> None:
    first, again = (list(itertools.islice(make_inputs([b"abc", b"xyz"], 7), 50)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(make_inputs([b"abc", b"xyz"], 8), 50))


def test_crash_leaves_an_input_and_the_command_that_replays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_on_x(data: bytes) -> None:
        assert b"x" not in data, "planted"

    monkeypatch.setattr(program, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "load_target", lambda name: (fail_on_x, [b"aaax"]))
    assert program.run_mutations("yaml", minutes=1, seed=1) == 1
    (kept,) = tmp_path.iterdir()
    assert b"x" in kept.read_bytes()
    assert f"python -m tests.fuzz yaml --input {kept}" in capsys.readouterr().out


def test_hanging_target_counts_as_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HANG_S", 1)

    def hang(data: bytes) -> None:
        while data:
            pass

    with pytest.raises(HangError):
        try_input(hang, b"x")


def test_recorded_input_can_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"run: x\n")
    command = [sys.executable, "-m", "tests.fuzz", "yaml", "--input", str(tmp_path / "input")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "no crash\n"
    assert registry.TARGETS["yaml"] == "tests.fuzz.targets_task"
