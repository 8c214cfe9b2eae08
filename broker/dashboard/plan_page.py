"""Show the page of a plan: the ranking, cost against time, every term, and a form that plans a changed task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.app.what_if import KEYS
from broker.dashboard.html import Content, Markup, element, join, table
from broker.dashboard.pareto import draw_pareto
from broker.dashboard.plans import CHANGE_MAX, PlanPage
from broker.formatting import format_hours, format_usd
from broker.optimizer.explain import show_chance
from broker.optimizer.terms import describe_hour_value, list_terms
from broker.types import Estimate, Plan

HEADS = ["#", "Location", "Nodes", "Market", "USD/h", "Expected USD", "Expected time", "Preemptions/h", "Deadline"]
RIGHT = ["#", "USD/h", "Expected USD", "Expected time", "Preemptions/h", "Deadline"]


def show_plan(page: PlanPage) -> Markup:
    """Show the plan of a job's task; nothing on this page starts or changes anything."""
    plan = page.plan
    as_of = plan.choice.placement.as_of or plan.prices_as_of
    parts: list[Content] = [
        element("p", element("a", f"Job {page.job_id}", href=f"/jobs/{page.job_id}"), f": {page.name}. {plan.reason}"),
        element(
            "p",
            f"{len(plan.estimates):,} placements fit; prices as of {as_of}. Planned for the whole task "
            "with the current catalog and preemption history; a running job keeps its location.",
            class_="faint",
        ),
        *_show_form(page),
        element("h2", "Best placements"),
        _show_ranking(page.top, "Best placements"),
    ]  # fmt: skip
    if page.points:
        parts += [
            element("h2", "Cost against time"),
            draw_pareto(page.points, page.frontier),
            _note_cut(page),
            element("h2", "Pareto-optimal placements"),
            _show_ranking(page.frontier, "Pareto-optimal placements"),
        ]
    if plan.hour_value_usd is not None:
        parts.append(element("p", f"The choice weighs cost against time: {describe_hour_value(plan)}."))
    parts.append(element("h2", "Terms"))
    parts += [_show_terms(plan, each) for each in page.explained]
    cells: list[Sequence[Content]] = [[each.filter, each.count, each.nearest or "-"] for each in plan.rejections]
    if cells:
        parts.append(element("h2", "Offers that do not fit"))
        parts.append(table(["Filter", "Offers", "Nearest"], cells, caption="Offers that do not fit", right=["Offers"]))
    return join(parts)


def _note_cut(page: PlanPage) -> Content:
    """Say that the plot has only some of the placements."""
    shown = len(page.points)
    if shown == page.timed_count:
        return None
    text = f"The plot has the first {shown:,} of {page.timed_count:,} placements, and all Pareto-optimal ones."
    return element("p", text, class_="faint")


def _show_form(page: PlanPage) -> Iterator[Content]:
    """Show the what-if form and its result; it is sent by GET, and the server only plans."""
    yield element("h2", "What if")
    yield element(
        "form",
        element("label", "Changes, such as ", element("code", "deadline=24h, use_spot=false"), for_="change"),
        element("input", id="change", name="change", value=page.change, maxlength=CHANGE_MAX, autocomplete="off"),
        element("button", "Plan the changed task", type="submit"),
        element("details", element("summary", "Keys"), element("p", ", ".join(KEYS))),
        method="get", action=f"/jobs/{page.job_id}/plan", class_="what-if",
    )  # fmt: skip
    if page.problem:
        yield element("p", f"`{page.change}` cannot be planned: {page.problem}", class_="note", role="status")
    elif page.changed is not None:
        before, after = page.plan.choice, page.changed.choice
        heads = ["Task", *HEADS[1:]]
        cells = [_list_cells("as it is", before), _list_cells(page.change, after)]
        yield table(heads, cells, caption="Comparison with the changed task", right=RIGHT)
        yield element("p", page.changed.reason)


def _show_ranking(estimates: Sequence[Estimate], caption: str) -> Markup:
    cells = [_list_cells(number, each) for number, each in enumerate(estimates, start=1)]
    return table(HEADS, cells, caption=caption, right=RIGHT)


def _list_cells(label: Content, each: Estimate) -> Sequence[Content]:
    placement, offer = each.placement, each.placement.offer
    is_estimated = offer.is_estimated and not placement.is_spot
    return [
        label, f"{offer.cloud} {offer.zone or offer.region}", f"{placement.node_count} x {offer.instance_type}",
        each.strategy, format_usd(placement.usd_hour, is_estimated=is_estimated),
        format_usd(each.expected_usd, is_estimated=is_estimated), format_hours(each.expected_hours),
        f"{each.preemptions_per_hour:.3f}", "-" if each.deadline_chance is None else show_chance(each.deadline_chance),
    ]  # fmt: skip


def _show_terms(plan: Plan, each: Estimate) -> Markup:
    offer = each.placement.offer
    title = f"{offer.cloud} {offer.zone or offer.region}, {offer.instance_type}, {each.strategy}"
    rows = [element("div", element("dt", name), element("dd", text)) for name, text in list_terms(plan.task, each)]
    return join([element("h3", title), element("dl", *rows, class_="terms")])


def show_choices(jobs: Sequence[tuple[int, str]], count: int) -> Markup:
    """List the jobs whose tasks can be planned: the newest of `count`."""
    if not jobs:
        return element("p", "No managed jobs. Rank placements of a task file with `broker plan TASK.yaml --explain`.")
    rows = [
        element("li", element("a", f"{job_id} {name}", href=f"/jobs/{job_id}/plan")) for job_id, name in jobs
    ]  # fmt: skip
    about = "Choose a job; its task is planned again, and nothing is started."
    more = ["Only live and newest jobs are listed. The page of each of ", element("a", "all jobs", href="/jobs"),
            " has a link to its plan."]  # fmt: skip
    return join([element("p", about), element("ul", *rows), element("p", *more) if count > len(jobs) else None])
