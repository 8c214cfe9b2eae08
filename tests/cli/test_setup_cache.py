"""`cache_setup` with a real daemon and nodes: later starts restore what `setup` wrote; anything else runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.types import EventKind
from tests.agent.archives import prolong_setup
from tests.cli.conftest import Shell
from tests.tiers import long, spread

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

# `setup` writes a line outside the node each time it runs. The program waits for a file in its second attempt.
TASK = """\
name: cached
resources: {infra: local, use_spot: true, job_recovery: {cache_setup: true}}
envs: {LEDGER: LEDGER_PATH}
setup: |
  echo ran >> $LEDGER
  mkdir -p ~/tools/bin && echo 'echo the tool works' > ~/tools/bin/tool && chmod +x ~/tools/bin/tool
  ln -s bin/tool ~/tools/link && ln ~/tools/bin/tool ~/tools/same
run: |
  ~/tools/link && ~/tools/same
  if [ $BROKER_ATTEMPT = 1 ]; then sleep 1000; fi
"""


class Bed:
    """A shell with a ledger of all times that `setup` ran."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.ledger = shell.folder / "ledger"

    def count_setups(self) -> int:
        return len(self.ledger.read_text().splitlines()) if self.ledger.exists() else 0

    def launch(self, text: str = TASK) -> int:
        known = {each["id"] for each in self.shell.read_json("jobs", "queue")}
        task = self.shell.write("cached.yaml", text.replace("LEDGER_PATH", str(self.ledger)))
        self.shell.run("jobs", "launch", task, "--yes", "--detach-run")
        (job_id,) = {each["id"] for each in self.shell.read_json("jobs", "queue")} - known
        return int(job_id)

    def list_kinds(self, job_id: int) -> list[EventKind]:
        with self.shell.open_store() as store:
            return [each.kind for each in store.events.list(job_id=job_id)]

    def wait_for(self, job_id: int, kind: EventKind) -> None:
        """Wait for an event. Fail at once, with its reason, if `setup` is unexpectedly not kept."""

        def has_come() -> bool:
            with self.shell.open_store() as store:
                events = store.events.list(job_id=job_id)
            kinds = {each.kind for each in events}
            assert EventKind.SETUP_NOT_KEPT not in kinds - {kind}, events
            return kind in kinds

        self.shell.wait_until(has_come, f"{kind} of job {job_id}")
        if kind is EventKind.SETUP_KEPT:
            for manifest in self.shell.home.glob("checkpoints/*setups*/*/manifest"):
                manifest.write_bytes(prolong_setup(manifest.read_bytes()))

    def preempt(self, job_id: int) -> None:
        """Preempt the job once its program has begun and its lines are copied: otherwise, they are lost with it."""
        log = self.shell.home / "logs" / "jobs" / f"{job_id}.log"
        self.shell.wait_until(
            lambda: log.exists() and log.read_text().count("the tool works") == 2, "the program has begun"
        )
        self.shell.run("local", "preempt", str(job_id))

    def finish(self) -> None:
        self.shell.wait_for_jobs()
        assert all(each["status"] == "SUCCEEDED" for each in self.shell.read_json("jobs", "queue"))

    @property
    def archive(self) -> Path:
        (found,) = self.shell.home.glob("checkpoints/*setups*/*/manifest")
        return found.parent


@pytest.fixture
def bed(shell: Shell) -> Bed:
    return Bed(shell)


@pytest.mark.long
def test_start_after_a_preemption_restores_what_setup_wrote(bed: Bed) -> None:
    job_id = bed.launch()
    bed.wait_for(job_id, EventKind.SETUP_KEPT)
    bed.preempt(job_id)
    bed.finish()
    assert bed.count_setups() == 1
    log = bed.shell.run("jobs", "logs", str(job_id), "--no-follow").stdout
    assert log.count("the tool works") == 4, "both links of both attempts"
    story = bed.shell.run("jobs", "why", str(job_id)).stdout
    assert "kept the files of `setup`" in story and "`setup` was skipped: its files came from an archive" in story
    other = bed.launch()  # another job with the same setup
    bed.wait_for(other, EventKind.SETUP_RESTORED)
    assert bed.count_setups() == 1
    bed.preempt(other)
    bed.finish()
    assert bed.count_setups() == 1


