"""A user's terminal in front of fake AWS and fake Google, real hosts behind every machine; and tasks to run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Job
from tests.cli.conftest import Shell
from tests.testbed.bridge import Bridge
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve
from tests.testbed.metadata import MetadataServer
from tests.testbed.s3 import BUCKET, S3Server, serve_s3
from tests.testbed.world import CONTROL

STORY_S_MAX = 900.0  # training processes import torch for many seconds on a busy machine
CANARY = "canary-of-the-task-4711"
PLACES = """\
  ordered:
    - {infra: aws/us-east-1/us-east-1a, instance_type: m5.large}
    - {infra: aws/us-east-1/us-east-1b, instance_type: m5.large}
    - {infra: aws/us-west-2/us-west-2a, instance_type: m5.large}
    - {infra: gcp/us-central1/us-central1-a, instance_type: e2-standard-4}
"""
HELLO = f"""\
name: hello
num_nodes: 2
resources:
  use_spot: true
{PLACES}
run: echo "hello from $(hostname) at $(date +%s.%N)"
"""
# Settings that a program on any cloud needs to reach the bucket.
BUCKET_LOGIN = (
    "--secret", "AWS_ACCESS_KEY_ID", "--secret", "AWS_SECRET_ACCESS_KEY", "--env", "AWS_ENDPOINT_URL_S3",
)  # fmt: skip
TRAIN = f"""\
name: train
num_nodes: 2
workdir: work
resources:
  use_spot: true
{PLACES}
checkpoint: {{to: s3://{BUCKET}/runs}}
secrets: {{AWS_ACCESS_KEY_ID: null, AWS_SECRET_ACCESS_KEY: null}}
envs: {{AWS_ENDPOINT_URL_S3: null, AWS_REGION: us-east-1}}
run: |
  {sys.executable} -m trainers.lm --strategy ddp --train.steps 60 --checkpoint.every_steps 5
"""


class WatchedGce(FakeGce):
    """A server that records the requests it receives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        # Called with each request: before it takes effect, and (True) before its answer leaves. May raise LostAnswer.
        self.on_call: Callable[[str, bool], None] = lambda action, is_after: None

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        self.requests.append((method, path, query, body))
        action = f"{method} {path.rpartition('/')[2] if method == 'POST' else ''}".strip()
        self.on_call(action, False)
        answer = super().answer(method, path, query, body)
        self.on_call(action, True)
        return answer


class Stage(Shell):
    """A user's terminal in front of two clouds."""

    def __init__(
        self, folder: Path, metadata: MetadataServer, *, shared: Sequence[Path] = (), hidden: Sequence[Path] = ()
    ) -> None:
        super().__init__(folder)
        self.patience_s = STORY_S_MAX
        self.s3: S3Server | None = None
        self.home.mkdir()
        (self.home / "aws.toml").write_text(f'ssh_from = ["{CONTROL}/32"]\n')
        self.account = Account(clock=SystemClock(), boot_s=0.0, shutdown_s=0.1, list_lag_s=0.0)
        self.aws = FakeAws(self.account, address=CONTROL)
        self.gce = WatchedGce()
        self.bridge = Bridge(folder / "hosts", metadata, aws=self.aws, gce=self.gce, shared=shared, hidden=hidden)
        (folder / "work").mkdir()
        self.environment |= {**self.aws.environment, "GOOGLE_CLOUD_PROJECT": self.gce.project}

    @property
    def owner(self) -> str:
        """Return the installation's id."""
        return (self.home / "owner").read_text().strip()

    def list_living(self) -> set[str]:
        return {name for name, host in self.bridge.hosts.items() if host.is_alive}

    def list_by_rank(self) -> list[str]:
        """List the machines of the one live gang, by rank."""
        store = Store(self.home / "state.db", clock=SystemClock())
        (cluster,) = store.clusters.list()
        return [node.id for node in sorted(cluster.nodes, key=lambda node: node.rank)]

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + self.patience_s
        while not is_so():
            assert time.monotonic() < end_s, f"this never happened: {what}\n{self.describe()}"
            time.sleep(0.1)

    def describe(self) -> str:
        """Return the story so far."""
        parts = [self.run("jobs", "events", "1", code=None).stdout, self.run("jobs", "queue", code=None).stdout]
        parts += [path.read_text()[-3000:] for path in (self.home / "logs").rglob("*.log")]
        return "\n".join(parts)

    def wait_for_step(self, step: int, *, attempt: int = 1) -> None:
        """Wait for a step, reading from the store: a command for each poll would slow the training down."""
        store = Store(self.home / "state.db", clock=SystemClock())

        def is_there() -> bool:
            job = store.jobs.get(1)
            assert job and not job.status.is_terminal, f"it ended before step {step}\n{self.describe()}"
            return len(job.attempts) >= attempt and job.progress is not None and job.progress.step >= step

        self.wait_until(is_there, f"step {step} of attempt {attempt}")

    def finish(self) -> Job:
        """Wait for the end of job 1 and of its machines."""
        store = Store(self.home / "state.db", clock=SystemClock())
        self.wait_until(lambda: (job := store.jobs.get(1)) is not None and job.status.is_terminal, "the job has ended")
        self.wait_until(lambda: not self.list_living(), "its machines have ended")
        job = store.jobs.get(1)
        assert job
        return job


@contextmanager
def open_stage(
    folder: Path, metadata: MetadataServer, *, shared: Sequence[Path] = (), hidden: Sequence[Path] = ()
) -> Iterator[Stage]:
    """Open a stage. `shared`: folders of this machine that every host has as well; `hidden`: those that none has."""
    stage = Stage(folder, metadata, shared=shared, hidden=hidden)
    try:
        with serve(stage.gce) as url, serve_s3(CONTROL) as s3:
            stage.environment |= {"BROKER_GCP_ENDPOINT": url, "AWS_ENDPOINT_URL_S3": s3.url}
            stage.s3 = s3
            yield stage
            for pid in stage.find_processes("broker daemon"):
                os.kill(pid, signal.SIGTERM)
    finally:
        stage.bridge.end_all()
        stage.aws.close()
