from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from local_gang import Rig, processes_of, wait_for

from broker.errors import InvalidRequestError, TransientError


def test_command_gets_stdin_and_environment_and_gives_all_its_output(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        script = "cat; echo $X >&2; pwd >&2; exit 5"
        data = bytes(range(256)) * 5000
        done = await rig.transport.run(node, ["bash", "-c", script], timeout_s=60, stdin=data, env={"X": "x y"})
        assert (done.returncode, done.stdout) == (5, data)
        assert done.stderr == f"x y\n{node.handle}/home\n".encode()
        missing = await rig.transport.run(node, ["no-such-command"], timeout_s=60)
        assert missing.returncode == 127

    asyncio.run(act())


def test_daemon_holding_the_output_does_not_hold_up_the_answer(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        done = await rig.transport.run(node, ["bash", "-c", "sleep 5432 & echo hi"], timeout_s=60)
        assert done.stdout == b"hi\n"

    asyncio.run(act())


def test_command_past_its_time_is_killed_and_transient(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        with pytest.raises(TransientError):
            await rig.transport.run(node, ["sleep", "5433"], timeout_s=0.3)
        await wait_for(lambda: not any(b"5433" in read_cmdline(pid) for pid in processes_of(node)))

    asyncio.run(act())


def read_cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_put_copies_what_changed_and_skips_what_is_ignored(rig: Rig, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("a.py", "sub/b.py", ".git/x", "__pycache__/x", "data/big.bin", "sub/c.tmp", "build/out"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "link").symlink_to("a.py")
    (source / ".skyignore").write_text("# ours\n*.tmp\n/data/big.bin\nbuild/\n")

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        home = Path(node.handle) / "home"
        await rig.transport.put(node, source, "sky_workdir")
        got = sorted(str(path.relative_to(home / "sky_workdir")) for path in (home / "sky_workdir").rglob("*"))
        assert got == [".skyignore", "a.py", "data", "link", "sub", "sub/b.py"]
        inode = (home / "sky_workdir/a.py").stat().st_ino
        (source / "sub/b.py").write_text("longer than before")
        await rig.transport.put(node, source, "sky_workdir")
        assert (home / "sky_workdir/a.py").stat().st_ino == inode
        assert (home / "sky_workdir/sub/b.py").read_text() == "longer than before"
        assert (home / "sky_workdir/link").readlink() == Path("a.py")
        await rig.transport.put(node, source / "a.py", "~/deep/er/file.py")
        assert (home / "deep/er/file.py").read_text() == "a.py"
        for outside in ("/data", "../escape"):
            with pytest.raises(InvalidRequestError):
                await rig.transport.put(node, source, outside)

    asyncio.run(act())
