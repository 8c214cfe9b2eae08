"""The machines of a server report every failure as an error of broker."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest

from broker.errors import BrokerError, StateError, TransientError
from broker.hosting.machines import SshMachine, ThisMachine
from broker.sites.login import SshLogin


@pytest.mark.parametrize(
    ("failure", "expected", "words"),
    [
        (subprocess.TimeoutExpired("python3", 900.0), TransientError, "`python3` did not end on this machine"),
        (
            FileNotFoundError(2, "No such file or directory"),
            StateError,
            "cannot run `python3` on this machine: No such",
        ),
    ],
)
def test_command_that_hangs_or_is_missing_here_is_an_error_of_broker(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, expected: type[BrokerError], words: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(expected, match=words):
        asyncio.run(ThisMachine().run(["python3"], stdin=b""))


def test_ssh_configuration_that_hangs_is_an_error_of_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("ssh", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(StateError, match="did not read its configuration for `far`"):
        _ = SshMachine(login=SshLogin(host="far")).address
