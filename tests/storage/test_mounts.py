"""Buckets as folders on a node: the scripts run on this machine as on a node of the local cloud."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from local_gang import Rig, make_task

from broker.errors import InvalidRequestError
from broker.optimizer.egress import GB_PER_GIB, EgressTable
from broker.storage import node_mount, open_bucket
from broker.storage.mounts import MountStep, add_mounts, make_script, measure_mounts, plan_mounts, price_mounts
from broker.types import EgressPrice, Origin, RunStatus, StorageMount, Task
from tests.testbed.s3 import BUCKET, S3Server, put_marker, serve_s3

WRITABLE = "mount-s3 --allow-delete --allow-overwrite"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix with three objects, next to another prefix that begins alike."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    prefix = uuid.uuid4().hex
    bucket = open_bucket(f"s3://{BUCKET}")
    for key, content in {"data/a": b"one", "data/deep/b": b"two" * 10**6, "data/c d": b"", "data2/x": b"no"}.items():
        bucket.write(f"{prefix}/{key}", content)
    return f"s3://{BUCKET}/{prefix}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A home folder and a PATH."""

    home: Path
    environment: Mapping[str, str]

    def run(self, *steps: MountStep) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", make_script(steps) + "echo done"],
            env={**self.environment, "HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def files(self, folder: str) -> dict[str, int]:
        place = self.home / folder
        return {str(each.relative_to(place)): each.stat().st_size for each in place.rglob("*") if each.is_file()}


@pytest.fixture
def node(tmp_path: Path, server: S3Server) -> Node:
    (tmp_path / "home").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Node(home=tmp_path / "home", environment={"PATH": path, **server.variables})


def copy_to(target: str, url: str) -> MountStep:
    return MountStep(target=target, url=url, mode="COPY")


def test_prefix_is_copied_whole_and_again_only_where_it_changed(node: Node, url: str) -> None:
    assert node.run(copy_to("~/in", f"{url}/data/")).stdout.endswith("done\n")
    assert node.files("in") == {"a": 3, "deep/b": 3_000_000, "c d": 0}
    kept, changed = (node.home / "in/deep/b").stat().st_mtime_ns, node.home / "in/a"
    changed.write_text("torn off")
    assert node.run(copy_to("in", f"{url}/data")).returncode == 0
    assert changed.read_bytes() == b"one" and (node.home / "in/deep/b").stat().st_mtime_ns == kept


def test_one_object_becomes_one_file(node: Node, url: str) -> None:
    assert node.run(copy_to("~/in/name", f"{url}/data/a")).returncode == 0
    assert (node.home / "in/name").read_bytes() == b"one" and len(node.files("in")) == 1


def test_empty_objects_by_which_a_console_marks_folders_become_folders(node: Node, url: str, server: S3Server) -> None:
    for name in ("data", "data/deep", "data/none"):
        put_marker(server, f"{url.removeprefix(f's3://{BUCKET}/')}/{name}/")
    assert node.run(copy_to("~/in", f"{url}/data")).stdout.endswith("done\n")
    assert node.files("in") == {"a": 3, "deep/b": 3_000_000, "c d": 0} and (node.home / "in/none").is_dir()
    assert node.run(copy_to("~/in", f"{url}/data/")).returncode == 0, "again"


def test_source_that_is_not_there_stops_the_script_and_is_named(node: Node, url: str) -> None:
    done = node.run(copy_to("~/in", f"{url}/dat"), copy_to("~/more", f"{url}/data"))
    assert done.returncode == 69 and "done" not in done.stdout and not (node.home / "more").exists()
    assert done.stderr == f"error: `{url}/dat` does not exist or is empty\n"
    done = node.run(copy_to("~/in", "s3://no-such-bucket/x"))
    assert done.returncode == 1 and "cannot copy or mount `s3://no-such-bucket/x` to `~/in`" in done.stderr


def test_r2_bucket_is_copied_with_its_own_login(node: Node, url: str, server: S3Server) -> None:
    """Moto's server stands in for Cloudflare; the login is from SkyPilot's files, or from variables."""
    step = copy_to("~/in", url.replace("s3://", "r2://") + "/data")
    bare = replace(node, environment={"PATH": node.environment["PATH"]})
    refused = bare.run(step)
    assert refused.returncode == 69 and "no login for r2://" in refused.stderr
    keys = {"R2_ACCESS_KEY_ID": "key", "R2_SECRET_ACCESS_KEY": "secret", "R2_ENDPOINT_URL": server.url}
    assert replace(bare, environment={**bare.environment, **keys}).run(step).returncode == 0
    assert node.files("in") == {"a": 3, "deep/b": 3_000_000, "c d": 0}
    (node.home / ".cloudflare").mkdir()
    login = "[r2]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    (node.home / ".cloudflare" / "r2.credentials").write_text(login)
    again = replace(bare, environment={**bare.environment, "R2_ENDPOINT_URL": server.url})
    assert again.run(replace(step, target="~/again")).returncode == 0 and node.files("again")["a"] == 3


@pytest.mark.parametrize(
    ("mode", "url", "tools", "expected"),
    [
        ("MOUNT", "r2://b/x", ["mount-s3", "rclone"], "rclone mount :s3,provider=Cloudflare,env_auth=true:b/x"),
        (
            "MOUNT",
            "s3://b/deep/x/",
            ["mount-s3", "rclone"],
            "mount-s3 --allow-delete --allow-overwrite --prefix deep/x/ b",
        ),
        ("MOUNT", "gs://b/x", ["gcsfuse"], "gcsfuse --implicit-dirs --only-dir x b"),
        ("MOUNT", "az://b/x", ["rclone"], "rclone mount :azureblob,env_auth=true:b/x"),
        ("MOUNT", "s3://b", ["rclone"], "rclone mount :s3,provider=AWS,env_auth=true:b"),
        ("MOUNT_CACHED", "s3://b/x", ["mount-s3", "rclone"], "rclone mount :s3,provider=AWS,env_auth=true:b/x"),
        ("MOUNT read-only", "s3://b", ["mount-s3"], "mount-s3 --read-only b"),
        ("MOUNT read-only", "gs://b", ["gcsfuse"], "gcsfuse --implicit-dirs -o ro b"),
        ("MOUNT_CACHED read-only", "s3://b", ["rclone"], "rclone mount :s3,provider=AWS,env_auth=true:b"),
    ],
)
def test_mount_takes_the_tool_that_the_node_has(
    node: Node, tmp_path: Path, mode: str, url: str, tools: list[str], expected: str
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in tools:
        (tmp_path / "bin" / tool).write_text(
            f'#!/bin/sh\necho {tool} "$@" >> "$HOME/calls"\n'
            'echo "$RCLONE_S3_ENDPOINT $AWS_ACCESS_KEY_ID" > "$HOME/login"\n'
        )
        (tmp_path / "bin" / tool).chmod(0o755)
    keys = {"R2_ACCESS_KEY_ID": "key", "R2_SECRET_ACCESS_KEY": "secret", "R2_ACCOUNT_ID": "me"}
    with_tools = replace(node, environment={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **keys})
    mode, _, access = mode.partition(" ")
    done = with_tools.run(MountStep(target="~/see", url=url, mode=mode, is_read_only=bool(access)))
    assert done.returncode == 0, done.stderr
    call = (node.home / "calls").read_text().splitlines()[-1]
    assert call.startswith(f"{expected} {node.home}/see")
    login = "https://me.r2.cloudflarestorage.com key" if url.startswith("r2:") else ""
    assert (node.home / "login").read_text().strip() == login, "rclone reads a login for R2 from variables alone"
    assert ("--vfs-cache-mode full" in call) == (mode == "MOUNT_CACHED")
    assert ("--read-only" in call or "-o ro" in call) == bool(access)
    known = [json.loads(path.read_text()) for path in node.home.glob(".broker/mounts/*.json")]
    if expected.startswith("rclone"):  # it uploads later: the agent must know where to look
        assert [each["url"] for each in known] == [url] and f"--cache-dir {known[0]['cache']}" in call
    else:
        assert not known


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake mount tools, which write their calls to a file; `busy` beside it lets unmounting fail."""
    calls, live = tmp_path / "calls", tmp_path / "live"
    scripts = {
        "mount-s3": f'#!/bin/sh\necho mount "$@" >> {calls}; touch {live}\n',
        "fusermount3": f'#!/bin/sh\necho unmount "$@" >> {calls}; test ! -e {tmp_path}/busy && rm {live}\n',
    }
    (tmp_path / "bin").mkdir()
    for tool, script in scripts.items():
        (tmp_path / "bin" / tool).write_text(script)
        (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(node_mount, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr("os.path.ismount", lambda place: live.exists())
    return calls


def test_live_mount_is_kept_only_for_the_same_bucket_and_access(mounted: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "see")

    def mount_again(url: str = "s3://b", access: str = "") -> list[str]:
        mounted.write_text("")
        node_mount.main("MOUNT", url, place, access)
        return [line.partition(" /")[0] for line in mounted.read_text().splitlines()]

    assert mount_again() == ["mount --allow-delete --allow-overwrite b"]
    assert mount_again() == []
    assert mount_again(access="read-only") == ["unmount -u", "mount --read-only b"]
    assert mount_again(access="read-only") == []
    assert mount_again("s3://other", access="read-only") == ["unmount -u", "mount --read-only other"]
    (tmp_path / "busy").touch()
    with pytest.raises(node_mount.MountError, match="another mount that is in use"):
        mount_again("s3://other")
    assert mount_again("s3://other", access="read-only") == [], "the mount that is in use has not changed"


def test_mount_is_replaced_once_its_written_files_are_uploaded(mounted: Path, tmp_path: Path) -> None:
    """rclone uploads them only while it runs, and the agent's retry would mount the old bucket over the new one."""
    place, mounts = str(tmp_path / "see"), tmp_path / "mounts"
    rclone = tmp_path / "bin/rclone"
    rclone.write_text(f"#!/bin/sh\necho mount >> {mounted}; touch {tmp_path}/live\n")
    rclone.chmod(0o755)
    node_mount.main("MOUNT_CACHED", "s3://b c/d", place)
    (about,) = mounts.glob("*.json")
    entry = Path(json.loads(about.read_text())["cache"]) / "vfsMeta/remote/file"
    entry.parent.mkdir(parents=True)
    (entry.parent / "another").write_text('{"Size": 3, "Dirty": false}')
    mounted.write_text("")
    for text in ('{"Size": 3, "Dirty": true}', "", "{"):  # the latter two: it is being written
        entry.write_text(text)
        with pytest.raises(node_mount.MountError, match="files that are not in `s3://b c/d` yet"):
            node_mount.main("MOUNT", "s3://other", place)
    assert mounted.read_text() == "" and about.exists(), "it is still mounted"
    entry.write_text('{"Size": 3, "Dirty": false}')
    node_mount.main("MOUNT", "s3://other", place)
    assert [line.split()[0] for line in mounted.read_text().splitlines()] == ["unmount", "mount"]
    assert not about.exists()


def test_mount_whose_program_was_killed_is_removed_before_the_next_one(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, stat = tmp_path / "see", Path.stat

    def look(path: Path, **options: bool) -> os.stat_result:
        if path == place and (tmp_path / "live").exists():
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return stat(path, **options)

    (tmp_path / "live").touch()
    mounted.write_text("")
    monkeypatch.setattr(Path, "stat", look)
    node_mount.main("MOUNT", "s3://b", str(place))
    assert [line.split()[0] for line in mounted.read_text().splitlines()] == ["unmount", "mount"]


def test_node_without_a_tool_names_it(node: Node) -> None:
    bare = replace(node, environment={"PATH": "/usr/bin:/bin"})
    done = bare.run(MountStep(target="~/see", url="s3://b/x", mode="MOUNT"))
    assert done.returncode == 69
    assert "cannot mount `s3://b/x`: it has no mount-s3 and no rclone" in done.stderr
    assert "hint: use `mode: COPY`" in done.stderr


def test_local_node_stays_in_its_home(node: Node, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a").write_text("one")
    local = replace(node, environment={**node.environment, "BROKER_NODE_DIR": str(tmp_path)})
    outside = tmp_path / "outside"
    done = local.run(copy_to(str(outside), f"file://{tmp_path}/source"))
    assert done.returncode == 69 and "outside the home folder" in done.stderr and not outside.exists()
    step = MountStep(target="~/deep/er/see", url=f"file://{tmp_path}/source", mode="MOUNT")
    assert local.run(step, step, copy_to("~/copy", f"file://{tmp_path}/source")).returncode == 0
    (tmp_path / "source/a").write_text("two")
    assert ((node.home / "deep/er/see/a").read_text(), (node.home / "copy/a").read_text()) == ("two", "one")
    done = local.run(replace(step, target="~/gone", url=f"file://{tmp_path}/gone"))
    assert (done.returncode, done.stderr) == (69, f"error: `file://{tmp_path}/gone` is not a folder\n")
    (node.home / "file").touch()
    done = local.run(replace(step, target="~/file/below"))
    assert done.returncode == 1 and "permission denied" not in done.stderr, "root could not make that folder either"


def test_folder_outside_the_home_folder_is_made_by_root_and_given_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sudo").write_text(f'#!/bin/sh\nshift; echo "$@" >> {tmp_path}/calls; test ! -e {tmp_path}/refused\n')
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(node_mount.os, "access", lambda path, mode: False)
    place = tmp_path / "data"
    assert node_mount.make_room(str(place)) == place
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"mkdir -p {place}", f"chown {os.getuid()}:{os.getgid()} {place}"]
    (tmp_path / "refused").touch()
    with pytest.raises(node_mount.MountError, match=f"permission denied: `{place}`"):
        node_mount.make_room(str(place))


@pytest.mark.parametrize("version", ["v1.61.1", "v1.62.0"])
@pytest.mark.parametrize("spare_bytes", [-1, 0])
def test_rclone_is_given_a_socket_if_it_supports_one_and_its_path_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, spare_bytes: int
) -> None:
    """Without the socket the agent reads rclone's cache; with one that rclone refuses, nothing would be mounted."""
    (tmp_path / "rclone").write_text(
        f'#!/bin/sh\n[ "$1" = version ] && echo rclone {version} && exit\n'
        f'echo "$RCLONE_S3_ENDPOINT$BROKER_RUN" "$@" > {tmp_path}/call\n'
    )
    (tmp_path / "rclone").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("AWS_ENDPOINT_URL_S3", "RCLONE_S3_ENDPOINT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # removed again after the test
    monkeypatch.setenv("BROKER_RUN", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    monkeypatch.setattr(node_mount, "MOUNTS", tmp_path / "mounts")
    length = len(f"{tmp_path}/mounts/0123456789abcdef.sock")
    monkeypatch.setattr(node_mount, "SOCKET_PATH_BYTES_MAX", length + spare_bytes)
    node_mount.main("MOUNT", "s3://b", str(tmp_path / "see"))
    has_socket = version == "v1.62.0" and spare_bytes == 0
    call, (about,) = (tmp_path / "call").read_text(), (tmp_path / "mounts").glob("*.json")
    assert ("--rc-addr unix://" in call) is has_socket and bool(json.loads(about.read_text())["socket"]) is has_socket
    assert call.startswith("http://elsewhere mount "), (
        "older versions do not read AWS_ENDPOINT_URL, and the end of the run must not end the mount"
    )


def mount(source: str = "", **fields: object) -> Task:
    made = StorageMount(target="/d", source=(source,) if source else (), **fields)  # type: ignore[arg-type]
    return Task(setup="true", storage_mounts=(made,))


def test_task_is_given_the_script_before_its_own_setup() -> None:
    bare = mount("gcs://bucket/a b", mode="COPY")
    task = add_mounts(bare)
    assert task.setup is not None and task.storage_mounts == bare.storage_mounts, "access is granted by them"
    assert task.setup.splitlines()[-2:] == [
        "python3 ~/.broker/node_mount.py COPY 'gs://bucket/a b' /d || exit $?",
        "true",
    ]
    bare = Task(setup="true")
    assert add_mounts(bare) is bare


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (mount("oci://b"), "`oci://`"),
        (mount("./local", name="b"), "a bucket without `name` and `store`"),
        (mount(name="b"), "a bucket without `name` and `store`"),
        (mount("s3://b", mode="LINK"), "mode `LINK`"),
        (Task(storage_mounts=(StorageMount(target="/d", source=("s3://a", "s3://b")),)), "a list of buckets"),
    ],
)
def test_mount_that_no_node_can_have_is_refused_with_its_place(task: Task, words: str) -> None:
    placed = replace(task.storage_mounts[0], origin=Origin(file="t.yaml", line=4, column=3))
    with pytest.raises(InvalidRequestError) as caught:
        plan_mounts(replace(task, storage_mounts=(placed,)))
    assert str(caught.value) == f"t.yaml:4:3: `file_mounts: /d`: {words} is not supported" and caught.value.hints
    assert plan_mounts(mount(name="b", store="gcs"))[0].url == "gs://b"
    (step,) = plan_mounts(mount("./local", name="b", store="R2"))
    assert (step.url, step.uploads) == ("r2://b", ("./local",))


def test_copies_cost_what_leaves_the_bucket_once_a_node(url: str) -> None:
    table = EgressTable.from_prices([EgressPrice(cloud="aws", from_region="*", target="internet", usd_per_gb=0.09)])
    steps = (copy_to("/a", f"{url}/data"), MountStep(target="/b", url=f"{url}/data2", mode="MOUNT"))
    sizes = measure_mounts(steps)
    assert sizes == {f"{url}/data": 3_000_003 / 2**30}
    prices = price_mounts({"s3://b": 100.0, "gs://g": 10.0, "r2://r": 5.0}, cloud="gcp", node_count=2, table=table)
    assert [(each.url, each.usd) for each in prices] == [
        ("s3://b", pytest.approx(100 * GB_PER_GIB * 0.09 * 2)),
        ("gs://g", 0.0),
        ("r2://r", 0.0),
    ]


def test_nodes_of_a_gang_see_the_data_and_a_missing_source_fails_the_run(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a").write_text("one")
    there = StorageMount(target="~/data", source=(f"file://{tmp_path}/source",), mode="COPY")
    gone = replace(there, source=(f"file://{tmp_path}/gone",))

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        task = make_task("cat ~/data/a", num_nodes=2)
        await rig.start(cluster, add_mounts(replace(task, storage_mounts=(there,))))
        assert (await rig.finish(cluster)).returncode == 0
        assert (await rig.read_log(cluster)).count("one") == 2
        await rig.start(cluster, add_mounts(replace(task, storage_mounts=(gone,))), run_id=2)
        report = await rig.finish(cluster, run_id=2)
        assert (report.status, report.returncode) == (RunStatus.FAILED_SETUP, 69)
        assert f"error: `file://{tmp_path}/gone` does not exist" in await rig.read_log(cluster, run_id=2)

    asyncio.run(act())


@pytest.mark.parametrize(
    ("variable", "scheme", "expected"),
    [
        ("AWS_ENDPOINT_URL_S3", "s3", "https://minio.example https://minio.example https://minio.example"),
        ("AWS_ENDPOINT_URL_S3", "r2", "https://r2.example https://r2.example https://r2.example"),
    ],
)
def test_tools_use_the_address_of_another_s3_service(
    node: Node, tmp_path: Path, variable: str, scheme: str, expected: str
) -> None:
    """mount-s3 reads AWS_ENDPOINT_URL only, the AWS CLI prefers AWS_ENDPOINT_URL_S3, and rclone has its own."""
    (tmp_path / "bin").mkdir()
    for tool in ("mount-s3", "rclone"):
        script = '#!/bin/sh\necho "$AWS_ENDPOINT_URL $AWS_ENDPOINT_URL_S3 $RCLONE_S3_ENDPOINT" > "$HOME/seen"\n'
        (tmp_path / "bin" / tool).write_text(script)
        (tmp_path / "bin" / tool).chmod(0o755)
    keys = {"R2_ACCESS_KEY_ID": "key", "R2_SECRET_ACCESS_KEY": "secret", "R2_ENDPOINT_URL": "https://r2.example"}
    path = f"{tmp_path}/bin:{node.environment['PATH']}"
    environment = {"PATH": path, variable: "https://minio.example", **keys}
    step = MountStep(target="~/see", url=f"{scheme}://b", mode="MOUNT")
    done = replace(node, environment=environment).run(step)
    assert done.returncode == 0, done.stderr
    assert (node.home / "seen").read_text().strip() == expected
