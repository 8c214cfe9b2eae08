"""A real PostgreSQL for tests: a cluster of its own in a temporary folder, run by a user who is not root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.parse import quote

USERS = ("postgres", "nobody")
_numbers = count(1)


def find_reason_to_skip() -> str | None:
    """Return why no server can be started here; None where one can."""
    if _find_program("initdb") is None or _find_program("postgres") is None:
        return "no PostgreSQL server is installed (Debian: `apt-get install postgresql`)"
    if os.geteuid() == 0 and _find_user() is None:
        return f"PostgreSQL does not run as root, and there is no user {' or '.join(USERS)}"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed (extra `server`)"
    return None


def _find_program(name: str) -> str | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    return str(paths[0]) if paths else shutil.which(name)


def _find_user() -> pwd.struct_passwd | None:
    known = {each.pw_name: each for each in pwd.getpwall()}
    return next((known[name] for name in USERS if name in known), None)


class Server:
    """A server that listens on a socket in its folder only, and can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        user = _find_user() if os.geteuid() == 0 else None
        self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        if user:
            os.chown(folder, user.pw_uid, user.pw_gid)
        folder.chmod(0o755)  # the client may be another user
        self._run("initdb", "-D", str(folder / "data"), "-U", "broker", "-A", "trust", "--no-sync", "-E", "UTF8")
        self.start()

    def _run(self, name: str, *arguments: str) -> None:
        program = _find_program(name)
        assert program is not None
        done = subprocess.run(
            [program, *arguments], cwd=self._folder, capture_output=True, text=True, check=False, **self._identity
        )  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        self._run(
            "pg_ctl", "start", "-w", "-s", "-D", str(self._folder / "data"), "-l", str(self._folder / "log"), "-o",
            f"-k {self._folder} -c listen_addresses='' -c fsync=off -c max_connections=50 -c shared_buffers=16MB",
        )  # fmt: skip

    def stop(self, *, mode: str = "immediate") -> None:
        """Stop it; `immediate` ends all sessions as a crash does."""
        self._run("pg_ctl", "stop", "-w", "-s", "-m", mode, "-D", str(self._folder / "data"))

    def kill(self) -> None:
        pid = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def make_url(self) -> str:
        """Make an empty schema of its own; return the URL of it."""
        import psycopg

        name = f"test_{next(_numbers)}"
        base = f"postgresql://broker@/postgres?host={quote(str(self._folder), safe='')}"
        with psycopg.connect(base, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")  # type: ignore[arg-type]
        return f"{base}&options={quote(f'-csearch_path={name}')}"


@contextmanager
def run_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="broker-postgres-", dir="/tmp"))
    try:
        server = Server(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
