"""Reach a real host: the system's OpenSSH, one persistent connection per host, files by tar or rsync."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shlex
import signal
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from broker.clock import Clock
from broker.config import Config
from broker.errors import CloudError, StateError, TransientError, UnreachedError
from broker.runtime.base import Shell
from broker.runtime.keys import Keys
from broker.runtime.streams import Stream, open_program
from broker.runtime.transports.ssh_files import put_files
from broker.runtime.transports.ssh_options import SshRoute, make_options, name_control, parse_handle
from broker.sites.openssh import ALIVE_COUNT_MAX, ALIVE_INTERVAL_S, PERSIST_S, Completed, call, explain, find_program
from broker.types import Node

MARGIN_S = ALIVE_INTERVAL_S * ALIVE_COUNT_MAX + 2.0
FIRST_POLL_S = 0.1
POLL_S_MAX = 1.0
# Until a node's boot script has finished, its sshd is down or presents a host key that is not ours.
PATIENCE_S = 60.0
# A keepalive per second costs 0.18 ms of CPU time per second and connection. Above this number of sessions, keepalives
# are sent less often, and the failure of a host that loses power is detected after 20 s instead of 4 s.
SESSIONS_PER_S_MAX, MANY_ALIVE_INTERVAL_S = 500, 5
RENEWED_S = 15.0  # a new firewall rule takes effect within seconds
KILLED = 128 + signal.SIGKILL
MARK = b"\nbroker-exit "
BEGIN = b"broker-output\n"  # start-up files of the login shell may print before it
# Output goes through unlinked files, so that a daemon that keeps them open does not delay the answer. The exit code is
# the last line of stderr, so that ssh's own 255 is not mistaken for the program's. The files are in memory if it has
# space: a node whose disk is full must answer, or it would count as lost.
WRAPPER = """\
if [ "$2" = env ]; then IFS= read -r line; eval "$(printf %s "$line" | base64 -d)"; fi
limit=$1; shift 2; umask 077
for d in /dev/shm "${TMPDIR:-/tmp}"; do
  o=$(mktemp "$d/broker.XXXXXX" 2>/dev/null) && e=$(mktemp "$d/broker.XXXXXX" 2>/dev/null) &&
    printf '%65536s' '' 2>/dev/null >"$o" && break
  rm -f "$o" "$e"; o=
