"""Observe the checkpoints in a run's folder, for programs that do not report their steps. Standard library only.

`find_checkpoints` is called once a program has failed. A process of its own lists the folder, because the listing does
not return while a network mount hangs: no signal ends that process then, so it is abandoned.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LIMIT_S = 5.0
ENTRIES_MAX = 10_000  # a larger tree is not observed
DEPTH_MAX = 4  # Lightning: lightning_logs/version_0/checkpoints/epoch=0-step=100.ckpt
# Logs and configurations change with each start, which is not progress, so only files with weights count.
SUFFIXES = (
    ".bin", ".ckpt", ".distcp", ".h5", ".keras", ".msgpack", ".npz", ".pdparams", ".pt", ".pth", ".safetensors",
)  # fmt: skip
UNFINISHED = (".", "tmp")  # prefixes of names, as of `tmp-checkpoint-500`
# In order of precedence: `epoch=3-step=100.ckpt` has number 100. Longer numbers are dates or times, which grow with
# each start.
NUMBERS = tuple(
    re.compile(rf"{word}s?[-_=. ]?0*(\d{{1,7}})(?!\d)", re.IGNORECASE)
    for word in ("step", "iter(?:ation)?", "checkpoint", "ckpt", "epoch")
)


def find_checkpoints(
    envs: Mapping[str, str], *, program: Sequence[str] = (), limit_s: float = LIMIT_S
) -> dict[str, Any] | None:
    """Return the state of the checkpoint folder as `observe` does; None without a folder or without a timely answer."""
    place = envs.get("BROKER_CHECKPOINT_DIR", "")
    folder = place[len("file://") :] if place.startswith("file://") else place
    if not folder.startswith("/"):  # a bucket, or relative to a folder that only the program knows
        return None
    try:
        process = subprocess.Popen(
            program or [sys.executable, "-I", "-S", str(Path(__file__).resolve()), folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:  # too little memory, perhaps why the program failed: the outcome must still be written
        return None
    try:
        found = json.loads(process.communicate(timeout=limit_s)[0])
    except subprocess.TimeoutExpired:
        process.kill()  # without `wait`, which a hung mount would block
        return None
    except ValueError:  # it could not list the folder
        return None
    return found if isinstance(found, dict) else None


def observe(folder: str) -> dict[str, Any] | None:
    """Return `number`, `unnumbered_s` and `time_s` of the checkpoints in the folder; None if there are none.

    `number`: the highest step, checkpoint or epoch in a name; 0 without one. `unnumbered_s`: the newest modification of
    a file without a number, such as `last.ckpt`, which is replaced by each save; 0 without one. `time_s`: the newest
    modification of any checkpoint. Raises OSError for an unreadable folder, ValueError for a tree that is too large.
    """
    number, unnumbered_s, time_s = 0, 0.0, 0.0
    for path, saved_s in list_files(folder):
        found = read_number(path)
        number, time_s = max(number, found or 0), max(time_s, saved_s)
        unnumbered_s = max(unnumbered_s, 0.0 if found is not None else saved_s)
    return {"number": number, "unnumbered_s": unnumbered_s, "time_s": time_s} if time_s else None


def list_files(root: str) -> Iterator[tuple[str, float]]:
    """Yield path and modification time of the files with weights; one for each folder that has a number."""
    left, folders = ENTRIES_MAX, [("", 1)]
    while folders:
        part, depth = folders.pop()
        with os.scandir(f"{root}/{part}") as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise ValueError("too many entries")
                if entry.name.startswith(UNFINISHED):
                    continue
                path = f"{part}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if depth < DEPTH_MAX:
                        folders.append((path, depth + 1))
                elif entry.name.endswith(SUFFIXES) and entry.stat().st_size:
                    yield path, entry.stat().st_mtime
                    # A sharded checkpoint may have thousands of files; `epoch_1` may hold a checkpoint of each step.
                    if read_number(part) is not None and read_number(entry.name) is None:
                        break


def read_number(path: str) -> int | None:
    """Return the number of a checkpoint by its path; None if it has none."""
    for pattern in NUMBERS:
        found = pattern.findall(path)
        if found:
            return int(found[-1])
    return None


if __name__ == "__main__":
    print(json.dumps(observe(sys.argv[1])))
