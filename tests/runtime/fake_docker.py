"""A `docker` for tests: containers are names, what runs in them runs here. Like the real one, it forwards no signal.

Every call is recorded in `calls`; images that can be pulled are in `registry`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROGRAM = """\
#!@PYTHON@ -ISB
import json, os, pathlib, subprocess, sys

here = pathlib.Path("@FOLDER@")
words = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")


def fail(text):
    sys.exit(f"docker: {text}")


def find_pid(name):
    try:
        pid = int((here / "containers" / name).read_text())
        os.kill(pid, 0)
        return pid
    except (OSError, ValueError):
        return None


verb = words[0]
if verb == "info":
    if (here / "broken").exists():
        fail("Cannot connect to the Docker daemon")
elif words[:2] == ["image", "inspect"]:
    if not (here / "pulled" / words[2].replace("/", "_")).exists():
        fail("No such image")
elif verb == "login":
    if sys.stdin.read() != "open sesame":
        fail("unauthorized")
elif verb == "pull":
    if not (here / "registry" / words[1].replace("/", "_")).exists():
        fail("manifest unknown")
    print("Status: Downloaded newer image for", words[1], flush=True)
    (here / "pulled" / words[1].replace("/", "_")).touch()
elif verb == "run":
    if words[-1] != "cat" or (here / "unrunnable").exists():
        fail("could not select device driver")
    if "--ulimit" in words and (here / "bounded").exists():
        fail("error setting rlimit type 8: operation not permitted")
    name = words[words.index("--name") + 1]
    (here / "containers" / name).write_text(str(os.getpid()))
    sys.stdin.read()
    (here / "containers" / name).unlink()
elif verb in ("inspect", "rm"):
    if find_pid(words[-1]) is None:
        fail("No such container")
elif verb == "exec":
    rest = words[1:]
    folder = None
    if rest[0] == "--workdir":
        folder, rest = rest[1], rest[2:]
    if find_pid(rest[0]) is None:
        fail("No such container")
    inside = {"PATH": os.environ["PATH"], "HOME": "/root", "FROM_IMAGE": "yes"}
    process = subprocess.Popen(rest[1:], cwd=folder, env=inside, start_new_session=True)
    code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)
"""


class FakeDocker:
    """Put `folder` on PATH."""

    def __init__(self, folder: Path, *, images: tuple[str, ...] = ("team/image:1",)) -> None:
        self.folder = folder
        for name in ("containers", "pulled", "registry"):
            (folder / name).mkdir(parents=True)
        for image in images:
            (folder / "registry" / image.replace("/", "_")).touch()
        program = folder / "docker"
        program.write_text(PROGRAM.replace("@PYTHON@", sys.executable).replace("@FOLDER@", str(folder)))
        program.chmod(0o755)

    def list_calls(self, verb: str) -> list[list[str]]:
        path = self.folder / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [words for words in calls if words[0] == verb]

    def list_containers(self) -> list[str]:
        """List containers whose input is still held open: at its end, docker ends them."""
        files = (self.folder / "containers").iterdir()
        return sorted(each.name for each in files if Path(f"/proc/{each.read_text()}").exists())
