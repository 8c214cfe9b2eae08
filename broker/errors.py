"""The error tree. An error carries what happened, why, and hints as data; the CLI alone renders it.

BrokerError                     exit code
├── TaskError                   2   the task file is wrong: one issue or many, each with file:line:column
├── UsageError                  2   the command makes no sense here (no such cluster, wrong state, bad option)
├── NoOfferError                3   nothing for sale fits; says which filter took what
│   ├── NotImportedError            the price book has no offers yet of a cloud that the user has to import
│   └── UnknownNameError            the price book has no such cloud, region, zone, machine or accelerator
├── StateError                  4   the state folder cannot be used (locked, newer schema, unreadable)
│   ├── FencedError                 another daemon has taken over; this one must stop
│   └── DamagedRowError             one row of the state file cannot be read; the others can
├── SourceError                 1   a price source gave no answer, or none that can be believed
├── RunFailedError              100 the user's program failed; its own exit code is `returncode`
└── CloudError                  5   a cloud said no
    ├── CapacityError               try elsewhere; `scope` says how far away
    ├── QuotaError                  do not ask there again
    ├── AuthError                   stop; the hint says what to log in to
    │   ├── AccountError                logged in to another account than the one that holds the nodes
    │   └── DeniedError                 a policy or a missing permission forbids it there; `scope` says how far
    ├── ThrottledError              back off, then retry
    ├── InvalidRequestError         stop: asking again gives the same answer
    │   └── MissingPackageError         an optional package is not installed; the hint says how to install it
    ├── TransientError              retry
    │   └── UnreachedError          a machine that has never answered: it may still boot
    └── UnknownOutcomeError         the call may have worked: look before trying again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from broker.nouns import noun

Scope = Literal["zone", "region", "cloud"]


class BrokerError(Exception):
    """Something a user can act on. `hints` are complete sentences or commands, most useful first; `details` are lines
    that say more of why."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hints: Sequence[str] = (), details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.details = tuple(details)


@noun
class Issue:
    """One fault in a task file. Lines and columns count from 1; 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str
    hint: str | None = None
    source_line: str | None = None


class TaskError(BrokerError):
    """All faults found in a task file, reported at once."""

    exit_code = 2

    def __init__(self, issues: Sequence[Issue]) -> None:
        count = len(issues)
        super().__init__(issues[0].message if count == 1 else f"{count} errors in {issues[0].file}")
        self.issues = tuple(issues)


class UsageError(BrokerError):
    exit_code = 2


class NoOfferError(BrokerError):
    exit_code = 3


class NotImportedError(NoOfferError):
    """Raised before any offer is looked at: what fits there is not known, so a plan shows it without failing."""


class UnknownNameError(NoOfferError):
    pass


class StateError(BrokerError):
    exit_code = 4


class FencedError(StateError):
    pass


class DamagedRowError(StateError):
    """`table` and `key` name the row."""

    def __init__(self, table: str, key: str, why: str) -> None:
        super().__init__(
            f"row `{key}` of `{table}` in the state file is damaged: {why}",
            hints=(
                f"`broker state restore` goes back to the newest copy; "
                f"`broker state drop {table} '{key}'` removes the row",
            ),
        )
        self.table = table
        self.key = key


class SourceError(BrokerError):
    pass


class RunFailedError(BrokerError):
    exit_code = 100

    def __init__(self, message: str, *, returncode: int, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.returncode = returncode


class CloudError(BrokerError):
    exit_code = 5


class CapacityError(CloudError):
    def __init__(
        self, message: str, *, scope: Scope = "zone", hints: Sequence[str] = (), details: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints, details=details)
        self.scope = scope


class QuotaError(CloudError):
    pass


class AuthError(CloudError):
    pass


class AccountError(AuthError):
    pass


class DeniedError(AuthError):
    """Final where it was said: by an organisation's policy, an explicit deny, or for want of a permission. Places
    outside `scope` may still allow it."""

    def __init__(
        self, message: str, *, scope: Scope = "region", hints: Sequence[str] = (), details: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints, details=details)
        self.scope = scope


class ThrottledError(CloudError):
    pass


class InvalidRequestError(CloudError):
    pass


class MissingPackageError(InvalidRequestError):
    pass


class TransientError(CloudError):
    pass


class UnreachedError(TransientError):
    """`node_id` names the machine."""

    def __init__(self, message: str, *, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class UnknownOutcomeError(CloudError):
    pass
