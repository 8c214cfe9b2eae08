"""Run a phase in a container with the node's docker, as if it ran on the node itself. Standard library only.

There is one container per node and image. It lives as long as the node, so that `run` finds what `setup` installed.
The node's home is mounted at the same path; network and devices are the node's. No argument contains a secret.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EX_UNAVAILABLE = 69
START_S = 60.0
LOGIN = ("SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_SERVER")
DEVICES = ("/dev/infiniband", "/dev/kfd", "/dev/dri", "/dev/fuse")  # passed on if the node has them
LIMITS = ("--ulimit", "memlock=-1", "--ulimit", "stack=67108864")  # for network cards with direct memory access
INSTALL = "sudo -n apt-get update -q && sudo -n apt-get install -y -q docker.io"
# Signals all processes with a mark in their environment. A container's processes belong to root and are visible only
# inside it.
KILL = """\
grep -lF -e "$1" /proc/[0-9]*/environ 2>/dev/null | while IFS=/ read -r _ _ pid _; do kill -"$2" "$pid"; done
true"""
# The container's main process: it ends with the process on the node that holds its input open.
KEEP = "sleep 2147483647 | { @DOCKER@; kill -KILL 0; }"


class Failure(Exception):
    """A failure to report in the run's log."""


class Container:
    """A container of `image` on this node. `mounts`: paths outside the home folder, mounted at the same path."""

    def __init__(self, image: str, *, home: Path, mounts: list[str], has_gpus: bool) -> None:
        self._image, self._home, self._mounts, self._has_gpus = image, home, mounts, has_gpus
        text = "\0".join([str(home), image, *sorted(mounts), str(has_gpus)])
        self.name = "broker-" + hashlib.sha256(text.encode()).hexdigest()[:16]
        self._docker: list[str] | None = None

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Ensure that the container runs; docker's output goes to stdout. Idempotent. Raises Failure."""
        docker = self._find_docker()
        if self._call("inspect", self.name).returncode == 0 and self._call("exec", self.name, "true").returncode == 0:
            return
        if self._call("image", "inspect", self._image).returncode:
            self._log_in(docker, variables)
            if subprocess.run([*docker, "pull", self._image], check=False, stdin=subprocess.DEVNULL).returncode:
                raise Failure(f"docker cannot pull `{self._image}`")
        # Docker inside a container may not raise limits, and few programs need that.
        if self._begin(docker, LIMITS) and (refusal := self._begin(docker, ())):
            raise Failure(f"docker cannot run `{self._image}`: {refusal[-300:]}")

    def _begin(self, docker: list[str], limits: Sequence[str]) -> str:
        """Start the container; return docker's output if it exits at once, else "". Raises Failure on a timeout."""
        self._call("rm", "--force", self.name)
        flags = [*self._list_flags(), *limits]
        argv = [*docker, "run", "--rm", "--interactive", "--name", self.name, *flags, self._image, "cat"]
        log = self._home / ".broker" / f"{self.name}.log"
        with log.open("wb") as output:
            keeper = subprocess.Popen(
                ["sh", "-c", KEEP.replace("@DOCKER@", shlex.join(argv))],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        give_up_s = time.monotonic() + START_S
        while self._call("exec", self.name, "true").returncode:
            if keeper.poll() is not None:
                return log.read_text(errors="replace").strip() or "no output"
            if time.monotonic() >= give_up_s:
                raise Failure(f"docker did not start `{self._image}` within {START_S:g} s")
            time.sleep(0.1)
        return ""

    def make_argv(self, script: Path, folder: Path) -> list[str]:
        """Return the command that runs a script inside, passing on its output and exit code."""
        return [*self._find_docker(), "exec", "--workdir", str(folder), self.name, "sh", str(script)]

    def signal(self, mark: str, number: int) -> None:
        """Send a signal to every process inside that has this `NAME=value` in its environment."""
        try:
            self._call("exec", self.name, "sh", "-c", KILL, "sh", mark, signal.Signals(number).name[3:])
        except Failure:
            pass  # no container, no processes

    def _list_flags(self) -> list[str]:
        flags = ["--network", "host", "--ipc", "host"]
        flags += ["--entrypoint", "", "--volume", f"{self._home}:{self._home}"]
        for path in self._mounts:
            flags += ["--volume", f"{path}:{path}"]
        for path in DEVICES:
            if Path(path).exists():
                flags += ["--device", path]
        if Path("/dev/fuse").exists():
            flags += ["--cap-add", "SYS_ADMIN", "--security-opt", "apparmor:unconfined"]
        return [*flags, "--gpus", "all"] if self._has_gpus and not Path("/dev/kfd").exists() else flags

    def _find_docker(self) -> list[str]:
        """Return the docker command, run as this user or as root; install docker if the node has none and uses apt."""
        if self._docker:
            return self._docker
        if not shutil.which("docker") and shutil.which("apt-get"):
            print("this node has no docker: installing it", flush=True)
            subprocess.run(["sh", "-c", INSTALL], check=False, stdin=subprocess.DEVNULL)
        path = shutil.which("docker")
        if path is None:
            raise Failure("this node has no docker; use an `image_id` that includes it, or omit the `docker:` image")
        refusal = ""
        for argv in ([path], ["sudo", "-n", path]):
            try:
                info = subprocess.run([*argv, "info"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
            except FileNotFoundError:  # no sudo
                continue
            if info.returncode == 0:
                self._docker = argv
                return argv
            refusal = refusal or info.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Failure(f"this node's docker does not answer: {refusal[:300]}")

    def _log_in(self, docker: list[str], variables: Mapping[str, str]) -> None:
        """Log in to a private registry with SkyPilot's variables."""
        user, password, server = (variables.get(name, "") for name in LOGIN)
        if user and password:
            argv = [*docker, "login", "--username", user, "--password-stdin", *([server] if server else [])]
            login = subprocess.run(argv, input=password.encode(), capture_output=True, check=False)
            if login.returncode:
                raise Failure(f"the registry refused the login of `{user}`")

    def _call(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        argv = [*self._find_docker(), *words]
        return subprocess.run(argv, capture_output=True, check=False, stdin=subprocess.DEVNULL)


def find_container(spec: Mapping[str, Any], home: Path) -> Container | None:
    """Return the container that a run's spec requests."""
    if not spec.get("image"):
        return None
    has_gpus = float(spec["gpus_per_node"]) > 0
    return Container(str(spec["image"]), home=home, mounts=list(spec.get("mounts") or []), has_gpus=has_gpus)


def write_script(
    path: Path,
    script: str,
    variables: Mapping[str, str],
    *,
    first: Mapping[str, str] = MappingProxyType({}),
    folders: Sequence[str] = (),
) -> None:
    """Write the commands with their environment to a private file. Other variables of the image stay.

    `first` is prepended to a variable's value, as in PATH; missing `folders` are created.
    """
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    lines += [f"export {name}={shlex.quote(value)}${{{name}:+:${name}}}" for name, value in sorted(first.items())]
    lines += [f"mkdir -p -- {shlex.quote(folder)}" for folder in folders]
    lines.append('for shell in bash sh; do command -v "$shell" >/dev/null && break; done')
    lines.append(f'exec "$shell" -c {shlex.quote(script)}')
    fd = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def main(phase_folder: str, phase: str) -> None:
    """Run `agent.py _contain FOLDER PHASE`: prepare, then exec the command, which inherits stdout and stderr."""
    import agent_files  # type: ignore[import-not-found]

    folder = Path(phase_folder)
    spec = agent_files.read_json(folder / "spec.json")
    container = find_container(spec, agent_files.HOME)
    assert container is not None, "only called for runs with an image"
    try:
        container.prepare({**spec["envs"], **spec["secrets"]})
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(EX_UNAVAILABLE)
    argv = container.make_argv(folder / f"{phase}.sh", agent_files.HOME / "sky_workdir")
    os.execv(argv[0] if os.sep in argv[0] else str(shutil.which(argv[0])), argv)
