"""The administrator's policy: a function that receives each task before it is planned, and may change or refuse it.

`admin_policy` in `config.toml` names it (on a server, for all users): `package.module:function`, or a file,
`/etc/broker/policy.py:function`. It receives a `PolicyRequest` and returns the task; it raises `PolicyError` to refuse
it. A policy must accept its own result unchanged, because a task may be planned more than once.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from broker.config import find_admin_policy
from broker.errors import PolicyError, StateError, TaskError
from broker.frozen import frozen
from broker.types import Payee, Task

log = logging.getLogger(__name__)

ASK = "ask your administrator, who set `admin_policy` in `config.toml`"
YAML_NAMES = {"recovery": "job_recovery", "unattended_s": "unattended", "max_duration_s": "max_duration"}


@frozen
class PolicyRequest:
    """A task that is about to be planned. `user` and `project` come from a server's token, or are empty."""

    task: Task
    user: str = ""
    project: str = ""


AdminPolicy = Callable[[PolicyRequest], Task]


def govern(home: Path, task: Task, payee: Payee, *, note: Callable[[str], None]) -> Task:
    """Apply the policy of this state folder; return the resulting task, and note the fields that changed.

    Raises PolicyError for a task that the policy refuses, and StateError for a policy that cannot be loaded or fails.
    Nothing starts in that case, because an unchecked task might be forbidden.
    """
    entry = find_admin_policy(home)
    if entry is None:
        return task
    policy = load_policy(entry)
    try:
        governed = policy(PolicyRequest(task=task, user=payee.user, project=payee.project))
    except PolicyError:
        raise
    except Exception as error:  # the administrator's code
        log.warning("admin_policy %s failed", entry, exc_info=error)
        raise StateError(f"`admin_policy` {entry} failed: {type(error).__name__}: {error}", hints=[ASK]) from error
    if not isinstance(governed, Task):
        raise StateError(f"`admin_policy` {entry} returned {type(governed).__name__}, not a task", hints=[ASK])
    if governed == task:
        return task
    note(f"note: the administrator's policy changed {', '.join(f'`{name}`' for name in list_changed(task, governed))}")
    return check(governed, entry)


def check(task: Task, entry: str) -> Task:
    """Return the task if all its values are valid. Raises StateError."""
    from broker.task.checking import check_task

    try:
        return check_task(task)
    except TaskError as error:
        found = "; ".join(issue.message for issue in error.issues)
        raise StateError(f"`admin_policy` {entry} made an invalid task: {found}", hints=[ASK]) from error


def list_changed(before: Task, after: Task) -> list[str]:
    """Return the changed fields by their names in a task file; `resources` counts as one."""
    names = (each.name for each in fields(Task) if getattr(before, each.name) != getattr(after, each.name))
    return [YAML_NAMES.get(name, name) for name in names]


@lru_cache
def load_policy(entry: str) -> AdminPolicy:
    """Import a policy once for this process. Raises StateError."""
    where, _, name = entry.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        policy: AdminPolicy = getattr(module, name)
    except Exception as error:  # the administrator's code
        raise StateError(
            f"cannot load `admin_policy` {entry}: {type(error).__name__}: {error}",
            hints=["the module must be importable by broker's own Python, or be a file with an absolute path", ASK],
        ) from error
    if not callable(policy):
        raise StateError(f"`admin_policy` {entry} is not a function", hints=[ASK])
    return policy


def _load_file(path: Path) -> object:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"broker_admin_policy_{path.stem}", path)
    assert spec is not None, "the name ends with .py"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file require it
    spec.loader.exec_module(module)
    return module
