"""Check which clouds could launch nodes now, concurrently, and why the others could not."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.extras import find_missing_extra, write_install
from broker.clouds import CHECKS, CLOUDS
from broker.clouds.findings import CanInspectQuickly, CheckResult
from broker.errors import CloudError, StateError, UsageError
from broker.frozen import frozen
from broker.task.reading import suggest

if TYPE_CHECKING:
    from broker.clouds.findings import Inspector

LOCAL = "local"
LOGIN_HINTS = {"aws": "log in with `aws configure`", "gcp": "log in with `gcloud auth application-default login`"}


@frozen
class CloudSummary:
    """Whether a cloud can launch nodes, with a note that gives the reason."""

    name: str
    can_launch: bool
    note: str


async def check_clouds(context: Context) -> Sequence[CloudSummary]:
    """Check every cloud that has prices, and clouds behind SkyPilot that can launch; the local cloud is first."""
    listed = list(context.book.count_offers())
    checked = [name for name in listed if name in CHECKS and (name in context.clouds or _can_glance(name))]
    unlisted = [name for name in CHECKS if name not in listed and _can_glance(name)]
    answers = await _check_all([*checked, *unlisted], context)
    found = [CloudSummary(name=LOCAL, can_launch=True, note="this machine, simulated prices")]
    for name in listed:
        if name in answers:
            found.append(answers[name])
        elif name not in CLOUDS or name not in context.clouds:
            found.append(CloudSummary(name=name, can_launch=False, note=_explain(name)))
    return [*found, *(answers[name] for name in unlisted if answers[name].can_launch)]


def find_inspector(name: str) -> Inspector:
    """Return the inspector of a cloud. Raises UsageError for an unknown cloud, or if its library is not installed."""
    if name not in CHECKS:
        near = suggest(name, CHECKS)
        raise UsageError(f"unknown cloud `{name}`", hints=(near or f"known clouds: {', '.join(sorted(CHECKS))}",))
    if ":" not in CHECKS[name] and (extra := find_missing_extra(name)):
        raise UsageError(f"`{name}` requires its library", hints=(f"install it: `{write_install(extra)}`",))
    module, _, maker = CHECKS[name].partition(":")
    found = importlib.import_module(module)
    inspector: Inspector = getattr(found, maker)(name) if maker else found
    return inspector


async def _check_all(names: Sequence[str], context: Context) -> Mapping[str, CloudSummary]:
    """Check clouds concurrently, but clouds behind SkyPilot in sequence: the first answer applies to all of them."""
    behind = [name for name in names if _can_glance(name)]

    async def check_behind() -> list[CloudSummary]:
        return [await _summarize(name, context) for name in behind]

    own = [name for name in names if name not in behind]
    checking = asyncio.ensure_future(check_behind())
    found = await asyncio.gather(*(_summarize(name, context) for name in own))
    return {each.name: each for each in (*found, *await checking)}


async def inspect_closely(name: str, context: Context) -> Sequence[CheckResult]:
    """Check everything that one cloud requires, on its side and on this machine. Raises UsageError, CloudError."""
    if name == LOCAL and LOCAL in context.clouds:  # a server may exclude it
        return [CheckResult(name="machine", is_ok=True, note="`local` is this machine: always usable, no login needed")]
    findings = await find_inspector(name).inspect(context.config, clock=context.clock)
    return [*findings, *_list_missing_programs(name, context)]


def _list_missing_programs(name: str, context: Context) -> Sequence[CheckResult]:
    from broker.clouds.base import NeedsPrograms
    from broker.clouds.findings import CheckResult
    from broker.sites.openssh import find_program

    found = []
    cloud = context.clouds.get(name) if name in CLOUDS else None
    programs: tuple[str, ...] = cloud.programs if isinstance(cloud, NeedsPrograms) else ()
    for program in programs:
        try:
            find_program(program)
        except StateError as error:
            command = "apt-get install openssh-client"
            found.append(CheckResult(name="programs", is_ok=False, note=error.message, command=command))
    return found


async def _summarize(name: str, context: Context) -> CloudSummary:
    inspector = find_inspector(name)
    inspect = inspector.inspect_quickly if isinstance(inspector, CanInspectQuickly) else inspector.inspect
    try:
        findings = [*await inspect(context.config, clock=context.clock), *_list_missing_programs(name, context)]
    except CloudError as error:
        return CloudSummary(name=name, can_launch=False, note=error.message)
    wrong = next((finding for finding in findings if finding.is_needed and not finding.is_ok), None)
    if wrong is not None:
        return CloudSummary(name=name, can_launch=False, note=f"{wrong.name}: {wrong.note}")
    return CloudSummary(name=name, can_launch=True, note=findings[0].note)


def _can_glance(name: str) -> bool:
    return ":" in CHECKS[name] and isinstance(find_inspector(name), CanInspectQuickly)


def _explain(name: str) -> str:
    """Explain why a cloud cannot launch nodes."""
    if name not in CLOUDS:
        return "no adapter yet"
    if extra := find_missing_extra(name):
        return f"install `intercloud-broker[{extra}]`"
    return LOGIN_HINTS.get(name, "no login found")
