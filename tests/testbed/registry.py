"""A package index in a folder, for hosts that reach no other: `python -m tests.testbed.registry` fills it, once.

It is filled outside the sealed network, by pip, for this machine's Python; a server on the clouds' address shows it to
hosts.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from broker.runtime.package import EXTRAS, list_requirements
from tests.testbed.world import CONTROL
from trainers.node_uv import UV
from trainers.setup import BUCKETS, PACKAGES

ROOT = Path(__file__).parents[2]
SERVER = tuple(each.text for each in list_requirements((*EXTRAS, "aws")))  # of `broker server up --infra aws`
WANTED = (f"uv=={UV}", *PACKAGES, BUCKETS, *SERVER)
SYSTEM_PYTHON = Path("/usr/bin/python3")


def find_folder() -> Path:
    """Find the folder: each list of packages and each Python has an index of its own."""
    digest = hashlib.sha256("\n".join(WANTED).encode()).hexdigest()[:8]
    return ROOT / "build" / f"index-{digest}-py{sys.version_info[0]}{sys.version_info[1]}"


def find_obstacle() -> str:
    """Return why there is no index for the hosts, with a remedy; empty where there is one."""
    if not (find_folder() / "complete").exists():
        return "hosts have no package index: run `python -m tests.testbed.registry` outside the world (`make testbed`)"
    says = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([SYSTEM_PYTHON, "-c", says], capture_output=True, text=True)
    own = f"{sys.version_info[0]} {sys.version_info[1]}\n"
    return "" if done.stdout == own else f"{SYSTEM_PYTHON} is not the Python that the index is for"


def fill() -> None:
    folder = find_folder()
    if (folder / "complete").exists():
        return
    flat = folder / "flat"
    flat.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(flat)]
    subprocess.run([*pip, *WANTED], check=True)
    for file in flat.glob("*.whl"):
        name = re.sub(r"[-_.]+", "-", file.name.split("-")[0]).lower()
        (folder / "simple" / name).mkdir(parents=True, exist_ok=True)
        file.replace(folder / "simple" / name / file.name)
    (folder / "complete").touch()


class Handler(SimpleHTTPRequestHandler):
    """A server that lists folders as pages of links, which is all that the simple index requires (PEP 503)."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serve_index() -> Iterator[str]:
    """Serve the index, and yield its address for hosts."""
    server = ThreadingHTTPServer((CONTROL, 0), partial(Handler, directory=str(find_folder())))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{CONTROL}:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    fill()
