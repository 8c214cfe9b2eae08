"""A user's machine with its state folder: `broker` commands as real processes, on a disk and a clock of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.torture.history import History
from tests.torture.processes import Process, list_processes, read_process, send_signal
from tests.torture.workloads import HERE, ROOT, Setting

COMMAND_S_MAX = 300.0  # a stopped daemon may hold the store for as long as it is stopped; more is a hang
DISK_MIB = 160
CLOUD_LOGINS = ("AWS_", "GOOGLE_", "CLOUDSDK_", "BROKER_", "AZURE_", "R2_", "SKYPILOT_")
# Output that a user sees for an error that broker did not foresee.
RAW_ERRORS = ("Traceback (most recent call last)", "this is a fault of broker")


class LocalBed:
    """A bed whose nodes are processes. `folder` must be new; all but `evidence` may be on a small disk."""

    name = "local"

    def __init__(self, folder: Path, history: History) -> None:
        self.folder, self.history = folder, history
        self.home = folder / "small" / "home"
        self.evidence = folder / "evidence"
        self.tasks = folder / "tasks"
        self.clock = folder / "clock"
        self.skipped: list[str] = []
        self._filler = folder / "small" / "filler"
        self._is_mounted = self.is_closed = False
        for path in (self.evidence, self.tasks, folder / "small", folder / "tmp"):
            path.mkdir()
        self.clock.write_bytes(struct.pack("q", 0))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CLOUD_LOGINS)}
        nowhere = str(folder / "no-login")
        logins = ("CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BROKER_SKY_PYTHON")
        self.environment = {
            **kept, **dict.fromkeys(logins, nowhere), "BROKER_HOME": str(self.home), "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "BROKER_OFFLINE": "1",
        }  # fmt: skip

    @property
    def setting(self) -> Setting:
        return Setting(evidence=self.evidence)

    @property
    def launch_flags(self) -> tuple[str, ...]:
        """Return the flags that a program needs at its launch."""
        return ()

    @property
    def database(self) -> Path:
        return self.home / "state.db"

    @property
    def mark(self) -> str:
        """Return the mark in the environment of every process of this bed, and of no other."""
        return str(self.folder / "small")

    def open(self) -> None:
        """Prepare disk and clock; what this machine does not allow is named in `skipped`."""
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "torture", str(self.folder / "small")]
        if os.geteuid() == 0:
            self._is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
        if not self._is_mounted:
            self.skipped.append("full disk: a small file system can be mounted by root only")
        self.home.mkdir(mode=0o700)
        self.load_clock()

    def load_clock(self) -> None:
        """Give the commands a wall clock that can be set; what is missing for that is named in `skipped`."""
        library = self.folder / "skew.so"
        compiler = shutil.which("cc")
        command = [str(compiler), "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "skew.c"), "-ldl"]
        if not compiler or subprocess.run(command, capture_output=True).returncode:
            self.skipped.append("clock jumps: they need a C compiler, and Linux")
            return
        self.environment |= {"LD_PRELOAD": str(library), "TORTURE_CLOCK": str(self.clock)}

    def close(self) -> None:
        """End what is left, by signals to processes of this bed alone, and give the disk back."""
        self.is_closed = True
        for _ in range(20):
            if not (found := self.list_processes()):
                break
            for each in found:
                self.signal(each, signal.SIGKILL)
            time.sleep(0.1)
        if self._is_mounted:
            kept = self.folder / "home-at-the-end"
            shutil.copytree(self.home, kept, ignore_dangling_symlinks=True, ignore=ignore_special, dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(self.folder / "small")], check=False, capture_output=True)

    @property
    def can_fill(self) -> bool:
        return self._is_mounted

    @property
    def can_jump(self) -> bool:
        return "LD_PRELOAD" in self.environment

    def fill_disk(self, left_bytes: int) -> None:
        """Fill the disk, leaving this much room in the state folder and on all nodes."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(65536)) == 65536:
                pass
            while file.write(bytes(4096)) == 4096:
                pass
        size = self._filler.stat().st_size
        os.truncate(self._filler, max(0, size - left_bytes))

    def free_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def is_full(self) -> bool:
        return self._filler.exists()

    def set_clock(self, skew_s: int) -> None:
        """Set the clock of broker's commands and daemon; nodes keep their own."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("q", skew_s))

    def list_processes(self) -> list[Process]:
        return list_processes(self.mark)

    def signal(self, process: Process, number: int) -> bool:
        """Signal a process and return whether it was delivered: never to a process that is not of this bed."""
        return send_signal(process, number, lambda pid: read_process(pid, self.mark))

    def find_checkpoints(self, folder: str) -> str:
        """Find the places where the trainers of a job keep checkpoints."""
        return str(self.home / "checkpoints" / folder)

    def check_nodes(self) -> None:
        """Check that every node of the local cloud has ended, and has left neither files of a program nor a socket."""
        root, violate = self.home / "local", self.history.violate
        for folder in sorted(root.iterdir()) if root.exists() else []:
            if folder.name.startswith(".new-"):
                violate(f"a node was made halfway and is left: {folder.name}")
            elif folder.is_dir():
                record = json.loads((folder / "node.json").read_text())
                if not (folder / "ended.json").exists():
                    violate(f"node {folder.name} has not ended")
                if Path(record["socket"]).exists() or (folder / "home").exists():
                    violate(f"node {folder.name} has left a socket or its files")

    def write_task(self, name: str, text: str) -> str:
        path = self.tasks / f"{name}.yaml"
        path.write_text(text)
        return str(path)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        if self.is_closed:  # the run was interrupted, and a user at another thread has not heard of it
            raise RuntimeError("the bed is closed")
        command = [sys.executable, "-m", "broker", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end. A hang and a raw Python error are violations; other refusals are the caller's."""
        was_full = self.is_full
        process = self.start(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=COMMAND_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            self.history.violate(f"`broker {arguments[0]}` hangs", arguments=arguments, stderr=stderr[-2000:])
        if any(sign in stderr for sign in RAW_ERRORS):
            when = " on a full disk" if was_full or self.is_full else ""
            last = next((line for line in stderr.splitlines() if line.startswith("error: ")), stderr[-200:])
            self.history.violate(
                f"`broker {arguments[0]}` shows a Python error{when}: {last}",
                arguments=arguments,
                stderr=stderr[-4000:],
            )
        fields = {} if process.returncode == 0 else {"stderr": stderr[-600:]}
        self.history.write("command", arguments=arguments, code=process.returncode, **fields)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def ignore_special(folder: str, names: list[str]) -> list[str]:
    """Ignore sockets and pipes, which cannot be copied."""
    return [name for name in names if not ((path := Path(folder) / name).is_file() or path.is_dir())]
