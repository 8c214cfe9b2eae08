"""Ctrl-C of a client: what it started on the server ends there too."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from broker.app.verbs.launching import describe_interrupted, launch
from broker.server.context import Interruption
from broker.state.people import AuditEvent
from broker.types import Resources, Task
from tests.server.conftest import Hosted


def interrupt(*anything: object) -> None:
    raise KeyboardInterrupt


def wait_for_record(hosted: Hosted, target: str) -> AuditEvent:
    """Return the one record about a target; the server writes it when the work has ended, perhaps after its client."""
    give_up_s = time.monotonic() + 120
    while not (found := [each for each in hosted.context.store.audit.list() if each.target == target]):
        assert time.monotonic() < give_up_s, f"no record of {target}"
        time.sleep(0.02)
    (last,) = found
    return last


@pytest.mark.parametrize("where", ["show", "confirm", "on_stage"])
def test_interrupted_launch_ends_on_the_server(hosted: Hosted, where: str) -> None:
    """After `on_stage`, the launch may have created its cluster already; nothing of it is unknown then."""
    name = f"cut-{where.replace('_', '-')}"
    callbacks = {each: interrupt if each == where else (lambda value: None) for each in ("show", "confirm", "on_stage")}
    session = hosted.open("user")
    with pytest.raises(KeyboardInterrupt):
        session.call(
            launch, task=Task(run="true", resources=(Resources(cloud="local"),)), cluster=name, autostop=None, hedge=1,
            retry_until_up=False, is_dryrun=False, **callbacks,
        )  # fmt: skip
    last = wait_for_record(hosted, f"cluster {name}")
    lines = session.call(describe_interrupted, cluster=name)
    if where == "on_stage":
        assert last.outcome in ("interrupted", "done")
        hosted.open("admin").request("POST", "/v1/terminate_clusters", f'{{"names": ["{name}"]}}'.encode())
    else:
        assert last.outcome in ("interrupted", "UsageError")  # the price was not accepted
        assert lines == ("interrupted; nothing was started",)
        assert hosted.context.store.clusters.get(name) is None


def test_work_is_cancelled_from_another_thread() -> None:
    interruption, begun = Interruption(), threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    def interrupt_once_begun() -> None:
        begun.wait()
        interruption.interrupt()

    thread = threading.Thread(target=interrupt_once_begun)
    thread.start()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interruption.guard(work()))
    thread.join()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interruption.guard(work()))  # interrupted before it began


def test_others_cannot_interrupt(hosted: Hosted) -> None:
    status, answer = hosted.ask(f"/v1/cancel/{'0' * 32}", {}, token=hosted.tokens["viewer"])
    assert (status, answer) == (200, {"is_running": False})
    assert hosted.ask(f"/v1/cancel/{'0' * 32}", {})[0] == 401
