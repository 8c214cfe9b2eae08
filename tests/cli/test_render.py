"""Tables: 80 columns, and no two different cells that look the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cli.render import _fit_column, fits, format_table, print_table

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


def test_wide_table_states_what_all_rows_share_once_instead_of_cutting_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [[name, "y" * 40, "H100:8", f"{number}"] for number, name in enumerate(("p4d.24xlarge", "p4de.24xlarge"))]
    print_table(["INSTANCE", "NOTE", "ACC", "USD"], rows, right=("USD",), firm=("USD",))
    assert "All rows" not in capsys.readouterr().out, "a table that fits keeps its columns"
    print_table(["INSTANCE", "NOTE", "ACC", "USD"], [[row[0], "y" * 70, *row[2:]] for row in rows], firm=("USD",))
    assert capsys.readouterr().out.splitlines() == [
        f"All rows: NOTE {'y' * 70}",
        "INSTANCE       ACC     USD",
        "p4d.24xlarge   H100:8  0",
        "p4de.24xlarge  H100:8  1",
    ]


def test_single_row_keeps_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "B"], [["x" * 50, "y" * 50]])
    assert capsys.readouterr().out.startswith("A  ")


@pytest.mark.parametrize(("note", "is_fitting"), [("y" * 70, True), ("z" * 60, False)])
def test_table_fits_if_no_cell_is_cut(note: str, is_fitting: bool) -> None:
    rows = [["p4d.24xlarge", note, "1"], ["p4de.24xlarge", "y" * 70, "2"]]
    assert fits(["INSTANCE", "NOTE", "USD"], rows) is is_fitting
    assert any("…" in line for line in format_table(["INSTANCE", "NOTE", "USD"], rows)) is not is_fitting


@given(st.lists(st.lists(st.text("ab", max_size=60), min_size=3, max_size=3), max_size=4))
def test_no_dropped_column_differs_between_rows(rows: list[list[str]]) -> None:
    lines = format_table(["A", "B", "C"], rows)
    if lines[0].startswith("All rows: "):
        kept = lines[1].split()
        assert kept[0] == "A" and len(rows) > 1
        assert all(len({row["ABC".index(name)] for row in rows}) == 1 for name in "ABC" if name not in kept)
    else:
        assert lines[0].split() == ["A", "B", "C"]


@given(st.lists(st.text("ab12", min_size=0, max_size=12), max_size=6), st.integers(1, 12))
def test_different_cells_stay_different_and_fit(cells: list[str], width: int) -> None:
    fitted = _fit_column(cells, width)
    assert all(len(part) <= width for lines in fitted for part in lines)
    shown = {cell: tuple(lines) for cell, lines in zip(cells, fitted, strict=True)}
    assert len(set(shown.values())) == len(shown)
