"""Task <-> JSON text for the store. The text contains the names of secrets, never their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from broker.types import Secret, Task


def encode_task(task: Task) -> str:
    """Return a task as JSON for the store, without the values of its secrets."""
    hidden = {name: Secret(value="") for name in task.secrets}
    return msgspec.json.encode(replace(task, secrets=hidden)).decode()


def decode_task(text: str, secrets: Mapping[str, str]) -> Task:
    """Return the task with its secrets filled in; unknown secrets remain empty."""
    task = msgspec.json.decode(text, type=Task)
    return replace(task, secrets={name: Secret(value=secrets.get(name, "")) for name in task.secrets})
