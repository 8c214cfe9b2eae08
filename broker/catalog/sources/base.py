"""The interface of a price source, and its access to the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

from broker.types import Offer


class Get(Protocol):
    """Fetches a URL's whole body."""

    def __call__(self, url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        """Return the body of a response. Raises SourceError after the last retry, AuthError for status 401 or 403."""


class PriceSource(Protocol):
    """A provider of prices. Constructed with a URL, or without one for the default."""

    name: ClassVar[str]
    clouds: ClassVar[tuple[str, ...]]

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Return every offer of the cloud, at today's prices. Called once per refresh; reads everything or raises.

        `known` are the book's current offers of the cloud: they provide interruption bands, zones, and the sizes of
        machines that a price list only names. An offer without dates is from today; an offer whose price could not be
        renewed keeps its date.

        Raises AuthError with the missing login, and SourceError for an implausible response: a missing field, another
        currency, a repeated page. A price of 0 is skipped as an error in the list.
        """
        ...
