"""Mutants are named by their place, keep every other line, and leave alone what is only read."""

from __future__ import annotations

import ast
from random import Random
from textwrap import dedent

import pytest

from tests.mutation import draw
from tests.mutation.judge import Verdict
from tests.mutation.operators import find_mutants, is_sound, plant
from tests.mutation.readers import find_readers
from tests.mutation.report import measure_percent, render
from tests.tiers import long

FILE = "broker/jobs/example.py"


def mutate(source: str) -> dict[str, str]:
    """Return each mutant's name and the line that it makes."""
    text = dedent(source)
    found = {}
    for mutant in find_mutants(FILE, text):
        if is_sound(text, mutant):
            changed = plant(text, mutant).splitlines()
            found[f"{mutant.operator}: {mutant.before} -> {mutant.after}"] = changed[mutant.line - 1].strip()
    return found


@pytest.mark.parametrize(
    ("line", "operator", "expected"),
    [
        ("return a < b", "boundary", "return a <= b"),
        ("return a < b", "negation", "return a >= b"),
        ("return a is not b", "negation", "return a is b"),
        ("return (a) and (b)", "boolean", "return (a) or (b)"),
        ("return a and b", "operand", "return ((b))"),
        ("return not a", "negation", "return (a)"),
        ("return a - b", "arithmetic", "return a + b"),
        ("return max(a, b)", "extreme", "return min(a, b)"),
        ("return b", "return", "return None"),
        ("x = 2", "constant", "x = 3"),
        ("x = 600.0", "constant", "x = 6000.0"),
        ("x = True", "constant", "x = False"),
        ("await a(b)", "await", "pass"),
        ("a.close()", "statement", "pass"),
        ("a.b = 1", "statement", "pass"),
        ("raise a", "raise", "pass"),
        ("a(b, c=d)", "argument", "a(b)"),
        ("x = [e for e in a if e]", "filter", "x = [e for e in a if True]"),
        ("while a: continue", "jump", "while a: break"),
        ("with a.transaction(): b()", "durable", "with a.transaction(is_durable=False): b()"),
        ("with a.transaction(): b()", "atomic", 'with __import__("contextlib").nullcontext(): b()'),
        ("a.intents.close(b, IntentEnd.UP)", "outcome", "a.intents.close(b, IntentEnd.NEVER_ASKED)"),
        (
            'a.rows("SELECT 1 FROM jobs WHERE NOT is_terminal")',
            "sql",
            'a.rows("SELECT 1 FROM jobs WHERE is_terminal")',
        ),
    ],
)
def test_each_operator_changes_its_own_part_of_the_line(line: str, operator: str, expected: str) -> None:
    found = mutate(f"async def f(a, b, d):\n    {line}\n")
    assert expected in [text for name, text in found.items() if name.startswith(f"{operator}: ")], found


def test_caught_errors_are_narrowed_and_widened() -> None:
    found = mutate("def f():\n    try:\n        g()\n    except (A, B):\n        h()\n")
    lines = {text for name, text in found.items() if name.startswith("caught")}
    assert lines == {"except ZeroDivisionError:", "except Exception:", "except (A,):", "except (B,):"}


@pytest.mark.parametrize(
    "source",
    [
        '"""Words, 1 < 2."""\n',
        'def f():\n    """Words."""\n',
        "def f(a: 'x < 1') -> 'y and z':\n    pass\n",
        "log.warning('%s is %d', a, 1 + 2)\n",
        "def f(self):\n    self._store.events.add(event, job_id=1)\n",
        "make_event(EventKind.SHRUNK, rank=1 + 2)\n",
        "def f():\n    assert a < 1, 'words'\n",
        "x = f'{a + 1}'\n",
        "if TYPE_CHECKING:\n    x = 1\n",
        "class P(Protocol):\n    x: int = 1\n",
        "def __repr__(self):\n    return 1 < 2\n",
        "__all__ = ['a']\n",
        "def describe_place(a) -> str:\n    return 'x' if a > 1 else 'y'\n",
    ],
)
def test_type_hints_and_docstrings_have_no_mutants(source: str) -> None:
    assert mutate(source) in ({}, {"condition: TYPE_CHECKING -> not (TYPE_CHECKING)": "if not (TYPE_CHECKING):"})


