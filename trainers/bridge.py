"""Connect any training program to the broker: checkpoints, progress and preemption notices in a few lines.

    from trainers import bridge

    step, folder = bridge.resume()               # (0, None) at the first start
    while step < steps:
        step, loss = step + 1, train(step)
        is_leaving = bridge.preempted()
        if is_leaving or step % 50 == 0:
            save(bridge.folder_of(step))         # every rank may write into it
            bridge.commit(step)                  # on the first rank, after all ranks have written
        bridge.progress(step, steps, loss)
        if is_leaving:
            bridge.leave()

Every function also works outside broker; checkpoints are then kept in `./checkpoints`. `bridge_keras`,
`bridge_lightning`, `bridge_hugging_face`, `bridge_accelerate`, `bridge_orbax` and `bridge_ray` connect these
frameworks; `bridge_torch` makes ranks agree. Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterable, NamedTuple, NoReturn

EXIT_CODE_PREEMPTED = 143  # what a shell reports for a process ended by SIGTERM: 128 + 15
STEP = re.compile(r"step-(\d+)-attempt-(\d+)")
COMPLETE = "COMPLETE"  # written last: a folder without it was interrupted
RESULT = "result.json"


class Resumed(NamedTuple):
    """The newest complete checkpoint: its step and folder."""

    step: int
    folder: Path | None


class _State:
    """The state of this process: whether SIGTERM arrived, the committed step, and reports of progress."""

    has_signal = False
    is_listening = False
    has_reported = False
    has_failed = False
    checkpoint_step: int | None = None


def checkpoint_dir() -> str:
    """Return the location that outlives the machines: a folder, created if missing, or the URL of a bucket.

    `CHECKPOINTS` overrides broker's choice, e.g. with the path of a mounted bucket for a framework that needs a folder.
    """
    place = os.environ.get("CHECKPOINTS") or os.environ.get("BROKER_CHECKPOINT_DIR") or "./checkpoints"
    if place.startswith("file://"):
        place = place[len("file://") :]
    if "://" not in place:
        Path(place).mkdir(parents=True, exist_ok=True)
        place = str(Path(place).resolve())
    return place


def checkpoint_folder() -> Path:
    """Return `checkpoint_dir()` as a path. Raises ValueError for a bucket's URL."""
    place = checkpoint_dir()
    if "://" in place:
        raise ValueError(f"{place} is not a folder: mount the bucket with `file_mounts`, and set CHECKPOINTS to it")
    return Path(place)


def attempt() -> int:
    """Return the number of this attempt, which increases with each attempt of the job."""
    return int(os.environ.get("BROKER_ATTEMPT") or 1)


def node_rank() -> int:
    """Return this node's rank in the gang; 0 outside broker."""
    return int(os.environ.get("SKYPILOT_NODE_RANK") or 0)


def node_addresses() -> list[str]:
    """Return the addresses of all nodes, by rank."""
    return (os.environ.get("SKYPILOT_NODE_IPS") or "127.0.0.1").split()


def node_count() -> int:
    """Return the number of nodes in the gang."""
    return len(node_addresses())


def port(offset: int = 0) -> int:
    """Return a port for traffic between nodes. Local nodes on macOS share an address, so pass the rank as offset."""
    return int(os.environ.get("BROKER_MASTER_PORT") or 29500) + offset


def is_first() -> bool:
    """Return whether this process is the first rank, according to the variables of torchrun, MPI or broker.

    Under torchrun, that is the first process on the first node, where broker reads progress: an elastic rendezvous may
    give rank 0 to any node.
    """
    if os.environ.get("SKYPILOT_NODE_RANK") and os.environ.get("LOCAL_RANK"):
        return node_rank() == 0 and os.environ["LOCAL_RANK"] == "0"
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if os.environ.get(name):
            return os.environ[name] == "0"
    return node_rank() == 0


def every_s(default: float = 600.0) -> float:
    """Return the recommended time between checkpoints, in seconds, for the placement of this attempt."""
    try:
        value = float(os.environ.get("BROKER_CHECKPOINT_EVERY_S") or default)
    except ValueError:
        return default
    return value if value > 0 else default


def folder_of(step: int) -> Path:
    """Return the folder of a new checkpoint, created if missing. Each attempt has its own folders.

    A checkpoint that this attempt has committed already counts as incomplete until its next `commit`.
    """
    folder = _name_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / COMPLETE
    if marker.exists():  # a kill while the files are replaced must not leave a torn checkpoint that counts
        try:
            marker.unlink()
        except FileNotFoundError:  # another rank was faster
            pass
        _flush(folder)
    return folder


