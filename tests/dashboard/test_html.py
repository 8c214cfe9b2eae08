"""Untrusted text is shown as text, never as markup."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from broker.dashboard.html import Markup, element, join, table
from broker.formatting import strip_control


class Reader(HTMLParser):
    """Reads the tags, attributes and text that a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(), st.text())
def test_texts_and_attributes_survive_a_round_trip(text: str, value: str) -> None:
    seen = Reader(element("p", text, title=value))
    assert seen.tags == ["p"]
    assert seen.text == strip_control(text)
    assert seen.attributes == [("title", strip_control(value))]


def test_markup_is_inserted_once_escaped() -> None:
    assert join(["<b>", element("i", "&")]) == "&lt;b&gt;<i>&amp;</i>"
    assert isinstance(join([]), Markup)


def test_attributes_are_written_as_html_requires() -> None:
    made = element("input", type="hidden", class_="a", aria_label="x", disabled=True, checked=False, value=None)
    assert made == '<input type="hidden" class="a" aria-label="x" disabled>'


def test_a_table_has_a_caption_and_marks_number_columns() -> None:
    made = table(["Job", "Name"], [[1, "a"]], caption="Jobs", right=["Job"])
    assert "<caption>Jobs</caption>" in made and 'role="region" aria-label="Jobs"' in made
    assert '<td class="number">1</td><td>a</td>' in made
