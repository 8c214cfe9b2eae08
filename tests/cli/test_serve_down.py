"""`broker serve down` asks on a terminal only, as `broker down` does."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.cli.main import main
from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import ReadinessProbe, Resources, ServiceSpec, Task
from tests.cli.test_lifecycle import Keyboard


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Hold the service `web`, which the daemon ends as soon as that is requested."""

    def end_services(context: Context) -> None:
        for each in context.store.services.list():
            if each.down_requested:
                context.store.services.delete(each.name)

    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    monkeypatch.setattr(Context, "ensure_daemon", end_services)
    store = Store(tmp_path / "state.db", clock=SystemClock())
    task = Task(run="x", resources=(Resources(cloud="local"),), service=ServiceSpec(probe=ReadinessProbe(path="/")))
    store.services.add("web", task, host="127.0.0.1", port=1, wanted=1)
    yield store
    store.close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(("serve", "down", *arguments))
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_service_is_terminated_in_a_pipe_without_a_question(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(""))
    assert run("web") == 0
    assert store.services.list_names() == []
    shown = capsys.readouterr()
    assert "Service web is terminated" in shown.out and "?" not in shown.out + shown.err


@pytest.mark.parametrize(("typed", "flags", "is_down"), [("n\n", (), False), ("y\n", (), True), ("", ("--yes",), True)])
def test_service_is_terminated_on_a_terminal_only_after_a_yes(
    typed: str, flags: tuple[str, ...], is_down: bool, store: Store,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    assert run("--all", *flags) == (0 if is_down else 1)
    assert (store.services.list_names() == []) is is_down
    shown = capsys.readouterr()
    assert ("Terminate web?" in shown.err) is not bool(flags) and "Terminate web?" not in shown.out
