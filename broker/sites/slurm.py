"""Slurm clusters: `slurm.yaml` in the state folder, and the partitions that `broker check slurm` found.

hpc:                          # infra: slurm/hpc/PARTITION
  login: login.example.org    # absent: sbatch runs on this machine
  user: alice
  usd_hour: 1.5               # of a whole node; or {PARTITION: price}; default 0
  partitions: [gpu, low]      # default: all that are up
  qos: [normal, low]          # further offers PARTITION@QOS
  options: [--account=lab]    # for every sbatch
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from broker.frozen import frozen
from broker.sites.facts import Machine, write_json
from broker.sites.login import SshLogin, read_login
from broker.sites.reading import ADDRESS, LOGIN_FIELDS, OneOrList, read_entries
from broker.task.reading import Reader
from broker.task.shapes import Either, Flag, MapOf, Number, Text
from broker.task.tables import Field, Section, Table
from broker.types import Offer

# Folder of a node on its host: private, and local so that sockets and locks work; `{user}` is the UID on that host.
NODE_ROOT = "/tmp/broker-slurm-{user}"
# On some login nodes only a login shell finds Slurm, by /etc/profile.d or a module in ~/.bash_profile; the output of
# those files is dropped.
FIND_SLURM = (
    'command -v sinfo >/dev/null 2>&1 && exec "$@"; '
    r'exec bash -lc "exec \"\$@\" >&3 2>&4 3>&- 4>&-" bash "$@" 3>&1 4>&2 >/dev/null 2>&1'
)
PRICE = Number(above=None)
OPTION = re.compile(r"--([a-z][a-z-]*)(=.*)?", re.DOTALL)
# Options by which broker finds its jobs again, or that would start them more than once, or elsewhere.
RESERVED_OPTIONS = (
    "array", "clusters", "comment", "dependency", "job-name", "nodes", "ntasks", "ntasks-per-node", "partition",
    "requeue", "test-only", "wrap",
)  # fmt: skip
CLUSTER = Table(
    name="slurm_cluster",
    fields={
        **LOGIN_FIELDS,
        "login": Field(shape=ADDRESS, about="Login node; default: sbatch runs on this machine."),
        "usd_hour": Field(
            shape=Either(shapes=[PRICE, MapOf(value=PRICE)]), about="Price of a whole node per hour, by partition."
        ),
        "partitions": Field(shape=OneOrList(), about="Partitions to use; default: all that are up."),
        "qos": Field(shape=OneOrList(), about="QOS to offer in addition to each partition's default."),
        "preemptible_qos": Field(shape=OneOrList(), about="Entries of `qos` whose jobs may be preempted."),
        "options": Field(shape=OneOrList(), about="Further options for every `sbatch`."),
        "time": Field(
            shape=Text(pattern=r"[\d:-]+", expected="a time such as `1-00:00:00`", also_scalar=True),
            about="Time limit; default: the partition's longest.",
        ),
        "is_off": Field(shape=Flag(), about="The cluster was shut down; its jobs have ended."),
    },
    about="One Slurm cluster.",
)


@frozen
class SlurmCluster:
    """One entry of the file. `login` is None if Slurm's commands run on this machine."""

    name: str
    login: SshLogin | None = None
    usd_hour: Mapping[str, float] | float = 0.0
    partitions: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    preemptible_qos: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    time: str | None = None
    is_off: bool = False

    def get_usd_hour(self, partition: str) -> float:
        """Return the price of a whole node of the partition in USD per hour; 0 if the file states none."""
        return self.usd_hour.get(partition, 0.0) if isinstance(self.usd_hour, Mapping) else self.usd_hour


@frozen
class Partition:
    """Equal nodes of one partition, as `sinfo` reports them. `is_preemptible`: a higher partition may take them."""

    name: str
    machine: Machine
    node_count: int
    is_preemptible: bool = False
    grace_s: float = 0.0
    time_limit: str = ""
    gres: str = ""  # the site's name for the type of its cards
    is_exclusive: bool = False  # every job gets whole nodes, and is charged for them


