"""Links, anchors and file names in the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import CHANGELOG, ROOT, list_anchors, list_links, list_pages, list_prose

PACKAGES = ("broker", "trainers", "tests", "docs", "task_templates")
# `broker/jobs/node_replacement.py`, `jobs/controller.py`, `dag*.py`; a user's file (`train.py`) has no folder.
FILE = re.compile(r"`([\w./*{},-]+/[\w.*{},-]+\.(?:py|md|toml|c|yaml|json|svg))`")
# Files of a user, a node or a service, which the repository does not have.
ELSEWHERE = ("~/", "/", "gcp/nodes.json", "delivery.json", "$", "secrets/")


def find_link_problem(page: Path, target: str) -> str:
    """Return an empty text if the link is good, or leads out of the repository."""
    if re.match(r"[a-z]+:", target):
        return ""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"no file `{path}`"
    if anchor and file.suffix == ".md" and anchor not in list_anchors(file):
        return f"no heading `#{anchor}` in {file.relative_to(ROOT)}"
    return ""


def test_every_relative_link_and_anchor_resolves() -> None:
    broken = [
        f"{page.relative_to(ROOT)}:{line}: {target}: {problem}"
        for page in list_pages()
        for line, target in list_links(page)
        if (problem := find_link_problem(page, target))
    ]
    assert not broken, "\n".join(broken)


def is_there(page: Path, name: str) -> bool:
    """Look from the top, below `broker/` (as ARCHITECTURE.md names modules), or beside the page."""
    patterns = [name]
    if braces := re.search(r"\{([^}]*)\}", name):
        patterns = [name.replace(braces[0], choice) for choice in braces[1].split(",")]
    bases = (ROOT, ROOT / "broker", ROOT / "broker/runtime", ROOT / "tests", ROOT / "tests/testbed", page.parent)
    return all(any(any(base.glob(each)) for base in bases) for each in patterns)


def test_every_file_that_a_page_names_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}:{line}: {name}"
        for page in list_pages()
        if page != CHANGELOG  # mentions files as they were then
        for line, text in list_prose(page)
        for name in FILE.findall(text)
        if not name.startswith(ELSEWHERE) and not is_there(page, name)
    ]
    assert not missing, "\n".join(missing)


def test_every_module_that_a_page_names_without_a_folder_exists() -> None:
    known = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")} | {"train.py"}  # the user's
    missing = [
        f"{page.relative_to(ROOT)}:{line}: {name}"
        for page in list_pages()
        if page != CHANGELOG
        for line, text in list_prose(page)
        for name in re.findall(r"`(\w+\.py)`", text)
        if name not in known
    ]
    assert not missing, "\n".join(missing)


def list_misplaced(text: str) -> list[str]:
    """List modules that follow a path in a line or cell (`broker/jobs/health.py`, `deaths.py`) but lie elsewhere."""
    misplaced = []
    for cell in text.split(" | "):
        folder: Path | None = None
        for name in re.findall(r"`([\w/.-]+\.py)`", cell):
            if "/" in name:
                folder = next((base / name for base in (ROOT, ROOT / "broker") if (base / name).exists()), None)
                folder = folder and folder.parent
            elif folder is not None and not name.startswith("agent_") and not (folder / name).exists():
                misplaced.append(f"{name} is not in {folder.relative_to(ROOT)}")
    return misplaced


def test_modules_named_after_a_path_lie_beside_it() -> None:
    assert list_misplaced("`broker/jobs/health.py`, `deaths.py` | `keys.py`") == []
    assert list_misplaced("`broker/jobs/health.py` and `keys.py`") == ["keys.py is not in broker/jobs"]
    found = [
        f"{page.relative_to(ROOT)}:{line}: {each}"
        for page in list_pages()
        if page != CHANGELOG
        for line, text in list_prose(page)
        for each in list_misplaced(text)
    ]
    assert not found, "\n".join(found)


def test_glossary_has_at_most_15_words() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    glossary = text.partition("## Glossary")[2].partition("\n## ")[0]
    words = re.findall(r"^\| (?!word|---)([^|]+) \|", glossary, re.MULTILINE)
    assert 8 <= len(words) <= 15
    assert not [word for word in words if text.lower().count(word[:4]) < 2], (
        "a word that the page does not use needs no entry"
    )


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for _, target in list_links(page):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.exists():
                waiting.append(file)
            elif file.is_dir():
                waiting.extend(file.glob("*.md"))
    unlinked = [page for page in list_pages() if page not in seen and ".github" not in page.parts]
    assert not unlinked, unlinked
