"""Every socket on which broker listens: address, authentication, what others can do. SECURITY.md shows the table."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ANY = ("0.0.0.0", "::")
_LISTENS, _ACCEPTS = "0A", 0x10000  # TCP_LISTEN of linux/tcp_states.h, __SO_ACCEPTCON of linux/net.h


@dataclass(frozen=True, kw_only=True)
class Declared:
    """`process` is a pattern of the command line, `address` one of what is listened on."""

    name: str
    process: str
    address: str
    where: str
    authentication: str
    stranger: str
    code: str


DECLARED = (
    Declared(
        name="gang coordinator",
        process=r"agent\.py _run ",
        address=r"tcp:(?!0\.0\.0\.0:|\[::\]:).+",
        where="the gang's interface on the first node, or on a survivor of an elastic gang that has lost it (the "
        "loopback on the local cloud), a port chosen by the kernel",
        authentication="mutual TLS 1.2 or newer with a certificate made for each run",
        stranger="nothing: the handshake fails before a line is read; 256 open handshakes at most, 15 s each",
        code="`broker/agent/agent_gang.py`, `agent_link.py`, `agent_wire.py`",
    ),
    Declared(
        name="network measurement",
        process=r"allreduce\.py ",
        address=r"tcp:.+",
        where="all interfaces of the nodes of a gang with GPUs, a port chosen by the kernel, for at most 30 s before "
        "the first step",
        authentication="a random token of the run, which the nodes get over the coordinator's TLS",
        stranger="nothing: a connection without the token is closed; a measurement sends zeros, which are discarded",
        code="`broker/agent/agent_allreduce.py`",
    ),
    Declared(
        name="elastic rendezvous",
        process=r"trainers\.launch|--elastic|trainers\.\w+",
        address=r"tcp:(?!0\.0\.0\.0:|\[::\]:).+",
        where="the gang's interface, `BROKER_MASTER_PORT` plus the node's rank; only of elastic runs",
        authentication="the same credential of the run; on one machine without broker, a secret of that run",
        stranger="nothing: the handshake fails before a line is read; 512 open handshakes at most",
        code="`trainers/rendezvous_server.py`, `trainers/wire.py`",
    ),
    Declared(
        name="balancer on a gateway",
        process=r"broker balancer .*/exchange",
        address=r"tcp:.+",
        where="a machine of its own for services with `gateway`: all interfaces, the port of the service (the loopback "
        "on the local cloud)",
        authentication="API keys; without keys every request is refused (on the loopback: admitted); TLS if the task "
        "has `tls`",
        stranger="with a key, or on the loopback of a service without keys: send requests to the service",
        code="`broker/serve/balancer.py`, `gateway_task.py`",
    ),
    Declared(
        name="balancer of a service",
        process=r"broker balancer|haproxy -W",
        address=r"tcp:.+",
        where="the loopback, or the address that `--host` of `broker serve up` names; only while a service is up",
        authentication="API keys if the service has any; without keys the loopback is open and other addresses refuse "
        "every request; TLS if the task has `tls`; over `tcp` and `grpc`, and with HAProxy, other addresses require "
        "certificates of clients, or TLS that the program terminates",
        stranger="with a key, or on the loopback of a service without keys: send requests to the service",
        code="`broker/serve/balancer.py`, `tcp_path.py`, `haproxy_path.py`",
    ),
    Declared(
        name="inference router of a service",
        process=r"smg::router|vllm::router|smg launch|vllm-router ",
        address=r"tcp:127\.0\.0\.1:.+",
        where="the loopback, free ports: the router, its metrics, and an endpoint for each replica; only while a "
        "service with `balancer: {type: smg}` or `vllm-router` is up",
        authentication="none",
        stranger="users of the same machine: send requests to the replicas without a key, and add workers to the "
        "router",
        code="`broker/serve/router_path.py`, `router_process.py`",
    ),
    Declared(
        name="entrance of a replica",
        process=r"agent\.py _run ",
        address=r"tcp:(?!0\.0\.0\.0:|\[::\]:).+",
        where="port 19443 on the first node's address (a free port of the loopback on the local cloud)",
        authentication="mutual TLS 1.2 or newer: only the certificate of the service's balancer opens it",
        stranger="nothing: the handshake fails before a byte is passed on; 64 open handshakes at most, 15 s each, "
        "during which the program sees a connection without data",
        code="`broker/agent/agent_entrance.py`, `broker/serve/credentials.py`",
    ),
    Declared(
        name="program of a replica",
        process=r"trainers\.serve|tests\.serve\.stand_in",
        address=r"tcp:127\.0\.0\.1:.+",
        where="the loopback of its node, `BROKER_REPLICA_PORT`; an engine that is not configured for this address may "
        "choose all interfaces",
        authentication="none",
        stranger="users of the node itself can send requests; on AWS and Google Cloud the firewall does not admit the "
        "port even where the engine listens on all interfaces",
        code="`trainers/serve.py`, or the user's own engine; `broker/serve/replicas.py`",
    ),
    Declared(
        name="torch's store and process groups",
        process=r"python",
        address=r"tcp:.+",
        where="the program's own: torch's store listens on all interfaces at `BROKER_MASTER_PORT`, gloo and NCCL on "
        "the interface they choose",
        authentication="none; torch offers none",
        stranger="any client that reaches the port can read and break the training: "
        "the firewall admits only the gang's nodes",
        code="torch; `broker/clouds/aws/network.py`, `broker/clouds/gcp/firewall.py`",
    ),
    Declared(
        name="machine of the local cloud",
        process=r"local_machine\.py",
        address=r"unix:.*/broker-\d+/[0-9a-f]{16}\.sock",
        where="a Unix socket in a folder of mode 0700 of this user",
        authentication="file permissions",
        stranger="nothing: other users cannot open the folder",
        code="`broker/clouds/local_machine.py`",
    ),
    Declared(
        name="kept ssh connection",
        process=r"ssh",
        address=r"unix:.*/broker-ssh-\d+/ssh-[0-9a-f]{16}(\.\w+)?",
        where="a Unix socket of the system's OpenSSH in a folder of mode 0700 of this user",
        authentication="file permissions",
        stranger="nothing: other users cannot open the folder",
        code="`broker/runtime/transports/ssh.py`, `ssh_options.py`",
    ),
    Declared(
        name="sshd of a node",
        process=r"sshd",
        address=r"tcp:.+",
        where="port 22 of a cloud node; the security group admits this machine's address and the gang",
        authentication="an Ed25519 key made for each cluster; the host key is made by us and pinned",
        stranger="nothing but OpenSSH's own handshake; passwords are off",
        code="`broker/runtime/keys.py`, `bootstrap.py`",
    ),
    Declared(
        name="dashboard",
        process=r"broker dashboard",
        address=r"tcp:127\.0\.0\.1:.+",
        where="127.0.0.1, only while `broker dashboard` runs",
        authentication="a cookie for which a link's token is exchanged, once, and for `/metrics` a token kept in a "
        "file of mode 0600; `Host` and `Origin` are compared",
        stranger="nothing: other users and sites without the cookie get 401 or 403",
        code="`broker/dashboard/guard.py`, `server.py`",
    ),
    Declared(
        name="server",
        process=r"broker server start",
        address=r"tcp:.+",
        where="the loopback, or the address that `--host` of `broker server start` names; only while the server runs",
        authentication="a token in each request, compared by its SHA-256, or for pages a cookie for which a token is "
        "exchanged; TLS on every address but the loopback, with a certificate that clients pin",
        stranger="read `/healthz`, `/readyz`, `/openapi.json` and the login form, and begin a login at the issuer; "
        "anything else gets 401 or leads to the form",
        code="`broker/server/http.py`, `serving.py`, `authorisation.py`, `sessions.py`, `login.py`, `page_login.py`",
    ),
    Declared(
        name="browser login",
        process=r"broker login",
        address=r"tcp:127\.0\.0\.1:.+",
        where="127.0.0.1, a port chosen by the kernel; only while `broker login` waits for a browser, ten minutes at "
        "most",
        authentication="the `state` of this login, 256 random bits; the code is useless without the PKCE verifier",
        stranger="nothing: a request without the `state` gets 404",
        code="`broker/client/browser_login.py`",
    ),
)
OUTSIDE = "torch's store and process groups"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A listening socket: `address` is `tcp:HOST:PORT` or `unix:PATH`."""

    pid: int
    command: str
    address: str

    @property
    def is_wide(self) -> bool:
        return self.address.startswith(("tcp:0.0.0.0:", "tcp:[::]:"))


