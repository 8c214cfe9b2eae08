"""`.skyignore` and `.gitignore`: the files of a folder that are sent."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.app.buckets import collect_files
from broker.runtime.skyignore import CLONE_MARK, walk
from broker.runtime.transports.local import copy
from broker.runtime.transports.ssh_files import list_entries


def list_sent(source: Path) -> set[str]:
    return {str((folder / name).relative_to(source)) for folder, names in walk(source) for name in names}


def make(source: Path, *names: str) -> None:
    for name in names:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_clone_that_broker_made_is_sent_whole_with_its_git_folder(tmp_path: Path) -> None:
    make(tmp_path, ".git/HEAD", ".git/objects/ab/cd", "out.log", "__pycache__/kept.pyc")
    (tmp_path / ".gitignore").write_text("*.log\n")
    assert list_sent(tmp_path) == {".gitignore"}
    make(tmp_path, f".git/{CLONE_MARK}")
    assert {".git/HEAD", ".git/objects/ab/cd", "out.log", "__pycache__/kept.pyc"} <= list_sent(tmp_path)


@pytest.mark.parametrize(
    ("patterns", "ignored", "sent"),
    [
        ("*.log", {"a.log", "deep/a.log"}, {"a.txt", "A.LOG"}),
        ("data/", {"data/x", "deep/data/x"}, {"datax"}),
        ("/data", {"data/x"}, {"deep/data/x"}),
        ("deep/data", {"deep/data/x"}, {"other/deep/data/x"}),
        ("*.ckpt\n!best.ckpt", {"a.ckpt"}, {"best.ckpt", "deep/best.ckpt"}),
        ("logs/**/*.txt", {"logs/a.txt", "logs/1/2/b.txt"}, {"logs/1/c.md", "deep/logs/d.txt"}),
        ("**/tmp", {"tmp/x", "a/b/tmp/x"}, {"tmpx"}),
        ("a/**", {"a/b", "a/c/d"}, {"ab"}),
        ("*\n!*/\n!*.py", {"x.txt", "deep/x.txt"}, {"x.py", "deep/deeper/y.py"}),
        ("out\n!out/keep", {"out/keep", "out/x"}, {"x"}),  # git: nothing below an excluded folder comes back
        ("# words\n\n\\#odd\n!\n", {"#odd"}, {"words"}),
        ("trail \nspace\\ ", {"trail", "space "}, {"trail x"}),
    ],
)
@pytest.mark.parametrize("file", [".skyignore", ".gitignore"])
def test_patterns_mean_what_they_mean_to_git(
    file: str, patterns: str, ignored: set[str], sent: set[str], tmp_path: Path
) -> None:
    make(tmp_path, *ignored, *sent)
    (tmp_path / file).write_text(patterns)
    assert list_sent(tmp_path) - {file} == sent


def test_ignore_file_of_a_subfolder_overrides_those_above_it(tmp_path: Path) -> None:
    make(tmp_path, "a.log", "deep/a.log", "deep/keep.log", "deep/local", "deep/er/a.log", "local")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "deep/.gitignore").write_text("!keep.log\n/local\n!er/*\n")
    sent = {".gitignore", "deep/.gitignore", "deep/keep.log", "deep/er/a.log", "local"}
    assert list_sent(tmp_path) == sent


def test_skyignore_takes_the_place_of_gitignore(tmp_path: Path) -> None:
    make(tmp_path, "a.log", "b.txt", "deep/c.txt")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "deep/.gitignore").write_text("*\n")
    assert list_sent(tmp_path) == {".gitignore", "b.txt"}
    (tmp_path / ".skyignore").write_text("b.txt\n")
    assert list_sent(tmp_path) == {".gitignore", ".skyignore", "a.log", "deep/.gitignore", "deep/c.txt"}


def test_rules_of_one_clone_that_are_not_committed_count(tmp_path: Path) -> None:
    make(tmp_path, ".git/info/exclude", "secret", "shown")
    (tmp_path / ".git/info/exclude").write_text("secret\n")
    assert list_sent(tmp_path) == {"shown"}


def test_hidden_folder_has_rules_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, ".config/x", "config/x", ".config/y")
    (tmp_path / ".config/.gitignore").write_text("x\n")
    assert list_sent(tmp_path) == {".config/.gitignore", ".config/y", "config/x"}


def test_everything_is_sent_except_ignored_and_default_excluded_paths(tmp_path: Path) -> None:
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


def test_every_sender_sends_the_same_files(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "a.py", "b.log", "deep/keep.log", "deep/c.py", "out/x")
    (source / ".gitignore").write_text("*.log\nout\n")
    (source / "deep/.gitignore").write_text("!keep.log\n")
    sent = {".gitignore", "a.py", "deep/.gitignore", "deep/c.py", "deep/keep.log"}
    copy(source, target)
    assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == sent
    assert {name for name, file in list_entries(source) if file.is_file()} == sent
    assert set(collect_files((str(source),))) == sent


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("seed", [10, 30, 86, 143, 150, 151])
def test_random_trees_and_rules_agree_with_git(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    words = ["a", "b", "c.log", "d.py", "e"]
    for _ in range(30):
        make(
            tmp_path, "/".join(draw.choices(words[:2], k=draw.randrange(3))) + f"/{draw.choice(words[2:])}".lstrip("/")
        )
    parts = ["*", "**", "a", "b", "*.log", "?.py", "e", "[a-b]"]
    folders = [tmp_path, *(path for path in sorted(tmp_path.rglob("*")) if path.is_dir() and draw.random() < 0.3)]
    for folder in folders:
        lines = []
        for _ in range(draw.randrange(1, 4)):
            body = "/".join(draw.choices(parts, k=draw.randrange(1, 3)))
            lines.append(draw.choice(["", "", "!"]) + draw.choice(["", "/"]) + body + draw.choice(["", "", "/"]))
        (folder / ".gitignore").write_text("\n".join(lines) + "\n")
    git = ["git", "-c", "core.excludesFile=/dev/null"]
    alone = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True, env=alone)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], cwd=tmp_path, check=True, env=alone,
        capture_output=True, text=True,
    )  # fmt: skip
    assert list_sent(tmp_path) == set(listed.stdout.split())


@pytest.mark.parametrize("second", ["state.db", "state.guard"])
def test_state_folder_is_never_sent_although_no_ignore_file_names_it(second: str, tmp_path: Path) -> None:
    make(tmp_path, "train.py", "state/owner", f"state/{second}", "state/keys/node", "state/local/node-0/home/train.py")
    make(tmp_path, "data/owner")  # the user's own file
    assert list_sent(tmp_path) == {"train.py", "data/owner"}
    assert [name for name, _ in list_entries(tmp_path)] == ["train.py", "data", "data/owner"]


def test_copy_of_a_workdir_around_the_state_folder_to_a_local_node_ends(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "home/owner", "home/state.db")
    node = tmp_path / "home/local/node-0/home/sky_workdir"
    copy(tmp_path, node)
    assert [path.name for path in node.rglob("*")] == ["train.py"]


def test_state_folder_on_postgresql_is_known_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "train.py", "home/owner", "home/keys/node")
    monkeypatch.setenv("BROKER_HOME", str(tmp_path / "home"))
    assert list_sent(tmp_path) == {"train.py"}
