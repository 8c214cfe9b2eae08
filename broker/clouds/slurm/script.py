"""The batch job of a gang: its script, and the options of sbatch. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from broker.errors import InvalidRequestError
from broker.sites.host_python import make_python_argv
from broker.sites.slurm import NODE_ROOT, Partition, SlurmCluster
from broker.types import NodeRequest

# The job ends with its last node: a lost node must not end the others before they have saved their state. Since Slurm
# 22.05, srun does not inherit `--cpus-per-task`: a site with `TaskPluginParam=autobind` would bind a node to one CPU.
SCRIPT = """\
#!/bin/sh
# Written by broker: holds the nodes of one gang. Its nodes end with the job, and the job with its nodes.
exec srun --kill-on-bad-exit=0 --wait=0 --unbuffered --cpu-bind=none {python} {boot} {program}
"""
BOOT = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.argv[1])).decode())"
NOTICE_S = 120  # before the time limit


def name_job(owner: str, token: str) -> str:
    """Return the job name by which a repeated request finds its job."""
    return f"broker-{owner}-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def name_nodes(request: NodeRequest) -> str:
    """Return the common part of the gang's node ids, without the rank; equal for one owner, token and attempt."""
    digest = hashlib.sha256(f"{request.owner}\0{request.token}".encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-zA-Z0-9-]', '-', request.cluster)[:40]}-{request.attempt}-{digest}"


def make_argv(cluster: SlurmCluster, partition: Partition, request: NodeRequest, *, now_s: float) -> list[str]:
    """Return the command. `--requeue` is off, as broker recovers the job; equal names never run twice (`singleton`)."""
    offer = request.placement.offer
    name, _, qos = (offer.zone or "").partition("@")
    time = cluster.time or (partition.time_limit if partition.time_limit != "infinite" else "")
    argv = [
        "sbatch",
        "--parsable",
        f"--partition={name}",
        f"--nodes={request.placement.node_count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, int(offer.vcpus))}",
        f"--mem={int(offer.memory_gib * 1024)}M",
        "--no-requeue",
        "--dependency=singleton",
        f"--signal=TERM@{NOTICE_S}",
        f"--job-name={name_job(request.owner, request.token)}",
        f"--comment={json.dumps(make_comment(request, now_s=now_s), separators=(',', ':'))}",
        "--output=/dev/null",
        "--chdir=/tmp",
    ]
    if offer.accelerator:
        kind = f"{partition.gres}:" if partition.gres else ""
        argv.append(f"--gres=gpu:{kind}{int(offer.accelerator_count)}")
    argv += [f"--qos={qos}"] if qos else []
    argv += [f"--time={time}"] if time else []
    return [*argv, *cluster.options]


def make_comment(request: NodeRequest, *, now_s: float) -> Mapping[str, object]:
    """Return the comment from which the nodes of a job can be rebuilt: `squeue` is the only record."""
    placement = request.placement
    return {
        "o": request.owner,
        "c": request.cluster,
        "a": request.attempt,
        "t": request.token,
        "n": placement.node_count,
        "z": placement.offer.zone,
        "p": placement.is_spot,
        "u": round(placement.usd_hour / placement.node_count, 6),
        "s": round(now_s, 3),
        "i": name_nodes(request),
    }


def read_comment(text: str) -> Mapping[str, Any] | None:
    """Parse the comment of one of our jobs; None for any other job."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and set(found) >= set("ocatnzpusi") else None


def make_script(request: NodeRequest, partition: Partition, *, program: str, machine: str, kill_wait_s: float) -> bytes:
    """Return the script. `program`: the source of node_program.py and what it needs; `machine`: of local_machine.py."""
    settings = {"name": name_nodes(request), "notice_s": partition.grace_s or kill_wait_s}
    text = (
        f"{program}\nSETTINGS = json.loads({json.dumps(settings)!r})\n"
        f"SETTINGS['root'] = {NODE_ROOT!r}.format(user=os.getuid())\nmain(SETTINGS, {machine!r})\n"
    )
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    python = shlex.join(make_python_argv("-c"))
    return SCRIPT.format(python=python, boot=shlex.quote(BOOT), program=packed).encode()


def find_partition(partitions: Sequence[Partition], request: NodeRequest) -> Partition:
    """Return the partition of the offer. Raises InvalidRequestError if it is no longer known."""
    offer = request.placement.offer
    name = (offer.zone or "").partition("@")[0]
    fitting = [
        each for each in partitions if each.name == name and (each.machine.accelerator or None) == offer.accelerator
    ]
    if not fitting:
        raise InvalidRequestError(
            f"cluster `{offer.region}` has no partition `{name}` with {offer.instance_type}",
            hints=("run `broker check slurm` to query the partitions again",),
        )
    return max(fitting, key=lambda each: each.machine.vcpus >= offer.vcpus)
