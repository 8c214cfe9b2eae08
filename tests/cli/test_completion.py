"""Shell completion: names from the state file without importing a command, and all else through Typer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from broker.cli.commands import COMMANDS, GROUPS
from broker.cli.completion import NAMES, complete_jobs, complete_jobs_and_groups, find_items
from broker.cli.main import LazyGroup
from broker.cli.main import app as root
from broker.clock import SystemClock
from broker.state.names import list_cluster_names, list_job_names
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, GroupRole, JobStatus, Placement, Task
from tests.simulation.world import make_offer

ROOT = Path(__file__).parent.parent.parent
LIGHT_ONLY = (
    "typer",
    "asyncio",
    "msgspec",
    "yaml",
    "rich",
    "broker.state.store",
    "broker.cli.main",
    "broker.app",
    "broker.api",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clusters; job 1 has ended, job 2 is live; a job whose name a shell would evaluate."""
    store = Store(tmp_path / "state.db", clock=SystemClock())
    placement = Placement(offer=replace(make_offer("here"), cloud="local"), is_spot=False, node_count=1)
    for name in ("dev", "prod"):
        store.clusters.put(Cluster(name=name, status=ClusterStatus.UP, placement=placement, attempt=1, nodes=()))
    store.jobs.set_status(store.jobs.add("prepare", Task()).id, JobStatus.SUCCEEDED)
    store.jobs.add("train", Task())
    store.jobs.add("$(reboot)", Task())
    store.close()
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    return tmp_path


def complete(home: Path, line: str, shell: str = "bash", **more: str) -> subprocess.CompletedProcess[str]:
    """Complete a line with the cursor at its end, as the shell's script does; stderr names the imports."""
    words = line.split(" ")
    asked = {
        "_BROKER_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line, "BROKER_HOME": str(home), "PYTHONPATH": str(ROOT), **more,
    }  # fmt: skip
    code = (
        "import atexit, os, sys; import broker.__main__ as entry\n"
        "end = os._exit\n"
        f"def leave(code): sys.stderr.write(repr([n for n in {LIGHT_ONLY!r} if n in sys.modules])); "
        "sys.stderr.flush(); end(code)\n"
        "os._exit = leave; sys.argv = ['broker']; entry.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked}, timeout=300
    )


def test_names_come_from_the_state_file_and_no_command_is_imported(home: Path) -> None:
    done = complete(home, "broker down ")
    assert done.stdout.split() == ["dev", "prod"]
    assert done.stderr == "[]", "completion imports neither the parser nor the store"
    assert complete(home, "broker jobs why tr").stdout.split() == ["train"]


def test_options_are_completed_by_the_command_itself(home: Path) -> None:
    assert "--all" in complete(home, "broker down --").stdout
    assert complete(home, "broker launch -c de").stdout.split() == ["dev"]


def test_each_shell_gets_its_own_form(home: Path) -> None:
    zsh = complete(home, "broker stop ", "zsh").stdout
    assert zsh.startswith("_arguments '*: :((") and '"dev":"cluster"' in zsh
    assert complete(home, "broker stop d", "fish", _TYPER_COMPLETE_FISH_ACTION="get-args").stdout == "dev\tcluster\n"
    assert complete(home, "broker stop x", "fish", _TYPER_COMPLETE_FISH_ACTION="is-args").returncode == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "load", ['eval "$(broker --show-completion)"', "broker --install-completion > log; source ~/.bashrc"]
)
def test_script_that_is_shown_or_installed_works_in_bash(home: Path, load: str) -> None:
    """Sourced, and its function called as bash does for `broker down d<TAB>`."""
    tool = home / "broker"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m broker "$@"\n')
    tool.chmod(0o755)
    lines = f"{load}; COMP_WORDS=(broker down d); COMP_CWORD=2; _broker_completion broker"
    shown = subprocess.run(
        ["bash", "--norc", "-c", f'{lines}; echo "${{COMPREPLY[@]}}"'],
        capture_output=True, text=True, timeout=300, cwd=home,
        env={
            **os.environ, "PATH": f"{home}:{os.environ['PATH']}", "HOME": str(home), "BROKER_HOME": str(home),
            "PYTHONPATH": str(ROOT),
        },
    )  # fmt: skip
    assert shown.stdout.strip() == "dev", shown.stderr


def test_commands_and_names_that_fit_are_suggested(home: Path) -> None:
    def names(*words: str, at: str = "") -> list[str] | None:
        items = find_items(words, at)
        return None if items is None else [name for name, _ in items]

    assert names(at="jo") == ["jobs"] and names() == list(COMMANDS)
    for command in ("down", "status"):
        assert names(command, "dev") == ["prod"], "what is named already is not named again"
    assert names("exec", "dev") is None, "then comes a file"
    assert names("launch") is None and names("jobs") is None
    assert names("jobs", "cancel") == ["train", "3", "2"] and names("jobs", "retry") == ["prepare", "1"]


def test_groups_are_suggested_where_a_command_accepts_them(home: Path) -> None:
    store = Store(home / "state.db", clock=SystemClock())
    for name in ("learner", "rollout"):
        store.jobs.add(name, Task(group=GroupRole(name="rl", is_primary=True)), pipeline="rl-k7wq2")
    store.close()

    def names(*words: str) -> list[str]:
        return [name for name, _ in find_items(words, "rl") or ()]

    assert all(names("jobs", verb) == ["rl-k7wq2"] for verb in ("cancel", "logs", "why", "events"))
    assert names("jobs", "retry") == [], "it is live"
    assert names("jobs", "wait") == [], "it waits for one job"
    assert complete_jobs_and_groups("rl") == ["rl-k7wq2"] and complete_jobs("rl") == []


def test_state_that_cannot_be_read_suggests_nothing_and_is_not_made(tmp_path: Path) -> None:
    assert list_cluster_names(tmp_path / "none" / "state.db") == []
    assert not (tmp_path / "none").exists()
    (tmp_path / "state.db").write_text("not a database")
    assert list_job_names(tmp_path / "state.db") == []


def test_every_argument_that_is_a_name_is_in_the_table() -> None:
    """The commands' own arguments are authoritative; the table is their copy for speed."""
    group = typer.main.get_command(root)
    assert isinstance(group, LazyGroup)
    found = set()
    for name in COMMANDS:
        command = group.get_command(None, name)
        parts = command.commands.items() if name in GROUPS else [("", command)]
        nested = [
            (f"{part} {inner}", each) for part, above in parts for inner, each in getattr(above, "commands", {}).items()
        ]
        for part, each in [*parts, *nested]:
            if any(param.param_type_name == "argument" and param._custom_shell_complete for param in each.params):
                found.add((name, *part.split()))
    assert found == set(NAMES)