def test_messages_of_raised_errors_are_not_mutated() -> None:
    assert set(mutate("def f():\n    raise E(f'words', hints=('a',) * 2)\n").values()) == {"pass"}


def test_every_other_line_stays_where_it_was() -> None:
    source = (draw.ROOT / "broker/jobs/monitor.py").read_text()
    for mutant in find_mutants("broker/jobs/monitor.py", source)[::7]:
        lines = plant(source, mutant).splitlines()
        assert lines[: mutant.line - 1] == source.splitlines()[: mutant.line - 1]
        assert source.splitlines()[mutant.line - 1].strip() == mutant.text
        ast.parse(plant(source, mutant))


def test_bytes_beyond_ascii_before_a_mutant_do_not_move_it() -> None:
    assert mutate("def f(a, b):\n    x = ('é', a < b)\n")["boundary: < -> <="] == "x = ('é', a <= b)"


@long
def test_the_same_seed_draws_the_same_mutants_and_each_file_has_its_share() -> None:
    files = ["broker/state/calls.py", "broker/state/jobs.py", "broker/state/leader.py"]
    first, second, other = draw.draw(30, 1, files), draw.draw(30, 1, files), draw.draw(30, 2, files)
    assert first == second != other
    assert len(set(first)) == 30 and all(is_sound((draw.ROOT / each.file).read_text(), each) for each in first)
    assert {each.file for each in first} <= set(files) and "broker/state/jobs.py" in {each.file for each in first}


def test_a_constant_is_judged_by_the_tests_of_the_functions_that_read_it() -> None:
    def find(file: str, name: str) -> frozenset[str]:
        mutants = find_mutants(file, (draw.ROOT / file).read_text())
        return find_readers(next(each for each in mutants if each.name.endswith(name)))

    assert "broker/state/retention.py Compaction.compact" in find("broker/state/schema.py", "constant: 90 -> 0")
    assert find("broker/provision/hedge_timer.py", "arithmetic: / -> *") == frozenset(), "it is within a function"


def test_shares_sum_to_the_count_and_follow_the_weights() -> None:
    assert draw.share_out(10, {"a": 100, "b": 200, "c": 33}) == {"a": 3, "b": 6, "c": 1}


def test_a_frequent_operator_does_not_crowd_out_the_others() -> None:
    found = find_mutants(FILE, "def f(a, b):\n" + "    x = 100\n" * 50 + "    return a < b\n")
    assert "boundary" in {each.operator for each in list(draw.shuffle(found, Random(1)))[:4]}


def test_a_known_equivalent_mutant_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["broker/state/calls.py"]
    first, *others = draw.draw(5, 1, files)
    monkeypatch.setattr(draw, "read_equivalents", lambda: {first.identity: "changes nothing"})
    again = draw.draw(5, 1, files)
    assert first not in again and len(again) == 5 and set(others) <= set(again)


def test_each_claim_of_equivalence_has_a_reason_and_names_an_existing_file() -> None:
    for (file, *_), why in draw.read_equivalents().items():
        assert len(why) > 20 and (draw.ROOT / file).exists()


def test_the_report_counts_each_room_and_lists_survivors() -> None:
    one, two = find_mutants(FILE, "def f(a, b):\n    return a < b\n")[:2]
    judged = [(one, Verdict(by="test", where="x", cpu_s=1.0)), (two, Verdict(by="", where="", cpu_s=1.0))]
    assert measure_percent(judged) == 50.0
    text = "\n".join(render(judged))
    assert "broker/jobs" in text and two.name in text and one.name not in text.partition("survivors")[2]
