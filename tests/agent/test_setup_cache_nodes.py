"""Setup archives between real nodes: through a bucket, and why a setup is not kept."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, make_task, wait_for

from broker.types import Cluster, RunStatus, SetupResult, Task
from tests.agent.archives import prolong_setup
from tests.tiers import spread


class BucketServer:
    """S3's PUT and GET of whole objects; every request must be signed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        around = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found: bytes | None = b""
                if "AWS4-HMAC-SHA256 Credential=AKID/" not in self.headers.get("Authorization", ""):
                    self.send_error(403)
                    return
                if self.command == "PUT":
                    around.objects[self.path] = body
                else:
                    found = around.objects.get(self.path)
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()
                self.wfile.write(found or b"")

            do_GET = do_PUT = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}


@pytest.fixture
def bucket() -> Iterator[BucketServer]:
    server = BucketServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


async def start(rig: Rig, task: Task, place: str, *, node_count: int = 1, **order: Any) -> Cluster:
    """Start a managed job's task on new nodes that may cache its setup."""
    terms = {
        "place": place, "setup_chars": len(task.setup or ""), "starts": 1.0, "usd_hour": 0.0, "usd_gib_kept": 0.0,
        "usd_gib_read": 0.0, "mounts": [], "checks_system": False, "is_fresh": False, **order,
    }  # fmt: skip
    cluster = await rig.make_cluster(node_count)
    await rig.gang.prepare(cluster, task)
    envs = {"BROKER_JOB_ID": "1", "BROKER_SETUP_CACHE": json.dumps(terms)}
    await rig.gang.start(cluster, task, run_id=1, envs=envs)
    return cluster


async def wait_result(rig: Rig, cluster: Cluster) -> tuple[SetupResult, ...]:
    async def has_result() -> tuple[SetupResult, ...]:
        return (await rig.gang.poll(cluster, 1)).setups

    found: tuple[SetupResult, ...] = await wait_for(has_result)
    return found


def test_archive_travels_through_a_bucket_to_every_node_of_the_next_gang(rig: Rig, bucket: BucketServer) -> None:
    async def scenario() -> None:
        task = make_task(
            "cat ~/made", setup="echo $SKYPILOT_NUM_NODES nodes > ~/made; echo set up", num_nodes=2,
            envs=bucket.variables,
        )  # fmt: skip
        first = await start(rig, task, "s3://b/p-setups", node_count=2)
        (kept,) = await wait_result(rig, first)
        assert (kept.rank, kept.result, kept.size_bytes) == (0, "kept", len("2 nodes\n"))
        assert (await rig.finish(first)).status is RunStatus.SUCCEEDED
        (path,) = (each for each in bucket.objects if each.endswith("/manifest"))
        bucket.objects[path] = prolong_setup(bucket.objects[path])
        second = await start(rig, task, "s3://b/p-setups", node_count=2)
        assert (await rig.finish_all(second)).status is RunStatus.SUCCEEDED
        results = (await rig.gang.poll(second, 1)).setups
        assert [(each.rank, each.result) for each in results] == [(0, "used"), (1, "used")]
        log = await rig.read_log(second)
        assert log.count("2 nodes") == 2 and "set up" not in log
        secret = bucket.variables["AWS_SECRET_ACCESS_KEY"].encode()
        assert not any(secret in content for content in bucket.objects.values())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("setup", "order", "reason"),
    spread(
        [
            ("sleep 4323 >/dev/null 2>&1 &", {}, "setup left a process running"),
            ("echo $HOME > ~/made", {}, "its files contain the path of the home folder"),
            ("mkdir -p ~/.aws; echo x > ~/.aws/config", {}, "setup wrote ~/.aws, where tools keep logins"),
            ("cp ~/.broker/runs/1/gang.pem ~/made", {}, "setup wrote a secret to ~/made"),
            ("echo x > ~/made", {"starts": 0.0}, "no further start is expected"),
            ("echo x > ~/made", {"usd_gib_kept": 1e9}, "expected starts would save 0.00 USD"),
        ],
        every=6,
    ),
)
def test_reason_why_a_setup_is_not_kept(
    rig: Rig, tmp_path: Path, setup: str, order: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        cluster = await start(rig, make_task("true", setup=setup), str(tmp_path / "kept"), **order)
        (result,) = await wait_result(rig, cluster)
        assert result.result == "not_kept" and reason in result.reason
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED, "which is not the program's fault"

    asyncio.run(scenario())
    assert not list(tmp_path.glob("kept/*"))


@pytest.mark.long
def test_fresh_start_runs_setup_and_replaces_the_archive(rig: Rig, tmp_path: Path) -> None:
    counter, place = tmp_path / "counter", str(tmp_path / "kept")

    async def scenario() -> None:
        task = make_task("cat ~/made", setup=f"echo x >> {counter}; wc -l < {counter} > ~/made")
        for is_fresh, result, made in ((False, "kept", "1"), (True, "kept", "2"), (False, "used", "2")):
            cluster = await start(rig, task, place, is_fresh=is_fresh)
            (found,) = await wait_result(rig, cluster)
            assert found.result == result
            (manifest,) = Path(place).glob("*/manifest")
            manifest.write_bytes(prolong_setup(manifest.read_bytes()))
            await rig.finish(cluster)
            assert (await rig.read_log(cluster)).split()[-1] == made

    asyncio.run(scenario())


@pytest.mark.long
def test_bucket_that_refuses_or_is_unreachable_does_not_affect_the_start(rig: Rig, bucket: BucketServer) -> None:
    async def scenario() -> None:
        envs = {**bucket.variables, "AWS_ACCESS_KEY_ID": "WRONG"}
        cluster = await start(rig, make_task("cat ~/made", setup="echo made > ~/made", envs=envs), "s3://b/p-setups")
        (result,) = await wait_result(rig, cluster)
        assert result.result == "not_kept" and "HTTP 403" in result.reason
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        assert "setup archive not used" in await rig.read_log(cluster)

    asyncio.run(scenario())
    assert bucket.objects == {}
