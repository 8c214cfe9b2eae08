"""A standby process that has imported torch, in which a worker of an elastic run restarts.

With `--warm`, the launcher starts one for each worker. A worker that restarts sends it its environment and the file
descriptors of its state, and exits; the launcher then treats the standby as the worker.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PATH_VARIABLE, COMMAND_VARIABLE = "BROKER_ELASTIC_STANDBY", "BROKER_ELASTIC_COMMAND"
STATE_VARIABLE = "BROKER_ELASTIC_STATE"
EXIT_CODE_HANDED_OVER = 86  # the code of a worker that has handed over to its standby
HAND_OVER_S = 5.0
DESCRIPTORS_MAX = 253  # in one message; SCM_MAX_FD of Linux
READY, END, CONFIRMED = b"ready", b"\n", b"."
SET_PARENT_DEATH_SIGNAL = 1  # from linux/prctl.h
# The session is left out, because it measures the time since its import.
PREPARED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
    "trainers.checkpoint",
    "trainers.evaluate",
    "trainers.peer_checkpoint",
    "trainers.state",
    "trainers.state_transfer",
    "trainers.tokens",
)


def main(arguments: Sequence[str]) -> None:
    """Import, wait at the socket that the first argument names, then run the program of the other arguments."""
    path, command = Path(arguments[0]), list(arguments[1:])
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in `run_session`; read when torch is imported
    for name in PREPARED:
        importlib.import_module(name)
    variables, descriptors = receive(path)
    os.environ.clear()
    os.environ.update(variables)
    os.environ[STATE_VARIABLE] = ",".join(map(str, descriptors))
    run_program(command)


def receive(path: Path) -> tuple[dict[str, str], list[int]]:
    """Wait for a worker; return its environment and the descriptors of its state once it has exited."""
    with socket.socket(socket.AF_UNIX) as listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(1)
        connection, _ = listener.accept()
    path.unlink(missing_ok=True)
    with connection:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, DESCRIPTORS_MAX)
        while not message.endswith(END):
            part = connection.recv(1 << 16)
            if not part:
                raise SystemExit(1)  # the worker died during the handover
            message += part
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(READY)
            answer = connection.recv(1)
        if answer != CONFIRMED:
            raise SystemExit(1)  # the worker did not wait for us, and restarts by itself: both would have the same id
        with contextlib.suppress(OSError):
            connection.recv(1)  # returns when the worker has exited and released its device
    variables: dict[str, str] = json.loads(message)
    return variables, list(descriptors)


def hand_over(path: str, variables: Mapping[str, str], descriptors: Sequence[int]) -> socket.socket | None:
    """Hand over to the standby at `path`; return None, without effect, if none is ready.

    The standby begins when the returned connection is closed, at the latest by the exit of this process.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HAND_OVER_S)
        connection.connect(path)
        message = json.dumps(dict(variables)).encode() + END
        sent = socket.send_fds(connection, [message], descriptors)
        connection.sendall(message[sent:])
        if connection.recv(len(READY)) == READY:
            connection.sendall(CONFIRMED)
            return connection
    except OSError:
        pass
    connection.close()
    return None


class Standbys:
    """The standbys of the workers of a node, managed by the launcher."""

    def __init__(self, command: Sequence[str]) -> None:
        """Prepare for workers of `command`, which begins with the interpreter. Starts no process."""
        self._command = list(command)
        self._folder = Path(tempfile.mkdtemp(prefix="standby-"))  # mode 0700
        self._pids: dict[int, int] = {}  # process id -> place

    def find_variables(self, place: int) -> dict[str, str]:
        """Return the environment variables by which the worker at this place finds its standby."""
        return {PATH_VARIABLE: str(self._find_path(place)), COMMAND_VARIABLE: json.dumps(self._command)}

    def start(self, place: int) -> None:
        """Start a standby for the worker at this place."""
        python, *rest = self._command
        argv = [python, "-m", "trainers.standby", str(self._find_path(place)), *rest]
        self._pids[os.posix_spawn(python, argv, os.environ)] = place

    def take(self, place: int) -> int | None:
        """Return the standby that is now the worker at this place, and start the next one; None if there is none."""
        for pid, its_place in self._pids.items():
            if its_place == place:
                del self._pids[pid]
                self.start(place)
                return pid
        return None

    def forget(self, pid: int) -> bool:
        """Forget a process that has ended; return whether it was a standby. It is not replaced."""
        return self._pids.pop(pid, None) is not None

    def end(self) -> None:
        """Kill all standbys and wait for them."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _find_path(self, place: int) -> Path:
        return self._folder / str(place)


def run_program(command: Sequence[str]) -> None:
    """Run the program as `python COMMAND` would."""
    if command[0] == "-m":
        sys.argv = [command[1], *command[2:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
