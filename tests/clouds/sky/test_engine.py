"""The worker process: concurrent calls, its death, no response, lines that are not answers."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import clock
from broker.clouds.sky import engine as module
from broker.clouds.sky.engine import WorkerEngine
from broker.errors import AuthError, CapacityError, TransientError, UnknownOutcomeError

Make = Callable[[str], WorkerEngine]
LOOP = """
    import json, sys
    def answer(call, **reply):
        print(json.dumps({"id": call["id"], **reply}), flush=True)
    held = []
    for line in sys.stdin:
        call = json.loads(line)
        verb, arguments = call["verb"], call["arguments"]
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[WorkerEngine] = []

    def make(body: str) -> WorkerEngine:
        path = tmp_path / "worker.py"
        path.write_text(textwrap.dedent(LOOP) + textwrap.indent(textwrap.dedent(body), "    "))
        made.append(WorkerEngine(sys.executable, worker=path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_answers_reach_their_callers_in_any_order(make: Make) -> None:
    engine = make(
        """
        held.append(call)
        if len(held) == 3:
            for each in reversed(held):
                answer(each, value=each["arguments"]["name"] + "!")
        """
    )

    async def act() -> None:
        assert await asyncio.gather(*(engine.launch(name, {}) for name in "abc")) == ["a!", "b!", "c!"]

    asyncio.run(act())


def test_it_serves_one_event_loop_after_another(make: Make) -> None:
    engine = make('answer(call, value=["lambda"])')
    for _ in range(2):
        assert asyncio.run(engine.list_enabled()) == ["lambda"]


def test_errors_are_raised_as_brokers_classes(make: Make) -> None:
    engine = make('answer(call, fault={"type": "ResourcesUnavailableError", "message": "none left"})')
    with pytest.raises(CapacityError, match="none left"):
        asyncio.run(engine.launch("a", {}))


def test_a_worker_that_dies_leaves_the_outcome_open_and_the_next_call_starts_another(
    make: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "died"
    engine = make(
        f"""
        from pathlib import Path
        if not Path({str(mark)!r}).exists():
            Path({str(mark)!r}).touch()
            sys.exit(1)
        answer(call, value="r1")
        """
    )
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(engine.launch("a", {}))
    assert asyncio.run(engine.launch("a", {})) == "r1"


def test_a_query_to_a_worker_that_dies_may_be_repeated(make: Make) -> None:
    with pytest.raises(TransientError):
        asyncio.run(make("sys.exit(1)").list_enabled())


def test_silent_worker_ends_the_session(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("pass")

    async def give_up(work: object, limit_s: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(module, "within", give_up)
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(engine.launch("a", {}))
    with pytest.raises(TransientError):
        asyncio.run(engine.list_enabled())


def test_a_worker_whose_calls_hang_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyPilot waits without a limit for a server that can no longer be reached, such as after a change of network."""
    engine = make(f'call["id"] > {module.OVERDUE_MAX} and answer(call, value=["oci"])')
    limits = iter([0.0] * module.OVERDUE_MAX)
    within = clock.within

    async def give_up_at_first(work: Any, limit_s: float) -> Any:
        return await within(work, next(limits, limit_s))

    monkeypatch.setattr(module, "within", give_up_at_first)
    engine.start()
    first = engine._process
    for _ in range(module.OVERDUE_MAX):
        assert engine._process is first
        with pytest.raises(TransientError):
            asyncio.run(engine.list_enabled())
    assert first is not None and first.poll() is not None
    assert asyncio.run(engine.list_enabled()) == ["oci"]


def test_lines_that_are_not_answers_are_skipped(make: Make) -> None:
    assert asyncio.run(make('print("a warning"); answer(call, value=["oci"])').list_enabled()) == ["oci"]


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuthError) as caught:
        asyncio.run(WorkerEngine(str(tmp_path / "python")).hello())
    assert str(tmp_path / "python") in caught.value.message
    assert any("BROKER_SKY_PYTHON" in hint for hint in caught.value.hints)


def test_without_skypilot_the_worker_says_so(tmp_path: Path) -> None:
    """The real worker, in an interpreter without SkyPilot (isolated: nothing of ours is on its path)."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    engine = WorkerEngine(str(python))
    try:
        with pytest.raises(AuthError, match="sky"):
            asyncio.run(engine.hello())
    finally:
        engine.close()
