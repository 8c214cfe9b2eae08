"""The files of a folder that go to nodes and into buckets: all but what its ignore files exclude, as git reads them.

As SkyPilot does: `.skyignore` where the folder has one at its top, else `.gitignore` and `.git/info/exclude`. Files of
that name in subfolders count below them. Every sender asks `walk`, so all send the same files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

NEVER_COPIED = (".git", ".venv", "__pycache__")
Pattern = tuple[re.Pattern[str], bool]  # and whether it excludes; `!` takes back
Rules = tuple[tuple[str, tuple[Pattern, ...]], ...]  # (folder relative to the source, its patterns), innermost last


def walk(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder that is sent, with the names of its files and links. Links to folders are not entered."""
    file_name = ".skyignore" if (source / ".skyignore").is_file() else ".gitignore"
    rules_of: dict[str, Rules] = {}
    outer = () if file_name == ".skyignore" else _read_rules(source / ".git" / "info" / "exclude", "")
    for folder_name, folders, files in os.walk(source):
        folder = Path(folder_name)
        relative = "" if folder == source else folder.relative_to(source).as_posix()
        above = rules_of[relative.rpartition("/")[0]] if relative else outer
        rules = rules_of[relative] = above + (_read_rules(folder / file_name, relative) if file_name in files else ())
        prefix = f"{relative}/" if relative else ""
        links = [name for name in folders if (folder / name).is_symlink()]
        folders[:] = [
            name
            for name in folders
            if name not in links and name not in NEVER_COPIED and not is_ignored(f"{prefix}{name}/", rules)
        ]
        yield folder, [name for name in files + links if not is_ignored(prefix + name, rules)]


def is_ignored(path: str, rules: Rules) -> bool:
    """Whether a path relative to the source is excluded; a folder's ends with `/`, and those above it are not excluded.

    The innermost file decides, and in it the last pattern that matches.
    """
    for folder, patterns in reversed(rules):
        name = path[len(folder) + 1 :] if folder else path
        for expression, is_excluding in reversed(patterns):
            if _matches(expression, name):
                return is_excluding
    return False


def _matches(expression: re.Pattern[str], name: str) -> bool:
    """Whether a pattern names this very file or folder.

    pathspec's expressions also match what lies below a folder that they name (by their only group), which may have been
    taken back since: `*`, `!*/` excludes every file and no folder.
    """
    return any(not expression.groups or found.end() == len(name) for found in expression.finditer(name))


def _read_rules(path: Path, folder: str) -> Rules:
    """Empty where there is no such file, or nothing in it."""
    if not path.is_file():
        return ()
    patterns = tuple(_parse(path.read_text(encoding="utf-8", errors="replace").splitlines()))
    return ((folder, patterns),) if patterns else ()


def _parse(lines: Iterable[str]) -> Iterator[Pattern]:
    """A line that is not a pattern, such as a lone `!`, is passed over, as git does."""
    from pathspec import GitIgnoreSpec  # only a command that sends files pays for the import

    for line in lines:
        if line.rstrip().endswith("/**/"):  # the folders below: pathspec takes the one above them as well
            line = f"{line.rstrip()}*/"
        with suppress(ValueError):
            for each in GitIgnoreSpec.from_lines([line]).patterns:
                if each.include is not None and each.regex is not None:
                    yield each.regex, each.include
