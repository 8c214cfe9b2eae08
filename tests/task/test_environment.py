"""Values of `envs` and `secrets` reach the program as SkyPilot's loader would pass them."""

from __future__ import annotations

import pytest

from broker.task.loader import load_tasks_text
from broker.types import Task


def load(text: str) -> Task:
    (task,) = load_tasks_text(text, "task.yaml")
    return task


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("true", "True"),
        ("False", "False"),
        ("yes", "True"),
        ("Off", "False"),
        ("n", "n"),
        ("'true'", "true"),
        ("1.10", "1.1"),
        ("'1.10'", "1.10"),
        ("1.0e-5", "1e-05"),
        ("1e5", "1e5"),
        ("5e-5", "5e-5"),
        ("010", "8"),
        ("08", "08"),
        ("0x1F", "31"),
        ("1_000", "1000"),
        ("12:30", "750"),
        ("2024-01-01", "2024-01-01"),
        ("2024-99-99", "2024-99-99"),
        ("+1", "1"),
        (".inf", "inf"),
        ("!!str 1.10", "1.10"),
        ("''", ""),
        ("[1, 'x', yes]", "[1, 'x', True]"),
        ("{1: {b: [c, null]}}", "{1: {'b': ['c', None]}}"),
    ],
)
def test_value_is_the_text_that_skypilot_passes(written: str, text: str) -> None:
    assert load(f"run: x\nenvs: {{A: {written}}}").envs == {"A": text}
    assert load(f"run: x\nsecrets: {{A: {written}}}").secrets["A"].value == text


def test_paths_are_filled_with_the_text_that_the_program_gets() -> None:
    task = load("run: x\nenvs: {V: 1.10}\nfile_mounts: {/a: 's3://bucket/$V'}")
    assert task.storage_mounts[0].source == ("s3://bucket/1.1",)


@pytest.mark.parametrize("written", ["3.10", "010", "12:30", "yes", "1_000"])
def test_value_that_changes_is_noted_where_it_stands(written: str) -> None:
    (notice,) = load(f"run: x\nenvs:\n  VERSION: {written}").notices
    assert (notice.origin.line, notice.origin.column, notice.blocks_launch) == (3, 3, False)
    assert f"not `{written}`" in notice.message
    assert notice.hint == "put it in quotes to keep it"


@pytest.mark.parametrize("written", ["true", "FALSE", "1.0e-5", "42", "hello", "'3.10'", "[1, 2]"])
def test_value_that_no_program_reads_differently_is_not_noted(written: str) -> None:
    assert not load(f"run: x\nenvs: {{A: {written}}}").notices


def test_note_about_a_secret_does_not_show_it() -> None:
    (notice,) = load("run: x\nsecrets: {PIN: 0123456}").notices
    assert "`secrets.PIN` is not as written" in notice.message
    assert "0123456" not in f"{notice.message}{notice.hint}{notice.source_line}"
    assert "42798" not in notice.message
