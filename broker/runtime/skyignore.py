"""Select the files of a folder to send to nodes and buckets: all but those that ignore files exclude, by git's rules.

Like SkyPilot, use `.skyignore` if the folder has one at its top, else `.gitignore` and `.git/info/exclude`. The same
files in subfolders apply below them. Every sender uses `walk`, so all send the same files.

A clone that broker made is sent completely, with its `.git`, because programs read their version from it.
A state folder is never sent: it holds keys and the nodes of the local cloud, so each copy to such a node would grow it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from broker.config import is_state_folder

CLONE_MARK = "broker-clone"  # a file in the `.git` of a clone that broker made
NEVER_COPIED = (".git", ".venv", "__pycache__")
Pattern = tuple[re.Pattern[str], bool]  # (expression, whether it excludes); a pattern with `!` includes again
Rules = tuple[tuple[str, tuple[Pattern, ...]], ...]  # (folder relative to the source, its patterns), innermost last


def walk(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder to send, with the names of its files and links. Links to folders are not followed.

    Raises PermissionError for a folder that cannot be read: a part of a program must not be left out silently.
    """
    is_clone = (source / ".git" / CLONE_MARK).is_file()
    file_name = ".skyignore" if (source / ".skyignore").is_file() else ".gitignore"
    rules_of: dict[str, Rules] = {}
    outer = () if file_name == ".skyignore" else _read_rules(source / ".git" / "info" / "exclude", "")
    for folder_name, folders, files in os.walk(source, onerror=_refuse):
        folder = Path(folder_name)
        links = [name for name in folders if (folder / name).is_symlink()]
        if is_clone:
            folders[:] = [name for name in folders if name not in links]
            yield folder, files + links
            continue
        if is_state_folder(folder, files):
            folders.clear()
            continue
        relative = "" if folder == source else folder.relative_to(source).as_posix()
        above = rules_of[relative.rpartition("/")[0]] if relative else outer
        rules = rules_of[relative] = above + (_read_rules(folder / file_name, relative) if file_name in files else ())
        prefix = f"{relative}/" if relative else ""
        folders[:] = [
            name
            for name in folders
            if name not in links and name not in NEVER_COPIED and not is_ignored(f"{prefix}{name}/", rules)
        ]
        yield folder, [name for name in files + links if not is_ignored(prefix + name, rules)]


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # it was removed meanwhile
        raise error


def is_ignored(path: str, rules: Rules) -> bool:
    """Return whether a relative path is excluded. A folder's path ends with `/`; its parents must not be excluded.

    The innermost file decides, and in it the last pattern that matches.
    """
    for folder, patterns in reversed(rules):
        name = path[len(folder) + 1 :] if folder else path
        for expression, is_excluding in reversed(patterns):
            if _matches(expression, name):
                return is_excluding
    return False


def _matches(expression: re.Pattern[str], name: str) -> bool:
    """Return whether a pattern matches exactly this file or folder.

    pathspec's expressions also match paths below a folder that they match (by their only group), which may have been
    included again: `*`, `!*/` excludes every file and no folder.
    """
    return any(not expression.groups or match.end() == len(name) for match in expression.finditer(name))


def _read_rules(path: Path, folder: str) -> Rules:
    """Read an ignore file; empty if it is missing or has no patterns."""
    if not path.is_file():
        return ()
    patterns = tuple(_parse(path.read_text(encoding="utf-8", errors="replace").splitlines()))
    return ((folder, patterns),) if patterns else ()


def _parse(lines: Iterable[str]) -> Iterator[Pattern]:
    """Parse patterns; skip invalid lines such as a lone `!`, as git does."""
    from pathspec import GitIgnoreSpec  # imported late: only commands that send files need it

    for line in lines:
        if line.rstrip().endswith("/**/"):  # only folders below: pathspec would also match their parent
            line = f"{line.rstrip()}*/"
        with suppress(ValueError):
            for pattern in GitIgnoreSpec.from_lines([line]).patterns:
                if pattern.include is not None and pattern.regex is not None:
                    yield pattern.regex, pattern.include
