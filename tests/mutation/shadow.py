"""A copy of the product and its tests, in which one module at a time is changed; the work tree is never touched.

Programs in the copy import the copy, as do the processes they start: `PYTHONPATH` and the working folder come before
the installed package, the tests pass on their own folder, and node agents are packed from the folder of
`broker/runtime/gang.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutation.operators import Mutant, plant

ROOT = Path(__file__).parent.parent.parent
COPIED = ("broker", "trainers", "task_templates", "tests", "docs", "pyproject.toml", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".hypothesis", ".pytest_cache")
# Added to each of our programs: records each function that it enters once, however and wherever the process ends.
RECORDER = """
import os as _reach_os, sys as _reach_sys, threading as _reach_threading
if not hasattr(_reach_sys, "_reach"):  # a test may load agent modules beside broker: one recorder a process
    def _reach(frame, event, argument, seen=set(), open=_reach_os.open, write=_reach_os.write):  # a test may patch them
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            file = code.co_filename
            if {broker!r} in file or {trainers!r} in file or "/agent/agent" in file:
                line = file + chr(9) + getattr(code, "co_qualname", code.co_name) + chr(10)
                try:
                    file = open({log!r}, _reach_os.O_WRONLY | _reach_os.O_APPEND | _reach_os.O_CREAT)
                    write(file, line.encode())
                    _reach_os.close(file)
                except OSError:
                    seen.discard(code)
    _reach.seen = _reach.__defaults__[0]
    _reach_sys._reach = _reach
    _reach_sys.settrace(_reach)
    _reach_threading.settrace(_reach)
"""
AGENT = ("agent.py", "agent_run.py")


class Shadow:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp_s = 1_000_000_000
        self._unchanged: dict[str, str] = {}

    def read(self, file: str) -> str:
        """Return the file's text when the copy was made, whatever happens to the work tree meanwhile."""
        if file not in self._unchanged:
            self._unchanged[file] = (self.folder / file).read_text()
        return self._unchanged[file]

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant this fault in the copy for the duration of the context."""
        self._write(mutant.file, plant(self.read(mutant.file), mutant))
        try:
            yield
        finally:
            self._write(mutant.file, self.read(mutant.file))

    def record_reach(self) -> Path:
        """Record in this file, from now on, the functions that the copy's programs enter."""
        log = self.folder / "reach.tsv"
        recorder = RECORDER.format(broker=f"{self.folder}/broker/", trainers=f"{self.folder}/trainers/", log=str(log))
        for file in ("broker/__init__.py", "trainers/__init__.py", *(f"broker/agent/{name}" for name in AGENT)):
            head, mark, rest = self.read(file).partition("from __future__ import annotations\n")
            self._write(file, f"{head}{mark}{recorder}{rest}" if mark else f"{head}\n{recorder}")
        return log

    def make_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "BROKER_"))}
        offline = {"BROKER_OFFLINE": "1"}  # a mutant may run any command
        return {**kept, **offline, "PYTHONPATH": str(self.folder), "PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"}

    def _write(self, file: str, text: str) -> None:
        """Write with a distinct time: Python matches compiled code by whole seconds and length."""
        path = self.folder / file
        path.write_text(text)
        self._stamp_s += 10
        os.utime(path, (self._stamp_s, self._stamp_s))


@contextmanager
def make_shadow() -> Iterator[Shadow]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="broker-mutation-", dir=memory if memory.is_dir() else None))
    try:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=LEFT_OUT)
            elif source.exists():
                shutil.copy(source, folder / name)
        yield Shadow(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
