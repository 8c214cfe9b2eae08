"""`broker check slurm`: query every cluster's partitions and record them as offers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from broker.clock import Clock
from broker.clouds.findings import CheckResult, report_invalid_file
from broker.clouds.slurm.commands import RunCommand, call_slurm, parse_pairs, run_command
from broker.config import Config
from broker.errors import BrokerError, CloudError
from broker.sites import find_file
from broker.sites.facts import Machine, find_facts, is_part, name_accelerator
from broker.sites.slurm import Partition, SlurmCluster, read_clusters, read_partitions, write_partitions

FIELDS = ("%R", "%c", "%m", "%G", "%D", "%a", "%l")
# A type may begin with a digit: `gpu:2080ti:8(S:0-1)`; without a type, `gpu:4`.
GRES = re.compile(r"(?:^|,)gpu:(?:(?P<kind>[^:,()]+):)?(?P<count>\d+)(?=[,(]|$)")


async def inspect(config: Config, *, clock: Clock, run: RunCommand = run_command) -> Sequence[CheckResult]:
    """Report each cluster with its partitions; those of a cluster that does not answer are kept."""
    path = find_file("slurm", config.home)
    assert path is not None, "only called for native clusters"
    try:
        clusters = {name: cluster for name, cluster in read_clusters(path).items() if not cluster.is_off}
    except BrokerError as error:
        return report_invalid_file("clusters", path, error)
    facts = find_facts("slurm", config.home)
    answers = dict(
        zip(clusters, await asyncio.gather(*(_read_partitions(run, each) for each in clusters.values())), strict=True)
    )
    found = {name: answer for name, answer in answers.items() if not isinstance(answer, CloudError)}
    kept = {name: partitions for name, partitions in read_partitions(facts).items() if name in clusters}
    write_partitions(facts, {**kept, **found})
    is_alone = len(clusters) == 1
    return [judge_cluster(clusters[name], answer, is_needed=is_alone) for name, answer in answers.items()]


def write_policy(config: Config) -> str:
    """Return a comment only: Slurm has no policy file; the site's administrator grants access to partitions."""
    return "# slurm: an account that may submit to its partitions, and Python 3 on the nodes\n"


async def _read_partitions(run: RunCommand, cluster: SlurmCluster) -> Sequence[Partition] | CloudError:
    try:
        nodes = await call_slurm(run, cluster, ["sinfo", "--noconvert", "-h", "-o", "|".join(FIELDS)])
        rules = await call_slurm(run, cluster, ["scontrol", "-o", "show", "partition"])
    except CloudError as error:
        return error
    return parse_partitions(nodes, rules)


def parse_partitions(nodes: str, rules: str) -> Sequence[Partition]:
    """Parse `sinfo` (one line for equal nodes of a partition) and `scontrol show partition`.

    A partition is preemptible if it has a preemption mode and another partition has a higher priority tier.
    """
    by_name = {pairs["PartitionName"]: pairs for line in rules.splitlines() if (pairs := parse_pairs(line))}
    highest = max((int(each.get("PriorityTier", 1)) for each in by_name.values()), default=1)
    found = []
    for line in nodes.splitlines():
        name, vcpus, memory_mb, gres, count, availability, limit = line.split("|")
        if availability != "up":
            continue
        rule = by_name.get(name, {})
        card = find_card(gres)
        kind = (card["kind"] or "") if card else ""
        found.append(
            Partition(
                name=name,
                machine=Machine(
                    vcpus=int(vcpus.rstrip("+")),
                    memory_gib=int(int(memory_mb.rstrip("+")) / 1024 * 100) / 100,  # never more than the node has
                    accelerator=name_accelerator(kind or "gpu") if card else None,
                    accelerator_count=int(card["count"]) if card else 0,
                ),
                node_count=int(count),
                is_preemptible=is_preemptible(rule, highest),
                grace_s=float(rule.get("GraceTime", 0)),
                time_limit=find_time_limit(rule, limit),
                gres=kind,
                is_exclusive=rule.get("OverSubscribe") == "EXCLUSIVE",
            )
        )
    return found


def is_preemptible(rule: Mapping[str, str], highest: int) -> bool:
    """Return whether Slurm may preempt jobs of the partition `rule`; `highest`: the highest priority tier of all."""
    return rule.get("PreemptMode", "OFF") != "OFF" and int(rule.get("PriorityTier", 1)) < highest


def find_card(gres: str) -> re.Match[str] | None:
    """Return the first type of whole cards of a node, and their number; parts of cards (MIG) are not offered."""
    return next((each for each in GRES.finditer(gres) if not is_part(each["kind"] or "")), None)


def find_time_limit(rule: Mapping[str, str], limit: str) -> str:
    """Return the limit to request, the partition's longest; "" to leave the choice to Slurm, where none is set.

    Without a request, Slurm would take the partition's default time, often an hour, even if there is no maximum.
    """
    if limit[:1].isdigit():
        return limit
    return "UNLIMITED" if rule.get("DefaultTime", "NONE") != "NONE" else ""


def judge_cluster(cluster: SlurmCluster, answer: Sequence[Partition] | CloudError, *, is_needed: bool) -> CheckResult:
    """Report the partitions that are up, or why the cluster does not answer, or which stated partition is missing."""
    where = f"ssh {cluster.login.host} sinfo" if cluster.login else "sinfo"
    if isinstance(answer, CloudError):
        hint = answer.hints[0] if answer.hints else ""
        note = f"{answer.message}{f' ({hint})' if hint else ''}"
        return CheckResult(name=cluster.name, is_ok=False, note=note, command=where, is_needed=is_needed)
    names = {each.name: each for each in answer}
    if missing := [name for name in cluster.partitions if name not in names]:
        note = f"no partition {', '.join(f'`{name}`' for name in missing)}; there are {', '.join(names) or 'none'}"
        return CheckResult(name=cluster.name, is_ok=False, note=note, command=where, is_needed=is_needed)
    descriptions = [f"{each.name} ({each.node_count} x {each.machine.name})" for each in answer]
    return CheckResult(
        name=cluster.name,
        is_ok=bool(descriptions),
        note=(", ".join(descriptions) or "no partition is up") + _note_unknown_memory(answer),
        command="" if descriptions else where,
    )


def _note_unknown_memory(partitions: Sequence[Partition]) -> str:
    """Name the partitions whose nodes have Slurm's default of 1 MB, as `slurm.conf` does not set their memory."""
    names = [each.name for each in partitions if not each.machine.memory_gib]
    if not names:
        return ""
    return f"; no `RealMemory` in slurm.conf for {', '.join(names)}: a task with `memory` does not match, so omit it"