def commit(step: int, keep: int = 3) -> None:
    """Commit the checkpoint of `step`, and delete all but the newest `keep`. Call it on the first rank only.

    Folders that earlier attempts left incomplete are deleted too. The data is flushed to disk before the marker is
    written. Raises OSError if either fails.
    """
    folder = _name_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_dir():
            _flush(path)
    (folder / COMPLETE).touch()
    _flush(folder)
    _flush(folder.parent)  # the folder itself may be new, and older ones are deleted next
    _State.checkpoint_step = step
    for old in _list_complete()[max(1, keep) :]:
        (old / COMPLETE).unlink()  # first, so that a partly deleted folder is incomplete
        shutil.rmtree(str(old), ignore_errors=True)
    for path in checkpoint_folder().glob("step-*"):
        found = STEP.fullmatch(path.name)
        if found and int(found[2]) < attempt() and not (path / COMPLETE).exists():
            shutil.rmtree(str(path), ignore_errors=True)


def resume() -> Resumed:
    """Return the newest complete checkpoint; (0, None) if there is none. At startup, all ranks get the same one."""
    complete = _list_complete()
    if not complete:
        return Resumed(0, None)
    step = _read_step(complete[0])[0]
    _State.checkpoint_step = step
    return Resumed(step, complete[0])


def progress(
    step: int, total: int, loss: float | None = None, checkpoint_step: int | None = None, **details: Any
) -> None:
    """Report a step on stdout and to broker. On nodes without the first rank, one rank reports only `own_s`.

    `own_s` is the time in seconds that this rank took for its own part of the step, before it waited for the others;
    broker uses it to identify nodes that are slower than the rest.
    `checkpoint_step` is the step of the newest checkpoint; it defaults to that of the last `commit` or `resume`.
    """
    if not is_first():
        if details.get("own_s") is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            _append({"time": time.time(), "step": step, "own_s": details["own_s"]})
        return
    if checkpoint_step is not None:
        _State.checkpoint_step = checkpoint_step
    line: dict[str, Any] = {"time": time.time(), "step": step, "total": total, "loss": _or_null(loss)}
    line["checkpoint_step"] = _State.checkpoint_step
    line.update(details)
    if not _State.has_reported:
        line["start_cpu_s"] = round(sum(os.times()[:4]), 2)
        _State.has_reported = True
    _append(line)
    print("step {}/{}{}".format(step, total, "" if loss is None else f"  loss {loss:.6f}"), flush=True)


def _append(line: dict[str, Any]) -> None:
    """Append a line to the progress file of this node; do nothing outside broker."""
    place = os.environ.get("BROKER_PROGRESS_FILE")
    if place:
        try:
            # One small write in append mode: a line is whole or absent, even if this process is killed meanwhile.
            with Path(place).open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:  # a full disk must not end the training
            if not _State.has_failed:
                print(f"warning: progress is not recorded: {error}", file=sys.stderr, flush=True)
            _State.has_failed = True


def listen() -> None:
    """Treat SIGTERM as a preemption notice. Has no effect outside the main thread."""
    if not _State.is_listening and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _remember)
        _State.is_listening = True


def preempted() -> bool:
    """Return whether this process should save and exit: SIGTERM arrived, or the broker's file appeared.

    Possibly only some of the nodes received the notice: if all ranks save together, make them agree first
    (`bridge_torch.agree`).
    """
    listen()
    place = os.environ.get("BROKER_PREEMPTION_FILE")
    return _State.has_signal or bool(place and Path(place).exists())


def leave() -> NoReturn:
    """End this process after a save; broker restarts the same command elsewhere."""
    sys.stdout.flush()
    os._exit(EXIT_CODE_PREEMPTED)  # exit at once: the framework's shutdown would wait for peers that have left


def finish(step: int, arrays: Iterable[Any] = (), **values: Any) -> None:
    """Write `result.json` with a digest of the final weights, so that two runs can be compared bit for bit.

    `arrays` are numpy arrays, or anything with a buffer. Call it on the first rank only.
    """
    digest = hashlib.sha256()
    for each in arrays:
        digest.update(each.tobytes() if hasattr(each, "tobytes") else bytes(each))
    result = dict(values, step=step, attempt=attempt(), weights_sha256=digest.hexdigest())
    folder = checkpoint_folder()
    aside = folder / f".{RESULT}.{os.getpid()}"
    aside.write_text(json.dumps(result))
    aside.replace(folder / RESULT)
    print("finished {}  weights {}".format(step, result["weights_sha256"][:16]), flush=True)


def _name_folder(step: int) -> Path:
    return checkpoint_folder() / f"step-{step:08}-attempt-{attempt():04}"


def _list_complete() -> list[Path]:
    """Return the folders of complete checkpoints, the newest first."""
    found = [path for path in checkpoint_folder().glob("step-*") if STEP.fullmatch(path.name)]
    return sorted((path for path in found if (path / COMPLETE).exists()), key=_read_step, reverse=True)


def _read_step(folder: Path) -> list[int]:
    found = STEP.fullmatch(folder.name)
    return [int(group) for group in found.groups()] if found else []


def _flush(path: Path) -> None:
    number = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # some mounts cannot flush a folder
            raise
    finally:
        os.close(number)


def _or_null(value: float | None) -> float | None:
    """Return None for non-finite floats, which JSON cannot represent."""
    return None if value is None or not math.isfinite(value) else float(value)


def _remember(signal_number: int, frame: Any) -> None:
    _State.has_signal = True
