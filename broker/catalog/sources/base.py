"""The seam to a price source, and the way it reaches the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

from broker.types import Offer


class Get(Protocol):
    """Fetches a URL's whole body. Raises SourceError after its retries, and AuthError when the answer is 401 or 403."""

    def __call__(self, url: str, *, query: Mapping[str, str] | None = None) -> bytes: ...


class PriceSource(Protocol):
    """One provider of prices. Made with the URL to ask, or without for the usual one."""

    name: ClassVar[str]
    clouds: ClassVar[tuple[str, ...]]

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Every offer of the cloud, at today's prices. Called once a refresh; reads to the end or raises.

        `known` are the book's present offers of the cloud: sizes of machines that a price list only names, interruption
        bands, zones. An offer without dates is of today; one whose price could not be renewed keeps the date it had.
        Raises AuthError with the login that is missing, and SourceError for an answer that cannot be believed: a
        missing field, another currency, a page that repeats. A price of 0 is skipped: nothing is given away.
        """
        ...
