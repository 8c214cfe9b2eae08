"""The next command completes the work of a killed one: kill -9 of real processes, on the `local` cloud."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.notify.receivers import HttpReceiver, run_receiver

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")
SLEEP = "resources: {infra: local}\nrun: sleep 600\n"


def kill_at(shell: Shell, command: str, method: str) -> None:
    """Let the next `broker COMMAND` kill itself when it calls this method of the local cloud."""
    (shell.folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        f"if {command!r} in sys.orig_argv and not pathlib.Path('killed').exists():\n"
        "    from broker.clouds.local import LocalCloud\n"
        "    def kill(*_):\n"
        "        pathlib.Path('killed').touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        f"    LocalCloud.{method} = kill\n"
    )
    shell.environment["PYTHONPATH"] = f"{shell.folder}{os.pathsep}{shell.environment['PYTHONPATH']}"


def test_termination_whose_command_was_killed_is_completed_after_a_look_at_the_status(shell: Shell) -> None:
    """Its status is TERMINATING: a user who sees that does not repeat `broker down`."""
    shell.run("launch", shell.write("sleep.yaml", SLEEP), "-c", "dev", "--yes", "--detach-run")
    kill_at(shell, "down", "terminate_nodes")
    assert shell.run("down", "dev", "--yes", code=None).returncode == -9
    assert "TERMINATING" in shell.run("status").stdout
    shell.wait_until(shell.is_at_rest, "the cluster is terminated")
    assert not [each for each in shell.find_processes().values() if "broker daemon" not in each]


def test_notification_that_a_killed_daemon_did_not_deliver_is_delivered_after_the_next_command(shell: Shell) -> None:
    with run_receiver(HttpReceiver()) as webhook:
        webhook.status = 503
        shell.home.mkdir()
        (shell.home / "config.toml").write_text(f'[notify]\nwebhook = "{webhook.url}"\n')
        task = shell.write("fail.yaml", "resources: {infra: local}\nrun: exit 7\nnotify: {on: [failed]}\n")
        shell.run("jobs", "launch", task, "--yes", "--detach-run")
        shell.wait_until(lambda: webhook.bodies and shell.is_at_rest(), "the job has ended, and its report is refused")
        shell.kill_daemon()
        webhook.bodies.clear()
        webhook.status = 200
        shell.run("status")
        shell.wait_until(lambda: bool(webhook.bodies), "the report is sent again")
    assert webhook.bodies[0]["job"]["status"] == "FAILED"
