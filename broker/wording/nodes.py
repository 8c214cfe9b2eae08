"""Render the events of the search for nodes, and of clusters and nodes found or terminated."""

from __future__ import annotations

from collections.abc import Sequence

from broker.formatting import format_usd
from broker.wording.places import Place, describe_place


def render_place_asked(*, place: Place, usd_hour: float, is_resumed: bool = False) -> str:
    verb = "resuming" if is_resumed else "requesting"
    return f"{verb} {describe_place(place)} at {format_usd(usd_hour)} USD/h"


def render_place_hedged(
    *, place: Place, usd_hour: float, late: Place, at_stake_usd_hour: float, late_s: float | None = None
) -> str:
    """Render an additional request. `late`: the previous place, silent for `late_s` (None: unclear answer)."""
    why = "has given no clear answer" if late_s is None else f"has not responded for {late_s:.0f} s"
    request = render_place_asked(place=place, usd_hour=usd_hour)
    return f"{describe_place(late)} {why}; also {request}, up to {format_usd(at_stake_usd_hour)} USD/h at once"


def render_place_whole(*, place: Place, took_s: float) -> str:
    return f"{describe_place(place)}: all nodes are running after {took_s:.1f} s"


def render_place_refused(*, place: Place, took_s: float, error: str) -> str:
    return f"{describe_place(place)} refused after {took_s:.1f} s: {error}"


def render_place_skipped(*, place: Place, error: str) -> str:
    return f"{describe_place(place)} skipped: {error}"


def render_region_skipped(*, cloud: str, region: str, error: str) -> str:
    return f"{region} ({cloud}) skipped: {error}"


def render_cloud_skipped(*, cloud: str, error: str) -> str:
    return f"{cloud} skipped: {error}"


def render_call_failed(*, place: Place, error: str, wait_s: float | None = None) -> str:
    """Render a failed call; without `wait_s`, it is not repeated."""
    then = "giving up" if wait_s is None else f"retrying in {wait_s:.1f} s"
    return f"{describe_place(place)}: {error}; {then}"


def render_call_unclear(*, place: Place, error: str) -> str:
    return f"{describe_place(place)}: {error}; checking whether nodes were created"


def render_place_given_up(*, place: Place) -> str:
    return f"giving up on {describe_place(place)}; confirming that no node runs there"


def render_place_unneeded(*, place: Place) -> str:
    return f"{describe_place(place)} is no longer needed; terminating it"


def render_place_returned(*, place: Place, took_s: float, usd: float) -> str:
    return f"terminated {describe_place(place)} in {took_s:.1f} s (cost {format_usd(usd)} USD)"


def render_last_places(*, regions: Sequence[str]) -> str:
    return f"no location outside {' and '.join(regions)} remains to be tried; waiting for a clear answer there"


# -- clusters and nodes


def render_up(*, cluster: str, place: Place) -> str:
    return f"{cluster} is up: {describe_place(place)}"


def render_down(*, cluster: str) -> str:
    return f"{cluster} is down"


def render_replaced(*, cluster: str, rank: int) -> str:
    return f"node {rank} of {cluster} is up again"


def render_collected(*, node: str) -> str:
    return f"terminated {node}, which had no record"


def render_cluster_adopted(*, cluster: str, tag: str, node_count: int) -> str:
    return f"{node_count} running nodes tagged `{tag}` had no record; `broker down {cluster}` terminates them"


def render_attempt_adopted(*, number: int, found_count: int | None = None) -> str:
    """Render an adopted attempt. `found_count`: number of nodes found of an incomplete gang."""
    result = "continues" if found_count is None else f"ends because only {found_count} of its nodes were found"
    return f"attempt {number} was found by its tags and {result}"


def render_restored(*, copy: str) -> str:
    return f"the state was restored from {copy}"


def render_note(*, text: str) -> str:
    return text
