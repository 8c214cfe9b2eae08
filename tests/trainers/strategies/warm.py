"""A process that has torch imported and forks worlds of ranks from itself: `python warm.py`, JSON lines both ways.

Importing torch and its distributed parts takes seconds for each rank; a fork takes milliseconds. It does no arithmetic
and has no threads of its own, so its children are as good as fresh processes, and are killed like those.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PREPARED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "trainers.checkpoint",
    "trainers.evaluate",
    "trainers.generate",
    "trainers.lm",
    "trainers.loop",
    "trainers.lora",
    "trainers.packing",
    "trainers.restore",
    "trainers.session",
    "trainers.supervisor",
)


def serve() -> None:
    """Answer each order with the exit codes of its ranks."""
    sys.path.insert(0, str(REPOSITORY))
    for name in PREPARED:
        importlib.import_module(name)
    importlib.import_module("torch")._dynamo  # noqa: B018 - imported by being named
    gc.freeze()  # a collection in a child would touch, and so copy, every page of what is imported
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run_world(order)), flush=True)


def run_world(order: dict[str, Any]) -> list[int]:
    """Fork the ranks, kill them all once the first prints the expected line, and wait for all of them.

    `kill_share` delays the kill by that share of the time since the line before: of a step. The first rank continues
    after each line when it has been read, so that the ranks cannot end before they are killed.
    """
    port = importlib.import_module("trainers.launch").find_free_port()
    reading, writing = os.pipe()
    confirmed, confirming = os.pipe()
    pids = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if not pid:
            os.close(reading)
            os.close(confirming)
            be_rank(order, rank, port, writing, confirmed)
        pids.append(pid)
    os.close(writing)
    line_s = time.monotonic()
    is_killed = False
    with os.fdopen(reading) as output:
        for line in output:  # to the end: a full pipe would hold the rank up
            before_s, line_s = line_s, time.monotonic()
            if not order["kill_at"] or is_killed:
                continue
            is_last = line.startswith(order["kill_at"])
            if not is_last or order["kill_share"]:
                os.write(confirming, b".")
            if is_last:
                time.sleep(order["kill_share"] * (line_s - before_s))
                is_killed = True
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
    os.close(confirmed)
    os.close(confirming)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def confirm_lines(confirmed: int) -> None:
    """Let each line of standard output wait until its reader has confirmed that it was read.

    The trainers hold this very object since they were imported, so it is changed in place.
    """
    show = sys.stdout.write

    def write(text: str) -> int:
        count = show(text)
        sys.stdout.flush()
        for _ in range(text.count("\n")):
            os.read(confirmed, 1)
        return count

    sys.stdout.write = write  # type: ignore[method-assign]


def be_rank(order: dict[str, Any], rank: int, port: int, output: int, confirmed: int) -> None:
    """Run the order in the child, and exit."""
    os.environ.update(
        order["variables"],
        RANK=str(rank),
        WORLD_SIZE=str(order["ranks"]),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(order["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(output if rank == 0 else errors, 1)
    if rank == 0 and order["kill_at"]:
        confirm_lines(confirmed)
    code = 70
    try:
        module_name, _, function_name = order["call"].partition(":")
        code = getattr(importlib.import_module(module_name), function_name)(order["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
