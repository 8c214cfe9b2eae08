"""The machine of the local cloud: `python -I -S local_machine.py NODE_DIR`; standard library only.

SSH pools and Slurm allocations run it too: there a node is this process tree on a host, and its end frees the host.
Two processes, so that no child outlives the machine however it dies. The keeper holds the tree; the machine serves
commands on a Unix socket (in place of sshd), one per connection. Both are child subreapers: when one is killed, the
other stops and kills every descendant, then exits. Without prctl (macOS), orphans are found by a marker in their
environment instead. Both share a lock on NODE_DIR/alive.lock: a node is alive exactly as long as the lock is held.
"""
# Plain paths: pathlib would double the boot time.
# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH110, PTH116, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
IS_LINUX = sys.platform.startswith("linux")
TICK_S = 0.1
REQUEST_BYTES_MAX = 1 << 36
HOST_TAKEN = 3  # exit code: another node holds this host
FOREGROUND = "foreground"
# How a node ended, for a batch system that keeps nothing but an exit code.
EXIT_CODES = {"lease": 71, "done": 72, "autostop": 73, "stopped": 74, "terminated": 75, "crashed": 76}


def main(folder: str, mode: str = "") -> None:
    """Boot the node in the background; return (exit status 0) once its socket responds.

    In the foreground, if a batch system keeps the process, return when the node has ended. SIGTERM is its notice.
    """
    ready_out, ready_in = os.pipe()
    if mode != FOREGROUND:
        if os.fork():
            os.close(ready_in)
            sys.exit({b"1": 0, b"": 1}.get(os.read(ready_out, 1), HOST_TAKEN))
        os.close(ready_out)
        os.setsid()
    redirect_stdio(os.path.join(folder, "machine.log"))
    locks = (open_lock(folder), take_host(folder))
    if locks[1] < 0:
        os.write(ready_in, b"0")
        sys.exit(HOST_TAKEN)
    os.umask(0o077)
    os.environ["BROKER_NODE_DIR"] = folder
    become_subreaper()
    machine = os.fork()
    if machine == 0:
        serve(folder, ready_in, mode)
    os.close(ready_in)
    if mode == FOREGROUND:
        signal.signal(signal.SIGTERM, lambda *_: give_notice(folder))
        signal.signal(signal.SIGUSR1, lambda *_: power_off(folder, "terminated"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: power_off(folder, "terminated"))
    os.waitpid(machine, 0)
    power_off(folder, "crashed")


def open_lock(folder: str) -> int:
    """Lock alive.lock. A reader that checks whether the node lives holds it for an instant, so retry for a while."""
    lock = os.open(os.path.join(folder, "alive.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    give_up_s = time.monotonic() + 2
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                sys.exit(1)
            time.sleep(0.002)


def take_host(folder: str) -> int:
    """Lock the host for this node, if node.json names the lock, and return its descriptor; -1 if it is taken.

    The kernel releases it with the last process of the node. Whatever the umask, other users must be able to read it. A
    lock on its folder keeps systemd-tmpfiles from removing the file once it is old, which would free the host.
    """
    if not (host := json.loads(read_text(os.path.join(folder, "node.json"))).get("host_lock")):
        return 0
    os.umask(0o022)  # until main narrows it again
    os.makedirs(around := os.path.dirname(host), exist_ok=True)
    with contextlib.suppress(PermissionError):  # created by another user
        os.chmod(around, 0o755)
    try:
        fcntl.flock(os.open(around, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
        lock = os.open(host, os.O_RDONLY | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return -1
    return lock


def give_notice(folder: str) -> None:
    """Pass the batch system's SIGTERM on as a preemption notice: it kills the node after its grace time."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Slurm and our parent both send it: write once
    record = json.loads(read_text(os.path.join(folder, "node.json")))
    if not os.path.exists(path := os.path.join(folder, "home", ".broker", "preemption")):
        write_json(path, {"notice_s": float(record.get("notice_s", 0.0)), "time_s": time.time()})


def redirect_stdio(log: str) -> None:
    """Read stdin from /dev/null, and append stdout and stderr to a log of mode 0600."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, out), (2, out)):
        os.dup2(source, target)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be found and ended; only on Linux."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(folder: str, ready: int, mode: str) -> NoReturn:
    """Run commands until a power-off is requested. Without a free process or descriptor, only a command is lost."""
    keeper = os.getppid()
    end_signal = signal.SIGTERM
    if mode == FOREGROUND:
        os.setsid()  # a batch system that kills our process group leaves this one to kill the tree
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a notice, which some send to every process
        end_signal = signal.SIGUSR2
    signal.signal(end_signal, lambda *_: power_off(folder, "crashed"))
    become_subreaper()
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, end_signal, 0, 0, 0)
    path = json.loads(read_text(os.path.join(folder, "node.json")))["socket"]
    remove(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    write_json(os.path.join(folder, "machine.json"), {"keeper": keeper, "machine": os.getpid()})
    os.write(ready, b"1")
    os.close(ready)
    preempt_s: float | None = None
    while os.getppid() == keeper:
        if select.select([listener], [], [], TICK_S)[0]:
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                if os.fork() == 0:
                    listener.close()
                    handle(connection)
        reap()
        preempt_s = check_power(folder, preempt_s)
    power_off(folder, "crashed")


def check_power(folder: str, preempt_s: float | None) -> float | None:
    """Power off if due; return when a preemption notice ends, by the monotonic clock, or None without one."""
    try:
        os.stat(os.path.join(folder, "node.json"))
    except OSError as error:  # any other one, as of a file server that does not answer, does not mean that it is gone
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            power_off(folder, "deleted")  # a node without a folder could be neither listed nor terminated
    if shutdown := read_text(os.path.join(folder, "home", ".broker", "shutdown")):
        power_off(folder, shutdown.strip())
    if preempt_s is None and (notice := read_text(os.path.join(folder, "preempt.json"))):
        preempt_s = time.monotonic() + float(json.loads(notice)["notice_s"])
    if preempt_s is not None and time.monotonic() >= preempt_s:
        power_off(folder, "preempted")
    return preempt_s


def handle(connection: socket.socket) -> NoReturn:
    """Serve one command: a 4-byte length, a JSON header {argv, env, stdin, timeout_s}, then stdin; answer likewise.

    With `is_stream` in the header, the rest of the connection is the command's input and output. Otherwise output goes
    through unlinked files, so a daemon that keeps them open does not delay the answer.
    """
    code = 1
    try:
        header = json.loads(read_exactly(connection, struct.unpack("!I", read_exactly(connection, 4))[0]))
        if header.get("is_stream"):
            become_command(header, connection.fileno())
        files = [open_unlinked() for _ in range(3)]
        copy_stdin(connection, files[0], int(header["stdin"]))
        returncode = run_command(header, files)
        out, err = (os.fstat(fd).st_size for fd in files[1:])
        answer = json.dumps({"returncode": returncode, "stdout": out, "stderr": err}).encode()
        connection.sendall(struct.pack("!I", len(answer)) + answer)
        for fd, size in ((files[1], out), (files[2], err)):
            if size:
                connection.sendfile(os.fdopen(fd, "rb"), 0, size)
        code = 0
    except (OSError, ValueError, KeyError, EOFError) as error:
        print(f"command failed: {type(error).__name__}", flush=True)  # not its text, which may quote the request
    finally:
        os._exit(code)


def become_command(header: dict[str, Any], connection: int) -> NoReturn:
    """Replace this process with the command, whose input and output is the connection; closing either side ends it."""
    os.setsid()
    os.chdir(os.environ["HOME"])
    for number in (signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for target in (0, 1):
        os.dup2(connection, target)
    os.execvpe(header["argv"][0], header["argv"], {**os.environ, **header["env"]})


def run_command(header: dict[str, Any], files: list[int]) -> int:
    """Run the command in its own session; at its time limit kill its whole process group and raise TimeoutError.

    An answer of -9 could reach a caller whose own limit expires at the same moment before the group is dead.
    """
    os.chdir(os.environ["HOME"])
    environment = {**os.environ, **header["env"]}
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(files)]
    defaults = [signal.SIGPIPE, signal.SIGTERM, signal.SIGINT]
    try:
        pid = os.posix_spawnp(
            header["argv"][0], header["argv"], environment, file_actions=actions, setsid=IS_LINUX, setsigdef=defaults
        )
    except FileNotFoundError:
        os.write(files[2], b"command not found\n")
        return 127
    is_late = False

    def expire(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_late
        is_late = True
        os.killpg(pid, signal.SIGKILL) if IS_LINUX else os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, float(header["timeout_s"])))
    status = os.waitpid(pid, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    if is_late:
        raise TimeoutError
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)  # of Python 3.8, too


def open_unlinked() -> int:
    """Create a private file without a name, and return its descriptor; the kernel frees it when closed."""
    path = os.path.join(os.environ["TMPDIR"], f".command-{os.getpid()}-{time.monotonic_ns()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def copy_stdin(connection: socket.socket, fd: int, size: int) -> None:
    """Copy `size` bytes from the connection to the file. Raises ValueError above the limit, EOFError if cut off."""
    if size > REQUEST_BYTES_MAX:
        raise ValueError("too much stdin")
    while size:
        if not (chunk := connection.recv(min(1 << 20, size))):
            raise EOFError
        os.write(fd, chunk)
        size -= len(chunk)
    os.lseek(fd, 0, os.SEEK_SET)


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if the peer closes the connection before."""
    data = bytearray()
    while len(data) < size:
        if not (chunk := connection.recv(size - len(data))):
            raise EOFError
        data += chunk
    return bytes(data)


def power_off(folder: str, reason: str) -> NoReturn:
    """End immediately and silently, as a machine that loses power: record the reason, kill every descendant, exit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = "STOPPED" if reason == "stop" else "TERMINATED"
    kill_tree(folder)
    record_end(folder, state=state, reason="stopped" if reason == "stop" else reason)
    ended = json.loads(read_text(os.path.join(folder, "ended.json")) or "{}")
    os._exit(EXIT_CODES.get(ended.get("reason", reason), 0))


def record_end(folder: str, *, state: str, reason: str) -> None:
    """Record why the node ended. NODE_DIR/ended.json is written once per boot: the first record stands."""
    path = os.path.join(folder, "ended.json")
    aside = os.path.join(folder, f".ended.{os.getpid()}.{time.monotonic_ns()}")
    with contextlib.suppress(OSError):  # already recorded, or the folder is gone
        write_json(aside, {"state": state, "reason": reason, "ended_s": time.time()})
        os.link(aside, path)
    remove(aside)


def kill_tree(folder: str) -> None:
    """Stop all descendants, then kill them, until none is left: a fork bomb cannot escape.

    Those of other users, such as root's after `sudo`, are killed by sudo; they are left if it asks for a password.
    """
    left: set[int] = set()
    while True:
        stopped: set[int] = set()
        while fresh := set(find_victims(folder)) - stopped - left:
            for pid in fresh:
                send(pid, signal.SIGSTOP)
            stopped |= fresh
        if foreign := {pid for pid in stopped if not send(pid, signal.SIGKILL)}:
            os.spawnvp(os.P_WAIT, "sudo", ["sudo", "-n", "kill", "-KILL", *map(str, foreign)])
            left |= foreign
        reap()
        if not stopped:
            return
        time.sleep(0.001)


def find_victims(folder: str) -> Iterator[int]:
    """Yield the processes of this node, except zombies without children."""
    if not IS_LINUX:
        yield from find_marked(folder)
        return
    stack = [os.getpid()]
    while stack:
        for child in list_children(stack.pop()):
            if not is_zombie(child) or list_children(child):
                yield child
            stack.append(child)


def list_children(pid: int) -> list[int]:
    """List the child processes of all threads of a process; empty if it is gone."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, read_text(f"/proc/{pid}/task/{thread}/children").split())
    return children


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended or is gone."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] in ("Z", "X", "")


def find_marked(folder: str) -> list[int]:
    """Find processes whose environment names this node: the fallback, and the only way without prctl."""
    mark, pids = f"BROKER_NODE_DIR={folder}", []
    if IS_LINUX:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            if mark in read_text(f"/proc/{entry}/environ").split("\0"):
                pids.append(int(entry))
    else:
        with os.popen("ps -axEww -o pid=,command=") as lines:
            pids = [int(line.split(None, 1)[0]) for line in lines if f"{mark} " in f"{line.strip()} "]
    return [pid for pid in pids if pid not in (os.getpid(), os.getppid())]


def send(pid: int, number: int) -> bool:
    """Send a signal; return whether this user may. A process that is gone counts as success."""
    try:
        os.kill(pid, number)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def reap() -> None:
    """Collect the exit codes of all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def read_text(path: str) -> str:
    """Return the content of a file, "" if it cannot be read: its process may be gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def write_json(path: str, value: object) -> None:
    """Replace a file atomically, mode 0600."""
    aside = f"{path}.{os.getpid()}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(aside, path)


def remove(path: str) -> None:
    """Delete a file; one that is gone counts as success."""
    with contextlib.suppress(OSError):
        os.unlink(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
