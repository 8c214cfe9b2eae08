"""Behaviour reads kinds, never sentences: outcomes, events, errors and reasons are compared by enum or class only."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.types import Event, EventKind, Outcome, OutcomeKind
from broker.wording import describe_event, describe_outcome
from broker.wording.events import find_renderer

BROKER = Path(__file__).parent.parent / "broker"
WORDS = {"outcome", "message", "detail", "details", "reason", "failure"}  # attributes that hold text for people
KINDS = {"kind", "outcome_kind"}  # attributes that hold an enum: a literal beside one is a kind that no type checks
LOCALS = {"outcome", "failure", "detail"}  # as above, once they are in a variable
READERS = {
    "startswith", "endswith", "partition", "rpartition", "split", "rsplit", "splitlines", "find", "rfind", "index",
    "count", "removeprefix", "removesuffix",
}  # fmt: skip
CHANGERS = {"lower", "upper", "casefold", "strip", "lstrip", "rstrip", "replace", "format"}
TO_TEXT = {"str", "repr", "describe_outcome", "describe_event"}
MATCHERS = {"match", "fullmatch", "search", "findall", "finditer"}  # of `re`, and of patterns
EXEMPT = {
    "broker/state/sentences.py",  # the migration: it reads what older versions recorded, once
}
SHORTENED = {  # texts that are shortened for display; no decision depends on them
    "broker/app/market.py: wider.message.partition('\\n')",
    "broker/cli/what_if.py: error.message.splitlines()",
    "broker/clouds/aws/startable.py: error.message.rpartition(': ')",
}
UNTOLD = {OutcomeKind.NO_OFFER, OutcomeKind.DEPENDENCY_FAILED, OutcomeKind.OTHER}  # the detail is all that is said


def list_text_reads(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of each decision that depends on text for people."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_reader = node.func.attr in READERS and _is_text(node.func.value)
            is_matcher = node.func.attr in MATCHERS and any(map(_is_text, node.args))
            if is_reader or is_matcher:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_text(side) or _is_kind(side) for side in sides) and any(map(_is_literal, sides)):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Match) and (_is_text(node.subject) or _is_kind(node.subject)):
            patterns = (part for case in node.cases for part in ast.walk(case.pattern))
            if any(isinstance(part, ast.MatchValue) and _is_literal(part.value) for part in patterns):
                yield node.lineno, ast.unparse(node.subject)


def _is_text(node: ast.expr) -> bool:
    """Include text that is only converted to a string, or to lower case, before it is read."""
    if isinstance(node, ast.Attribute):
        return node.attr in WORDS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in CHANGERS and _is_text(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TO_TEXT:
        return any(map(_is_text, node.args))
    return isinstance(node, ast.Name) and node.id in LOCALS


def _is_kind(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in KINDS


def _is_literal(node: ast.expr) -> bool:
    """A text, several of them, or a constant of a module that may be one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_literal, node.elts))
    if isinstance(node, ast.Name):
        return node.id.isupper()
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and type(node.value) is str)


def test_no_behaviour_reads_a_sentence() -> None:
    found = [
        (f"{name}: {code}", line)
        for path in sorted(BROKER.rglob("*.py"))
        if (name := f"broker/{path.relative_to(BROKER)}") not in EXEMPT
        for line, code in list_text_reads(path.read_text())
    ]
    wrong = [f"{read} (line {line})" for read, line in found if read not in SHORTENED]
    assert not wrong, "compare kinds or classes, not text:\n" + "\n".join(wrong)
    assert {read for read, _ in found} >= SHORTENED, "an exception that is no longer needed"


