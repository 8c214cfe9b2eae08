"""A task's buckets, from the file to the nodes, and the cost of copying them."""

from __future__ import annotations

import time

import boto3
import pytest

from tests.cli.conftest import Shell
from tests.testbed.s3 import BUCKET, serve_s3

TASK = f"""\
resources: {{infra: local}}
num_nodes: 2
file_mounts: {{~/data: 's3://{BUCKET}/set'}}
run: cat ~/data/deep/words
"""


@pytest.mark.long
def test_bucket_is_priced_before_the_launch_and_lies_on_every_node(shell: Shell) -> None:
    with serve_s3() as server:
        shell.environment |= server.variables
        login = server.variables
        client = boto3.client(
            "s3",
            endpoint_url=login["AWS_ENDPOINT_URL"],
            region_name=login["AWS_REGION"],
            aws_access_key_id=login["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=login["AWS_SECRET_ACCESS_KEY"],
        )
        client.put_object(Bucket=BUCKET, Key="set/deep/words", Body=b"from the bucket\n")
        client.put_object(Bucket=BUCKET, Key="set/big", Body=bytes(11 << 20))
        flags = [each for name, value in login.items() for each in ("--env", f"{name}={value}")]
        task = shell.write("task.yaml", TASK)
        done = shell.run("launch", task, "-c", "dev", *flags)
        assert done.stdout.count("from the bucket\n") == 2
        # 0.0107 GiB at AWS's 0.09 USD per GB, twice.
        assert f"copying `s3://{BUCKET}/set` to 2 nodes: 0.01 GiB each, 0.0021 USD per start" in done.stderr
        wrong = shell.write("wrong.yaml", TASK.replace(f"s3://{BUCKET}", "s3://no-such-bucket"))
        refused = shell.run("launch", wrong, "-c", "other", *flags, code=5)
        assert "cannot list `s3://no-such-bucket`: NoSuchBucket" in refused.stderr
        assert [each["name"] for each in shell.read_json("status")["clusters"]] == ["dev"]


@pytest.mark.long
def test_local_files_are_put_into_a_bucket_that_is_made_for_them(shell: Shell) -> None:
    (shell.folder / "set" / "deep").mkdir(parents=True)
    (shell.folder / "set" / "deep" / "words").write_text("from here\n")
    (shell.folder / "set" / ".skyignore").write_text("*.tmp\n")
    (shell.folder / "set" / "x.tmp").write_text("no")
    written_s = max(path.stat().st_ctime for path in (shell.folder / "set").rglob("*"))
    # S3 states whole seconds: what is uploaded in the second of its change is sent again.
    shell.wait_until(lambda: int(time.time()) > int(written_s), "the second has passed")
    task = """\
resources: {infra: local}
file_mounts:
  ~/data: {name: made-for-the-test, source: ./set, store: s3, mode: COPY}
run: cat ~/data/deep/words; ls ~/data
"""
    with serve_s3() as server:
        shell.environment |= server.variables
        flags = [each for name, value in server.variables.items() for each in ("--env", f"{name}={value}")]
        done = shell.run("launch", shell.write("task.yaml", task), "-c", "dev", *flags)
        assert "created bucket `s3://made-for-the-test`: 2 of 2 files uploaded" in done.stderr
        assert "from here\n" in done.stdout and "x.tmp" not in done.stdout
        again = shell.run("launch", shell.write("task.yaml", task), "-c", "dev", *flags)
        assert "bucket `s3://made-for-the-test`: 0 of 2 files uploaded" in again.stderr and "from here" in again.stdout
        wrong = shell.write("wrong.yaml", task.replace("./set", "./gone"))
        assert "a path that does not exist: `./gone`" in shell.run("launch", wrong, "-c", "other", code=2).stderr
