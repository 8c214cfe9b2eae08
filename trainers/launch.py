"""Start one worker process per GPU on this node: `python -m trainers.launch -m trainers.lm --flags`.

A trainer that is started without a launcher on broker's nodes uses this one automatically.

This is a light torchrun with fixed ranks. It imports no torch: the first line of a worker runs after 0.04 s, compared
with 2 s under torchrun.
"""

import contextlib
import importlib.util
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from trainers.errors import TrainerError
from trainers.gang_file import NAMED_VARIABLE, find_epoch, mark_followed, read_leader
from trainers.preemption import EXIT_CODE_PREEMPTED
from trainers.standby import EXIT_CODE_HANDED_OVER, PATH_VARIABLE, Standbys, hand_over

if TYPE_CHECKING:
    from trainers import rendezvous_server

PORT_DEFAULT = 29500  # torchrun's own
USAGE = "usage: python -m trainers.launch [--workers COUNT] -m MODULE [ARGUMENT ...]"
PEM_MISSING = """\
error: `--elastic` on several nodes requires `BROKER_GANG_PEM`, a file with one certificate and its key for all nodes

hint: create it once as follows, copy it to every node, and set `BROKER_GANG_PEM` to its path there:
  (umask 077; openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=gang \
-keyout gang.pem -out gang.pem)"""
TORCH_MISSING = f"""\
error: {sys.executable} has no torch

hint: in a task, `setup: python3 -m trainers.setup` installs torch for the node; elsewhere `pip install torch`"""
# Time for workers to exit after one has failed; then they are assumed to hang in a collective, and killed.
GRACE_S = 5.0
# The same after one has left because of a preemption: the first rank may still commit and report the checkpoint.
LEAVE_S = 60.0
EXIT_CODE_INTERRUPTED = 130  # the code that a shell reports for a process ended by SIGINT: 128 + 2
# Restarts of killed workers on one node of an elastic run. If memory was insufficient, it will be again.
RESTARTS_MAX = 3
# Time at the end of an elastic run for ranks of other nodes to exit before their rendezvous does.
DEPARTURES_S_MAX = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ranks of this node within the gang."""

    workers: int
    node_rank: int
    node_count: int
    master_address: str
    master_port: int | None
    addresses: tuple[str, ...] = ("127.0.0.1",)
    nodes_min: int | None = None  # broker continues with this many nodes, including the first

    @property
    def elastic(self) -> tuple[int, int] | None:
        """The minimum and maximum number of ranks that broker allows; None for a fixed gang."""
        return None if self.nodes_min is None else (self.nodes_min * self.workers, self.node_count * self.workers)

    def worker_variables(self, local_rank: int, port: int) -> dict[str, str]:
        """Return the environment variables of one worker, named as torch expects."""
        return {
            "RANK": str(self.node_rank * self.workers + local_rank),
            "WORLD_SIZE": str(self.node_count * self.workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(port),
        }


def main(arguments: Sequence[str]) -> int:
    """Run the workers until they exit; return 0, or the exit code of the first worker that failed."""
    workers, command = split_arguments(arguments)
    plan = read_plan(os.environ, workers)
    command = [sys.executable, *command]
    if elastic := find_elastic(command):
        is_warm = any(word in ("--warm", "--warm=true") for word in command)
        return run_elastic(plan, elastic, command, is_warm=is_warm)
    return run_fixed(plan, command)


def run_fixed(plan: Plan, command: list[str]) -> int:
    """Run workers with fixed ranks until they exit. A single worker replaces this process."""
    port = plan.master_port or (find_free_port() if plan.node_count == 1 else PORT_DEFAULT)
    if plan.workers == 1:
        os.environ.update(plan.worker_variables(0, port))
        os.execv(command[0], command)
    return run_workers([(command, {**os.environ, **plan.worker_variables(rank, port)}) for rank in range(plan.workers)])


def launch_if_needed(
    module: str | None, arguments: Sequence[str], *, elastic: str | None = None, is_warm: bool = False
) -> int | None:
    """Start the ranks of this node, unless this process is one of them.

    Workers run `module` with `arguments`, or this process's own command line if it is None. `elastic` is the value of
    the trainer's flag of that name; `is_warm` starts standbys for the workers. Returns the exit code of the workers, or
    None if this process is a rank.
    """
    check_torch()
    if "RANK" in os.environ or "BROKER_ELASTIC_AT" in os.environ:  # under torchrun, or one of our own workers
        return None
    plan = read_plan(os.environ)
    bounds = None if elastic is None else parse_elastic(elastic) if elastic else plan.elastic
    command = [sys.executable, *(["-m", module, *arguments] if module else sys.orig_argv[1:])]
    if bounds:
        return run_elastic(plan, bounds, command, is_warm=is_warm)
    if plan.workers > 1:
        return run_fixed(plan, command)
    if plan.node_count > 1:
        os.environ.update(plan.worker_variables(0, plan.master_port or PORT_DEFAULT))
    return None


def check_torch() -> None:
    """Raise SystemExit if torch is not installed, before any process is started."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(TORCH_MISSING)


