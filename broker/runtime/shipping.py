"""Ship the bundled trainers: an archive of the installed package, unpacked on each node of a task that runs them.

    run: python -m trainers.lm      ->  ~/.broker/trainers/<digest>/trainers/ on every node, first on PYTHONPATH

Every start of a gang sends it, so replacement nodes and nodes that join an elastic gang get it too. A node that already
has this digest ignores it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import zipfile
from functools import cache
from pathlib import Path

from broker.errors import StateError, TransientError
from broker.frozen import frozen
from broker.runtime.base import Transport
from broker.types import Node, Task

PACKAGE = "trainers"
RUNS_TRAINERS = re.compile(
    r"""-m[\s\\"',]*trainers\.\w"""
)  # of python, torchrun or accelerate; also as a list of words
DIGEST_LENGTH = 16
SEND_S = 60.0
LEFT_OUT = ("__pycache__", ".pyc")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can hold
# The folder appears complete or not at all; of two concurrent calls, one wins.
UNPACK = """\
import hashlib, io, os, shutil, sys, tempfile, zipfile
digest, name = sys.argv[1:]
content = sys.stdin.buffer.read()
home = os.path.join(os.environ.get("HOME") or os.path.expanduser("~"), ".broker", "trainers")
target = os.path.join(home, name)
if not os.path.isdir(target):
    if hashlib.sha256(content).hexdigest() != digest:
        sys.exit("the archive's checksum does not match")
    os.umask(0o077)
    os.makedirs(home, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=".new.", dir=home)
    try:
        zipfile.ZipFile(io.BytesIO(content)).extractall(aside)
        os.rename(aside, target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not os.path.isdir(target):
            raise
"""


@frozen
class Archive:
    """`digest` is the SHA-256 of `content`; `name` is the folder below `~/.broker/trainers` that holds the files."""

    digest: str
    content: bytes

    @property
    def name(self) -> str:
        """The name of the archive's folder on a node, derived from the digest."""
        return self.digest[:DIGEST_LENGTH]


def needs_trainers(task: Task) -> bool:
    """Return whether `setup` or `run` starts a module of the bundled trainers, such as `python -m trainers.lm`."""
    return any(RUNS_TRAINERS.search(text) for text in (task.setup, task.run) if text)


async def send_trainers(transport: Transport, node: Node) -> None:
    """Send the trainers to a node, which ignores an archive it already has. Raises TransientError if that fails."""
    archive = pack_trainers()
    argv = ["python3", "-I", "-S", "-c", UNPACK, archive.digest, archive.name]
    result = await transport.run(node, argv, timeout_s=SEND_S, stdin=archive.content)
    if result.returncode:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TransientError(f"the trainers cannot be installed on node `{node.id}`: {last[:200]}")


@cache
def pack_trainers() -> Archive:
    """Pack the installed package reproducibly: the same files give the same bytes."""
    spec = importlib.util.find_spec(PACKAGE)  # found, not imported: broker runs without torch
    if spec is None or not spec.submodule_search_locations:
        raise StateError("the bundled trainers are not installed with broker", hints=("reinstall `intercloud-broker`",))
    return pack(Path(next(iter(spec.submodule_search_locations))))


def pack(folder: Path) -> Archive:
    """Pack a package's folder under its own name, without compiled files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder.parent).as_posix()
            if path.is_file() and not any(part.endswith(LEFT_OUT) for part in path.parts):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, path.read_bytes())
    content = packed.getvalue()
    return Archive(digest=hashlib.sha256(content).hexdigest(), content=content)
