"""The last lines of a node reach the bucket when its preemption is announced; the job's log has them afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.testbed.s3 import BUCKET, S3Server, serve_s3

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

# The first attempt prints a line when it is notified of its preemption, and does not end by itself.
STUBBORN = f"""\
name: stubborn
resources: {{infra: local, use_spot: true}}
checkpoint: {{to: s3://{BUCKET}/last-lines}}
run: |
  [ $BROKER_ATTEMPT = 1 ] || {{ echo "attempt $BROKER_ATTEMPT ran"; exit 0; }}
  trap 'echo "last words of the first attempt"' TERM
  echo "attempt 1 began"
  while true; do sleep 0.1; done
"""


def read_objects(server: S3Server, part: str) -> list[bytes]:
    """Return the objects whose key contains `part`."""
    from obstore.store import from_url

    login = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_region": "us-east-1"}
    store = from_url(f"s3://{BUCKET}", endpoint=server.url, client_options={"allow_http": True}, **login)
    return [bytes(store.get(key).bytes()) for key in server.list_keys("last-lines") if part in key]


@pytest.mark.exhaustive
def test_lines_printed_after_the_notice_are_in_the_log_of_the_job_although_the_node_died_with_them(shell: Any) -> None:
    with serve_s3() as server:
        shell.environment |= server.variables
        shell.run("jobs", "launch", shell.write("stubborn.yaml", STUBBORN), "--yes", "--detach-run")
        log = shell.home / "logs" / "jobs" / "1.log"
        shell.wait_until(lambda: log.exists() and "attempt 1 began" in log.read_text(), "the program runs")
        shell.kill_daemon()  # it would copy the lines from the node while that lives
        shell.run("local", "preempt", "stubborn", "--notice", "3600")
        assert not shell.find_processes("broker daemon")
        shell.wait_until(
            lambda: any(b"last words" in content for content in read_objects(server, "/logs/1.log")), "the log is there"
        )
        assert read_objects(server, "/outcomes/") == [], "the program has not ended"
        assert "last words" not in log.read_text()
        shell.run("local", "preempt", "stubborn")
        shell.wait_until(lambda: not shell.read_json("status")["live_jobs"], "the job has ended")
        lines = [line for line in shell.run("jobs", "logs", "1").stdout.splitlines() if "attempt" in line]
        assert lines == ["attempt 1 began", "last words of the first attempt", "attempt 2 ran"]
