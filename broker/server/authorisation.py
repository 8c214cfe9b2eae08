"""Authorisation: check the role of a token for a verb, and the owner of the resources that the verb changes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from broker.app import jobs
from broker.app.container import Context
from broker.app.sweeping import SweepRequest, name_sweep
from broker.app.verbs.shells import find_owned
from broker.client.wire import Verb
from broker.errors import DeniedError, UsageError
from broker.state.people import Owned, Role, Token
from broker.state.store import Store

SHELLS = ("open_shell", "run_on_node")  # the owner of a managed job or a service may enter its nodes
ORDER = (Role.VIEWER, Role.USER, Role.ADMIN)


def has_role(token: Token, needed: Role) -> bool:
    """Return whether the token has at least this role."""
    return ORDER.index(token.role) >= ORDER.index(needed)


def check_role(token: Token, verb: Verb) -> None:
    """Raise DeniedError unless the token has the role that the verb requires."""
    if not has_role(token, verb.role):
        raise DeniedError(
            f"`{verb.name}` requires the role `{verb.role.value}`, but {token.user} has `{token.role.value}`",
            hints=["ask an administrator of the server for another token"],
        )


def check_verb(context: Context, token: Token, verb: Verb, arguments: Mapping[str, Any]) -> None:
    """Check the role and, for users, that they own everything that the verb changes. Raises DeniedError."""
    check_role(token, verb)
    if has_role(token, Role.ADMIN):
        return
    if arguments.get("is_all") and verb.owned:
        raise DeniedError("`--all` includes resources of other users", hints=["name your own jobs"])
    for kind, name in list_changed(context, verb, arguments):
        check_owner(context.store, kind, name, user=token.user)


def check_owner(store: Store, kind: Owned, name: str, *, user: str) -> None:
    """Raise DeniedError if a cluster, service, schedule or job (by ID) exists and belongs to another user."""
    if not is_in_use(store, kind, name):
        return
    owner = store.owners.get(kind, name)
    if kind is Owned.SCHEDULE:
        schedule = store.schedules.get(name)
        owner = schedule.user or None if schedule else None
    if owner != user:
        raise _deny(kind, name, owner)


def is_in_use(store: Store, kind: Owned, name: str) -> bool:
    """Return whether the name belongs to something; the name of a cluster that is gone is free."""
    if kind is Owned.CLUSTER:
        return store.clusters.get(name) is not None or bool(store.intents.list_open(name))
    if kind is Owned.SERVICE:
        return store.services.get(name) is not None
    return kind is Owned.JOB or store.schedules.get(name) is not None


def _deny(kind: Owned, name: str, owner: str | None) -> DeniedError:
    whose = f"belongs to {owner}" if owner else "was started on the server itself"
    return DeniedError(f"{kind.value} `{name}` {whose}", hints=["ask its owner, or an administrator of the server"])


def list_changed(context: Context, verb: Verb, arguments: Mapping[str, Any]) -> Iterator[tuple[Owned, str]]:
    """List the clusters, services and jobs (by ID) that are named in the arguments of a verb."""
    request = arguments.get("request")
    if verb.name == "run_sweep" and isinstance(request, SweepRequest):  # the same sweep of another user
        group = name_sweep(request)
        yield from ((Owned.JOB, str(line.id)) for line in context.store.jobs.list_lines() if line.pipeline == group)
    for parameter, kind in verb.owned.items():
        given = arguments.get(parameter)
        names = [given] if isinstance(given, str) else list(given or ())
        for name in names:
            if kind is Owned.JOB:
                yield from ((kind, found) for found in _find_job_ids(context, name))
            elif kind in (Owned.SERVICE, Owned.SCHEDULE):
                yield kind, name
            elif verb.name in SHELLS and (found := context.store.clusters.get(name)) is not None:
                yield find_owned(context.store, found)
            else:
                known = [each.name for each in context.store.clusters.list(on_damage=context.warn)]
                yield from ((kind, each) for each in {name, *fnmatch.filter(known, name)})


def _find_job_ids(context: Context, name: str) -> list[str]:
    try:
        return [str(job.id) for job in jobs.find_jobs(context, [name])]
    except UsageError:
        return []  # unknown: the verb itself reports it
