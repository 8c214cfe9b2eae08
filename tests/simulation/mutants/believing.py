"""Bugs planted into the interpretation of lists: their owner, their coverage, and the evidence against them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from broker.errors import AccountError
from broker.jobs import controller, health, progress
from broker.provision.listing import Listing

Patches = Sequence[Any]


def list_of_another_account_believed() -> Patches:
    """Believe another account's list: the nodes are not in it, so they count as gone."""
    find_doubt = Listing.find_doubt

    def doubt_regions_only(self: Any, place: Any) -> Any:
        doubt = find_doubt(self, place)
        return None if isinstance(doubt, AccountError) else doubt

    return (patch.object(Listing, "find_doubt", doubt_regions_only),)


def silent_region_counts_as_empty() -> Patches:
    """Treat a region that does not answer as empty."""
    find_doubt = Listing.find_doubt

    def doubt_accounts_only(self: Any, place: Any) -> Any:
        doubt = find_doubt(self, place)
        return doubt if isinstance(doubt, AccountError) else None

    return (patch.object(Listing, "find_doubt", doubt_accounts_only),)


def answering_agent_is_no_proof_of_life() -> Patches:
    """Let a list without a node beat the node that has just answered."""
    return (patch.object(controller, "list_answering", lambda report, cluster: frozenset()),)


def silent_gang_replaced_as_soon_as_one_node() -> Patches:
    """Replace a silent gang as soon as one node, although our own network may be broken."""
    return (patch.object(health, "GANG_UNREACHABLE_S_MIN", health.UNREACHABLE_S_MIN),)


def silence_forgotten_at_a_restart() -> Patches:
    """Do not record how long nodes have been silent."""
    return (patch.object(progress, "with_silence", lambda attempt, silent_s: attempt),)
