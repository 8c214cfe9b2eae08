"""Build HTML. All text is escaped here, because names, logs and errors of clouds are untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from broker.formatting import strip_control

VOID = frozenset({"meta", "link", "input", "br"})
_NAME = re.compile(r"[a-z][a-z0-9-]*")


class Markup(str):
    """HTML that was built by this module and may be inserted as it is."""

    __slots__ = ()


Content = Markup | str | int | None


def join(parts: Iterable[Content]) -> Markup:
    """Join parts; text that is not markup is escaped, and its control characters are removed."""
    return Markup("".join(_render(part) for part in parts))


def element(tag: str, *children: Content, **attributes: str | int | bool | None) -> Markup:
    """Make an element. `class_` stands for `class`, `_` for `-`; attributes that are None or False are left out.

    >>> element("a", "<b>", href="/jobs/1", class_="id")
    '<a href="/jobs/1" class="id">&lt;b&gt;</a>'
    """
    assert _NAME.fullmatch(tag)
    written = "".join(_write_attribute(name, value) for name, value in attributes.items())
    return Markup(f"<{tag}{written}>" if tag in VOID else f"<{tag}{written}>{join(children)}</{tag}>")


def link_job(job_id: int) -> Markup:
    """Return a link to the page of a job."""
    return element("a", str(job_id), href=f"/jobs/{job_id}")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Content]], *, caption: str, right: Sequence[str] = ()
) -> Markup:
    """Make a table with a caption for screen readers; columns in `right` hold numbers."""
    kinds = ["number" if head in right else None for head in heads]
    header = [element("th", head, scope="col", class_=kind) for head, kind in zip(heads, kinds, strict=True)]
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    inner = element(
        "table", element("caption", caption), element("thead", element("tr", *header)), element("tbody", *body)
    )
    return make_scrollable(inner, caption)


def make_scrollable(inner: Markup, title: str) -> Markup:
    """Make a table or picture scroll sideways on a narrow screen, also by keyboard."""
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=title)


def note_newest(shown: int, count: int, *, command: str) -> Markup | None:
    """Say that only the newest rows are shown, and which command lists all; None if all are shown."""
    if shown >= count:
        return None
    text = f"The newest {shown:,} of {count:,}; all are listed by "
    return element("p", text, element("code", command), ".", class_="faint")


def show_key(key: Mapping[str, str]) -> Markup:
    """Explain the colours of a picture: class -> meaning."""
    return element(
        "p", *(element("span", element("i", class_=kind), f" {name}") for kind, name in key.items()), class_="key"
    )


def _render(part: Content) -> str:
    if part is None:
        return ""
    return part if isinstance(part, Markup) else escape(strip_control(str(part)))


def _write_attribute(name: str, value: str | int | None) -> str:  # a bool is an int
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(strip_control(str(value)))}"'
