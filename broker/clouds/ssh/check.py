"""`broker check ssh`: contact every host of the pools, and detect the sizes that the file does not state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.findings import CheckResult, report_invalid_file
from broker.clouds.ssh.hosts import RunOnHost, call_host, run_by_ssh
from broker.config import Config
from broker.errors import BrokerError, CloudError
from broker.sites import find_file
from broker.sites.facts import Machine, find_facts, name_accelerator, read_facts, write_facts
from broker.sites.pools import Host, read_pools

LISTED_MAX = 3


async def inspect(config: Config, *, clock: Clock, run: RunOnHost = run_by_ssh) -> Sequence[CheckResult]:
    """Report each pool: the hosts that answer, their sizes, and the problems of the others."""
    path = find_file("ssh", config.home)
    assert path is not None, "only called for native pools"
    try:
        pools = read_pools(path)
    except BrokerError as error:
        return report_invalid_file("pools", path, error)
    facts_path = find_facts("ssh", config.home)
    hosts = [host for pool in pools.values() for host in pool if not host.is_off]
    answers = dict(zip(hosts, await asyncio.gather(*(_probe(run, host) for host in hosts)), strict=True))
    found = {host.key: read_machine(each) for host, each in answers.items() if not isinstance(each, CloudError)}
    kept = {key: machine for key, machine in read_facts(facts_path).items() if key in {host.key for host in hosts}}
    write_facts(facts_path, {**kept, **found})
    return [judge_pool(name, pool, answers, found) for name, pool in pools.items()]


def write_policy(config: Config) -> str:
    """Return a comment only: hosts of your own have no permissions beyond those of the login."""
    return "# ssh pools: a login with a key on every host, and Python 3\n"


async def _probe(run: RunOnHost, host: Host) -> Any:
    try:
        return await call_host(run, host, "probe")
    except CloudError as error:
        return error


def read_machine(answer: Mapping[str, Any]) -> Machine:
    """Return the size that a host reports. Cards of several kinds are counted as the first kind."""
    cards = [name_accelerator(each) for each in answer["cards"]]
    return Machine(
        vcpus=answer["vcpus"],
        memory_gib=answer["memory_gib"],
        accelerator=cards[0] if cards else None,
        accelerator_count=cards.count(cards[0]) if cards else 0,
    )


def judge_pool(
    name: str, pool: Sequence[Host], answers: Mapping[Host, Any], found: Mapping[str, Machine]
) -> CheckResult:
    """Report how many hosts of a pool answer, and their sizes. Launches are impossible only if none answers."""
    errors = [(host, answers[host]) for host in pool if isinstance(answers.get(host), CloudError)]
    sizes = sorted({(host.machine or found[host.key]).name for host in pool if host.key in found})
    note = f"{sum(host.key in found for host in pool)} of {len(pool)} hosts answer: {', '.join(sizes) or 'none'}"
    if not errors:
        return CheckResult(name=name, is_ok=True, note=note)
    why = "; ".join(error.message for _, error in errors[:LISTED_MAX])
    host = errors[0][0]
    target = f"{host.login.user}@{host.name}" if host.login.user else host.name
    is_needed = len(errors) == len(pool)
    return CheckResult(name=name, is_ok=False, note=f"{note}; {why}", command=f"ssh {target}", is_needed=is_needed)