def run_process(run: Callable[[], int]) -> NoReturn:
    """Run a rank, or the launcher of a node, and end the process, also after an error.

    The interpreter would wait for a thread that writes a checkpoint, which waits for the other ranks, which wait in a
    step for this one: for the limit of a checkpoint, two hours, without reacting to signals.
    """
    try:
        exit_code = run()
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        exit_code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's names the rank
        exit_code = EXIT_CODE_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    end_process(exit_code)


def end_process(exit_code: int) -> NoReturn:
    """Exit at once, without finalizing the interpreter.

    During finalization a thread of gloo that releases its last tensor may be terminated inside a C++ destructor, which
    aborts the process after a successful run: seen in one of about thirty runs of `pipeline+fsdp` on torch 2.13.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def split_arguments(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the value of `--workers`, if given, and the command line of the workers from `-m` on."""
    rest = list(arguments)
    workers = None
    if len(rest) >= 2 and rest[0] == "--workers" and rest[1].isdigit() and int(rest[1]) > 0:
        workers, rest = int(rest[1]), rest[2:]
    if len(rest) < 2 or rest[0] != "-m":
        raise SystemExit(USAGE)
    return workers, rest


def read_plan(variables: Mapping[str, str], workers: int | None = None) -> Plan:
    """Derive the ranks from the SKYPILOT_* variables; without them, this node is the only one."""
    addresses = variables.get("SKYPILOT_NODE_IPS", "").split()
    node_count = int(variables.get("SKYPILOT_NUM_NODES") or len(addresses) or 1)
    port, nodes_min = variables.get("BROKER_MASTER_PORT"), variables.get("BROKER_NODES_MIN")
    return Plan(
        workers=workers or max(1, int(variables.get("SKYPILOT_NUM_GPUS_PER_NODE") or 1)),
        node_rank=int(variables.get("SKYPILOT_NODE_RANK") or 0),
        node_count=node_count,
        master_address=addresses[0] if addresses and node_count > 1 else "127.0.0.1",
        addresses=tuple(addresses[:node_count] if node_count > 1 else ()) or ("127.0.0.1",),
        master_port=int(port) if port else None,
        nodes_min=int(nodes_min) if nodes_min and node_count > 1 else None,
    )


