"""The site has every page, and builds without a warning where mkdocs is installed (extra `docs`)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, list_pages

GENERATED = {"index.md", "COMMANDS.md"}


def list_nav() -> list[str]:
    """List the pages of the navigation, read as text: the file's hooks and tags need mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def test_navigation_has_every_page_once() -> None:
    found = list_nav()
    assert len(found) == len(set(found))
    pages = {page.relative_to(ROOT).as_posix().removeprefix("docs/") for page in list_pages()}
    pages = {page for page in pages if not page.startswith(".github/")} - {"README.md"}
    assert set(found) - GENERATED == pages


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "site/COMMANDS.html").read_text()
    assert "broker jobs launch" in commands and "--detach-run" in commands
