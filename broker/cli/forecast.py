"""Render the forecast of a plan: cost and time as ranges, and their main drivers."""

from __future__ import annotations

from collections.abc import Callable

from broker.cli.render import print_line, print_wrapped
from broker.formatting import format_count, format_hours, format_usd, to_plain
from broker.optimizer.explain import show_chance
from broker.optimizer.forecast import CostForecast, forecast_plan, list_influences
from broker.types import Plan
from broker.types.forecasts import Range

INFLUENCES_MAX, INFLUENCE_MIN = 4, 0.005  # smaller shares of the expected cost are not shown
HOURS_MIN = 0.05


def list_forecast_lines(plan: Plan) -> list[str]:
    """List p50 and p10-p90 of cost and time under the production policy, and what it is expected to do."""
    found = forecast_plan(plan)
    if found is None:
        return []
    lines = [
        f"Forecast: {_describe_range(found.usd, format_usd)} USD, {_describe_range(found.hours, format_hours)} "
        "from submission to end (p50, p10-p90)",
        f"Chances: {_describe_chances(found)}",
        f"On average: {_describe_counts(found)}; {format_count(found.places, 'candidate location')}",
    ]
    if not _describe_chances(found):
        del lines[1]
    if found.is_costlier_than_on_demand(plan.hour_value_usd or 0.0):
        lines.append(
            f"Note: on-demand to the end costs {format_usd(found.ondemand_usd)} USD, less than the forecast's mean of "
            f"{format_usd(found.usd_mean)} USD"
        )
    return lines


def show_influences(plan: Plan) -> None:
    """Print the changes with the largest effect on the expected cost."""
    found = forecast_plan(plan)
    if found is None:
        return
    print_line(f"\nExpected {format_usd(found.usd_mean)} USD; this would change if")
    influences = list_influences(plan)
    for each in influences[:INFLUENCES_MAX]:
        change = each.usd_mean - found.usd_mean
        if abs(change) >= INFLUENCE_MIN * found.usd_mean:
            print_wrapped(f"  {each.change}: {'-' if change < 0 else '+'}{format_usd(abs(change))} USD", indent=4)


def _describe_range(found: Range, show: Callable[[float], str]) -> str:
    return f"{show(found.p50)} ({show(found.p10)} to {show(found.p90)})"


def _describe_chances(found: CostForecast) -> str:
    parts = []
    if found.deadline_chance is not None:
        by = ", by switching to on-demand if needed" if found.has_fallback else ""
        parts.append(f"{show_chance(found.deadline_chance)} to meet the deadline{by}")
    if found.budget_chance is not None:
        parts.append(f"{show_chance(found.budget_chance)} to stay within the budget")
    return "; ".join(parts)


def _describe_counts(found: CostForecast) -> str:
    parts = [f"{found.preemptions:.1f} preemptions", f"{format_hours(found.waiting_hours)} waiting for spot"]
    if found.ondemand_hours >= HOURS_MIN:
        parts.append(f"{format_hours(found.ondemand_hours)} on-demand")
    return ", ".join(parts)


def describe_forecast(plan: Plan) -> object:
    """Return the forecast, JSON-ready; None if the choice does not run on spot."""
    found = forecast_plan(plan)
    return None if found is None else to_plain(found)
