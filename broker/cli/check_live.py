"""`broker check CLOUD --live`: test a first launch on a real account, with a spending limit."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import typer

from broker.app.container import Context
from broker.app.planning import check_programs
from broker.cli import options
from broker.cli.launch import note_remaining
from broker.cli.render import print_json, print_line, print_note, print_wrapped
from broker.clouds.base import CanObserve, Cloud
from broker.clouds.tape import Scrubber, Tape
from broker.errors import CloudError, NoOfferError, UsageError
from broker.formatting import format_duration, format_usd
from broker.jobs.checkpoints import BUCKET_SCHEMES
from broker.provision.trial import MARK, PROGRAM, Step, StepOutcome, Trial, choose_places
from broker.types import Plan

PLACES = 3  # of each region: spot may be unavailable in one zone
HOURS = 0.25  # upper estimate of a trial's duration, for the price shown
OWNER = "0123456789ab"  # replaces the installation's ID in recordings


def check_live(
    context: Context,
    name: str,
    *,
    spend_usd_max: float,
    bucket: str | None,
    record: Path | None,
    gpus: str | None,
    on_demand: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Run each step of a node's life cycle and show its result and cost. Exit with code 5 if one fails."""
    cloud = context.clouds.get(name.partition("/")[0])
    if cloud is None:
        raise UsageError(
            f"`{name}` is not set up to launch nodes", hints=[f"see what is missing: `broker check {name}`"]
        )
    plan = _plan(context, name, gpus=gpus, is_spot=not on_demand, spend_usd_max=spend_usd_max)
    check_programs(context, [plan])
    plan = _set_bucket(context, plan, bucket)
    _agree(plan, spend_usd_max, yes=yes)
    cluster = f"{MARK}-{cloud.name}-{context.config.owner[:4]}"
    tape = _open_tape(context, cloud, record)
    trial = Trial(
        cluster, plan, cloud, provisioner=context.provisioner, gang=context.gang, store=context.store,
        clock=context.clock, owner=context.config.owner, spend_usd_max=spend_usd_max, bucket_url=bucket or "",
        on_step=(lambda step: None) if as_json else _show,
    )  # fmt: skip
    try:
        with closing(tape) if tape else nullcontext():
            steps = asyncio.run(trial.run())
    except KeyboardInterrupt:
        note_remaining(context, cluster)
        raise typer.Exit(130) from None
    if as_json:
        keys = ("name", "outcome", "note", "took_s", "spent_usd", "hints")
        print_json([{key: getattr(step, key) for key in keys} for step in steps])
    else:
        _sum_up(steps[-1].spent_usd, [step.name for step in steps if step.outcome is StepOutcome.FAILED])
    if tape:
        print_note(f"recorded {tape.count} requests and responses in {record}; review it before sharing")
    if any(step.outcome is StepOutcome.FAILED for step in steps):
        raise typer.Exit(CloudError.exit_code)


def _set_bucket(context: Context, plan: Plan, bucket: str | None) -> Plan:
    """Set the bucket as the checkpoint location, so that the node gets access as a job's nodes do.

    Raises AuthError or InvalidRequestError, before anything is paid for, if access cannot be granted.
    """
    if not bucket or not bucket.startswith(BUCKET_SCHEMES):
        return plan
    plan = replace(plan, task=replace(plan.task, checkpoint=replace(plan.task.checkpoint, to=bucket)))
    for sentence in context.grants.check([plan]):
        print_note(sentence)
    return plan


def _plan(context: Context, infra: str, *, gpus: str | None, is_spot: bool, spend_usd_max: float) -> Plan:
    """Plan the cheapest locations for one node; without GPUs, 2 vCPUs and any memory, which every account may launch.

    Raises UsageError if 15 minutes exceed the limit everywhere.
    """
    overrides = options.Overrides(
        name=MARK,
        infra=infra,
        gpus=gpus,
        cpus=None if gpus else "2+",
        memory=None if gpus else "0.5+",
        num_nodes=1,
        use_spot=is_spot,
    )
    task = context.resolve(options.read_task([PROGRAM], overrides))
    try:
        plan = context.plan(task, usable_clouds=frozenset(context.clouds))
    except NoOfferError as error:
        hints = ["try an on-demand instance: `--on-demand`", *error.hints] if is_spot else error.hints
        raise NoOfferError(error.message, hints=hints) from None
    places = choose_places(plan, per_region=PLACES, usd_hour_max=spend_usd_max / HOURS)
    if places.estimates:
        return places
    likely_usd = min(each.placement.usd_hour for each in plan.estimates) * HOURS
    raise UsageError(
        f"15 minutes of {plan.choice.placement.offer.instance_type} cost {format_usd(likely_usd)} USD, "
        f"more than the limit of {format_usd(spend_usd_max)}",
        hints=[f"raise the limit: `--spend {math.ceil(100 * likely_usd) / 100:.2f}`"],
    )


def _agree(plan: Plan, spend_usd_max: float, *, yes: bool) -> None:
    """Ask before launching."""
    usd_hour = max(estimate.placement.usd_hour for estimate in plan.estimates)
    offer, is_spot = plan.choice.placement.offer, plan.choice.placement.is_spot
    regions = len({estimate.placement.offer.region for estimate in plan.estimates})
    where = f" in the first of {regions} regions that provides one" if regions > 1 else ""
    print_note(
        f"one {'spot' if is_spot else 'on-demand'} {offer.instance_type}{where},\n"
        f"at up to {format_usd(usd_hour)} USD/h for a few minutes, terminated at {format_usd(spend_usd_max)} USD;\n"
        "clouds bill at least a minute, plus disks"
    )
    if offer.cloud != "local" and not yes:
        options.ask("Start?")


def _open_tape(context: Context, cloud: Cloud, record: Path | None) -> Tape | None:
    if record is None:
        return None
    if not isinstance(cloud, CanObserve):
        raise UsageError(f"`--record` is not supported for {cloud.name}", hints=["supported: aws and gcp"])
    owner = context.config.owner
    tape = Tape(record, Scrubber({owner: OWNER, owner[:4]: OWNER[:4], **_find_private(cloud)}))
    cloud.observe(tape.add_exchange)
    return tape


def _find_private(cloud: Cloud) -> dict[str, str]:
    """Find names that identify the account: Google project names contain people and companies."""
    from broker.clouds.base import HasAccounts

    if not isinstance(cloud, HasAccounts):
        return {}
    account = asyncio.run(cloud.find_account())
    return {} if account.isdigit() else {account: "project-1"}  # account numbers are recognised by their form


def _show(step: Step) -> None:
    took = f" ({format_duration(step.took_s)}, {format_usd(step.spent_usd)} USD so far)" if step.took_s >= 1 else ""
    print_wrapped(f"{step.outcome.value:8}{step.name}: {step.note}{took}", indent=8)
    for hint in step.hints:
        print_wrapped(f"        {hint}", indent=8)


def _sum_up(spent_usd: float, failed: list[str]) -> None:
    cost = f"cost about {format_usd(spent_usd)} USD at list price"
    print_line(f"failed: {', '.join(failed)}; {cost}" if failed else f"all steps passed; {cost}")
