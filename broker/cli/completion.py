"""Complete commands and names from the state file in the shell, without importing a command or its parser.

Typer's own completion handles the rest (options and their values); it imports the command. Shells call this as the
scripts of `broker --show-completion` specify.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

VARIABLE = "_BROKER_COMPLETE"
Item = tuple[str, str]  # inserted text, and help

# command -> kind of name, and whether it accepts several
NAMES: dict[tuple[str, ...], tuple[str, bool]] = {
    ("status",): ("cluster", True),
    ("exec",): ("cluster", False),
    ("logs",): ("cluster", False),
    ("queue",): ("cluster", False),
    ("cancel",): ("cluster", False),
    ("stop",): ("cluster", False),
    ("start",): ("cluster", False),
    ("down",): ("cluster", True),
    ("autostop",): ("cluster", False),
    ("ssh",): ("cluster", False),
    ("local", "preempt"): ("cluster", False),
    ("jobs", "cancel"): ("live job or group", True),
    ("jobs", "retry"): ("ended job or group", False),
    ("jobs", "wait"): ("job", False),
    ("jobs", "logs"): ("job or group", False),
    ("jobs", "events"): ("job or group", False),
    ("jobs", "why"): ("job or group", False),
    ("jobs", "watch"): ("job", False),
    ("jobs", "trace"): ("job", False),
    ("jobs", "forward"): ("job", False),
    ("jobs", "schedules", "history"): ("schedule", False),
    ("jobs", "schedules", "pause"): ("schedule", False),
    ("jobs", "schedules", "resume"): ("schedule", False),
    ("jobs", "schedules", "remove"): ("schedule", False),
}


def complete() -> bool:
    """Print suggestions if this module can complete the line; return False to leave it to Typer."""
    asked = os.getenv(VARIABLE, "")
    line = _read_line(asked)
    if line is None or any(mark in word for word in line for mark in "'\"\\$`"):
        return False
    *words, incomplete = line
    items = find_items(words, incomplete)
    if items is None:
        return False
    RENDERERS[asked](items)
    return True


def _read_line(asked: str) -> list[str] | None:
    """Read the words after `broker`, the last one incomplete or empty. None for another instruction."""
    if asked not in RENDERERS:
        return None
    if asked == "complete_bash":
        words, position = os.getenv("COMP_WORDS", "").split(), int(os.getenv("COMP_CWORD") or "0")
        return [*words[1:position], words[position] if position < len(words) else ""]
    text = os.getenv("_TYPER_COMPLETE_ARGS", "")
    return [*text.split()[1:], *([""] if text[-1:].isspace() else [])] or None


def find_items(words: Sequence[str], incomplete: str) -> list[Item] | None:
    """Find completions for the last word; None where options or files are possible."""
    if incomplete.startswith("-") or any(word.startswith("-") for word in words):
        return None
    if not words:
        from broker.cli.commands import COMMANDS

        return [(name, text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
    for count in (1, 2, 3):
        if known := NAMES.get(tuple(words[:count])):
            kind, is_several = known
            given = words[count:]
            if given and not is_several:
                return None
            return [(name, kind) for name in list_names(kind) if name.startswith(incomplete) and name not in given]
    return None


def complete_clusters(incomplete: str) -> list[str]:
    """Complete cluster names, for arguments through Typer."""
    return [name for name in list_names("cluster") if name.startswith(incomplete)]


def complete_jobs(incomplete: str) -> list[str]:
    """Complete job names and IDs, for arguments through Typer."""
    return [name for name in list_names("job") if name.startswith(incomplete)]


def complete_jobs_and_groups(incomplete: str) -> list[str]:
    """Complete names and IDs of jobs, and names of groups, for arguments through Typer."""
    return [name for name in list_names("job or group") if name.startswith(incomplete)]


def complete_schedules(incomplete: str) -> list[str]:
    """Complete names of schedules, for arguments through Typer."""
    return [name for name in list_names("schedule") if name.startswith(incomplete)]


def list_names(kind: str) -> Sequence[str]:
    """List names in the state file of this installation."""
    from broker.config import find_home
    from broker.state.names import list_cluster_names, list_group_names, list_job_names, list_schedule_names

    database = find_home() / "state.db"
    if kind == "cluster":
        return list_cluster_names(database)
    if kind == "schedule":
        return list_schedule_names(database)
    is_live = {"live": True, "ended": False}.get(kind.partition(" ")[0])
    groups = list_group_names(database, is_live=is_live) if kind.endswith("group") else ()
    return [*groups, *list_job_names(database, is_live=is_live)]


def _print_bash(items: Sequence[Item]) -> None:
    sys.stdout.write("\n".join(name for name, _ in items) + "\n")


def _print_zsh(items: Sequence[Item]) -> None:
    """Print a call of `_arguments`, which the shell evaluates: strip characters that are special there."""
    if not items:
        sys.stdout.write("_files\n")
        return
    kept = str.maketrans({mark: None for mark in "'\"\\$`():"})
    lines = "\n".join(f'"{name}":"{text.translate(kept)}"' for name, text in items)
    sys.stdout.write(f"_arguments '*: :(({lines}))'\n")


def _print_fish(items: Sequence[Item]) -> None:
    if os.getenv("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        sys.exit(0 if items else 1)  # 1: fish suggests files
    sys.stdout.write("\n".join(f"{name}\t{text}" for name, text in items) + "\n")


RENDERERS: dict[str, Callable[[Sequence[Item]], None]] = {
    "complete_bash": _print_bash,
    "complete_zsh": _print_zsh,
    "complete_fish": _print_fish,
}
