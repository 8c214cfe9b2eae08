"""Measures restores of large checkpoints on two ranks: `python -m tests.bench.bench_restore`. Ratios within one run.

- store: seconds to restore through an object store of limited rate, over the transfer's own time
- disk: rate of a restore from a disk, over that of plain reads by as many threads; both begin with an empty cache

`--gigabytes 20 --spill` measures 20 GB on a machine with less than the 40 GB of memory that the state and its verified
copy take. The copy is then in files, which the kernel may write to the disk, and all tensors of the state share one
buffer. The checkpoint itself is generated and takes no memory.
"""

import argparse
import functools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.bench.throttled_store import BUCKET, serve_folder

RANKS = 2
TENSOR_BYTES = 128 * 2**20
READ_BYTES = 2**23
# The bars: of the time over the transfer's, and of the rate over the disk's.
RATIO_MAX, SHARE_MIN = 1.2, 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure restores of large checkpoints.")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint; twice in memory")
    parser.add_argument("--megabytes_s", type=float, default=200.0, help="rate of the store")
    parser.add_argument("--spill", action="store_true", help="keep the restored state in files instead of memory")
    parser.add_argument("--folder", help="where the checkpoint and the files of --spill are; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3, help="restores from the disk")
    parser.add_argument("--only", choices=("store", "disk"), help="measure one thing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        run_ranks(1, str(folder / "checkpoint"), options.gigabytes * 1e9, None)
        spilled = folder / "spilled" if options.spill else None
        if options.only in (None, "store"):
            measure_store(folder, options.gigabytes * 1e9, options.megabytes_s * 1e6, spilled)
        if options.only in (None, "disk"):
            measure_disk(folder / "checkpoint", options.gigabytes * 1e9, options.rounds, spilled)


def measure_store(folder: Path, size: float, bytes_s: float, spilled: Path | None) -> None:
    """Restore through a server whose total rate is limited."""
    files = sum(file.stat().st_size for file in list_files(folder))
    with serve_folder(folder, bytes_s) as variables:
        os.environ.update(variables)
        seconds = max(run_ranks(2, f"s3://{BUCKET}/checkpoint", size, spilled))
    own_s = files / bytes_s
    print(
        f"restore of {files / 1e9:.2f} GB on {RANKS} ranks through an object store of {bytes_s / 1e6:.0f} MB/s: "
        f"{seconds:.1f} s, the transfer alone {own_s:.1f} s; {compare(seconds / own_s, most=RATIO_MAX)}; "
        f"share of the store's rate {compare(own_s / seconds, least=SHARE_MIN)}",
        flush=True,
    )


def measure_disk(folder: Path, size: float, rounds: int, spilled: Path | None) -> None:
    """Alternate restores and plain reads."""
    files = list_files(folder)
    total = sum(file.stat().st_size for file in files)
    shares, ours, plain = [], [], []
    for round_ in range(rounds):
        plain.append(total / read_plainly(files))
        drop_cache(files)
        ours.append(total / max(run_ranks(3 + round_, str(folder), size, spilled)))
        shares.append(ours[-1] / plain[-1])
    print(
        f"restore of {total / 1e9:.2f} GB on {RANKS} ranks from a disk: {statistics.median(ours) / 1e6:.0f} MB/s, "
        f"plain reads {statistics.median(plain) / 1e6:.0f} MB/s; share "
        f"{compare(statistics.median(shares), least=SHARE_MIN)} ({' '.join(f'{share:.2f}' for share in shares)})",
        flush=True,
    )


def compare(figure: float, *, most: float | None = None, least: float | None = None) -> str:
    """Return a figure with its bar, and whether it is met."""
    is_met = figure <= most if most is not None else figure >= (least or 0.0)
    bar = f"<= {most}" if most is not None else f">= {least}"
    return f"{figure:.3f} (bar {bar}: {'MET' if is_met else 'MISSED'})"


def list_files(folder: Path) -> list[Path]:
    """List the files of the checkpoint that hold tensors."""
    return sorted(folder.rglob("*.distcp"))


def drop_cache(files: list[Path]) -> None:
    """Make the kernel forget what the files hold, so that the disk is read."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(files: list[Path]) -> float:
    """Return the seconds that it takes to read all files concurrently, a thread for each, and do nothing with them."""

    def read(file: Path) -> None:
        buffer = bytearray(READ_BYTES)
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass

    drop_cache(files)
    threads = [threading.Thread(target=read, args=(file,)) for file in files]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def run_ranks(attempt: int, place: str, size: float, spilled: Path | None) -> list[float]:
    """Save in the first attempt or restore in a later one, on all ranks; return the seconds of each."""
    from trainers.launch import find_free_port

    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), find_free_port()
    ranks = [
        context.Process(target=be_rank, args=(attempt, rank, port, place, size, spilled, answers))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with {process.exitcode}")
    return [answers.get() for _ in ranks]


def be_rank(attempt: int, rank: int, port: int, place: str, size: float, spilled: Path | None, answers: Any) -> None:
    """Save or restore this rank's half of sharded tensors, each filled with its number."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from trainers import restore, snapshot
    from trainers.checkpoint import CheckpointManager
    from trainers.ranks import join_ranks, leave_ranks
    from trainers.storage import open_storage

    ranks = join_ranks(start_s=600.0, checkpoint_s=3600.0)
    count, length = round(size / TENSOR_BYTES), TENSOR_BYTES // 4 // RANKS
    kept: list[Any] = []  # the copies in files, of which each has its own values
    if attempt == 1:  # generated: a stride of 0 repeats one number, and nothing changes while it is written
        parts = [torch.full((1,), float(number)).expand(length) for number in range(count)]
        patch.object(snapshot, "copy_state", lambda state: state).start()
    elif spilled is None:
        parts = [torch.full((length,), -1.0) for _ in range(count)]
    else:
        parts = [torch.full((length,), -1.0)] * count
        patch.object(restore, "copy_state", copy_to_files(spilled / str(rank), kept)).start()
    shared = {"weights": Weights(parts)}
    manager = CheckpointManager(open_storage(place), ranks, attempt=attempt, keep=1, shared=shared, own={})
    begin = time.perf_counter()
    if attempt == 1:
        manager.save(1)
        manager.wait()
    elif manager.restore() != 1:
        raise SystemExit("the checkpoint was not restored")
    seconds = time.perf_counter() - begin
    if attempt > 1 and any(float(part[-1]) != number for number, part in enumerate(kept or parts)):
        raise SystemExit("the checkpoint was not restored as it was saved")
    answers.put(seconds)
    leave_ranks()


class Weights:
    """Sharded tensors over parts of them, which may repeat one number or share memory."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by number."""
        return {f"{number:05}": spread(part) for number, part in enumerate(self._parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the values are in the parts."""


def spread(part: Any) -> Any:
    """Return a tensor of which this rank holds a part."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size([len(part) * RANKS])
    return DTensor.from_local(part, find_mesh(), [Shard(0)], run_check=False, shape=shape, stride=(1,))


@functools.cache
def find_mesh() -> Any:
    """Return the mesh of all ranks, created once by all of them together."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,))


def copy_to_files(folder: Path, kept: list[Any]) -> Callable[[Any], Any]:
    """Return a function that copies a state into files without names; `kept` gets the parts of its tensors."""
    import torch
    from torch import Tensor

    folder.mkdir(parents=True, exist_ok=True)

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(part) for key, part in value.items()}
        if not isinstance(value, Tensor):
            return value
        if not hasattr(value, "to_local"):
            return value.detach().clone()
        length = len(value.to_local())
        file = folder / str(len(kept))
        kept.append(torch.from_file(str(file), shared=True, size=length))  # a sparse file
        file.unlink()
        return spread(kept[-1])

    return copy


if __name__ == "__main__":
    main()
