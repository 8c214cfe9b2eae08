"""`broker locations`: time on spot, preemptions, refusals and prices by location, as on the dashboard's page."""

from __future__ import annotations

from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_table
from broker.dashboard.place_history import SHOWN_DAYS, PlaceHistory
from broker.dashboard.verbs import list_locations
from broker.formatting import format_duration, format_usd, to_plain


def locations(as_json: options.AsJson = False) -> None:
    """Show preemptions, refusals and prices of the locations where jobs ran on spot."""
    session = make_session()
    found = session.call(list_locations)
    if as_json:
        places = [{**to_plain(each), "preemptions_per_hour": each.row.hazard_per_hour} for each in found.places]
        print_json({"places": places, "refusals": to_plain(found.refusals)})
        return
    if not found.places:
        print_line("No job has run on spot yet")
    else:
        heads = ["LOCATION", "TYPE", "STAYS", "HOURS", "LOST", "LOST/h", "REFUSED", "SPOT", "ON-DEMAND"]
        print_table(heads, [_list_cells(each) for each in found.places], right=heads[2:])
        print_line(f"LOST: preemptions; REFUSED: refusals in {SHOWN_DAYS:.0f} days; prices in USD/h of one machine")
    now_s = session.clock.now_s()
    rows = [
        [
            f"{each.cloud} {each.zone or each.region or 'all regions'}", each.instance_type or "all",
            "spot" if each.is_spot else "on-demand", format_duration(max(0.0, each.expires_s - now_s)), each.reason,
        ]
        for each in found.refusals
    ]  # fmt: skip
    if rows:
        print_line()
        print_table(["REFUSED NOW", "TYPE", "MARKET", "EXPIRES IN", "REASON"], rows, firm=("EXPIRES IN",))


def _list_cells(each: PlaceHistory) -> list[str]:
    row = each.row
    return [
        f"{row.cloud} {row.zone or row.region}", row.instance_type, str(row.stays), f"{row.hours:.2f}",
        str(row.preemptions), "-" if row.hazard_per_hour is None else f"{row.hazard_per_hour:.3f}",
        str(len(each.refused_s)), format_usd(each.spot_usd_hour), format_usd(each.ondemand_usd_hour),
    ]  # fmt: skip
