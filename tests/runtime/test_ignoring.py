"""`.skyignore`: what of a folder goes to the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.ignoring import is_ignored, read_patterns, walk


def list_sent(source: Path) -> set[str]:
    return {
        str((folder / name).relative_to(source))
        for folder, names in walk(source, read_patterns(source))
        for name in names
    }


def make(source: Path, *names: str) -> None:
    for name in names:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_patterns_are_lines_without_comments_and_blanks(tmp_path: Path) -> None:
    assert read_patterns(tmp_path) == []
    (tmp_path / ".skyignore").write_text("# words\n\n  *.log  \n  # more\ndata/\n")
    assert read_patterns(tmp_path) == ["*.log", "data/"]


@pytest.mark.parametrize(
    ("path", "pattern", "is_folder", "expected"),
    [
        ("a.log", "*.log", False, True),
        ("deep/a.log", "*.log", False, True),
        ("a.txt", "*.log", False, False),
        ("data", "data/", True, True),
        ("data", "data/", False, False),
        ("deep/data", "data/", True, True),
        ("deep/data", "/data", True, False),
        ("data", "/data", True, True),
        ("deep/data", "deep/data", False, True),
        ("other/deep/data", "deep/data", False, False),
        ("A.LOG", "*.log", False, False),
    ],
)
def test_a_pattern_matches_as_in_gitignore(path: str, pattern: str, is_folder: bool, expected: bool) -> None:
    assert is_ignored(Path(path), [pattern], is_folder=is_folder) is expected
    assert is_ignored(Path(path), ["nothing", pattern], is_folder=is_folder) is expected


def test_all_is_sent_but_what_is_named_and_what_is_never_wanted(tmp_path: Path) -> None:
    kept = {"a.py", "deep/b.py", "deep/data/c", "git/x"}
    make(tmp_path, *kept, "a.log", "deep/a.log", "data/x", ".git/x", ".venv/x", "deep/__pycache__/x")
    (tmp_path / ".skyignore").write_text("*.log\n/data/\n")
    assert list_sent(tmp_path) == {*kept, ".skyignore"}


def test_links_are_sent_as_links_and_not_entered(tmp_path: Path) -> None:
    make(tmp_path, "real/x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nothing")
    assert list_sent(tmp_path) == {"real/x", "link", "loop", "gone.log"}
    (tmp_path / ".skyignore").write_text("link\n*.log")
    assert list_sent(tmp_path) == {"real/x", "loop", ".skyignore"}
