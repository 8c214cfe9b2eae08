"""The program that runs on a host of a pool for one call: `python3 -I -S -`, with a request; standard library only.

A claim is a folder ~/.broker-pool/NODE with the machine of the local cloud in it (`local_machine.py`, sent along),
which holds a lock on the host while it lives. Everything is read from processes and locks: a host that lost power has
released its claim by the time it answers again. Hosts may share the home folder: each sees only the claims made on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sent after this file, into the same namespace
    from broker.clouds.usual_python import find_path

KEEP_ENDED_S = 3600.0  # as EC2, which lists a terminated instance for about an hour
BOOT_S_MAX = 45.0  # a busy host; less than the 60 s that the caller waits
KILL_S_MAX = 45.0
GPU_LIST_S_MAX = 10.0
STRANGERS_MIB_MIN = 1024  # more than a monitor of GPUs or an idle notebook uses
HOST_TAKEN = 3  # as in local_machine.py
PASSED_ENV = ("LANG", "LC_ALL", "USER", "LOGNAME", "SHELL", "TZ", "PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


def main(request: dict[str, object], machine: str) -> None:
    """Carry out one request under the lock of this user's claims, and print the answer as JSON."""
    os.umask(0o077)
    root = os.path.join(os.path.expanduser("~"), ".broker-pool")
    os.makedirs(root, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    verb = str(request["verb"])
    if verb == "claim":
        answer: object = claim(root, request, machine)
    elif verb == "end":
        ids = request["ids"]
        assert isinstance(ids, list)
        answer = [end(os.path.join(root, each), is_forgotten=bool(request["is_forgotten"])) for each in ids]
    elif verb == "probe":
        answer = probe()
    else:
        folders = [os.path.join(root, name) for name in sorted(os.listdir(root))]
        found = [observe(folder) for folder in folders if is_of_host(folder)]
        answer = [each for each in found if each and each["owner"] == request["owner"]]
    print(json.dumps({"answer": answer, "uid": os.geteuid()}))


def claim(root: str, request: dict[str, object], machine: str) -> object:
    """Claim the host for a node and boot it; an existing claim of the node is returned unchanged.

    `taken`: the holder.
    """
    record = request["record"]
    assert isinstance(record, dict)
    folder = os.path.join(root, str(record["id"]))
    if read_json(os.path.join(folder, "node.json")) is None:
        shutil.rmtree(folder, ignore_errors=True)  # the rest of a claim whose file a loss of power has damaged
        aside = tempfile.mkdtemp(prefix=".new-", dir=root)
        for name in ("home", "home/.broker", "tmp"):
            os.mkdir(os.path.join(aside, name), 0o700)
        socket = os.path.join(make_socket_folder(), hashlib.sha256(folder.encode()).hexdigest()[:16] + ".sock")
        # The address at which sshd was reached: the file may contain a name that only the user's machine resolves.
        address = (os.environ.get("SSH_CONNECTION", "").split() or ["", "", ""])[2] or record["address"]
        write_json(
            os.path.join(aside, "node.json"),
            {**record, "socket": socket, "address": address, "made_on": identify(), "uid": os.geteuid()},
        )
        os.rename(aside, folder)
    if not is_alive(folder) and not os.path.exists(os.path.join(folder, "ended.json")):
        if request["has_accelerator"] and (strangers := list_gpu_programs()):
            shutil.rmtree(folder, ignore_errors=True)
            return {"taken": read_holder(root) or strangers}
        program = os.path.join(root, f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.py")
        if not os.path.exists(program):
            with open(program + ".new", "w", encoding="utf-8") as file:
                file.write(machine)
            os.replace(program + ".new", program)
        argv = [sys.executable, "-I", "-S", program, folder]
        done = subprocess.run(argv, env=make_env(folder), cwd=folder, timeout=BOOT_S_MAX, stdin=subprocess.DEVNULL)
        if done.returncode == HOST_TAKEN:
            shutil.rmtree(folder, ignore_errors=True)
            return {"taken": read_holder(root)}
        if done.returncode:
            return {"failed": "see " + os.path.join(folder, "machine.log")}
    return observe(folder)


def observe(folder: str) -> dict[str, object] | None:
    """Return the claim's state according to its processes; clean up a dead claim, and forget it an hour later."""
    record = read_json(os.path.join(folder, "node.json"))
    if record is None:
        return None
    if is_alive(folder):
        return {**record, "state": "RUNNING", "ended": None, "now_s": time.time()}
    path = os.path.join(folder, "ended.json")
    ended = read_json(path)
    if ended is None:
        kill_marked(folder)
        ended = {"reason": "crashed", "ended_s": time.time()}
        write_json(path, ended)
    for name in ("home", "tmp"):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    if time.time() - float(str(ended["ended_s"])) > KEEP_ENDED_S:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return {**record, "state": "TERMINATED", "ended": ended, "now_s": time.time()}


def end(folder: str, *, is_forgotten: bool) -> bool:
    """End all processes of a claim, remove its files and release the host. Return True once nothing is left of it."""
    if os.path.basename(folder) in ("", ".", "..") or not is_of_host(folder):
        return True
    if not os.path.exists(os.path.join(folder, "ended.json")):
        write_json(os.path.join(folder, "ended.json"), {"reason": "terminated", "ended_s": time.time()})
    give_up_s = time.monotonic() + KILL_S_MAX
    while is_alive(folder) and time.monotonic() < give_up_s:
        for pid in (read_json(os.path.join(folder, "machine.json")) or {}).values():
            if is_process_of(folder, pid):
                send(int(str(pid)), signal.SIGTERM)
        time.sleep(0.01)
    kill_marked(folder)
    observe(folder)
    if is_forgotten and not is_alive(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return not is_alive(folder)


def probe() -> dict[str, object]:
    """Measure the host: vCPUs, memory, cards."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        cards = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        cards = []
    return {"vcpus": len(os.sched_getaffinity(0)), "memory_gib": round(pages / 2**30, 1), "cards": cards}


def list_gpu_programs() -> str:
    """Describe the programs that compute on the host's GPUs; empty if they use little memory, or cannot be listed.

    Asked before a node of ours runs here: they are of other people, or of another broker.
    """
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=GPU_LIST_S_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    pairs = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    found = {pid.strip(): int(used) for pid, used in pairs if used.strip().isdigit()}  # or `[N/A]`
    if done.returncode or sum(found.values()) < STRANGERS_MIB_MIN:
        return ""
    return f"programs on its GPUs ({sum(found.values())} MiB, process {', '.join(sorted(found)[:4])})"


def identify() -> dict[str, str]:
    """Return the current boot of this host, and a name of the host that later boots keep."""
    found = {"boot": "", "host": os.uname().nodename}
    for name, path in (("boot", "/proc/sys/kernel/random/boot_id"), ("id", "/etc/machine-id")):
        try:
            with open(path, encoding="ascii") as file:
                found[name] = file.read().strip()
        except OSError:
            pass
    return found


def is_of_host(folder: str) -> bool:
    """Return whether the folder is a claim made on this host: in a home folder that hosts share, each lists its own.

    The processes and locks of another host's claim may be invisible here, so it would be taken for dead and removed.
    """
    record = read_json(os.path.join(folder, "node.json"))
    if record is None:
        return False
    own, made = identify(), record.get("made_on")
    if not isinstance(made, dict):  # a claim of an earlier version
        return True
    is_same_boot = bool(own["boot"]) and made.get("boot") == own["boot"]
    return is_same_boot or (made.get("host"), made.get("id")) == (own["host"], own.get("id"))


def is_alive(folder: str) -> bool:
    """Return whether the claim's machine is alive: it holds a lock that the kernel releases with it.

    Raises OSError if that cannot be determined, such as without free descriptors or with a home that is not answering:
    the processes of a claim that is taken for dead are killed.
    """
    try:
        lock = os.open(os.path.join(folder, "alive.lock"), os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def read_holder(root: str) -> str:
    """Return the claim of this user that has the host; empty if another user has it."""
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        record = read_json(os.path.join(folder, "node.json"))
        if record and is_of_host(folder) and is_alive(folder):
            return f"cluster {record['cluster']} of broker {record['owner']}"
    return ""


def make_env(folder: str) -> dict[str, str]:
    """Return the machine's environment: some variables of the login, and folders of its own."""
    passed = {name: os.environ[name] for name in PASSED_ENV if name in os.environ}
    own = {"HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp"), "BROKER_NODE_DIR": folder}
    own["PATH"] = find_path(folder)
    return {**passed, **own, "PYTHONUNBUFFERED": "1", "BROKER_HOST_HOME": os.path.expanduser("~")}


def make_socket_folder() -> str:
    """Return a private folder with a short path: a Unix socket's path is limited to 108 bytes."""
    folder = f"/tmp/broker-pool-{os.getuid()}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    assert status.st_uid == os.getuid() and not status.st_mode & 0o077, f"{folder} is not a private folder"
    return folder


def kill_marked(folder: str) -> None:
    """Kill processes that outlived the machine or were started outside it, such as shells."""
    mark = b"BROKER_NODE_DIR=" + folder.encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                is_ours = mark in file.read().split(b"\0")
        except OSError:
            continue
        if is_ours and int(entry) != os.getpid():
            send(int(entry), signal.SIGKILL)


def is_process_of(folder: str, pid: object) -> bool:
    """Return whether the process has the folder as an argument: a recorded pid may be in use by another one."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return folder.encode() in file.read().split(b"\0")
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Send a signal. Errors are ignored: the process may have ended, or its pid may belong to another user."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def read_json(path: str) -> dict[str, object] | None:
    """Read a JSON object; None if the file is missing or damaged.

    Raises OSError if it cannot be read: a claim that is not listed counts as gone.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: str, value: object) -> None:
    """Replace a file atomically: a reader sees the old or the new value, never a part."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)
