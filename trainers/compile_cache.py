"""Keep the output of torch.compile beside the checkpoints, so that a restart on another machine does not compile again.

`compiled/<key>/<digest>` holds the artifacts of one set of graphs; `key` is a digest of everything on which the machine
code depends. Ranks that compiled the same graphs share one file. A file is a SHA-256 and a zip archive: `about.json`,
torch's own artifacts, and on CPUs the compiled kernels, which torch's artifacts lack: with those alone, each start
would still call the C++ compiler.
"""

import dataclasses
import hashlib
import io
import json
import platform
import threading
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from trainers.config import RunConfig
from trainers.manifest import DamagedFile, warn
from trainers.restore_progress import Counter
from trainers.storage import Storage

FOLDER = "compiled"
FORMAT = 1
ABOUT, ARTIFACTS, KERNELS = "about.json", "artifacts", "kernels"
DIGEST_BYTES = hashlib.sha256().digest_size
# Sets of graphs of one run: eight devices in each of eight pipeline stages. Every rank loads all of them.
FILES_MAX = 64
# Options that do not change a graph. Correctness does not depend on this list: torch compares each graph, its inputs
# and its own settings with those of an artifact.
UNRELATED = frozenset(
    {
        *("checkpoint", "data", "elastic", "evaluate", "init_from", "log"),
        *("prefetch", "profile", "sample", "scale_report", "warm", "watchdog"),
    }
)
RELATED_TRAIN = ("batch", "micro_batch")


