"""Tables: 80 columns, and no two different cells that look the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cli.render import _fit_column, print_table

AZURE = ["Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5", "Standard_ND96isr_H100_v5"]


def test_long_names_with_a_common_prefix_stay_distinct_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "x" * 56
    print_table(["A", "INSTANCE"], [[wide, name] for name in AZURE], firm=("A",))
    _, *rows = capsys.readouterr().out.splitlines()
    assert all(len(row) <= 80 for row in rows)
    assert rows[0] == rows[2] != rows[1]


def test_name_that_no_cut_keeps_distinct_is_wrapped() -> None:
    cells = ["aaaa1bbbb", "aaaa2bbbb"]
    assert _fit_column(cells, 4) == [["aaaa", "1bbb", "b"], ["aaaa", "2bbb", "b"]]


def test_column_without_name_and_text_takes_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "", "B"], [["1", "", "2"]])
    assert capsys.readouterr().out == "A    B\n1    2\n"


def test_table_without_rows_shows_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "B"], [])
    assert capsys.readouterr().out == "A  B\n"


@given(st.lists(st.text("ab12", min_size=0, max_size=12), max_size=6), st.integers(1, 12))
def test_different_cells_stay_different_and_fit(cells: list[str], width: int) -> None:
    fitted = _fit_column(cells, width)
    assert all(len(part) <= width for lines in fitted for part in lines)
    shown = {cell: tuple(lines) for cell, lines in zip(cells, fitted, strict=True)}
    assert len(set(shown.values())) == len(shown)
