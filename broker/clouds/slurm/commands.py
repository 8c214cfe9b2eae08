"""Run Slurm's commands, here or on the login node, and read their output."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from broker.clouds.slurm.states import GONE, find_error
from broker.errors import InvalidRequestError, TransientError, UnknownOutcomeError
from broker.frozen import frozen
from broker.sites.openssh import Completed, call
from broker.sites.slurm import SlurmCluster, join_command

CALL_S = 60.0
SSH_S = 15.0
NOT_FOUND = 127
UNKNOWN_NODE = "not found"  # `Node n7 not found`, by scontrol, without another error
# Variables of our environment that Slurm's commands get; a job inherits them, so no credential is among them.
PASSED_ENV = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
FIELDS = ("%i", "%T", "%r", "%D", "%N", "%S", "%e", "%P", "%k")  # the comment last: it may contain the separator

# Runs one command for a cluster, as `run_command` does; tests substitute a fake.
RunCommand = Callable[[SlurmCluster, Sequence[str], bytes], Awaitable[Completed]]


@frozen
class QueuedJob:
    """A job as `squeue` lists it; times in seconds since the epoch, None while unknown."""

    id: int
    state: str
    reason: str
    node_count: int
    node_list: str
    start_s: float | None
    end_s: float | None
    partition: str
    comment: str


async def run_command(cluster: SlurmCluster, argv: Sequence[str], stdin: bytes = b"") -> Completed:
    """Run a command on the machine that has the cluster's commands.

    Raises TransientError, or AuthError for a refused login.
    """
    if cluster.login is not None:
        return await cluster.login.run(join_command(argv), stdin=stdin, timeout_s=CALL_S)
    env = {name: os.environ[name] for name in PASSED_ENV if name in os.environ}  # noqa: TID251 - passed on
    try:
        return await call(argv, stdin=stdin, timeout_s=CALL_S, what=f"`{argv[0]}`", env=env)
    except FileNotFoundError:
        return Completed(returncode=NOT_FOUND, stdout=b"", stderr=f"{argv[0]}: command not found".encode())


async def call_slurm(run: RunCommand, cluster: SlurmCluster, argv: Sequence[str], stdin: bytes = b"") -> str:
    """Return a command's output. Raises the CloudError to which its message maps."""
    done = await run(cluster, argv, stdin)
    if done.returncode == NOT_FOUND:
        where = f"on `{cluster.login.host}`" if cluster.login else "on this machine"
        raise InvalidRequestError(
            f"`{argv[0]}` is not installed {where}",
            hints=("install Slurm's client there, or name the login node in `slurm.yaml`: `login: HOST`",),
        )
    if done.returncode:
        raise find_error(done.stderr.decode(errors="replace"))
    return done.stdout.decode(errors="replace")


async def list_jobs(run: RunCommand, cluster: SlurmCluster, *, name: str | None = None) -> Sequence[QueuedJob]:
    """List this user's jobs, including those that ended within Slurm's MinJobAge (5 minutes by default).

    Only those of this cluster, also if it is part of a federation.
    """
    chosen = ["--name", name] if name else []
    argv = [
        "env",
        "SLURM_TIME_FORMAT=%s",
        "squeue",
        "--local",
        "--noconvert",
        "--me",
        "-h",
        "-a",
        "-t",
        "all",
        *chosen,
        "-o",
        "|".join(FIELDS),
    ]
    try:
        text = await call_slurm(run, cluster, argv)
    except UnknownOutcomeError as error:  # listing has no third outcome: it failed
        raise TransientError(error.message) from error
    return [job for line in text.split("\n") if (job := parse_line(line)) is not None]


def parse_line(line: str) -> QueuedJob | None:
    """Parse one line of `squeue`; None for a line that cannot be of a job of ours.

    Times that Slurm does not know are N/A.

    The list has all jobs of the user: tasks of arrays (`7_3`, `7_[1-9%2]`), parts of heterogeneous jobs (`7+1`), and
    comments of several lines.
    """
    words = line.split("|", len(FIELDS) - 1)
    if len(words) < len(FIELDS) or not (words[0].isdecimal() and words[3].isdecimal()):
        return None

    def read_time(text: str) -> float | None:
        return float(text) if text.isdigit() else None

    return QueuedJob(
        id=int(words[0]),
        state=words[1],
        reason=words[2],
        node_count=int(words[3]),
        node_list=words[4],
        start_s=read_time(words[5]),
        end_s=read_time(words[6]),
        partition=words[7],
        comment=words[8].strip(),
    )


async def show_job(run: RunCommand, cluster: SlurmCluster, job_id: int) -> Mapping[str, str]:
    """Return the fields of one job; empty once Slurm has forgotten it. Raises CloudError if it does not answer."""
    done = await run(cluster, ["scontrol", "-o", "show", "job", str(job_id)], b"")
    if done.returncode == 0:
        return parse_pairs(done.stdout.decode(errors="replace"))
    text = done.stderr.decode(errors="replace")
    if any(each in text for each in GONE):
        return {}
    error = find_error(text)
    raise TransientError(error.message) if isinstance(error, UnknownOutcomeError) else error


async def find_federation_name(run: RunCommand, cluster: SlurmCluster) -> str | None:
    """Return the cluster's name in its federation; None if it is in none. Raises CloudError if it does not answer.

    `scontrol show federation` begins with `Federation: NAME`, then `Self: CLUSTER:HOST:PORT ID:1 ...`.
    """
    try:
        text = await call_slurm(run, cluster, ["scontrol", "show", "federation"])
    except UnknownOutcomeError as error:
        raise TransientError(error.message) from error
    found = re.search(r"^Self:\s+([^:\s]+):", text, re.MULTILINE)
    return found[1] if found else None


def parse_pairs(line: str) -> Mapping[str, str]:
    """Parse `Name=value Name=value`; a word without `=` continues the value before it."""
    pairs: dict[str, str] = {}
    last = ""
    for word in line.split():
        name, separator, value = word.partition("=")
        if separator and name[:1].isupper():
            last = name
            pairs[name] = value
        elif last:
            pairs[last] += f" {word}"
    return pairs


async def find_addresses(run: RunCommand, cluster: SlurmCluster, node_list: str) -> Sequence[tuple[str, str]]:
    """Return name and address of each node of an allocation, in the order of their ranks.

    The address is the name if Slurm does not show the node: it may have left the configuration, or be private
    (`PrivateData=nodes`).
    """
    done = await run(cluster, ["scontrol", "-o", "show", "node", node_list], b"")
    text, errors = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
    if done.returncode and UNKNOWN_NODE not in f"{text}{errors}":
        error = find_error(errors)
        raise TransientError(error.message) if isinstance(error, UnknownOutcomeError) else error
    by_name = {pairs["NodeName"]: pairs for line in text.splitlines() if "NodeName" in (pairs := parse_pairs(line))}
    names = (await call_slurm(run, cluster, ["scontrol", "show", "hostnames", node_list])).split()
    return [(name, by_name.get(name, {}).get("NodeAddr") or name) for name in names]
