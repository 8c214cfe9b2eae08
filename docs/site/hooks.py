"""MkDocs hooks: top-level pages join the site, and the command reference is generated from the command line itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# page of the site -> file of the repository
TOP_LEVEL = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
}
COMMANDS = "COMMANDS.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of `docs/`."""
    for name, source in TOP_LEVEL.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, COMMANDS, content=write_commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of `docs/` at the pages added above, and a folder at its first page."""
    text = re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown) if "/" not in page.file.src_uri else markdown
    text = text.replace("](README.md", "](index.md").replace("](pictures/make_rehearsal.py)", "](REHEARSE.md)")
    return text.replace("](decisions)", "](decisions/0010-exact-pipelines.md)")


def write_commands() -> str:
    """Return a page with every command and its help, as `--help` prints it."""
    import typer

    from broker.cli.main import app

    root: Any = typer.main.get_command(app)
    context = root.make_context("broker", [], resilient_parsing=True)
    lines = ["# Commands", "", "Generated from `broker --help` and the help of every command.", ""]
    for name in root.list_commands(context):
        lines += _describe(root.get_command(context, name), f"broker {name}", context, level=2)
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str, parent: Any, *, level: int) -> list[str]:
    context = command.make_context(name.rsplit(" ", 1)[-1], [], parent=parent, resilient_parsing=True)
    lines = [f"{'#' * level} `{name}`", "", "```text", command.get_help(context), "```", ""]
    if hasattr(command, "list_commands"):
        for each in command.list_commands(context):
            lines += _describe(command.get_command(context, each), f"{name} {each}", context, level=level + 1)
    return lines
