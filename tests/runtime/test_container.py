"""`image_id: docker:...` on real local nodes, with a docker that records its calls."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from fake_docker import FakeDocker
from local_gang import Rig, make_task, processes_of, wait_for

from broker.agent import agent_container
from broker.types import Resources, RunStatus, Secret, Task
from tests.tiers import long, spread

CANARY = "canary-in-a-container-0815"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    docker = FakeDocker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{docker.folder}:{os.environ['PATH']}")
    return docker


def make_contained(run: str | None, *, image: str = "team/image:1", **fields: object) -> Task:
    resources = (Resources(cloud="local", image_id=f"docker:{image}"),)
    return Task(name="t", run=run, resources=resources, **fields)  # type: ignore[arg-type]


def test_setup_and_run_share_a_container_with_the_nodes_home_and_network(rig: Rig, docker: FakeDocker) -> None:
    run = """
        cat "$HOME/installed"
        echo "$FROM_IMAGE $SKYPILOT_NODE_RANK $LINES_OF $BROKER_ATTEMPT" | tr '\\n' ' '
        echo "$SKYPILOT_NODE_IPS" | wc -l; pwd; printenv TOKEN | wc -c
        echo '{"step": 7}' >> "$BROKER_PROGRESS_FILE"
        exit 3
    """
    task = make_contained(
        run, setup="echo ready > ~/installed", num_nodes=2, envs={"LINES_OF": "it's\ntwo"},
        secrets={"TOKEN": Secret(value=CANARY)},
    )  # fmt: skip

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs={"BROKER_ATTEMPT": "4"})
        report = await rig.finish(cluster)
        log = await rig.read_log(cluster)
        assert (report.status, report.returncode) == (RunStatus.FAILED, 3), log
        assert report.progress and report.progress.step == 7
        own = [line for line in log.splitlines() if not line.startswith("(rank1) ")]
        folder = f"{cluster.nodes[0].handle}/home/sky_workdir"
        expected = ["ready", "yes 0 it's two 4 2", folder, str(len(CANARY) + 1)]
        assert own == ["Status: Downloaded newer image for team/image:1", *expected] or own == expected

    asyncio.run(act())
    started = docker.list_calls("run")
    assert len(started) == 2 and all(each[-2:] == ["team/image:1", "cat"] for each in started)
    words = " ".join(started[0])
    assert "--network host" in words and "--ipc host" in words and "--gpus" not in words
    assert CANARY not in json.dumps([docker.list_calls(verb) for verb in ("run", "exec", "pull", "login")])


@long
def test_trainers_come_first_inside_and_the_folder_for_state_exists(
    rig: Rig, docker: FakeDocker, tmp_path: Path
) -> None:
    run = """
        python3 -c 'import trainers; print("from", trainers.__file__)'
        echo "path $PATH"; cd "$BROKER_CHECKPOINT_DIR" && echo "state there"; : -m trainers.launch
    """
    task = make_contained(run, envs={"BROKER_CHECKPOINT_DIR": f"{tmp_path}/state/of it"})

    async def act() -> None:
        cluster = await rig.make_cluster(1)
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs={})
        report = await rig.finish(cluster)
        log = await rig.read_log(cluster)
        assert report.status is RunStatus.SUCCEEDED, log
        home = f"{cluster.nodes[0].handle}/home/.broker"
        assert f"from {home}/trainers/" in log and "state there" in log
        (path,) = (line.split()[1] for line in log.splitlines() if line.startswith("path "))
        first, rest = path.split(":", 1)
        # Not the node's own: the image has another Python. The image's own settings come after it.
        assert first.startswith(f"{home}/python/broker-") and first.endswith("/bin") and rest

    asyncio.run(act())


@pytest.mark.long
def test_gangs_credential_can_be_read_inside(rig: Rig, docker: FakeDocker) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_contained('grep -c BEGIN "$BROKER_GANG_PEM"; echo "at $BROKER_GANG_PEM"'))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        home = f"{cluster.nodes[0].handle}/home"
        assert (await rig.read_log(cluster)).splitlines()[-2:] == ["2", f"at {home}/.broker/runs/1/gang.pem"]
        assert f"{home}:{home}" in docker.list_calls("run")[0]

    asyncio.run(act())


@pytest.mark.long
def test_notice_and_cancel_reach_the_program_inside_and_leave_nothing(rig: Rig, docker: FakeDocker) -> None:
    run = "trap 'echo saved; exit 0' TERM; (setsid sleep 600 &) ; echo up; while :; do sleep 0.05; done"

    async def act() -> None:
        cluster = await rig.make_cluster()
        task = make_contained(run)
        await rig.start(cluster, task)
        await rig.wait_log(cluster, "up")
        await rig.gang.cancel(cluster, 1)
        assert (await rig.finish(cluster)).status is RunStatus.CANCELLED
        assert "saved" in await rig.read_log(cluster)
        stubborn = make_contained("trap '' TERM; echo up; while :; do sleep 0.05; done")
        await rig.start(cluster, stubborn, run_id=2)
        await rig.wait_log(cluster, "up", run_id=2)
        await rig.gang.cancel(cluster, 2)
        assert (await rig.finish(cluster, run_id=2)).status is RunStatus.CANCELLED
        assert len(docker.list_calls("run")) == 1, "one container for all runs of a node"
        plain = make_task("echo $FROM_IMAGE")  # as `exec`, which says nothing of images
        await rig.start(cluster, plain, run_id=3)
        await rig.finish(cluster, run_id=3)
        assert (await rig.read_log(cluster, run_id=3)).splitlines()[-1] == "yes"
        await rig.cloud.terminate_nodes([cluster.nodes[0]])
        await wait_for(lambda: not docker.list_containers() and not processes_of(cluster.nodes[0]))

    asyncio.run(act())


@pytest.mark.parametrize(
    ("flaw", "words"),
    spread(
        [
            ("registry", "docker cannot pull `team/image:1`"),
            ("broken", "docker does not answer: docker: Cannot connect to the Docker daemon"),
            ("unrunnable", "docker cannot run `team/image:1`: docker: could not select device driver"),
        ],
        every=3,
    ),
)
def test_a_refusal_by_docker_is_a_setup_failure_with_its_message(
    rig: Rig, docker: FakeDocker, flaw: str, words: str
) -> None:
    if flaw == "registry":
        shutil.rmtree(docker.folder / "registry")
        (docker.folder / "registry").mkdir()
    else:
        (docker.folder / flaw).touch()

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_contained("echo never"))
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.FAILED_SETUP, 69)
        log = await rig.read_log(cluster)
        assert f"error: this node's {words}" in log or f"error: {words}" in log
        assert "never" not in log

    asyncio.run(act())


def test_node_without_docker_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    container = agent_container.Container("team/image:1", home=tmp_path, mounts=[], has_gpus=False)
    with pytest.raises(agent_container.Failure, match="this node has no docker; use an `image_id` that includes it"):
        container.prepare({})


@long
def test_docker_that_may_not_raise_limits_runs_without_them(rig: Rig, docker: FakeDocker) -> None:
    """Simulate a process in a foreign container."""
    (docker.folder / "bounded").touch()

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_contained("echo up"))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        assert "rlimit" not in await rig.read_log(cluster)

    asyncio.run(act())
    assert ["--ulimit" in words for words in docker.list_calls("run")] == [True, False]


def test_private_registry_gets_its_password_by_stdin_only(rig: Rig, docker: FakeDocker) -> None:
    secrets = {"SKYPILOT_DOCKER_PASSWORD": Secret(value="open sesame")}
    envs = {"SKYPILOT_DOCKER_USERNAME": "me", "SKYPILOT_DOCKER_SERVER": "registry.example"}

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_contained("true", secrets=secrets, envs=envs))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED

    asyncio.run(act())
    assert docker.list_calls("login") == [["login", "--username", "me", "--password-stdin", "registry.example"]]