@pytest.mark.parametrize(
    "damage", spread(["part cut", "part missing", "manifest cut", "manifest changed"], every=0, more=4)
)
def test_torn_archive_is_not_used(bed: Bed, damage: str) -> None:
    job_id = bed.launch()
    bed.wait_for(job_id, EventKind.SETUP_KEPT)
    what, how = damage.split()
    (path,) = bed.archive.glob("*.part") if what == "part" else [bed.archive / "manifest"]
    if how == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    bed.preempt(job_id)
    bed.finish()
    assert bed.count_setups() == 2
    log = bed.shell.run("jobs", "logs", str(job_id), "--no-follow").stdout
    assert "setup archive not used" in log and log.count("the tool works") == 4


@pytest.mark.exhaustive
def test_other_setup_envs_or_workdir_run_setup_again(bed: Bed) -> None:
    first = bed.launch()
    bed.wait_for(first, EventKind.SETUP_KEPT)
    bed.preempt(first)
    bed.finish()
    assert bed.count_setups() == 1
    ending = TASK.replace("if [ $BROKER_ATTEMPT = 1 ]; then sleep 1000; fi", "true")
    workdir = bed.shell.folder / "work"
    workdir.mkdir()
    (workdir / "requirements.txt").write_text("one\n")
    with_workdir = ending.replace("setup: |", f"workdir: {workdir}\nsetup: |")
    texts = [
        ending.replace("  echo ran", "  true\n  echo ran"),
        ending.replace("LEDGER: LEDGER_PATH", "LEDGER: LEDGER_PATH, VERSION: two"),
        with_workdir,
    ]
    for count, text in enumerate(texts, start=2):
        bed.launch(text)
        bed.finish()
        assert bed.count_setups() == count, text
    (workdir / "requirements.txt").write_text("two\n")
    bed.launch(with_workdir)
    bed.finish()
    assert bed.count_setups() == 5


@pytest.mark.exhaustive
def test_setup_that_fails_or_cannot_be_kept_whole_is_not_cached(bed: Bed) -> None:
    failing = bed.launch(TASK.replace("  mkdir -p", "  touch ~/half; exit 3\n  mkdir -p"))
    bed.shell.wait_for_jobs()
    assert bed.shell.read_json("jobs", "queue")[0]["status"] == "FAILED_SETUP"
    assert not {EventKind.SETUP_KEPT, EventKind.SETUP_RESTORED} & set(bed.list_kinds(failing))
    secret = bed.launch(
        TASK.replace("setup: |", "secrets: {PASS: correct-horse}\nsetup: |\n  echo key=$PASS > ~/settings")
    )
    bed.wait_for(secret, EventKind.SETUP_NOT_KEPT)
    story = bed.shell.run("jobs", "why", str(secret)).stdout
    assert "`setup` is not cached: setup wrote a secret to ~/settings" in story
    assert not list(bed.shell.home.glob("checkpoints/*setups*/**/*")), "nothing was stored, not even a part"
    bed.preempt(secret)
    bed.shell.wait_for_jobs()
    assert bed.count_setups() == 3


@long
def test_task_that_does_not_ask_for_it_runs_setup_at_each_start(bed: Bed) -> None:
    job_id = bed.launch(TASK.replace(", job_recovery: {cache_setup: true}", ""))
    bed.wait_for(job_id, EventKind.STARTED)
    bed.shell.wait_until(lambda: bed.count_setups() == 1, "setup ran")
    bed.preempt(job_id)
    bed.finish()
    assert bed.count_setups() == 2 and not list(bed.shell.home.glob("checkpoints/*setups*"))


@long
def test_buckets_are_mounted_at_a_start_that_skips_setup(bed: Bed) -> None:
    data = bed.shell.folder / "data"
    data.mkdir()
    (data / "x").write_text("mounted here\n")
    mount = f"file_mounts:\n  ~/data: {{source: 'file://{data}', mode: MOUNT}}\nsetup: |"
    job_id = bed.launch(TASK.replace("setup: |", mount).replace("run: |", "run: |\n  cat ~/data/x"))
    bed.wait_for(job_id, EventKind.SETUP_KEPT)
    bed.preempt(job_id)
    bed.finish()
    assert bed.count_setups() == 1
    assert bed.shell.run("jobs", "logs", str(job_id), "--no-follow").stdout.count("mounted here") == 2