def run_elastic(plan: Plan, bounds: tuple[int, int], command: list[str], *, is_warm: bool = False) -> int:
    """Run workers that get their ranks from a rendezvous: the first node's, or another's if that node is lost."""
    if plan.node_count == 1 and plan.workers < bounds[0]:  # no other node can join
        least, most = bounds
        raise SystemExit(
            f"error: `--elastic {least}:{most}` requires {least} ranks, and this node starts {plan.workers}\n\n"
            f"hint: start them with `python -m trainers.launch --workers {least} -m MODULE`"
        )
    port = plan.master_port or (find_free_port() if plan.node_count == 1 else PORT_DEFAULT)
    given = {name: os.environ[name] for name in ("BROKER_GANG_PEM",) if os.environ.get(name)}
    if not given and plan.node_count > 1:
        raise SystemExit(PEM_MISSING)
    given = given or {"BROKER_ELASTIC_SECRET": os.urandom(32).hex()}
    places = [f"{address}:{port + rank}" for rank, address in enumerate(plan.addresses)]
    # If half of the ranks or fewer may continue, they cannot know whether the other part continues as well: broker can.
    is_named = 2 * bounds[0] <= bounds[1] and read_leader(os.environ) is not None and plan.node_count > 1
    if (2 * bounds[0] <= bounds[1] and not is_named) or len(places) != plan.node_count:
        places, is_named = [f"{plan.master_address}:{port}"], False
    if len(places) > 1:
        mark_followed(os.environ)
    server = None
    if plan.node_rank < len(places):
        rendezvous: dict[str, Any] = {"least": bounds[0], "most": bounds[1], "is_movable": len(places) > 1}
        if is_named:
            rendezvous["find_epoch"] = partial(find_epoch, os.environ, plan.node_rank)
        server = serve_rendezvous(plan, rendezvous, port + plan.node_rank, given)

    # Only modules and scripts: a standby cannot apply options of the interpreter.
    is_plain = command[1] == "-m" or not command[1].startswith("-")
    standbys = Standbys(command) if is_warm and is_plain and sys.platform == "linux" else None

    def prepare(local_rank: int) -> tuple[list[str], dict[str, str]]:
        return command, {
            **os.environ,
            **given,
            **(standbys.find_variables(local_rank) if standbys else {}),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(plan.workers),
            "BROKER_ELASTIC_AT": ",".join(places),
            **({NAMED_VARIABLE: "1"} if is_named else {}),
            # The prefix is the node: all of its members are lost with it.
            "BROKER_ELASTIC_MEMBER": f"{plan.node_rank}.{uuid.uuid4().hex[:16]}",
            # After all members of the previous generation; newcomers are in the order of nodes.
            "BROKER_ELASTIC_ORDER": f"[1, {plan.node_rank * plan.workers + local_rank}]",
        }

    commands = [prepare(rank) for rank in range(plan.workers)]
    code = run_workers(commands, prepare_again=prepare, standbys=standbys)
    if server is not None and code == 0:
        server.await_departures(DEPARTURES_S_MAX)
    return code


def serve_rendezvous(
    plan: Plan, settings: Mapping[str, Any], port: int, given: Mapping[str, str]
) -> "rendezvous_server.RendezvousServer | None":
    """Start the rendezvous of this node for workers with the same credential."""
    from trainers.rendezvous import Rendezvous  # imports asyncio and ssl, which other runs do not need
    from trainers.rendezvous_server import RendezvousServer
    from trainers.wire import read_credential

    credential = read_credential(given)
    assert credential is not None, "a PEM or a secret"
    rendezvous = Rendezvous(first_count=plan.node_count * plan.workers, **settings)
    try:
        server = RendezvousServer(rendezvous, plan.addresses[plan.node_rank], port, credential)
    except TrainerError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        if plan.node_rank == 0:
            raise SystemExit(
                f"error: the rendezvous of `--elastic` cannot listen on port {port}: {error.strerror}\n\n"
                "hint: end the run that uses it, or set `BROKER_MASTER_PORT` to another port on all nodes"
            ) from None
        print(f"note: port {port}: {error.strerror}; the run cannot continue from this node alone", file=sys.stderr)
        return None
    if server.address in ("0.0.0.0", "::"):
        address = plan.addresses[plan.node_rank]
        print(
            f"note: {address} is not an address of this machine, so the rendezvous listens on all interfaces",
            file=sys.stderr,
        )
    return server


