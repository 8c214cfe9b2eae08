"""Commands on nodes whose output is passed on as it appears."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from local_gang import Rig

from broker.clock import SystemClock
from broker.errors import TransientError
from broker.runtime.commands import run_with_output
from broker.runtime.streams import LINE_BYTES_MAX, Stream, open_program
from broker.runtime.transports.local import LocalTransport
from tests.clouds.beds import make_node

LIMIT_S = 300.0


class Here:
    """A node whose programs run on this machine."""

    async def open_stream(self, node: object, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        self.stream = await open_program(list(argv))
        return self.stream


class Output:
    """What a command has written, and the sizes of the pieces."""

    def __init__(self) -> None:
        self.text = {"out": b"", "err": b""}
        self.bytes_max = 0

    def note(self, name: str, data: bytes) -> None:
        self.text[name] += data
        self.bytes_max = max(self.bytes_max, len(data))

    def run(self, *argv: str) -> int:
        return asyncio.run(run_with_output(Here(), make_node("n"), argv, timeout_s=LIMIT_S, on_output=self.note))


def test_output_is_passed_on_while_the_command_runs(tmp_path: Path) -> None:
    """The command waits for a file that only its own output causes."""
    answer = tmp_path / "answer"
    seen: list[bytes] = []

    def note(name: str, data: bytes) -> None:
        seen.append(data)
        answer.touch()

    script = f"echo ready; while [ ! -e {answer} ]; do sleep 0.05; done; echo done"
    work = run_with_output(Here(), make_node("n"), ["sh", "-c", script], timeout_s=LIMIT_S, on_output=note)
    assert asyncio.run(work) == 0 and b"".join(seen) == b"ready\ndone\n"


def test_large_output_comes_in_pieces_of_bounded_size() -> None:
    output = Output()
    assert output.run("sh", "-c", "head -c 5000000 /dev/zero; printf x >&2; exit 3") == 3
    assert (len(output.text["out"]), output.text["err"]) == (5_000_000, b"x")
    assert output.bytes_max <= LINE_BYTES_MAX // 4


@pytest.mark.long
def test_exit_codes_are_those_of_a_shell() -> None:
    output = Output()
    assert output.run("sh", "-c", "kill -TERM $$") == 128 + signal.SIGTERM
    assert output.run("no-such-program") == 127 and b"no-such-program: No such file" in output.text["err"]
    assert output.run("/etc/passwd") == 126


def test_processes_that_the_command_leaves_behind_are_not_waited_for(tmp_path: Path) -> None:
    output = Output()
    assert output.run("sh", "-c", f"sleep 600 & echo $! >{tmp_path}/pid; echo here") == 0
    assert output.text["out"] == b"here\n"
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_command_ends_when_its_user_leaves(tmp_path: Path) -> None:
    here = Here()

    async def act() -> None:
        started = asyncio.Event()
        work = asyncio.ensure_future(
            run_with_output(
                here, make_node("n"), ["sh", "-c", f"echo $$ >{tmp_path}/pid; echo; exec sleep 600"],
                timeout_s=LIMIT_S, on_output=lambda name, data: started.set(),
            )
        )  # fmt: skip
        await started.wait()
        here.stream.close()  # as if this process had died
        with pytest.raises(TransientError, match="ended before the command"):
            await work

    asyncio.run(act())
    pid = int((tmp_path / "pid").read_text())
    for _ in range(3000):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split():
            return
        asyncio.run(SystemClock().sleep(0.1))
    pytest.fail("the command outlived its user")


def test_command_on_a_local_node_has_the_environment_of_the_node(rig: Rig) -> None:
    output = Output()

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        code = await run_with_output(
            LocalTransport(), node, ["sh", "-c", "pwd; echo $HOME"], timeout_s=LIMIT_S, on_output=output.note
        )
        assert code == 0 and output.text["out"].decode().split() == [f"{node.handle}/home"] * 2

    asyncio.run(act())
