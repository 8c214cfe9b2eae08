"""Write a self-contained HTML file in the style of the dashboard: no scripts, no links to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.dashboard.html import Content, Markup, element
from broker.errors import UsageError

STYLE = Path(__file__).parent / "static" / "style.css"


def write_paper(title: str, *content: Content) -> str:
    """Make the file; the title is its heading."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} · broker"),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    body = element("body", element("main", element("h1", title), *content))
    return "<!doctype html>" + element("html", head, body, lang="en") + "\n"


def show_figures(figures: Sequence[tuple[str, Content]]) -> Markup:
    """Show totals as cards of (name, text)."""
    cards = [element("div", element("dt", name), element("dd", text)) for name, text in figures]
    return element("dl", *cards, class_="figures")


def save_paper(file: Path, text: str) -> None:
    """Write the file. Raises UsageError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{file}`: {(error.strerror or 'no access').lower()}") from None
