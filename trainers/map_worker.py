"""Process the shards of a `broker map` until none is left. This is the program that the task of a map runs.

    python -m trainers.map_worker embed.py        `process(items)` in embed.py returns one result per parsed line
    python -m trainers.map_worker -- ./embed.sh   one command per shard, which reads lines on stdin and prints results

The file is imported once, so it should load its model at module level. BROKER_MAP names the output, which holds the
plan.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainers.map_guard import CurrentShard, guard
from trainers.map_leases import Lease, Leases, MapPlan, Shard, read_plan
from trainers.map_places import Place, ReplacedError, open_place
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice

READ_BYTES = 1 << 20  # read at a time past the end of a shard, to complete its last line
RENEWALS = 3  # per lease, while it is valid
FAILURES_MAX = 3  # the worker fails after its program has failed on this many different shards in a row
POLL_S = 0.2
IsOver = Callable[[], bool]


class ShardLostError(Exception):
    """The shard was lost to another worker, or the machine is about to be preempted."""


class ProgramError(Exception):
    """The user's program failed on a shard."""


def main(arguments: Sequence[str]) -> int:
    """Return 0 if no shard is left, 1 if the program keeps failing, 143 after a preemption notice."""
    parser = argparse.ArgumentParser(prog="python -m trainers.map_worker", description=__doc__.split("\n\n")[0])
    parser.add_argument("program", nargs="+", help="a Python file with `process(items)`, or a command after `--`")
    parser.add_argument("--batch", type=int, default=32, help="items per call of `process` (default: %(default)s)")
    given = parser.parse_args(arguments)
    notice = PreemptionNotice(find_file("BROKER_PREEMPTION_FILE"))
    notice.listen()
    current = CurrentShard()
    death = guard(current, notice, failures_max=FAILURES_MAX) if is_file(given.program) else None
    output = open_place(os.environ["BROKER_MAP"])
    plan = read_plan(output)
    worker = f"{os.environ.get('SKYPILOT_TASK_ID', os.getpid())}/{os.environ.get('SKYPILOT_NODE_RANK', 0)}"
    leases = Leases(output, plan, worker=worker, attempt=int(os.environ.get("BROKER_ATTEMPT", 1)))
    if death is not None:
        leases.fail(death.lease, death.reason)
    run = make_program(given.program, given.batch)
    return work(leases, plan, open_place(plan.input), run, is_noticed=notice.is_given, current=current)


def work(
    leases: Leases,
    plan: MapPlan,
    source: Place,
    run: Callable[[bytes, IsOver], list[bytes]],
    *,
    is_noticed: IsOver,
    current: CurrentShard | None = None,
) -> int:
    """Process shards until none is free; `current` always has the lease of the one in work."""
    failed: set[int] = set()
    current = current or CurrentShard()
    report = make_report(len(plan.shards))
    while (lease := leases.acquire()) is not None:
        error: Exception | None = None
        results: list[bytes] | None = None
        with keep(leases, lease, every_s=plan.lease_s / RENEWALS) as lost:
            current.note(lease)
            try:
                results = run(read_lines(source, plan.shards[lease.number]), lambda: lost.is_set() or is_noticed())
            except ShardLostError:
                pass
            except (ProgramError, ReplacedError) as raised:
                error = raised
        if error is not None:
            print(f"shard {lease.number}: {error}", file=sys.stderr, flush=True)
            current.note(None)  # before the report: a death after it is not the shard's
            if isinstance(error, ReplacedError):
                leases.release(lease)
                return 1
            leases.fail(lease, str(error))
            failed.add(lease.number)
            if len(failed) == FAILURES_MAX:
                return 1
            continue
        if results is None:
            current.note(None)
            if is_noticed():
                leases.release(lease)
                return EXIT_CODE_PREEMPTED
            continue
        leases.commit(lease, b"".join(each + b"\n" for each in results), items=len(results))
        current.commits += 1
        current.note(None)
        failed.clear()
        report(len(leases.view.done))
    return 0


