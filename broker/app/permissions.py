"""Decisions of a server about its users, which verbs request where they act; without a server, everything is allowed.

A verb may wait between its start and its effects (for a price, for machines), and another user may create or take the
same name meanwhile. So owners are compared and recorded again in the transaction, or under the lock, that has the
effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from broker.types import Payee

if TYPE_CHECKING:
    from broker.app.limits import LaunchSize
    from broker.state.people import Owned
    from broker.types import Cluster, Estimate, Job


class Permissions:
    """The permissions of the one user of a state folder without a server; `ServerContext` overrides them."""

    is_administrator = True  # on a server: whether the caller has the role `admin`

    @property
    def payee(self) -> Payee:
        """The user and project against whose limits the jobs of a new schedule count; empty without a server."""
        return Payee()

    def admit(self, choices: Sequence[Estimate], demand: LaunchSize) -> None:
        """Accept the resources that a launch will start.

        A server raises LimitError if it would exceed a limit of its user.
        """

    def check_owner(self, kind: Owned, name: str) -> None:
        """Accept a change of what has this name.

        A server raises DeniedError if it belongs to another user. A name that is not in use has no owner.
        """

    def check_shell(self, cluster: Cluster) -> None:
        """Accept a shell on a node of the cluster. A server raises UsageError if it would be one on its own machine."""

    def check_requests(self, request_ids: Iterable[str]) -> None:
        """Accept request IDs, in the transaction that uses them.

        A server raises DeniedError for an ID of another user's job: the caller would get that job instead of one of its
        own.
        """

    def own(self, kind: Owned, name: str) -> None:
        """Record the owner of a cluster or service, just before it exists. Raises as `check_owner`."""

    def own_jobs(self, jobs: Sequence[Job]) -> None:
        """Record the owner of jobs, in the transaction that adds them; only a server does."""
