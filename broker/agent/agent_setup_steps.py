"""The steps of a setup that is cached: restore, keep, upload. Standard library only.

Each runs in a process of its own, with the environment of the setup: `agent.py _setup restore|keep|upload FOLDER
[SETUP_S]`. An archive is only an optimization: if anything fails here, `setup` runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from broker.agent import agent_files, agent_setup_archive, agent_setup_files, agent_setup_store
    from broker.agent.agent_login import Refused
    from broker.agent.agent_setup import BEFORE, MISSED, CacheOrder, read_order
    from broker.agent.agent_setup_archive import DamagedArchive
    from broker.agent.agent_setup_files import FILE, Change, FileState, NotCacheable
else:
    import agent_files
    import agent_setup_archive
    import agent_setup_files
    import agent_setup_store
    from agent_login import Refused
    from agent_setup import BEFORE, MISSED, CacheOrder, read_order
    from agent_setup_archive import DamagedArchive
    from agent_setup_files import FILE, Change, FileState, NotCacheable

STAGE = "setup-archive"  # below ~/.broker: on the disk of the home folder, so that files are moved and not copied
CHANGES = "setup_changes.json"
MANIFEST, USED = "manifest", "used.json"
READ_BYTES_S = 100e6  # expected before a download: what one request of S3 carries, of the several that are made
NICE = 10  # niceness of the upload, which runs beside the program
SECRET_CHARACTERS_MIN = 8  # a shorter value occurs in files by chance
SECRET_NAME = re.compile(r"(^|_)(API)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)", re.IGNORECASE)
TOKEN = re.compile(r"[A-Za-z0-9+=_.~-][A-Za-z0-9+/=_.~-]{23,}")  # not a path, which begins with a slash


def main(step: str, path: str, setup_s: str = "0") -> None:
    """Run one step; exit with MISSED unless it succeeded. Never raises: `setup` runs in its place."""
    folder = Path(path)
    spec = agent_files.read_json(folder / "spec.json") or {}
    order = read_order(spec)
    if order is None:
        sys.exit(MISSED)
    try:
        if step == "restore":
            sys.exit(0 if restore(order, spec, folder) else MISSED)
        elif step == "keep":
            keep(order, folder, float(setup_s))
        else:
            upload(order, spec, folder, float(setup_s))
    except (NotCacheable, DamagedArchive, Refused, OSError, ValueError, LookupError, TypeError) as error:
        if step != "restore":
            report(folder, "not_kept", reason=str(error))
        print(f"broker: setup archive: {error}", flush=True)
        sys.exit(MISSED)


def restore(order: CacheOrder, spec: Mapping[str, Any], folder: Path) -> bool:
    """Restore the archive of this setup; return whether one was used. Without one, record the home folder's state."""
    home, start_s, digest = agent_files.HOME, time.monotonic(), str(spec["setup_digest"])
    staged = agent_files.STATE / STAGE
    if agent_setup_archive.merge(staged, home) == digest:  # an earlier runner was killed while it moved the files
        return True
    before = agent_setup_files.scan(home)
    began_s = time.time()
    key = make_key(order, spec, home, before)
    try:
        if not order.is_fresh and (saved := fetch(order, key, staged, digest)):
            agent_setup_archive.merge(staged, home)
            took_s = time.monotonic() - start_s
            report(folder, "used", setup_s=saved["setup_s"], took_s=took_s, size_bytes=saved["size"])
            print(f"broker: setup skipped: its files were restored in {took_s:.1f} s", flush=True)
            return True
    except (DamagedArchive, Refused, OSError, ValueError, LookupError, TypeError) as error:
        print(f"broker: setup archive not used: {error}", flush=True)
        shutil.rmtree(str(staged), ignore_errors=True)
    is_first = agent_files.list_run_ids() == [int(spec["run_id"])]  # else `before` includes what an earlier one left
    if int(spec["rank"]) == 0 and is_first and not (folder / BEFORE).exists():
        agent_files.write_json(folder / BEFORE, {"key": key, "began_s": began_s, "seen": before}, is_durable=False)
    return False


def fetch(order: CacheOrder, key: str, staged: Path, digest: str) -> dict[str, Any] | None:
    """Stage the archive of a key and return its manifest; None if there is none. Raises DamagedArchive, Refused."""
    store = agent_setup_store.open_store(order.place, os.environ)
    for name in (name_archive(key, agent_files.HOME), key):
        content = store.get(f"{name}/{MANIFEST}")
        if content is None:
            continue
        manifest = agent_setup_archive.decode(content)
        setup_s = float(manifest["setup_s"])
        if measure_read_s(int(manifest["size"])) >= setup_s:
            raise DamagedArchive("reading it takes as long as `setup`")
        give_up_s = time.monotonic() + setup_s

        def get(part: str, name: str = name, give_up_s: float = give_up_s) -> bytes | None:
            if time.monotonic() > give_up_s:
                raise DamagedArchive("reading it takes longer than `setup`")
            return store.get(f"{name}/{part}")

        agent_setup_archive.stage(manifest, get, staged, digest)
        try:
            store.put(f"{name}/{USED}", json.dumps({"time_s": time.time()}).encode())
        except (Refused, OSError):
            pass  # it may expire earlier
        return manifest
    return None


