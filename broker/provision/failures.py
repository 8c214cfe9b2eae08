"""The reasons why a search found no gang: refusals of placements, and errors that a later launch would not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker.errors import AuthError, BrokerError, CapacityError, CloudError, DeniedError
from broker.provision.launch import describe
from broker.provision.zones import split_zones
from broker.types import Placement

REASONS_MAX, PLACES_MAX, HINTS_MAX = 8, 6, 4  # limits of the final error


class SearchFailures:
    """Collect why placements were refused or skipped, and explain it in one error."""

    def __init__(self) -> None:
        # by cloud, region or placement: a later launch would not change these
        self._lasting: dict[str, CloudError] = {}
        self._refused: dict[tuple[str, str], list[Placement]] = {}  # cloud and reason -> placements
        self._remembered: set[tuple[str, str]] = set()  # those with reasons only from earlier searches
        self._hints: dict[str, None] = {}
        self._has_temporary = False
        self.last_error: CloudError | None = None  # the newest refusal that may change with time

    def is_excluded(self, placement: Placement) -> bool:
        """Return whether the placement's cloud or region has failed permanently."""
        return placement.offer.cloud in self._lasting or _name_region(placement) in self._lasting

    def exclude_cloud(self, cloud: str, error: CloudError) -> None:
        """Exclude a cloud from this search, for example because of its login."""
        self._lasting[cloud] = error

    def exclude_region(self, placement: Placement, error: CloudError) -> None:
        """Exclude the placement's region from this search, because of a quota or policy."""
        self._lasting[_name_region(placement)] = error

    def exclude_placement(self, placement: Placement, error: CloudError) -> None:
        """Exclude a placement from this search, and record its refusal for the final error."""
        self._lasting[describe(placement)] = error
        self._refused.setdefault((placement.offer.cloud, error.message), []).extend(split_zones(placement))

    def note_refusal(self, placement: Placement, error: CloudError) -> None:
        """Record a refusal by the cloud in this search."""
        self.last_error = error
        self.note_reason(placement, error.message)
        self._remembered.discard((placement.offer.cloud, error.message))
        self._hints.update(dict.fromkeys(error.hints))

    def note_remembered(self, placement: Placement, reason: str, hints: Iterable[str]) -> None:
        """Record a refusal from an earlier search, because of which the cloud was not called."""
        key = placement.offer.cloud, reason
        if key not in self._refused:
            self._remembered.add(key)
        self._hints.update(dict.fromkeys(hints))
        self.note_reason(placement, reason)

    def note_reason(self, placement: Placement, reason: str) -> None:
        """Record a temporary refusal for the final error; the placement may be retried."""
        self._has_temporary = True
        self._refused.setdefault((placement.offer.cloud, reason), []).extend(split_zones(placement))

    def explain(self, cluster: str) -> BrokerError:
        """Return the error of the whole search: CapacityError if a later search may succeed."""
        if self._lasting and not self._has_temporary:  # a login can be renewed, whereas other errors remain
            return min(self._lasting.values(), key=lambda error: not is_login_error(error))
        suffixes = {
            key: " (earlier refusal, not retried yet)" if key in self._remembered else "" for key in self._refused
        }
        details = [f"{_join(places)} ({key[0]}): {key[1]}{suffixes[key]}" for key, places in self._refused.items()]
        details += [f"{name}: {error.message}" for name, error in self._lasting.items() if isinstance(error, AuthError)]
        if len(details) > REASONS_MAX:
            details[REASONS_MAX - 1 :] = [f"and {len(details) - REASONS_MAX + 1} more reasons"]
        hints = [*self._hints, *(hint for error in self._lasting.values() for hint in error.hints)]
        return CapacityError(
            f"no placement has capacity for {cluster} now",
            scope="cloud",
            details=details,
            hints=(
                *list(dict.fromkeys(hints))[:HINTS_MAX],
                "retry until capacity is available with `broker launch -r`, or allow more regions",
            ),
        )


def is_login_error(error: CloudError) -> bool:
    """Return whether a user who logs in again may remove the error."""
    return isinstance(error, AuthError) and not isinstance(error, DeniedError)


def _join(placements: Sequence[Placement]) -> str:
    """Return placements with the same reason on one line."""
    kinds: dict[str, dict[str, None]] = {}
    for placement in placements:
        kind = f"{placement.offer.instance_type} {'spot' if placement.is_spot else 'on-demand'}"
        kinds.setdefault(kind, {})[placement.offer.zone or placement.offer.region] = None
    shown = [f"{kind} in {_shorten(list(zones))}" for kind, zones in kinds.items()]
    return f"{placements[0].node_count} x {_shorten(shown, '; ')}"


def _shorten(words: Sequence[str], separator: str = ", ") -> str:
    rest = len(words) - PLACES_MAX
    return separator.join(words[:PLACES_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _name_region(placement: Placement) -> str:
    return f"{placement.offer.region} ({placement.offer.cloud})"
