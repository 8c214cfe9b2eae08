"""A stand-in for rclone on a node, limited to a mount with a write cache: files wait in it until a gate opens.

`rclone mount REMOTE PLACE ... --cache-dir CACHE` remembers the cache; `rclone put PLACE NAME TEXT` writes a file as a
program does through FUSE: it is dirty at once. While `$HOME/gate` exists, a server in the background uploads.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

HOME = pathlib.Path(os.environ["HOME"])
PLACES = HOME / "fake_mounts"
BUCKET = HOME / "fake_bucket"


def mount(place: str, cache: str) -> None:
    PLACES.mkdir(exist_ok=True)
    (PLACES / pathlib.Path(place).name).write_text(cache)
    subprocess.Popen(
        [sys.executable, __file__, "serve", cache],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def put(place: str, name: str, text: str) -> None:
    cache = pathlib.Path((PLACES / pathlib.Path(place).name).read_text())
    for kind, content in (("vfs", text), ("vfsMeta", json.dumps({"Size": len(text), "Dirty": True}))):
        file = cache / kind / "s3" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def serve(cache: str) -> None:
    while HOME.exists():
        for meta in pathlib.Path(cache, "vfsMeta", "s3").glob("*"):
            entry = json.loads(meta.read_text() or "{}")
            if entry.get("Dirty") and (HOME / "gate").exists():
                BUCKET.mkdir(exist_ok=True)
                (BUCKET / meta.name).write_text(pathlib.Path(cache, "vfs", "s3", meta.name).read_text())
                meta.write_text(json.dumps({**entry, "Dirty": False}))
        time.sleep(0.05)


def main(verb: str, *arguments: str) -> None:
    if verb == "version":
        print("rclone v1.60.1-DEV")
    elif verb == "mount":
        mount(arguments[1], arguments[arguments.index("--cache-dir") + 1])
    elif verb == "put":
        put(*arguments)
    else:
        serve(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