def keep(order: CacheOrder, folder: Path, setup_s: float) -> None:
    """List what `setup` changed, and upload it in the background if it is complete and pays. Raises NotCacheable."""
    noted = agent_files.read_json(folder / BEFORE)
    if noted is None:
        raise NotCacheable("the state before `setup` is unknown")
    mark = f"BROKER_RUN={os.environ.get('BROKER_RUN', '')}"
    if any(True for _ in agent_files.find_marked(mark)):
        raise NotCacheable("setup left a process running")
    before = {path: FileState(*each) for path, each in noted["seen"].items()}
    entries, seen = agent_setup_files.list_changes(agent_files.HOME, before)
    if refusal := refuse(order, setup_s=setup_s, size_bytes=sum(each.size for each in entries)):
        raise NotCacheable(refusal)
    files = {each.path: seen[each.path] for each in entries if each.type == FILE}
    agent_files.write_json(
        folder / CHANGES,
        {"key": noted["key"], "began_s": noted["began_s"], "entries": entries, "seen": files},
        is_durable=False,
    )
    (folder / BEFORE).unlink()
    subprocess.Popen(
        [sys.executable, "-I", "-S", *sys.argv[:1], "_setup", "upload", str(folder), str(setup_s)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def upload(order: CacheOrder, spec: Mapping[str, Any], folder: Path, setup_s: float) -> None:
    """Search the changes for secrets, store them, and publish the manifest. Raises NotCacheable, Refused."""
    os.nice(NICE)
    noted = agent_files.read_json(folder / CHANGES)
    if noted is None:
        raise NotCacheable("the changes of `setup` are unknown")
    home = agent_files.HOME
    entries = [Change(*each) for each in noted["entries"]]
    seen = {path: FileState(*each) for path, each in noted["seen"].items()}
    if order.checks_system and (path := agent_setup_files.find_system_change(float(noted["began_s"]))):
        raise NotCacheable(f"setup changed {path}, outside the home folder")
    is_bound = agent_setup_archive.search(entries, home, list(list_secrets(spec, folder)))
    if is_bound and "BROKER_NODE_DIR" in os.environ:  # a process tree, whose home folder ends with it
        raise NotCacheable("its files contain the path of the home folder, which differs between nodes of this cloud")
    name = name_archive(noted["key"], home) if is_bound else str(noted["key"])
    store = agent_setup_store.open_store(order.place, os.environ)
    size = sum(each.size for each in entries)
    parts = agent_setup_archive.pack(entries, home, seen, lambda part, content: store.put(f"{name}/{part}", content))
    manifest = {"entries": entries, "parts": parts, "size": size, "setup_s": setup_s, "made_s": time.time()}
    store.put(f"{name}/{MANIFEST}", agent_setup_archive.encode(manifest))
    (folder / CHANGES).unlink()
    report(folder, "kept", setup_s=setup_s, size_bytes=size)


def make_key(order: CacheOrder, spec: Mapping[str, Any], home: Path, before: Mapping[str, FileState]) -> str:
    """Return a digest of all that `setup` can depend on, as far as it can be read (docs/RECOVERY.md lists the rest)."""
    envs = spec["envs"]
    sources = {"sky_workdir": home / "sky_workdir", **{each: home / Path(each).expanduser() for each in order.mounts}}
    parts = {
        "version": agent_setup_archive.VERSION,
        "setup": spec["setup_digest"],  # with `envs` and image
        "secrets": sorted(spec["secrets"]),  # their names only
        "nodes": [spec["num_nodes"], spec["gpus_per_node"]],
        "trainers": spec.get("trainers"),
        "has_bucket": "://" in str(envs.get("BROKER_CHECKPOINT_DIR", "")),  # `trainers.setup` then installs more
        "files": {name: agent_setup_files.digest_tree(path) for name, path in sources.items()},
        "node": agent_setup_files.describe_node(before),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def name_archive(key: str, home: Path) -> str:
    """Return the name of an archive that only works below this home folder."""
    return f"{key}-{hashlib.sha256(os.fsencode(str(home))).hexdigest()[:8]}"


def measure_read_s(size_bytes: int) -> float:
    """Return the seconds that a restore is expected to take."""
    return size_bytes / READ_BYTES_S


def refuse(order: CacheOrder, *, setup_s: float, size_bytes: int) -> str:
    """Return why an archive would not pay; "" if it does. On free machines and storage, saved time alone decides."""
    saved_s, gib = setup_s - measure_read_s(size_bytes), size_bytes / 2**30
    if saved_s <= 0:
        return f"reading {gib:.2f} GiB would take as long as `setup`, {setup_s:.1f} s"
    if order.starts <= 0:
        return "no further start is expected"
    gain_usd = order.starts * saved_s / 3600 * order.usd_hour
    cost_usd = gib * (order.usd_gib_kept + order.starts * order.usd_gib_read)
    if gain_usd < cost_usd:
        gain, cost = f"would save {gain_usd:.2f} USD", f"{gib:.2f} GiB cost {cost_usd:.2f} USD"
        return f"{order.starts:.2f} expected starts {gain}, and {cost}"
    return ""


def list_secrets(spec: Mapping[str, Any], folder: Path) -> Iterator[bytes]:
    """Yield the texts that no archive may contain: secrets, logins among the variables, and keys of this run."""
    named = {**os.environ, **spec["envs"]}
    values = [
        *map(str, spec["secrets"].values()),
        *(value for name, value in named.items() if SECRET_NAME.search(name)),
    ]
    for value in dict.fromkeys(values):
        if len(value) >= SECRET_CHARACTERS_MIN and not value.startswith("/"):
            yield value.encode("utf-8", "surrogateescape")
            yield base64.b64encode(value.encode("utf-8", "surrogateescape")).rstrip(b"=")
    for path in (folder / agent_files.CREDENTIAL, *sorted((folder / "access").glob("*"))):
        if path.is_file():
            for token in dict.fromkeys(TOKEN.findall(path.read_text(encoding="utf-8", errors="replace"))):
                yield token.encode()


def report(folder: Path, result: str, **fields: Any) -> None:
    """Record the outcome of the archive, for the broker."""
    agent_files.write_json(folder / agent_files.SETUP_REPORT, {"result": result, **fields}, is_durable=False)