@pytest.mark.parametrize(
    "snippet",
    [
        # as the product did once
        'return outcome.startswith("preempted") and "taken down" not in outcome',
        'x = [each for each in attempts if each.outcome.startswith("preempted")]',
        "tries = sum(1 for each in job.attempts if each.outcome.startswith(NOT_STARTED_OUTCOME))",
        'kind, _, reason = attempt.outcome.partition(": ")',
        'if "obstore" not in error.message: raise',
        'if node.reason == "preempted": pass',
        "if node.reason in SELF_ENDED: pass",
        "if event.kind != LAST_LINES_KIND: pass",
        # as it might again
        'if event.kind == "preempted": pass',
        'if event.kind in ("up", "down"): pass',
        'if job.outcome_kind != "stalled": pass',
        'if "taken down" in describe_outcome(attempt.outcome): pass',
        'if str(attempt.outcome).lower() == "moved": pass',
        'if re.search("no new step", job.failure): pass',
        "if PATTERN.fullmatch(event.message): pass",
        'if attempt.outcome.detail.endswith("gone"): pass',
        'if any(word in job.failure.lower() for word in ("budget",)) or "budget" in job.failure: pass',
        'match node.reason:\n    case "lease":\n        pass',
        'match event.kind:\n    case "up" | "down":\n        pass',
    ],
)
def test_code_that_reads_a_sentence_is_found(snippet: str) -> None:
    lines = snippet if not snippet.startswith("return") else f"def f(outcome):\n    {snippet}"
    assert list(list_text_reads(lines))


@pytest.mark.parametrize(
    "snippet",
    [
        "if attempt.outcome.kind is OutcomeKind.PREEMPTED: pass",
        "if event.kind in (EventKind.UP, EventKind.DOWN): pass",
        "if node.reason == NodeEnd.LEASE or node.reason in (NodeEnd.DONE,): pass",
        "if attempt.outcome is None: pass",
        "if old.outcome == outcome or (old.kind, old.step) == (kind, step): pass",
        "if error.message != self._told: pass",
        "if len(refusal.message) <= MESSAGE_MAX: pass",
        'text = f"{error.message}; trying again"',
        "match outcome.kind:\n    case OutcomeKind.MOVED:\n        pass",
    ],
)
def test_comparing_kinds_and_showing_text_are_allowed(snippet: str) -> None:
    assert not list(list_text_reads(snippet))


# -- events carry what their words need


def list_events_made(source: str) -> Iterator[tuple[int, str, set[str], bool]]:
    """Yield (line, kind, names of its data, whether more data comes in a mapping)."""
    for node in ast.walk(ast.parse(source)):
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.value.id == "EventKind":
            assert isinstance(node, ast.Call)
            names = {keyword.arg for keyword in node.keywords if keyword.arg}
            yield node.lineno, first.attr, names, any(keyword.arg is None for keyword in node.keywords)


def test_every_event_carries_the_data_that_its_words_need() -> None:
    made = set()
    for path in sorted(BROKER.rglob("*.py")):
        if f"broker/{path.relative_to(BROKER)}" in EXEMPT:
            continue
        text = path.read_text()
        for line, kind, names, has_more in list_events_made(text) if "EventKind" in text else ():
            made.add(kind)
            parameters = inspect.signature(find_renderer(EventKind[kind])).parameters
            needed = {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}
            assert names <= set(parameters), f"{path}:{line}: {kind} has no {names - set(parameters)}"
            missing = needed - names - ({"in_place"} if kind.endswith("_RESTARTED") else set())
            assert has_more or not missing, f"{path}:{line}: {kind} lacks {missing}"
    assert made == {kind.name for kind in EventKind}, "each kind is made somewhere"


def test_every_outcome_has_words() -> None:
    for kind in OutcomeKind:
        said = describe_outcome(Outcome(kind=kind, detail="why", step=3, exit_code=2))
        assert said and "None" not in said
    assert describe_outcome(None) == ""


def test_incomplete_data_is_shown_without_an_error() -> None:
    assert describe_event(Event(kind=EventKind.SHRUNK, data={"rank": 1})) == "shrunk: {'rank': 1}"


@pytest.mark.parametrize("kind", [kind for kind in OutcomeKind if kind not in UNTOLD])
def test_outcome_without_detail_ends_in_no_colon(kind: OutcomeKind) -> None:
    said = describe_outcome(Outcome(kind=kind))
    assert said and not said.endswith(":") and ": after" not in said


def test_preemption_without_detail_names_the_step_only() -> None:
    assert describe_outcome(Outcome(kind=OutcomeKind.PREEMPTED, step=7)) == "preempted after step 7"
    assert describe_outcome(Outcome(kind=OutcomeKind.PREEMPTED, detail="node 1 gone")) == "preempted: node 1 gone"
