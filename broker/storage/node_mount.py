"""Copy a bucket to a folder of a node, or mount it there: a standalone program that uses obstore if available.

`python3 node_mount.py COPY|MOUNT|MOUNT_CACHED URL TARGET`. Idempotent: completed work stays, interrupted work
continues. Exit code 69 for a reported problem, such as a missing tool, and 1 for any other. Python 3.8 and later.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from broker.storage.node_objects import MountError, find_r2_login, open_store, read_text  # on a node: in this file

EX_UNAVAILABLE = 69
WORKERS = 16
PART_BYTES = 8 << 20
ATTEMPTS_MAX = 3
ENDPOINT_NAMES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "RCLONE_S3_ENDPOINT")
LIBRARY = pathlib.Path.home() / ".broker" / "lib"
# rclone's names of bucket providers, with the machine's own login.
RCLONE = {
    "s3": ":s3,provider=AWS,env_auth=true:", "r2": ":s3,provider=Cloudflare,env_auth=true:",
    "gs": ":gcs,env_auth=true:", "az": ":azureblob,env_auth=true:",
}  # fmt: skip
# To look up one object, to copy it, and to copy all below a folder.
COPIERS = {
    "aws": ("s3api head-object --bucket {bucket} --key {key}", "s3 cp --no-progress", "s3 sync --no-progress"),
    "gcloud": ("storage objects describe {source}", "storage cp", "storage rsync --recursive"),
    "rclone": ("lsjson --stat {source}", "copyto", "copy"),
}
MOUNTERS = {"s3": "mount-s3", "gs": "gcsfuse"}
MOUNTS = pathlib.Path.home() / ".broker" / "mounts"  # read by the agent
RC_SOCKET_VERSION = (1, 62)  # of rclone: the first whose remote control supports a Unix socket
SOCKET_PATH_BYTES_MAX = 103  # macOS; Linux has 107
CACHE_FLAGS = ("--vfs-cache-mode", "full", "--vfs-write-back", "1s")


def main(mode: str, url: str, target: str, access: str = "") -> None:
    """Copy or mount a bucket or folder to `target`; `access` of a mount may be `read-only`. Raises MountError."""
    scheme, _, rest = url.partition("://")
    place = make_room(target)
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        os.environ["AWS_ENDPOINT_URL"] = endpoint  # the only one that mount-s3 reads
        os.environ.setdefault("RCLONE_S3_ENDPOINT", endpoint)
    if scheme == "file":
        source = pathlib.Path("/" + rest.lstrip("/"))
        (copy_folder if mode == "COPY" else link_folder)(source, place)
        if access and mode != "COPY":
            print(f"note: `{target}` is a link to `{url}`, which does not refuse writes", file=sys.stderr)
    elif mode == "COPY":
        copy_bucket(url, place)
    else:
        mount_bucket(scheme, rest, place, is_cached=mode == "MOUNT_CACHED", is_read_only=access == "read-only")


def make_room(target: str) -> pathlib.Path:
    """Return the target as a path whose parent exists; outside the home folder, creating it may require root."""
    place = pathlib.Path.home() / pathlib.Path(target).expanduser()  # an absolute target stays as it is
    if "BROKER_NODE_DIR" in os.environ and pathlib.Path.home() not in (place, *place.parents):
        raise MountError(f"`{target}` is outside the home folder of a local node; use a path below `~/`")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(place.parent, os.W_OK) and not os.access(place, os.W_OK):
            raise PermissionError
    except PermissionError:
        owner = f"{os.getuid()}:{os.getgid()}"
        for argv in (["mkdir", "-p", str(place)], ["chown", owner, str(place)]):
            if subprocess.run(["sudo", "-n", *argv], check=False).returncode:
                raise MountError(f"permission denied: `{target}`; use a path below `~/`") from None
    return place


def link_folder(source: pathlib.Path, place: pathlib.Path) -> None:
    """Link a folder of this machine to the target."""
    if not source.is_dir():
        raise MountError(f"`file://{source}` is not a folder")
    if place.is_symlink():
        place.unlink()
    elif place.is_dir():
        place.rmdir()
    place.symlink_to(source)


def copy_folder(source: pathlib.Path, place: pathlib.Path) -> None:
    """Copy a local file or folder to `place`. Raises MountError if it does not exist."""
    if source.is_file():
        fetch_whole(place / source.name if place.is_dir() else place, lambda aside: shutil.copy2(source, aside))
    elif source.is_dir():
        shutil.copytree(source, place, dirs_exist_ok=True)
    else:
        raise MountError(f"`file://{source}` does not exist")


def copy_bucket(url: str, place: pathlib.Path) -> None:
    """Download a bucket path to `place`, with obstore or a tool of the node. Raises MountError."""
    if not import_obstore():
        return copy_by_tool(url, place)
    import obstore

    store, path = open_store(url)
    with contextlib.suppress(FileNotFoundError):
        if path:
            meta = obstore.head(store, path)
            return fetch(obstore, store, meta, place / path.rsplit("/", 1)[-1] if place.is_dir() else place)
    entries = [each for page in obstore.list(store, path or None, chunk_size=1000) for each in page]
    if not entries:
        raise MountError(f"`{url}` does not exist or is empty")
    place.mkdir(parents=True, exist_ok=True)
    names = [each["path"][len(path) :].lstrip("/") for each in entries]
    folders = {"", *(str(each) for name in names for each in pathlib.PurePosixPath(name).parents)}
    files = [(one, find_inside(place, name)) for one, name in zip(entries, names) if one["size"] or name not in folders]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda pair: fetch(obstore, store, *pair), files))
    print(f"{len(files)} files, {sum(each['size'] for each in entries) / 2**30:.2f} GiB from `{url}`", flush=True)


def find_inside(place: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file of a key below `place`. Raises MountError for keys with `..`."""
    if ".." in pathlib.PurePath(name).parts:
        raise MountError(f"the key `{name}` leads outside `{place}`")
    return place / name


