"""Read the hosts of SSH pools: `ssh_pools.yaml` in the state folder, in the form of SkyPilot's `ssh_node_pools.yaml`.

lab:
  user: ubuntu
  identity_file: ~/.ssh/id_ed25519
  hosts:
    - 10.0.0.1                                            # or a Host of your OpenSSH configuration
    - {ip: 10.0.0.2, accelerators: H100:8, cpus: 96, memory: 1000, usd_hour: 12}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from broker.frozen import frozen
from broker.sites.facts import Machine, read_facts
from broker.sites.login import SshLogin, read_login
from broker.sites.reading import ADDRESS, LOGIN_FIELDS, USD_HOUR, OneOrList, read_entries
from broker.task.reading import Reader
from broker.task.shapes import Anything, Either, Flag, ListOf, Number, Text
from broker.task.tables import Field, Section, Table
from broker.types import Offer

FENCE = Field(
    shape=OneOrList(), about="Command that switches a host off, with `{host}`; exit code 0 confirms that it is off."
)
PASSWORD = Field(shape=Anything(), about="Refused: broker logs in with keys.")
HOST = Table(
    name="pool_host",
    fields={
        **LOGIN_FIELDS,
        "ip": Field(shape=ADDRESS, about="Address, or a Host of your OpenSSH configuration.", is_required=True),
        "password": PASSWORD,
        "usd_hour": USD_HOUR,
        "fence": FENCE,
        "cpus": Field(shape=Number(), about="vCPUs; `broker check ssh` detects them."),
        "memory": Field(shape=Number(), about="Memory in GiB; `broker check ssh` detects it."),
        "accelerators": Field(
            shape=Text(pattern=r"[\w.-]+(:\d+)?", expected="such as `H100:8`"),
            about="GPUs; `broker check ssh` detects them with nvidia-smi.",
        ),
        "is_off": Field(shape=Flag(), about="The host is switched off; its programs have ended."),
    },
    about="One host of a pool.",
)
POOL = Table(
    name="pool",
    fields={
        **LOGIN_FIELDS,
        "password": PASSWORD,
        "usd_hour": USD_HOUR,
        "fence": FENCE,
        "hosts": Field(
            shape=ListOf(item=Either(shapes=[ADDRESS, HOST]), count_min=1), about="The hosts.", is_required=True
        ),
    },
    about="Hosts that broker may use.",
)


@frozen
class Host:
    """One host. `machine`: its size as stated in the file or detected; None if it is not known yet."""

    pool: str
    login: SshLogin
    machine: Machine | None = None
    usd_hour: float = 0.0
    fence: tuple[str, ...] = ()
    is_off: bool = False

    @property
    def name(self) -> str:
        """Return the address or ssh alias by which the login reaches the host."""
        return self.login.host

    @property
    def key(self) -> str:
        """Return `POOL/HOST`, under which its detected size and its claims are kept."""
        return f"{self.pool}/{self.name}"


def read_pools(path: Path) -> Mapping[str, Sequence[Host]]:
    """Return the hosts of every pool as the file states them. Raises TaskError."""
    return read_entries(path, POOL, _read_pool)


def read_hosts(path: Path, facts: Path) -> Sequence[Host]:
    """Return all hosts, with the sizes that `broker check ssh` detected. Raises TaskError."""
    known = read_facts(facts)
    hosts = [host for pool in read_pools(path).values() for host in pool]
    return [host if host.machine else replace(host, machine=known.get(host.key)) for host in hosts]


def list_offers(hosts: Sequence[Host]) -> Sequence[Offer]:
    """Return one offer for each size of machine in each pool."""
    offers = {name_offer(host): host for host in hosts if host.machine and not host.is_off}
    return [
        host.machine.make_offer("ssh", host.pool, zone=None, ondemand_usd_hour=host.usd_hour)
        for host in offers.values()
        if host.machine
    ]


def name_offer(host: Host) -> tuple[str, str, float] | None:
    """Return the key that distinguishes offers: pool, instance type, price."""
    return (host.pool, host.machine.name, host.usd_hour) if host.machine else None


def _read_pool(reader: Reader, name: str, pool: Section) -> Sequence[Host]:
    _refuse_password(reader, pool)
    hosts = [_read_host(reader, name, pool, each) for each in pool.get("hosts", ())]
    for index, host in enumerate(hosts):
        if host.name in [other.name for other in hosts[:index]]:
            reader.fault(pool.marks["hosts"], f"`{host.name}` is listed twice in pool `{name}`")
    return hosts


def _read_host(reader: Reader, pool_name: str, pool: Section, given: str | Section) -> Host:
    section = given if isinstance(given, Section) else Section(marked=pool.marked, values={"ip": given}, marks={})
    _refuse_password(reader, section)
    return Host(
        pool=pool_name,
        login=read_login(section.get("ip", ""), section, pool),
        machine=_read_machine(section),
        usd_hour=section.get("usd_hour", pool.get("usd_hour", 0.0)),
        fence=section.get("fence", pool.get("fence", ())),
        is_off=section.get("is_off", False),
    )


def _read_machine(section: Section) -> Machine | None:
    """Return the stated size; None if CPUs or memory are to be detected."""
    if section.get("cpus") is None or section.get("memory") is None:
        return None
    accelerator, _, count = (section.get("accelerators") or "").partition(":")
    return Machine(
        vcpus=section.get("cpus"),
        memory_gib=section.get("memory"),
        accelerator=accelerator or None,
        accelerator_count=int(count or 1) if accelerator else 0,
    )


def _refuse_password(reader: Reader, section: Section) -> None:
    if "password" in section.marks:
        place = section.find_key("password")
        hint = "remove it, run `ssh-copy-id USER@HOST` once, and name the key: `identity_file: ~/.ssh/id_ed25519`"
        reader.note(*place, "broker logs in with keys, not with passwords", hint, shows_line=False)
