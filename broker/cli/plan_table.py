"""Render a ranking as a table and as data."""

from __future__ import annotations

from collections.abc import Sequence

from broker.cli.render import drop_shared, measure_width, print_line, print_note, print_table, print_wrapped
from broker.formatting import format_count, format_hours, format_usd, to_plain
from broker.types import Estimate, Plan, Task

ZONE_WIDTH = 17  # the longest zone name of the large clouds, plus the suffix of one more zone
WIDTH_OF_ALL = 100  # columns that a table with every column takes
MODELS = {"on-demand": "od", "spot": "spot", "spot, then on-demand": "spot>od"}


def show_plan(plan: Plan, *, top: int = 5, now_s: float | None = None, forecast: Sequence[str] = ()) -> None:
    """Print the ranked table, the choice and its reason, and the date of the prices.

    `now_s` enables the note on the age of the prices. The lines of a `forecast` replace the chances of the estimate.
    """
    task = plan.task
    groups = fold_zones(plan.estimates, top)
    shown = [group[0] for group in groups]
    has_work = plan.choice.expected_usd is not None
    columns = ["#", "CLOUD", "REGION/ZONE", "INSTANCE", "ACC", "vCPU/GiB", "MODEL", "USD/h", "USD", "TIME"]
    gone = set[str]() if has_work else {"USD", "TIME"}
    if has_work and measure_width() < WIDTH_OF_ALL:
        # `Each node` below has vCPUs and memory, which matter less beside an accelerator.
        gone |= {"#", "vCPU/GiB"} if any(each.placement.offer.accelerator for each in shown) else {"#"}
    rows = [list_cells(number, group[0], join_zones(group)) for number, group in enumerate(groups, start=1)]
    columns, rows, shared = drop_shared(columns, rows, names=["ACC"])
    kept = [i for i, name in enumerate(columns) if name not in gone]
    numbers = ("#", "vCPU/GiB", "USD/h", "USD", "TIME")
    print_line(_make_header(task, shared.get("ACC", "-")))
    print_table(
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        right=numbers,
        firm=(*numbers, "CLOUD", "MODEL"),
        least={"REGION/ZONE": ZONE_WIDTH, "ACC": 12},
    )
    if (rest := len(plan.estimates) - sum(map(len, groups))) > 0:
        print_line(f"... and {rest} more")
    if order := _explain_order(plan, shown):
        print_wrapped(order, indent=7)
    print_line(f"Choice: {describe_choice(plan.choice)}")
    print_line(f"Each node: {describe_machine(plan.choice)}")
    print_wrapped(f"Why: {plan.reason}", indent=5)
    for line in forecast:
        print_wrapped(line, indent=line.index(":") + 2)
    if not forecast and (plan.choice.deadline_chance is not None or plan.choice.budget_chance is not None):
        print_line(f"Chances: {_describe_chances(plan.choice)}")
    as_of = plan.choice.placement.as_of or plan.prices_as_of
    marks = []
    if any(each.placement.offer.is_estimated and not each.placement.is_spot for each in shown):
        marks.append("~ marks an estimate")
    if any(each.switch_after_hours is not None for each in shown):
        marks.append("spot>od starts on spot and may switch to on-demand")
    print_line("; ".join([f"Prices as of {as_of}", *marks]))
    if now_s is not None:
        from broker.catalog.staleness import warn_if_stale

        if warning := warn_if_stale(plan.choice.placement, now_s):
            print_note(f"note: {warning}")


def _make_header(task: Task, accelerators: str) -> str:
    """Name the task, its nodes, and the accelerators of a node if they are the same in all rows."""
    each = "" if accelerators == "-" else f", {accelerators}{' each' if task.num_nodes > 1 else ''}"
    return f"Task {task.name or '(no name)'}: {format_count(task.num_nodes, 'node')}{each}"


def _explain_order(plan: Plan, shown: Sequence[Estimate]) -> str:
    """Explain rows that are not in the order of their cost; return an empty text if they are."""
    costs = [each.expected_usd or 0.0 for each in shown]
    if plan.hour_value_usd is None or costs == sorted(costs):
        return ""
    return (
        f"Order: USD + {format_usd(plan.hour_value_usd)} for each hour of TIME (`goal: {{hour_value: USD}}` changes it)"
    )


