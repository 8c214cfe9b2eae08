"""The clouds that are set up, each imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.clouds.base import Cloud


class LazyClouds(Mapping[str, "Cloud"]):
    """The clouds that are set up. An adapter is imported on the first lookup of its cloud; an iteration imports all."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Cloud | None]) -> None:
        self._names = names
        self._make = make
        self._made: dict[str, Cloud | None] = {}

    def __getitem__(self, name: str) -> Cloud:
        if name in self._names and name not in self._made:
            self._made[name] = self._make(name)
        cloud = self._made.get(name)
        if cloud is None:
            raise KeyError(name)
        return cloud

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