def fetch(obstore: Any, store: Any, meta: Any, file: pathlib.Path) -> None:
    """Download one object, unless a file of its size that is at least as new exists. It gets the object's time."""
    size, time_s = meta["size"], math.ceil(meta["last_modified"].timestamp())
    if file.is_file() and file.stat().st_size == size and file.stat().st_mtime >= time_s:
        return

    def fill(aside: pathlib.Path) -> None:
        with aside.open("wb") as out:
            for part in obstore.get(store, meta["path"]).stream(PART_BYTES):
                out.write(part)
        os.utime(aside, (time_s, time_s))  # the node's clock may be ahead, and an object may be replaced meanwhile

    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return fetch_whole(file, fill)
        except FileNotFoundError:
            if size:
                raise
            return file.mkdir(exist_ok=True)  # `sub/`, by which consoles mark a folder, is listed as `sub`
        except obstore.exceptions.GenericError:  # the connection broke during the response
            if attempt == ATTEMPTS_MAX:
                raise


def fetch_whole(file: pathlib.Path, fill: Callable[[pathlib.Path], object]) -> None:
    """Fill a temporary file and rename it to `file`, so that an interrupted download leaves none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        fill(aside)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def import_obstore() -> bool:
    """Return whether obstore can be used; if no other tool can copy, install it with pip into `LIBRARY`."""
    sys.path.insert(0, str(LIBRARY))
    for is_fetched in (False, True):
        try:
            import obstore  # noqa: F401

            return True
        except ImportError:
            if is_fetched or any(shutil.which(tool) for tool in ("aws", "gcloud", "rclone")):
                return False
            argv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(LIBRARY), "obstore>=0.6"]
            if subprocess.run(argv, check=False).returncode:
                return False
            importlib.invalidate_caches()  # `LIBRARY` did not exist when it was searched
    return False


def use_r2_login() -> None:
    """Configure endpoint and login for tools that use the S3 API."""
    login = find_r2_login()
    os.environ.update(AWS_ACCESS_KEY_ID=login["key"], AWS_SECRET_ACCESS_KEY=login["secret"], AWS_REGION="auto")
    os.environ.update(dict.fromkeys(ENDPOINT_NAMES, login["endpoint"]))


def copy_by_tool(url: str, place: pathlib.Path) -> None:
    """Copy with a tool that the node's image has. Raises MountError if it has none, or the URL has no content."""
    scheme, _, rest = url.partition("://")
    if scheme == "r2":
        use_r2_login()
    own = {"s3": "aws", "r2": "aws", "gs": "gcloud"}.get(scheme)
    tool = next((each for each in (own, "rclone") if each and shutil.which(each)), None)
    if tool is None:
        raise MountError(f"this node cannot copy `{url}`: it has no obstore, aws, gcloud or rclone, and pip failed")
    look_up, one, all_below = COPIERS[tool]
    bucket, _, key = rest.partition("/")
    source = f"{RCLONE[scheme]}{rest}" if tool == "rclone" else f"{'gs' if tool == 'gcloud' else 's3'}://{rest}"
    argv = [tool, *(each.format(bucket=bucket, key=key, source=source) for each in look_up.split())]
    found = subprocess.run(argv, check=False, capture_output=True, text=True)
    is_object = not found.returncode and (tool != "rclone" or re.search(r'"IsDir": *false', found.stdout))
    if key and key[-1] != "/" and is_object:  # copied as a folder, it would be an empty one
        file = place / key.rpartition("/")[2] if place.is_dir() else place
        fetch_whole(file, lambda aside: run([tool, *one.split(), source, aside]))
        return
    place.mkdir(parents=True, exist_ok=True)
    run([tool, *all_below.split(), source, place])
    if not any(place.iterdir()):
        raise MountError(f"`{url}` does not exist or is empty")