done
[ -n "$o" ] || exit 1
exec 3>"$o" 4<"$o" 5>"$e" 6<"$e"; rm -f "$o" "$e"
timeout -s KILL "$limit" "$@" >&3 2>&5 3>&- 4<&- 5>&- 6<&-
r=$?; printf 'broker-output\\n'; cat <&4; cat <&6 >&2; printf '\\nbroker-exit %s' "$r" >&2"""


def make_transport(config: Config, *, clock: Clock) -> SshTransport:
    """Create the transport, for the registry."""
    return SshTransport(Keys(config.keys), clock=clock)


async def renew_nothing(node: Node) -> bool:
    """Return False: without a provisioner, no firewall can be changed."""
    return False


class SshTransport:
    """Reach hosts through OpenSSH. Raises TransientError if a host is unreachable or presents another host key."""

    def __init__(self, keys: Keys, *, clock: Clock, patience_s: float = PATIENCE_S) -> None:
        self._keys = keys
        self._clock = clock
        self._patience_s = patience_s
        # Called before giving up on a node: returns whether this machine's current address was added to its firewall.
        # Raises CloudError if the cloud refuses that.
        self.renew_access: Callable[[Node], Awaitable[bool]] = renew_nothing
        self._locks: dict[str, asyncio.Lock] = {}
        self._reached: set[str] = set()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command. The environment is sent through stdin, so that no process list shows it."""
        words = ["sh", "-c", WRAPPER, "sh", f"{timeout_s:.3f}", "env" if env else "-", *argv]
        if env:
            exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
            stdin = base64.b64encode(exports.encode()) + b"\n" + stdin
        await self._connect(node)
        start_s = self._clock.now_s()
        result = await self._ssh(node, shlex.join(words), timeout_s=timeout_s, stdin=stdin)
        stderr, mark, code = result.stderr.rpartition(MARK)
        _, begin, stdout = result.stdout.partition(BEGIN)
        if not mark or not begin:
            raise TransientError(f"node `{node.id}` cannot be reached{explain(result.stderr)}")
        if int(code) == KILLED and self._clock.now_s() - start_s >= timeout_s:
            raise TransientError(f"node `{node.id}` did not answer within {timeout_s:g} s")
        return Completed(returncode=int(code), stdout=stdout, stderr=stderr)

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy changed files over the kept connection, by tar, or by rsync if large files have changed."""
        await self._connect(node)
        route = self._find(node)
        remote_shell = shlex.join(["ssh", *route.options])
        await put_files(self, node, source, target, remote_shell=remote_shell, destination=route.host)

    async def stream(self, node: Node, command: str, *, stdin: bytes | IO[bytes], timeout_s: float) -> Completed:
        """Run a shell command without the wrapper. Raises TransientError if it or ssh fails."""
        result = await self._ssh(node, command, timeout_s=timeout_s, stdin=stdin)
        if result.returncode:
            raise TransientError(f"copying to node `{node.id}` failed{explain(result.stderr)}")
        return result

    async def open_shell(self, node: Node) -> Shell:
        """Connect and return the ssh command. An unreachable node is thus an error here and not in the shell."""
        await self._connect(node)
        route = self._find(node)
        argv = (find_program("ssh"), "-t", *route.options, route.host)
        # Escapes such as `~C` would forward ports of a server's machine, see EscapeChar in ssh_config(5).
        return Shell(argv=argv, env={}, folder=str(Path.home()), relayed_options=("-e", "none"))

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        """Open a session that also carries the connection for all other calls: one local process per host, not two.

        Without `carries_calls` it uses the existing connection. Otherwise, the connection from `_connect` is asked to
        stop after its last call; other calls would keep using it.
        """
        await self._connect(node)
        route = self._find(node)
        if not carries_calls:
            words = [find_program("ssh"), "-T", *route.options, "-o", "ControlMaster=no", route.host]
            return await open_program([*words, "exec " + shlex.join(argv)])
        ssh, master = find_program("ssh"), ["-o", "ControlMaster=yes", "-o", "ControlPersist=no"]
        if len(self._streams) >= SESSIONS_PER_S_MAX:
            master += ["-o", f"ServerAliveInterval={MANY_ALIVE_INTERVAL_S}"]
        command = "exec " + shlex.join(argv)
        async with self._locks.setdefault(str(route.control), asyncio.Lock()):
            stop = [ssh, *route.options, "-O", "stop", route.host]
            await call(stop, stdin=b"", timeout_s=route.connect_s_max, what=f"node `{node.id}`")
            stream = await open_program([ssh, "-T", *master, *route.options, route.host, command])
            self._streams.add(stream)
            give_up_s = self._clock.now_s() + route.connect_s_max
            while not is_listening(route.control):  # earlier calls would open their own connections
                has_ended = stream.process is None or stream.process.poll() is not None
                if has_ended or self._clock.now_s() >= give_up_s:
                    stream.kill()
                    raise TransientError(f"node `{node.id}` cannot be reached")
                await self._clock.sleep(FIRST_POLL_S)
        return stream

    async def _ssh(self, node: Node, command: str, *, timeout_s: float, stdin: bytes | IO[bytes]) -> Completed:
        await self._connect(node)
        route = self._find(node)
        argv = [find_program("ssh"), "-T", *route.options, "-o", "ControlMaster=no", route.host, command]
        return await call(argv, stdin=stdin, timeout_s=timeout_s + MARGIN_S, what=f"node `{node.id}`")

    async def _connect(self, node: Node) -> None:
        """Ensure an open connection. A node that was never reached before gets time to boot; others do not."""
        route = self._find(node)
        async with self._locks.setdefault(str(route.control), asyncio.Lock()):
            if is_listening(route.control):
                return
            is_known = node.id in self._reached or (route.mark is not None and route.mark.exists())
            give_up_s = self._clock.now_s() + (0.0 if is_known else self._patience_s)
            look_s = FIRST_POLL_S
            is_renewed = False
            while (problem := await self._try_connect(node, route)) is not None:
                if self._clock.now_s() >= give_up_s:
                    try:
                        if not is_renewed and await self.renew_access(node):
                            is_renewed, give_up_s = True, self._clock.now_s() + RENEWED_S
                            continue
                    except CloudError as error:
                        problem += f"; its firewall cannot be changed: {error.message}"
                    if not is_known:
                        raise UnreachedError(f"node `{node.id}` cannot be reached{problem}", node_id=node.id)
                    raise TransientError(f"node `{node.id}` cannot be reached{problem}")
                await self._clock.sleep(look_s)
                look_s = min(POLL_S_MAX, look_s * 1.5)
            self._reached.add(node.id)
            if route.mark is not None:
                with contextlib.suppress(OSError):  # the keys may have been forgotten meanwhile
                    route.mark.touch(mode=0o600)

    async def _try_connect(self, node: Node, route: SshRoute) -> str | None:
        """Connect; return None on success, else the reason."""
        master = ["-o", "ControlMaster=yes", "-o", f"ControlPersist={PERSIST_S}", "-f", "-N"]
        argv = [find_program("ssh"), "-T", *route.options, *master, route.host]
        try:
            result = await call(argv, stdin=b"", timeout_s=route.connect_s_max, what=f"node `{node.id}`")
        except TransientError as error:
            return f": {error.message}"
        return explain(result.stderr) if result.returncode else None

    def _find(self, node: Node) -> SshRoute:
        keys = self._keys.find(node.cluster, node.token)
        if keys is None:
            raise StateError(
                f"the keys of cluster `{node.cluster}` are not in this state folder",
                hints=(f"run `broker down --now {node.cluster}`, or use the BROKER_HOME that it was launched with",),
            )
        place = parse_handle(node.handle)
        control = name_control(keys, place)
        options = tuple(make_options(keys, place, control))
        return SshRoute(options=options, host=place.host, control=control, mark=keys.folder / f"reached-{control.name}")


def is_listening(control: Path) -> bool:
    """Return whether a shared connection answers; remove the socket of a dead one."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(control))
            return True
        except FileNotFoundError:
            return False
        except OSError:
            control.unlink(missing_ok=True)
            return False
