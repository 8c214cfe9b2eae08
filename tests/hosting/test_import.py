"""`broker server import-local`: live jobs of a laptop continue on the server, and their programs are not restarted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.hosting.test_local import Hosted
from tests.signals import signal_all
from tests.tiers import spread

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="the host program reads Linux's /proc")

HOLD = """\
name: hold
resources: {{infra: local}}
workdir: code
secrets: {{TOKEN: null}}
run: |
  echo "pid $$ with ${{#TOKEN}} letters"
  until [ -e {release} ]; do sleep 0.1; done
  cat notes
"""


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    hosted = Hosted(tmp_path)
    yield hosted
    (tmp_path / "release").touch()
    hosted.run("server", "down", "--force", code=None)
    for word in ("broker server", "broker daemon", "local_machine", "agent"):
        signal_all(hosted.find_processes(word))


def start_job(shell: Shell) -> int:
    """Start a job on this machine's own state; return its program's process."""
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "notes").write_text("sent along\n")
    task = shell.write("hold.yaml", HOLD.format(release=shell.folder / "release"))
    shell.run("jobs", "launch", task, "-d", "--secret", "TOKEN=swordfish")
    return read_pid(shell)


def read_pid(shell: Shell) -> int:
    shell.wait_until(lambda: "pid " in shell.run("jobs", "logs", "1", "--no-follow", code=None).stdout, "it runs")
    found = re.findall(r"pid (\d+) with 9 letters", shell.run("jobs", "logs", "1", "--no-follow").stdout)
    assert len(found) == 1, "it was started once"
    return int(found[0])


def check_moved(hosted: Hosted, pid: int) -> None:
    """Check that the job continues on the server with its process, ends there, and that nothing starts here."""
    assert Path(f"/proc/{pid}").exists()
    late = hosted.run("jobs", "cancel", "1", code=None)
    assert late.returncode == 4 and f"were moved to http://127.0.0.1:{hosted.port}" in late.stderr, late.stderr
    assert "this shows the state before the move" in hosted.run("jobs", "queue").stderr
    hosted.run("login", f"http://127.0.0.1:{hosted.port}", "--token-file", str(hosted.home / "hosted" / "admin.token"))
    assert read_pid(hosted) == pid
    (hosted.folder / "release").touch()
    assert hosted.run("jobs", "wait", "1").stdout == "Job 1 (hold) is SUCCEEDED\n"
    log = hosted.run("jobs", "logs", "1", "--no-follow").stdout
    assert log.count("pid ") == 1 and "sent along" in log
    (job,) = hosted.read_json("jobs", "queue", "--all")
    assert [each["number"] for each in job["attempts"]] == [1]
    hosted.wait_until(lambda: not hosted.read_json("status")["clusters"], "its cluster is gone")
    assert hosted.server_home.is_dir()
    with hosted.open_store() as store:
        assert store.jobs.list_live_ids() == [1], "the laptop's rows are as they were"


@pytest.mark.long
def test_job_keeps_its_process_over_the_move_and_ends_on_the_server(hosted: Hosted) -> None:
    pid = start_job(hosted)
    hosted.up()
    listed = hosted.run("server", "import-local", "--dryrun").stdout
    assert listed.splitlines()[0] == "job 1 hold RUNNING" and listed.count("cluster job-1-") == 1
    assert not (hosted.home / "moved.json").exists()
    hosted.run("server", "import-local")
    assert (
        f"has already been moved to http://127.0.0.1:{hosted.port}"
        in hosted.run("server", "import-local", code=2).stderr
    )
    check_moved(hosted, pid)


KILLED = """\
import os, signal, sys
sys.path.insert(0, {root!r})
from broker.hosting import importing, lifecycle
target, name = {target}, {name!r}
real = getattr(target, name)
def die(*arguments, **named):
    if {is_after}:
        real(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(target, name, die)
sys.argv = ["broker", "server", "import-local"]
from broker.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("target", "name", "is_after"),
    spread(
        [
            ("importing", "_send_files", True),
            ("importing", "write_moved", True),
            ("importing", "pack_state", False),
            ("lifecycle.Hosting", "bring_up", False),
            ("lifecycle.Hosting", "bring_up", True),
        ],
        every=0,
        more=12,
    ),
)
def test_move_that_was_killed_at_a_step_is_completed_by_the_next(
    hosted: Hosted, target: str, name: str, is_after: bool
) -> None:
    pid = start_job(hosted)
    hosted.up()
    text = KILLED.format(root=str(hosted.folder), target=target, name=name, is_after=is_after)
    program = hosted.write("killed.py", text)
    done = subprocess.run([sys.executable, program], env=hosted.environment, cwd=hosted.folder, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Path(f"/proc/{pid}").exists()
    hosted.run("server", "import-local")
    check_moved(hosted, pid)


@pytest.mark.exhaustive
def test_server_with_work_of_its_own_is_refused(hosted: Hosted) -> None:
    hosted.up("--login")
    hosted.run("jobs", "launch", hosted.write("one.yaml", "name: one\nresources: {infra: local}\nrun: echo one\n"))
    hosted.run("logout")
    refused = hosted.run("server", "import-local", code=2).stderr
    assert "has jobs or clusters of its own" in refused
    assert not (hosted.home / "moved.json").exists()


@pytest.mark.long
def test_login_outlives_the_move_and_the_folder_is_used_again_once_the_server_is_removed(hosted: Hosted) -> None:
    nightly = "name: nightly\nresources: {infra: local}\nschedule: 0 2 1 1 *\nrun: echo night\n"
    hosted.run("jobs", "launch", hosted.write("nightly.yaml", nightly))
    hosted.up("--login")
    assert "schedule nightly\n" in hosted.run("server", "import-local", "--dryrun").stdout
    assert "log in:" not in hosted.run("server", "import-local").stderr
    assert [each["name"] for each in hosted.read_json("jobs", "schedules")] == ["nightly"]
    hosted.run("logout")
    refused = hosted.run("state", "reset", "--yes", code=4).stderr
    assert "were moved to" in refused and "after `broker server down`, `broker state reset`" in refused
    hosted.run("server", "down", "--force")
    hosted.run("state", "reset", "--yes")
    hosted.run("jobs", "launch", hosted.write("one.yaml", "name: one\nresources: {infra: local}\nrun: echo one\n"))
    assert hosted.run("jobs", "wait", "1").stdout == "Job 1 (one) is SUCCEEDED\n"
