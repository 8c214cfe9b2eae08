"""`broker forecast score` and `broker cost --forecast`: forecasts compared with outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer

from broker.app.session import Session
from broker.app.verbs.account import list_forecasts, score_forecasts
from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_table
from broker.formatting import format_count, format_hours, format_usd, to_plain
from broker.jobs.scoring import JOBS_MIN, LEVELS, ForecastScore, JudgedForecast
from broker.types.forecasts import QUANTILES

app = typer.Typer(
    help="Compare forecasts with the outcomes of ended jobs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
NONE_YET = "No job with a forecast has succeeded yet; `broker jobs launch` keeps one for tasks with `goal: {work: ...}`"


@app.callback()
def forecast() -> None:
    """Compare forecasts with the outcomes of ended jobs."""


@app.command()
def score(as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """Show how often jobs ended within their forecasts of cost and time.

    Once 10 jobs have ended, plans widen their intervals if too few jobs were within theirs.
    """
    found = make_session().call(score_forecasts)
    if as_json or output is options.Format.JSON:
        print_json(to_plain(found))
        return
    if not found.jobs:
        print_line(NONE_YET)
        return
    print_line(f"Forecasts of {format_count(found.jobs, 'ended job')}:")
    print_table(
        ["", *(f"WITHIN {level:.0%}" for level in LEVELS), "BIAS OF THE MEAN"],
        [
            ["cost", *_show_shares(found.usd_coverage), _show_bias(found.usd_bias)],
            ["time", *_show_shares(found.hours_coverage), _show_bias(found.hours_bias)],
        ],
        right=[*(f"WITHIN {level:.0%}" for level in LEVELS), "BIAS OF THE MEAN"],
    )
    if found.brier is not None:
        print_line(
            f"Chance of the deadline: Brier score {found.brier:.3f} ({format_count(found.deadline_jobs, 'job')})"
        )
    print_line(_describe_factor(found))


def _describe_factor(found: ForecastScore) -> str:
    if found.jobs < JOBS_MIN:
        return f"Intervals are unchanged: {JOBS_MIN} jobs are required to judge them"
    if found.interval_factor > 1.0:
        return f"Too few jobs were within their 80 % interval: plans widen intervals {found.interval_factor:.2f} times"
    return "Intervals are unchanged: these jobs do not contradict them"


def _show_shares(shares: Sequence[float] | None) -> list[str]:
    return [f"{each:.0%}" for each in shares or ()]


def _show_bias(bias: float | None) -> str:
    return "-" if bias is None else f"{bias:+.1%}"


def show_judged(session: Session, *, as_json: bool) -> None:
    """Print cost and time of each ended job with its forecast."""
    judged = session.call(list_forecasts)
    if as_json:
        print_json([{**to_plain(each), "is_in_time": each.is_in_time, "quantiles": QUANTILES} for each in judged])
        return
    if not judged:
        print_line(NONE_YET)
        return
    print_table(
        ["JOB", "USD", "FORECAST (P10-P90)", "TIME", "FORECAST (P10-P90)", "IN TIME"],
        [_list_cells(each) for each in judged],
        right=("USD", "TIME"),
    )


def _list_cells(each: JudgedForecast) -> list[str]:
    usd, hours = each.forecast.usd, each.forecast.hours
    in_time = {None: "-", True: "yes", False: "no"}[each.is_in_time]
    return [
        f"{each.job_id} {each.name}",
        format_usd(each.usd),
        _show_range(usd, format_usd),
        format_hours(each.hours),
        _show_range(hours, format_hours),
        in_time,
    ]


def _show_range(quantiles: Sequence[float], show: Callable[[float], str]) -> str:
    low, middle, high = (show(quantiles[QUANTILES.index(share)]) for share in (0.1, 0.5, 0.9))
    return f"{middle} ({low}-{high})"