def find_elastic(arguments: Sequence[str]) -> tuple[int, int] | None:
    """Return the bounds that `--elastic` among the trainer's arguments sets. The last occurrence counts."""
    bounds = None
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--elastic":
            bounds = value if equals else "".join(arguments[place + 1 : place + 2])
    try:
        return parse_elastic(bounds) if bounds else None
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def parse_elastic(text: str) -> tuple[int, int]:
    """Parse `2:4` into the minimum and maximum number of ranks. Raises ValueError for anything else."""
    least, colon, most = text.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal() or not 1 <= int(least) <= int(most):
        raise ValueError(f"`--elastic {text}` is not like `2:4`, the fewest and the most ranks to continue with")
    return int(least), int(most)


Command = tuple[list[str], Mapping[str, str]]


def run_workers(
    commands: Sequence[Command],
    prepare_again: Callable[[int], Command] | None = None,
    standbys: Standbys | None = None,
) -> int:
    """Start all workers, forward SIGTERM to them, and end the others if one fails; return the exit code.

    With `prepare_again`, a worker that was killed by a signal is restarted, up to `RESTARTS_MAX` times per node, and
    the exit of a preempted worker does not end the others. With `standbys`, a worker restarts in its standby.
    """
    running: dict[int, int] = {}
    restarts_left = RESTARTS_MAX if prepare_again else 0
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True
        _send(signal.SIGTERM, running)

    # Plain processes instead of Popen objects, which reap a child when they are sent a signal.
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, lambda *_: _send(signal.SIGKILL, running))
    for place, (command, environment) in enumerate(commands):
        running[os.posix_spawn(command[0], command, environment)] = place
        if standbys:
            standbys.start(place)
    _send(signal.SIGTERM, running if is_ending else ())  # to those that were started after the signal
    exit_code = 0
    while running:
        pid, status = os.wait()
        if pid not in running:  # a standby, or a child of a worker that has ended: the first process of a container
            if standbys:
                standbys.forget(pid)
            continue
        place = running.pop(pid)
        code, successor = _find_successor(_read_code(status, is_ending=is_ending), place, standbys)
        if code < 0 and not is_ending and restarts_left and prepare_again and not exit_code:
            restarts_left -= 1
            successor = _start_again(place, prepare_again(place), standbys)
        if successor is not None:
            running[successor] = place
            _send(signal.SIGTERM, (successor,) if is_ending else ())  # it may have come before it was started
            continue
        if code == EXIT_CODE_PREEMPTED and prepare_again:
            exit_code = exit_code or code
        elif code and not exit_code:
            exit_code = 128 - code if code < 0 else code  # 128 + signal, as a shell reports it
            signal.setitimer(signal.ITIMER_REAL, LEAVE_S if code == EXIT_CODE_PREEMPTED else GRACE_S)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if standbys:
        standbys.end()
    return exit_code


def _read_code(status: int, *, is_ending: bool) -> int:
    """Return an exit code, or a negative signal number."""
    code = os.waitstatus_to_exitcode(status)
    # A worker that was starting did not listen to the signal yet.
    return EXIT_CODE_PREEMPTED if code == -signal.SIGTERM and is_ending else code


def _find_successor(code: int, place: int, standbys: Standbys | None) -> tuple[int, int | None]:
    """Return the standby in which a worker continues, or None, and the code of the worker."""
    if standbys is None or code != EXIT_CODE_HANDED_OVER:
        return code, None
    successor = standbys.take(place)
    return (-signal.SIGKILL if successor is None else code), successor  # without one, it was killed just after


def _start_again(place: int, command: Command, standbys: Standbys | None) -> int:
    arguments, environment = command
    connection = hand_over(environment[PATH_VARIABLE], environment, []) if standbys else None
    if standbys and connection:
        connection.close()  # only then does the standby begin
        if successor := standbys.take(place):
            return successor
    return os.posix_spawn(arguments[0], arguments, environment)


def _send(signal_number: int, pids: Iterable[int]) -> None:
    for pid in tuple(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def find_free_port() -> int:
    """Return a free port below the ephemeral range (Linux: from 32768), so that no outgoing connection takes it."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
