"""`broker check`: check which clouds are usable and how to enable the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from broker.app.checking import find_inspector
from broker.app.checks import CheckedItem
from broker.app.session import Session
from broker.app.verbs.account import inspect_cloud, inspect_clouds, list_startable
from broker.cli import options
from broker.cli.context import check_embedded, make_context, make_session
from broker.cli.render import print_json, print_line, print_table, print_wrapped
from broker.errors import AuthError, UsageError


def check(
    cloud: Annotated[str | None, typer.Argument(metavar="CLOUD", help="Check one cloud in detail.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="CLOUD", help="Print the permissions that a cloud's credentials require, as a policy file."
        ),
    ] = None,
    types: Annotated[
        bool,
        typer.Option("--types", help="List accelerators that would start now on this cloud, and why others would not."),
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Launch one cheap node, test everything that jobs require, and terminate it.")
    ] = False,
    spend: Annotated[
        float, typer.Option("--spend", metavar="USD", min=0, help="With --live: maximum cost in USD.")
    ] = 1.0,
    bucket: Annotated[
        str | None, typer.Option(metavar="URL", help="With --live: bucket that nodes must be able to write to.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="NAME[:COUNT]", help="With --live: accelerators, instead of 2 vCPUs."),
    ] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="With --live: use an on-demand node, and also test stop and start.")
    ] = (False),
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --live: record requests and responses, without private data."),
    ] = None,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Check which clouds are usable and how to enable the others.

    With a cloud, the exit code is 5 if a required check fails.
    """
    cloud, policy = ("kubernetes" if each == "k8s" else each for each in (cloud, policy))
    if live:
        from broker.cli.check_live import check_live

        check_embedded("check --live")

        if cloud is None:
            raise UsageError(
                "`--live` requires a cloud",
                hints=["name one, e.g. `broker check aws --live`; `local` rehearses on this machine"],
            )
        check_live(
            make_context(), cloud, spend_usd_max=spend, bucket=bucket, record=record, gpus=gpus, on_demand=on_demand,
            yes=yes, as_json=as_json,
        )  # fmt: skip
    elif policy is not None:
        print_line(find_inspector(policy).write_policy(make_context().config).rstrip("\n"))
    elif types:
        _show_types(make_session(), cloud, as_json=as_json)
    elif cloud is not None:
        _show_closely(make_session(), cloud, as_json=as_json)
    else:
        _show_all(make_session(), as_json=as_json)


def _show_all(session: Session, *, as_json: bool) -> None:
    found = session.call(inspect_clouds)
    if as_json:
        print_json([{"cloud": each.name, "can_launch": each.can_launch, "note": each.note} for each in found])
        return
    print_table(
        ["CLOUD", "LAUNCH", "NOTE"], [[each.name, "yes" if each.can_launch else "no", each.note] for each in found]
    )
    print_line("Check one cloud in detail with `broker check CLOUD`")
    print_line("Plans include every listed cloud: `broker plan`, `broker launch --dryrun`")


def _show_closely(session: Session, name: str, *, as_json: bool) -> None:
    findings = session.call(inspect_cloud, cloud=name)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _show_finding(finding)
    if any(finding.is_needed and not finding.is_ok for finding in findings):
        raise typer.Exit(AuthError.exit_code)


def _show_types(session: Session, name: str | None, *, as_json: bool) -> None:
    if name is None:
        raise UsageError("`--types` requires a cloud", hints=("name one, e.g. `broker check aws --types`",))
    findings = session.call(list_startable, cloud=name)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
        return
    rows = [
        [
            finding.accelerator,
            finding.instance_type,
            _name_ways(finding.ways),
            finding.region or "-",
            finding.why.partition(":")[0],
        ]
        for finding in findings
    ]
    print_table(["GPU", "MACHINE", "STARTS", "REGION", "WHY"], rows, firm=("GPU", "STARTS", "REGION", "WHY"))
    alike: dict[str, list[str]] = {}
    for finding in findings:
        if finding.why:
            alike.setdefault(finding.why, []).append(finding.accelerator)
    for why, accelerators in alike.items():
        print_wrapped(f"{why} ({', '.join(accelerators)})", indent=2)
    print_wrapped("Each is listed with its smallest machine; capacity is known only when a node is created.", indent=0)
    print_line("`--json` includes the command that requests more quota")


def _name_ways(ways: Sequence[str]) -> str:
    return "no" if not ways else ways[0] if len(ways) == 1 else "yes"


def _show_finding(finding: CheckedItem) -> None:
    """Print a finding; the command stays on one line, to be copied."""
    word = "ok" if finding.is_ok else "wrong" if finding.is_needed else "none"
    print_wrapped(f"{word:5}  {finding.name}: {finding.note}", indent=7)
    if finding.command:
        print_line(f"       fix: {finding.command}")
