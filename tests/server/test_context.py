"""What a request may use: the clouds that the operator admits, and time until its client is gone."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.jobs import JobTarget
from broker.app.launching import prepare
from broker.app.verbs.account import plan_tasks
from broker.errors import NoOfferError, UsageError
from broker.server.context import DisconnectedError, Policy, RequestClock, ServerContext
from broker.state.people import Role, Token
from broker.types import Resources, Task

ON_LOCAL = Task(run="true", resources=(Resources(cloud="local"),))


def test_tasks_run_on_the_servers_machine_only_where_the_operator_allows_it(tmp_path: Path) -> None:
    allowing = ServerContext(tmp_path, policy=Policy(has_local_cloud=True))
    assert "local" in allowing.clouds and plan_tasks(allowing, tasks=(ON_LOCAL,), is_dryrun=False)
    refusing = ServerContext(tmp_path, policy=Policy())
    assert "local" not in refusing.clouds
    with pytest.raises(NoOfferError):
        plan_tasks(refusing, tasks=(ON_LOCAL,), is_dryrun=False)


def test_commands_run_on_the_servers_machine_only_where_the_operator_allows_it(tmp_path: Path) -> None:
    task = replace(ON_LOCAL, event_callback="cat ~/.broker/server/admin.token")
    allowing = ServerContext(tmp_path, policy=Policy(has_local_cloud=True))
    allowing.check_notify([task])
    refusing = ServerContext(tmp_path, policy=Policy())
    refusing.check_notify([ON_LOCAL])
    allowing.check_notify([replace(ON_LOCAL, pod_config="{}")])
    with pytest.raises(UsageError, match="the server's own access to Kubernetes"):
        refusing.check_notify([replace(ON_LOCAL, pod_config="{}")])
    with pytest.raises(UsageError, match="would run on the server's machine"):
        refusing.check_notify([task])
    with pytest.raises(UsageError, match="would run on the server's machine"):
        prepare(refusing, [replace(task, resources=(Resources(),))], JobTarget(context=refusing), is_dryrun=True)


def test_policy_of_the_administrator_sees_user_and_project_of_the_token(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "from dataclasses import replace\n"
        "def govern(request):\n"
        "    return replace(request.task, name=f'{request.user}-{request.project}')\n"
    )
    (tmp_path / "config.toml").write_text(f'admin_policy = "{tmp_path}/rules.py:govern"\n')
    notes: list[str] = []
    token = Token(id=1, user="ann", role=Role.USER, created_s=0.0, expires_s=None, revoked_s=None, project="vision")
    context = ServerContext(tmp_path, policy=Policy(), token=token, on_note=notes.append)
    assert (
        prepare(context, [Task(run="true")], JobTarget(context=context), is_dryrun=True).tasks[0].name == "ann-vision"
    )
    assert "note: the administrator's policy changed `name`" in notes
    context.close()


def test_reading_ends_when_its_client_is_gone() -> None:
    gone = threading.Event()
    clock = RequestClock(gone)
    asyncio.run(clock.sleep(0))
    gone.set()
    with pytest.raises(DisconnectedError):
        asyncio.run(clock.sleep(0))


def test_controllers_that_run_elsewhere_are_not_started_here(tmp_path: Path) -> None:
    context = ServerContext(tmp_path, policy=Policy(has_controller=False))
    context.store.jobs.add("train", ON_LOCAL)
    context.restart_daemon_if_needed()
    assert not context.config.daemon_lock.exists() and not context.config.daemon_log.exists()
    context.close()
