"""Which clusters and jobs a list shows to one user of a server: the user's own, or those of all users."""

from __future__ import annotations

from collections.abc import Mapping

from broker.app.container import Context
from broker.frozen import frozen
from broker.state.people import Owned


@frozen
class Visibility:
    """The owners of all objects of one kind by name, and the user to whose objects a list is limited.

    `has_unowned`: administrators also have what was started on the server itself, or moved there.
    """

    owners: Mapping[str, str]
    only: str  # "": no limit
    has_unowned: bool

    def shows(self, name: object) -> bool:
        """Return whether the list shows the object with this name (a job's ID, a cluster's name)."""
        owner = self.owners.get(str(name))
        return not self.only or owner == self.only or (owner is None and self.has_unowned)


def read_visibility(context: Context, kind: Owned, *, of_all_users: bool) -> Visibility:
    """Read the owners. Without a server there is one user, whose list has no limit."""
    user = context.payee.user
    owners = context.store.owners.list() if user else {}
    return Visibility(
        owners={name: owner for (each, name), owner in owners.items() if each is kind},
        only="" if of_all_users else user,
        has_unowned=context.is_administrator,
    )