def list_listeners(processes: Iterable[int]) -> list[Found]:
    """List the sockets on which these processes listen, from /proc."""
    addresses = {**_read_tcp("tcp"), **_read_tcp("tcp6"), **_read_unix()}
    found = []
    for pid in processes:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            held = set(_list_held(pid))
        except OSError:
            continue  # it has ended meanwhile
        inodes = {each.removeprefix("socket:[").removesuffix("]") for each in held if each.startswith("socket:[")}
        found += [
            Found(pid=pid, command=command, address=addresses[inode]) for inode in sorted(inodes & set(addresses))
        ]
    return found


def _list_held(pid: int) -> Iterator[str]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield path.readlink().name


def _read_tcp(name: str) -> dict[str, str]:
    """Return the address of each listening socket by its inode."""
    found = {}
    for line in _read_lines(Path("/proc/net") / name):
        words = line.split()
        if words[3] == _LISTENS:
            host, port = words[1].split(":")
            found[words[9]] = f"tcp:{_parse_host(host)}:{int(port, 16)}"
    return found


def _parse_host(text: str) -> str:
    import ipaddress

    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]  # of a little-endian CPU
    address = ipaddress.ip_address(b"".join(words))
    return f"[{address}]" if address.version == 6 else str(address)


def _read_unix() -> dict[str, str]:
    found = {}
    for line in _read_lines(Path("/proc/net/unix")):
        words = line.split(maxsplit=7)
        if int(words[3], 16) & _ACCEPTS:
            found[words[6]] = f"unix:{words[7].strip() if len(words) > 7 else ''}"
    return found


def _read_lines(path: Path) -> Iterator[str]:
    return iter(path.read_text().splitlines()[1:] if path.exists() else [])


def find_declared(found: Found, *, ours: bool = True) -> Declared | None:
    """Find the row of the table for a listener; with `ours`, skip torch's, which matches any address."""
    for each in DECLARED:
        if each.name == OUTSIDE and ours:
            continue
        if re.search(each.process, found.command) and re.fullmatch(each.address, found.address):
            return each
    return None


def write_table() -> str:
    """Return the table as in SECURITY.md."""
    lines = [
        "| listener | address | authentication | what a stranger can do | code |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.name} | {each.where} | {each.authentication} | {each.stranger} | {each.code} |" for each in DECLARED
    ]
    return "\n".join(lines) + "\n"