def read_clusters(path: Path) -> Mapping[str, SlurmCluster]:
    """Return the clusters of the file. Raises TaskError."""
    return read_entries(path, CLUSTER, _read_cluster)


def _read_cluster(reader: Reader, name: str, section: Section) -> SlurmCluster:
    host = section.get("login")
    for option in section.get("options", ()):
        if (found := OPTION.fullmatch(option)) is None:
            reader.fault(section.marks["options"], f"`{option}` is not an option of sbatch", "such as `--account=lab`")
        elif is_reserved(found[1]):
            reader.fault(section.marks["options"], f"`--{found[1]}` is set by broker", "remove it from `options`")
    return SlurmCluster(
        name=name,
        login=read_login(host, section) if host else None,
        usd_hour=section.get("usd_hour", 0.0),
        partitions=section.get("partitions", ()),
        qos=section.get("qos", ()),
        preemptible_qos=section.get("preemptible_qos", ()),
        options=section.get("options", ()),
        time=section.get("time"),
        is_off=section.get("is_off", False),
    )


def join_command(argv: Sequence[str]) -> str:
    """Return the shell command that runs one of Slurm's commands on a login node, whatever the user's shell is."""
    return shlex.join(["sh", "-c", FIND_SLURM, "sh", *argv])


def is_reserved(name: str) -> bool:
    """Return whether an option, or an abbreviation that sbatch would accept for it, is one of RESERVED_OPTIONS."""
    return any(each == name or (len(name) > 2 and each.startswith(name)) for each in RESERVED_OPTIONS)


def read_partitions(path: Path) -> Mapping[str, Sequence[Partition]]:
    """Return the partitions that `broker check slurm` found, by cluster; empty if the file is not readable."""
    try:
        found = json.loads(path.read_bytes())
        return {
            cluster: [Partition(**{**each, "machine": Machine(**each["machine"])}) for each in partitions]
            for cluster, partitions in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_partitions(path: Path, found: Mapping[str, Sequence[Partition]]) -> None:
    """Replace the recorded partitions."""
    write_json(path, {cluster: [asdict(each) for each in partitions] for cluster, partitions in found.items()})


def list_offers(clusters: Mapping[str, SlurmCluster], facts: Path) -> Sequence[Offer]:
    """Return offers of whole nodes, and of their halves, quarters and so on, as far as their units can be halved.

    A partition that gives every job whole nodes offers only those.
    """
    known = read_partitions(facts)
    offers = {
        (offer.region, offer.zone, offer.instance_type): offer
        for cluster in clusters.values()
        if not cluster.is_off
        for partition in known.get(cluster.name, ())
        if not cluster.partitions or partition.name in cluster.partitions
        for offer in _list_partition_offers(cluster, partition)
    }
    return list(offers.values())


def _list_partition_offers(cluster: SlurmCluster, partition: Partition) -> Iterator[Offer]:
    usd_hour = cluster.get_usd_hour(partition.name)
    for share, machine in islice(split_machine(partition.machine), 1 if partition.is_exclusive else None):
        price = round(usd_hour * share, 6)
        for zone, is_preemptible in [
            (partition.name, partition.is_preemptible),
            *((f"{partition.name}@{qos}", qos in cluster.preemptible_qos) for qos in cluster.qos),
        ]:
            yield machine.make_offer(
                "slurm",
                cluster.name,
                zone=zone,
                ondemand_usd_hour=None if is_preemptible else price,
                spot_usd_hour=price if is_preemptible else None,
            )


def split_machine(machine: Machine) -> Iterator[tuple[float, Machine]]:
    """Yield the whole machine and its equal parts: 8 cards -> 8, 4, 2, 1; 6 cards -> 6, 3; 12 vCPUs -> 12, 6, 3."""
    units = machine.accelerator_count or int(machine.vcpus)
    parts = 1
    while True:
        yield (
            1 / parts,
            Machine(
                vcpus=max(1, int(machine.vcpus // parts)),
                memory_gib=round(machine.memory_gib / parts, 2),
                accelerator=machine.accelerator,
                accelerator_count=machine.accelerator_count // parts,
            ),
        )
        parts *= 2
        if units % parts:
            return