@contextlib.contextmanager
def keep(leases: Leases, lease: Lease, *, every_s: float) -> Iterator[threading.Event]:
    """Renew the lease in a thread; the event is set when another worker has taken the shard."""
    lost, over = threading.Event(), threading.Event()

    def renew() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(OSError):  # the lease may expire, but the commit decides who has the result
                if not leases.renew(lease):
                    lost.set()
                    return

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        over.set()
        thread.join()  # a renewal after the commit or release would restore the lease


def read_lines(source: Place, shard: Shard) -> bytes:
    """Return the lines that begin in the shard. A line that began before it belongs to the previous shard."""
    start = max(0, shard.start - 1)
    content = source.read_range(shard.key, start, shard.end, shard.mark)
    if shard.start:
        if (first := content.find(b"\n")) < 0:
            return b""  # the shard lies within one long line that began earlier
        content = content[first + 1 :]
    end = shard.end
    while content and not content.endswith(b"\n") and end < shard.size_bytes:
        more = source.read_range(shard.key, end, min(shard.size_bytes, end + READ_BYTES), shard.mark)
        cut = more.find(b"\n") + 1
        content += more[:cut] if cut else more
        end += len(more)
    return content


def make_program(words: Sequence[str], batch: int) -> Callable[[bytes, IsOver], list[bytes]]:
    """Return the function that turns the lines of a shard into the lines of its result."""
    if is_file(words):
        process = load_function(Path(words[0]))
        return lambda content, is_over: call_function(process, content, batch, is_over)
    return lambda content, is_over: run_command(words, content, is_over)


def is_file(words: Sequence[str]) -> bool:
    """Return whether the program is a Python file, which runs in the worker's own process."""
    return len(words) == 1 and words[0].endswith(".py")


def load_function(path: Path) -> Callable[[list[Any]], list[Any]]:
    """Import the file and return its `process`. Raises SystemExit if it has none."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    if not hasattr(module, "process"):
        sys.exit(f"error: {path} has no function `process(items)`")
    process: Callable[[list[Any]], list[Any]] = module.process
    return process


def call_function(
    process: Callable[[list[Any]], list[Any]], content: bytes, batch: int, is_over: IsOver
) -> list[bytes]:
    """Call `process` batch by batch. Raises ProgramError for any error it raises, and for a wrong number of results."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    results: list[bytes] = []
    for first in range(0, len(lines), batch):
        if is_over():
            raise ShardLostError
        part = lines[first : first + batch]
        try:
            found = list(process([json.loads(line) for line in part]))
            results += [json.dumps(each).encode() for each in found]
        except Exception as error:  # any error of the user's program is reported with the shard
            raise ProgramError(f"{type(error).__name__}: {error}") from error
        if len(found) != len(part):
            raise ProgramError(f"`process` returned {len(found)} results for {len(part)} items")
    return results


def run_command(words: Sequence[str], content: bytes, is_over: IsOver) -> list[bytes]:
    """Run the command on the lines of one shard. Raises ProgramError for an exit code other than 0."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as made:
        given.write(content)
        given.seek(0)
        process = subprocess.Popen(words, stdin=given, stdout=made)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                    break
                if is_over():
                    raise ShardLostError
        finally:
            process.kill()
            process.wait()
        if process.returncode and is_over():  # a preemption notice ends the command too
            raise ShardLostError
        if process.returncode:
            raise ProgramError(f"`{words[0]}` exited with code {process.returncode}")
        made.seek(0)
        results = made.read().split(b"\n")  # a carriage return is part of a line
        return results if results[-1] else results[:-1]


def make_report(total: int) -> Callable[[int], None]:
    """Return the function that reports how many shards are done by all workers, as far as this worker knows."""
    file = find_file("BROKER_PROGRESS_FILE")

    def report(done: int) -> None:
        print(f"shard {done}/{total}", flush=True)
        if file is not None:
            line = {"time": time.time(), "step": done, "total": total, "checkpoint_step": done}
            with file.open("ab", buffering=0) as progress:
                progress.write(json.dumps(line).encode() + b"\n")

    return report


def find_file(variable: str) -> Path | None:
    """Return the file that an environment variable names, if it is set."""
    path = os.environ.get(variable)
    return Path(path) if path else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