class CompileCache:
    """The artifacts of one run on one kind of device. A failure is a warning: the run compiles as without a cache."""

    def __init__(self, storage: Storage, about: Mapping[str, Any], counter: Counter) -> None:
        """Use artifacts that were created under the same `about`; `counter` decides which of equal ranks writes."""
        self._storage, self._about, self._counter = storage, dict(about), counter
        self._folder = f"{FOLDER}/{hash_about(about)}"
        self._known: set[str] = set()  # in storage, as far as this process has seen
        self._written = ""
        self._thread: threading.Thread | None = None

    def load(self) -> int:
        """Make all artifacts available to torch.compile; return their number. Call before the first compilation.

        Damaged files, and those of another `about`, are deleted and not used.
        """
        for name in self._list()[:FILES_MAX]:
            path = f"{self._folder}/{name}"
            try:
                self._known |= self._load(self._storage.read(path))
            except DamagedFile as damage:
                warn(f"`{path}` is not used: {damage}")
                with suppress(Exception):  # a role without the right to delete; buckets have errors of their own
                    self._storage.delete(path)
            except Exception as error:  # torch raises errors of many kinds; without artifacts, it compiles
                warn(f"`{path}` is not used: {error}")
        return len(self._known)

    def save(self) -> None:
        """Write what has been compiled since the last call, in the background; no effect if nothing has."""
        collected = self._collect()
        if collected is None:
            return
        artifacts, keys, kernels = collected
        if not keys - self._known:
            return
        self._known |= keys
        self.wait()
        arguments = (artifacts, frozenset(keys), kernels)
        self._thread = threading.Thread(target=self._write, args=arguments, name="compile-cache", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until artifacts are written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _list(self) -> list[str]:
        try:
            return self._storage.list_names(self._folder)
        except OSError as error:
            warn(f"`{self._folder}` cannot be listed, so everything is compiled again: {error}")
            return []

    def _load(self, content: bytes | None) -> set[str]:
        """Pass artifacts to torch; return their keys. Raises DamagedFile unless they are exactly what was written."""
        archive = open_archive(content, self._about)
        about = json.loads(archive.read(ABOUT))
        for name in about[KERNELS]:
            place_kernel(find_folder(), name, archive.read(f"{KERNELS}/{name}"))
        # Unpickled there. Anyone who can write to the store can run code here, as with torch's index of a checkpoint.
        if torch.compiler.load_cache_artifacts(archive.read(ARTIFACTS)) is None:
            raise DamagedFile("torch cannot read its artifacts")
        return set(about["keys"])

    def _collect(self) -> tuple[bytes, set[str], dict[str, Path]] | None:
        """Return artifacts, their keys and the kernels of this process; None if it has compiled nothing."""
        try:
            saved = torch.compiler.save_cache_artifacts()
        except Exception as error:  # many kinds are possible, and training is worth more
            warn(f"the compiled graphs cannot be kept: {error}")
            return None
        if saved is None:
            return None
        artifacts, info = saved
        kernels = {path.relative_to(find_folder()).as_posix(): path for path in list_kernels(find_folder())}
        keys = {f"{kind}/{key}" for kind, keys in info.artifacts.items() for key in keys}
        return artifacts, keys | {f"{KERNELS}/{name}" for name in kernels}, kernels

    def _write(self, artifacts: bytes, keys: frozenset[str], kernels: Mapping[str, Path]) -> None:
        name = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
        try:
            if self._counter.add(f"{self._folder}/{name}", 1) > 1:
                return  # another rank has compiled the same graphs
            present = self._storage.list_names(self._folder)
            if name in present or len(present) >= FILES_MAX:
                return
            about = {**self._about, "keys": sorted(keys), KERNELS: sorted(kernels)}
            content = make_archive(about, artifacts, {name: path.read_bytes() for name, path in kernels.items()})
            self._storage.create(f"{self._folder}/{name}", content)
            if self._written:  # the new file contains all of it
                self._storage.delete(f"{self._folder}/{self._written}")
            self._written = name
        except Exception as error:  # in a thread of its own: nothing else would report it
            warn(f"the compiled graphs were not kept: {error}")


def describe_code(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return everything on which compiled code depends, as JSON: torch, the device and the options of the graphs."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in UNRELATED}
    options["train"] = {name: options["train"][name] for name in RELATED_TRAIN}
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": describe_device(device),
        "options": json.loads(json.dumps(options)),
    }


def describe_device(device: torch.device) -> str:
    """Return a name shared only by devices that can run each other's machine code."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        runtime = torch.version.cuda or torch.version.hip
        return f"{properties.name} {properties.major}.{properties.minor} {runtime} {platform.machine()}"
    return f"cpu {platform.machine()} {hash_cpu()}"


def hash_cpu(description: Path = Path("/proc/cpuinfo")) -> str:
    """Return a digest of the processor's model and instruction sets: kernels are compiled with `-march=native`."""
    try:
        lines = description.read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return platform.processor()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # x86 and ARM; without these names, any difference counts.
    names = [name for name in ("model name", "CPU part", "flags", "Features") if name in fields]
    told = {name: fields[name] for name in names} or fields
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def hash_about(about: Mapping[str, Any]) -> str:
    """Return the name of the folder for artifacts of this kind."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def make_archive(about: Mapping[str, Any], artifacts: bytes, kernels: Mapping[str, bytes]) -> bytes:
    """Return the content of a file: SHA-256 of the rest, then a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(ABOUT, json.dumps(about))
        archive.writestr(ARTIFACTS, artifacts)
        for name, kernel in kernels.items():
            archive.writestr(f"{KERNELS}/{name}", kernel)
    content = buffer.getvalue()
    return hashlib.sha256(content).digest() + content


def open_archive(content: bytes | None, about: Mapping[str, Any]) -> zipfile.ZipFile:
    """Return the archive of a file. Raises DamagedFile if it is missing or torn, or was made under another `about`."""
    if content is None:
        raise DamagedFile("it is missing")
    if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
        raise DamagedFile("it does not match its checksum")
    archive = zipfile.ZipFile(io.BytesIO(content[DIGEST_BYTES:]))
    actual = json.loads(archive.read(ABOUT))
    if different := [name for name in about if actual.get(name) != about[name]]:
        raise DamagedFile(f"it was compiled for another {different[0]}")
    return archive


def find_folder() -> Path:
    """Return the folder in which Inductor caches files on this node: TORCHINDUCTOR_CACHE_DIR, or below /tmp."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # imports nothing else of Inductor (torch 2.13)

    return Path(cache_dir()).resolve()


def list_kernels(folder: Path) -> list[Path]:
    """Return the shared libraries below `folder` that this process has loaded; none except on Linux."""
    try:
        lines: Iterable[str] = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    names = {line.split(maxsplit=5)[-1] for line in lines if line.endswith(".so")}
    return sorted(path for path in map(Path, names) if path.is_relative_to(folder))


def place_kernel(folder: Path, name: str, content: bytes) -> None:
    """Write a kernel where Inductor looks for it, atomically; no effect if it is there."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DamagedFile(f"`{name}` is outside of the cache")
    target = folder / name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    aside.write_bytes(content)
    aside.replace(target)