def mount_bucket(scheme: str, rest: str, place: pathlib.Path, *, is_cached: bool, is_read_only: bool) -> None:
    """Mount a bucket path at `place`; keep an equal live mount, and replace any other. Raises MountError."""
    drop_dead_mount(place)
    wanted = f"{scheme}://{rest} {'cached' if is_cached else 'direct'} {'read-only' if is_read_only else 'writable'}"
    record = MOUNTS / f"{hashlib.sha256(str(place).encode()).hexdigest()[:16]}.mounted"
    if os.path.ismount(place) and read_text(record) in ("", wanted):  # empty: not mounted by this program
        return
    if os.path.ismount(place):
        release_mount(place, read_text(record).rsplit(" ", 2)[0])
    MOUNTS.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    bucket, path = rest.partition("/")[0], rest.partition("/")[2].strip("/")
    if scheme == "r2":
        use_r2_login()
    own = MOUNTERS.get(scheme)
    if own and not is_cached and shutil.which(own):
        if own == "mount-s3":
            flags = ["--read-only"] if is_read_only else ["--allow-delete", "--allow-overwrite"]
            flags += ["--prefix", path + "/"] if path else []
        else:
            flags = ["--implicit-dirs", *(["-o", "ro"] if is_read_only else [])]
            flags += ["--only-dir", path] if path else []
        run([own, *flags, bucket, place])
    elif scheme in RCLONE and shutil.which("rclone"):
        mount_by_rclone(scheme, rest, place, is_cached=is_cached, is_read_only=is_read_only)
    else:
        tools = [each for each in (None if is_cached else own, "rclone") if each]
        raise MountError(
            f"this node cannot mount `{scheme}://{rest}`: it has no {' and no '.join(tools)}\n\n"
            "hint: use `mode: COPY`, or an `image_id` that includes one of them"
        )
    fetch_whole(record, lambda aside: aside.write_text(wanted, encoding="utf-8"))


def mount_by_rclone(scheme: str, rest: str, place: pathlib.Path, *, is_cached: bool, is_read_only: bool) -> None:
    """Mount with rclone. Written files stay in a cache of this mount until the upload, for which the agent waits."""
    mode, flags = ("MOUNT_CACHED", CACHE_FLAGS) if is_cached else ("MOUNT", ("--vfs-cache-mode", "writes"))
    flags = (*flags, "--read-only") if is_read_only else flags
    name = hashlib.sha256(f"{scheme}://{rest} {place}".encode()).hexdigest()[:16]
    cache, control = MOUNTS / name, MOUNTS / f"{name}.sock"
    has_control = find_rclone_version() >= RC_SOCKET_VERSION and len(os.fsencode(control)) <= SOCKET_PATH_BYTES_MAX
    remote_control = ["--rc", "--rc-addr", f"unix://{control}"] if has_control else []
    control.unlink(missing_ok=True)
    # Register before mounting, so that the agent waits for all writes to the mount.
    about = {"url": f"{scheme}://{rest}", "target": str(place), "cache": str(cache), "mode": mode}
    about.update(socket=str(control) if remote_control else "", access="read-only" if is_read_only else "")
    fetch_whole(MOUNTS / f"{name}.json", lambda aside: aside.write_text(json.dumps(about), encoding="utf-8"))
    argv = ["rclone", "mount", RCLONE[scheme] + rest, str(place), "--daemon", "--daemon-wait", "60s", *flags]
    run([*argv, "--cache-dir", str(cache), *remote_control])


def find_rclone_version() -> tuple[int, ...]:
    """Return the major and minor version of rclone, (0, 0) if it is unknown."""
    done = subprocess.run(["rclone", "version"], check=False, capture_output=True, text=True)
    match = re.match(r"rclone v(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def drop_dead_mount(place: pathlib.Path) -> None:
    """Unmount a mount whose program was killed: every access to it would fail."""
    try:
        place.stat()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            unmount(place, "-z")


def release_mount(place: pathlib.Path, url: str) -> None:
    """Unmount another mount. Raises MountError if it is in use, or has written files that nothing would upload."""
    name = hashlib.sha256(f"{url} {place}".encode()).hexdigest()[:16]
    entries = [read_text(each) for each in (MOUNTS / name / "vfsMeta").rglob("*") if each.is_file()]
    if not all(re.search(r'"Dirty":\s*false', each) for each in entries):
        raise MountError(f"`{place}` has files that are not in `{url}` yet; repeat the command once they are")
    if not unmount(place):
        raise MountError(f"`{place}` has another mount that is in use; wait until its run ends, or change the path")
    (MOUNTS / f"{name}.json").unlink(missing_ok=True)  # by it, the agent would mount it again over its successor


def unmount(place: pathlib.Path, *flags: str) -> bool:
    """Unmount a FUSE mount; return whether it succeeded."""
    tool = shutil.which("fusermount3") or shutil.which("fusermount")
    return tool is not None and not subprocess.run([tool, "-u", *flags, str(place)], check=False).returncode


def run(argv: Sequence[str | pathlib.Path]) -> None:
    """Run a command without the run's mark, so that a mount outlives the run. Raises MountError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "BROKER_RUN"}
    done = subprocess.run([str(each) for each in argv], check=False, env=environment)
    if done.returncode:
        raise MountError(f"`{argv[0]}` failed with exit code {done.returncode}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MountError as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(EX_UNAVAILABLE)
    except Exception as error:
        first = str(error).partition("\n")[0].partition("<?xml")[0]
        print(f"error: cannot copy or mount `{sys.argv[2]}` to `{sys.argv[3]}`: {first}", file=sys.stderr)
        sys.exit(1)