def has_spot_work(plan: Plan) -> bool:
    """Return whether the choice runs on spot with a known amount of work, so that cost and time can be forecast."""
    return plan.choice.placement.is_spot and plan.choice.breakdown is not None


def fold_zones(estimates: Sequence[Estimate], top: int) -> list[list[Estimate]]:
    """Group the first `top` lines of a ranking: neighbours that differ only by zone share a line."""
    groups = list[list[Estimate]]()
    for estimate in estimates:
        if groups and _strip_zone(estimate) == _strip_zone(groups[-1][0]):
            groups[-1].append(estimate)
        elif len(groups) == top:
            break
        else:
            groups.append([estimate])
    return groups


def _strip_zone(estimate: Estimate) -> tuple[object, ...]:
    offer = estimate.placement.offer
    return (offer.cloud, offer.region, *list_cells(0, estimate, "")[3:])


def join_zones(group: Sequence[Estimate]) -> str:
    """Join zones: `us-east-1a,b`, or `us-east-1a +4` for many."""
    first, *others = [each.placement.offer.zone or each.placement.offer.region for each in group]
    region = group[0].placement.offer.region
    text = ",".join([first, *(zone.removeprefix(region).lstrip("-") for zone in others)])
    return text if len(text) <= ZONE_WIDTH or not others else f"{first} +{len(others)}"


def list_cells(number: int, estimate: Estimate, zones: str) -> list[str]:
    """Return the cells of one row of the ranking."""
    offer = estimate.placement.offer
    is_estimated = offer.is_estimated and not estimate.placement.is_spot
    return [
        str(number), offer.cloud, zones, offer.instance_type,
        f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else "-",
        f"{offer.vcpus:g}/{offer.memory_gib:g}", MODELS[estimate.strategy],
        format_usd(estimate.placement.usd_hour, is_estimated=is_estimated),
        format_usd(estimate.expected_usd, is_estimated=is_estimated), format_hours(estimate.expected_hours),
    ]  # fmt: skip


def describe_machine(estimate: Estimate) -> str:
    """Describe a node: `96 vCPU, 1152 GiB, 8 x A100-80GB`."""
    offer = estimate.placement.offer
    accelerators = f", {offer.accelerator_count:g} x {offer.accelerator}" if offer.accelerator else ""
    return f"{offer.vcpus:g} vCPU, {offer.memory_gib:g} GiB{accelerators}"


def describe_choice(estimate: Estimate, *, zones: str | None = None) -> str:
    """Describe a placement: `2 x p5.48xlarge spot in aws us-east-1a`; `zones` names several equal ones."""
    placement = estimate.placement
    offer = placement.offer
    place = f"{offer.cloud} {zones or offer.zone or offer.region}"
    return f"{placement.node_count} x {offer.instance_type} {estimate.strategy} in {place}"


def _describe_chances(estimate: Estimate) -> str:
    from broker.optimizer.explain import show_chance

    parts = []
    if estimate.deadline_chance is not None:
        parts.append(f"{show_chance(estimate.deadline_chance)} to meet the deadline")
    if estimate.budget_chance is not None:
        parts.append(f"{show_chance(estimate.budget_chance)} to stay within the budget")
    return ", ".join(parts)


def describe_plan(plan: Plan, top: int) -> dict[str, object]:
    """Return the first `top` placements, the choice and the rejections, JSON-ready."""
    return {
        "task": plan.task.name,
        "num_nodes": plan.task.num_nodes,
        "reason": plan.reason,
        "hour_value_usd": plan.hour_value_usd,
        "prices_as_of": plan.prices_as_of,
        "candidates": len(plan.estimates),
        "choice": describe_estimate(plan.choice),
        "estimates": [describe_estimate(estimate) for estimate in plan.estimates[:top]],
        "rejections": to_plain(plan.rejections),
    }


def describe_estimate(estimate: Estimate) -> dict[str, object]:
    """Return an estimate as JSON-ready data."""
    data: dict[str, object] = to_plain(estimate)
    return {**data, "strategy": estimate.strategy, "usd_hour": estimate.placement.usd_hour}
