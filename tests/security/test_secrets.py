"""Files of a managed job are private to their owner, and its secrets are only in `secrets/` and in its program."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.aws.tags import make_tags
from broker.clouds.gcp.names import describe, make_labels
from broker.clouds.sky.task_spec import make_task
from broker.provision.lifecycle import Provisioner
from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import KeyPair
from broker.types import NodeRequest, Secret
from tests.cli.conftest import Shell
from tests.clouds.aws.bed import AwsBed
from tests.clouds.aws.test_provision import World, make_plan
from tests.clouds.clock_jumps import count_calls
from tests.clouds.contract import OWNER

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")
SECRET, FLAG, TOKEN = "CANARY-secret-9f8e7d", "CANARY-flag-5a4b3c", "CANARY-env-1c2d3e"
TASK = """\
name: canary
resources: {infra: local}
num_nodes: 2
secrets: {API_KEY: SECRET, GIVEN: }
envs: {HF_TOKEN: TOKEN}
run: |
  test -n "$API_KEY" && test -n "$GIVEN" && test -n "$HF_TOKEN" || exit 3
  touch FOLDER/seen-$SKYPILOT_NODE_RANK
  while [ ! -e FOLDER/enough ]; do sleep 0.1; done
"""


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def find_in_files(folder: Path, words: tuple[str, ...]) -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = {word: set() for word in words}
    for path in list_files(folder):
        with contextlib.suppress(FileNotFoundError):  # rewritten while it is read
            data = path.read_bytes()
            for word in words:
                if word.encode() in data:
                    found[word].add(path.relative_to(folder))
    return found


def list_open(home: Path) -> list[tuple[str, str]]:
    """List files, folders and sockets that users other than their owner may access."""
    wrong = []
    for path in [home, *home.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_code = path.parent.name == "agent" and path.suffix == ".py"  # ours and public, in a private folder
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077 and not is_code:
                wrong.append((oct(stat.S_IMODE(status.st_mode)), str(path.relative_to(home))))
    return wrong


def run_job(shell: Shell) -> None:
    """Start the job; return once both ranks have read their secrets."""
    text = TASK.replace("SECRET", SECRET).replace("TOKEN}", f"{TOKEN}}}").replace("FOLDER", str(shell.folder))
    task = shell.write("task.yaml", text)
    shell.environment["GIVEN"] = FLAG
    os.umask(0o022)  # the widest of the usual ones
    shell.run("jobs", "launch", task, "--yes", "--detach-run", "--secret", "GIVEN")
    del shell.environment["GIVEN"]
    seen = [shell.folder / f"seen-{rank}" for rank in range(2)]
    shell.wait_until(lambda: all(path.exists() for path in seen), "both ranks run")


def finish(shell: Shell) -> None:
    (shell.folder / "enough").touch()
    shell.wait_until(lambda: shell.get_status(1) == "SUCCEEDED", "the job ends")
    shell.run("jobs", "logs", "1")


def test_secrets_of_a_managed_job_are_in_no_file_but_their_own_and_in_no_argument(shell: Shell) -> None:
    run_job(shell)
    words = (SECRET, FLAG)
    where = find_in_files(shell.home, words)
    for word in words:
        kept = {path for path in where[word] if path.parts[0] == "secrets"}
        assert len(kept) == 1, "the daemon needs it until the job ends"
        on_nodes = {path for path in where[word] if is_of_node(path)}
        assert where[word] - kept - on_nodes == set()
    for pid, command in shell.find_processes().items():
        arguments = Path(f"/proc/{pid}/cmdline")
        text = arguments.read_text(errors="replace") if arguments.exists() else command
        assert not any(word in text for word in (SECRET, FLAG, TOKEN)), text
    finish(shell)
    assert not (shell.home / "secrets").exists() or not list_files(shell.home / "secrets")
    shown = "".join(
        shell.run(*words).stdout
        for words in (
            ("jobs", "queue", "--json"), ("jobs", "events", "1"), ("jobs", "logs", "1"), ("jobs", "why", "1"),
            ("status",),
        )
    )  # fmt: skip
    assert not any(word in shown for word in (SECRET, FLAG, TOKEN))
    after = find_in_files(shell.home, words)
    assert {path for paths in after.values() for path in paths if not is_of_node(path)} == set()


def is_of_node(path: Path) -> bool:
    """Return whether a node has this file: a local node's disk is in the state folder, and its run needs secrets."""
    return path.parts[0] == "local" and path.name in ("spec.json",)


@pytest.mark.long
def test_everything_in_the_state_folder_is_for_its_owner_alone(shell: Shell) -> None:
    run_job(shell)
    assert list_open(shell.home) == []
    finish(shell)
    assert list_open(shell.home) == []
    assert {path.name for path in shell.home.iterdir()} >= {"state.db", "owner", "logs"}


def test_neither_tags_nor_boot_scripts_hold_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check all that EC2 got for a task with secrets, and what SkyPilot and Compute Engine would get."""
    count_calls(monkeypatch)
    bed = AwsBed(monkeypatch)
    world = World(bed, tmp_path)
    sent: list[NodeRequest] = []

    def write_boot(request: NodeRequest) -> str:
        sent.append(request)
        pair = KeyPair(private="PRIVATE", public="ssh-ed25519 AAAA")
        return make_boot(cloud="aws", login="ssh-ed25519 AAAA", host=pair)

    secrets = {"API_KEY": Secret(value=SECRET)}
    plan = make_plan("us-east-1a", node_count=1)
    task = replace(plan.task, name="x", run=f"echo {FLAG}", setup=FLAG, secrets=secrets, envs={"HF_TOKEN": TOKEN})

    async def launch() -> None:
        clouds = {"aws": bed.reopen()}
        provisioner = Provisioner(clouds, world.store, clock=bed.clock, owner=OWNER, write_boot=write_boot)
        await provisioner.up("train", replace(plan, task=task), hedge=1)

    try:
        bed.run(launch())
        (instance,) = bed.account.instances.values()
        shown = repr(vars(instance)) + repr(vars(bed.account)) + instance.user_data.decode(errors="replace")
        (request,) = sent
        shown += repr([make_tags(request), make_labels(request), describe(request), make_task(request)])
    finally:
        world.store.close()
        bed.aws.close()
    assert "broker-owner" in shown and "vision" in shown, "tags are included"
    assert not any(word in shown for word in (SECRET, FLAG, TOKEN))
