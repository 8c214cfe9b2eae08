"""Define the error tree. An error carries its message, reasons and hints as data; only the CLI renders it.

BrokerError                     exit code
├── TaskError                   2   invalid task file: one or more issues, each with file:line:column
├── UsageError                  2   invalid command (unknown cluster, wrong state, bad option)
│   └── PolicyError                 the administrator's policy refuses the task
├── NoOfferError                3   no offer fits; lists what each filter removed
│   ├── NotImportedError            the catalog has no offers of a cloud that the user has to import
│   └── UnknownNameError            unknown cloud, region, zone, instance type or accelerator
├── StateError                  4   the state folder cannot be used (locked, newer schema, unreadable)
│   ├── FencedError                 another daemon has taken over; this one must stop
│   └── DamagedRowError             one row of the state file is unreadable; the others are fine
├── JobEndedError               1   a job ended with a status other than the one waited for
├── WaitTimeoutError            1   a job did not reach the status in time
├── SourceError                 1   a price source did not respond, or its response is implausible
├── RunFailedError              100 the user's program failed; its own exit code is `returncode`
└── CloudError                  5   cloud provider error
    ├── CapacityError               try elsewhere; outside `scope`
    ├── QuotaError                  do not retry there
    ├── LimitError                  over a limit that an administrator of the server set; nothing was started
    ├── AuthError                   stop; the hint shows how to log in
    │   ├── AccountError                logged in to an account other than the one with the nodes
    │   └── DeniedError                 forbidden by a policy or a missing permission, within `scope`
    ├── ThrottledError              back off, then retry
    ├── InvalidRequestError         stop: a retry would give the same answer
    │   └── MissingPackageError         an optional package is not installed; the hint shows how to install it
    ├── TransientError              retry
    │   └── UnreachedError          a node that has never responded: it may still be booting
    └── UnknownOutcomeError         the call may have succeeded: check before retrying
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from broker.frozen import frozen

Scope = Literal["zone", "region", "cloud"]


class BrokerError(Exception):
    """An error that a user can act on.

    `hints` are the next steps, most useful first; `details` are lines that explain why.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hints: Sequence[str] = (), details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.details = tuple(details)


@frozen
class Issue:
    """One issue in a task file. Lines and columns count from 1; 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str
    hint: str | None = None
    source_line: str | None = None


class TaskError(BrokerError):
    """All issues of a task file, reported at once."""

    exit_code = 2

    def __init__(self, issues: Sequence[Issue]) -> None:
        count = len(issues)
        super().__init__(issues[0].message if count == 1 else f"{count} errors in {issues[0].file}")
        self.issues = tuple(issues)


class UsageError(BrokerError):
    """An invalid command: an unknown cluster, the wrong state, an invalid option; exit code 2."""

    exit_code = 2


class PolicyError(UsageError):
    """The administrator's policy refuses a task; nothing was started. A policy raises it with its reason."""


class NoOfferError(BrokerError):
    """No offer in the catalog satisfies the task; `details` explain what excluded the offers."""

    exit_code = 3


class NotImportedError(NoOfferError):
    """The catalog has no offers of a cloud, so it is unknown whether any fits; a plan reports this without failing."""


class UnknownNameError(NoOfferError):
    """A name in the task, such as a region or an instance type, is not in the catalog."""


class StateError(BrokerError):
    """The state folder or database cannot be used; exit code 4."""

    exit_code = 4


class FencedError(StateError):
    """Another controller has taken over: this one may no longer write for the job."""


DROPPABLE_TABLES = ("jobs", "attempts", "clusters", "intents", "nodes", "schedules", "due_times")


class DamagedRowError(StateError):
    """A row of the state file is unreadable; `table` and `key` identify it."""

    def __init__(self, table: str, key: str, why: str) -> None:
        dropping = f", or delete the row with `broker state drop {table} '{key}'`" if table in DROPPABLE_TABLES else ""
        super().__init__(
            f"row `{key}` of `{table}` in the state file is damaged: {why}",
            hints=(f"restore the newest copy with `broker state restore`{dropping}",),
        )
        self.table = table
        self.key = key


class JobEndedError(BrokerError):
    """A job ended with a status other than the one waited for."""


class WaitTimeoutError(BrokerError):
    """A wait has reached its time limit."""


class SourceError(BrokerError):
    """A price source, catalog or trace could not be read, or its content is implausible."""


class RunFailedError(BrokerError):
    """The user's program failed; `returncode` is its exit code."""

    exit_code = 100

    def __init__(self, message: str, *, returncode: int, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.returncode = returncode


class CloudError(BrokerError):
    """A cloud refused a request, or the request failed; exit code 5."""

    exit_code = 5


class CapacityError(CloudError):
    """The cloud has no capacity for the machine in `scope`: try elsewhere."""

    def __init__(
        self, message: str, *, scope: Scope = "zone", hints: Sequence[str] = (), details: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints, details=details)
        self.scope = scope


class QuotaError(CloudError):
    """The request exceeds a quota of the account: do not retry there."""


class AuthError(CloudError):
    """The login is missing, expired or rejected: stop, and name the command to log in."""


class AccountError(AuthError):
    """The login belongs to a different account from the one that holds the nodes."""


class DeniedError(AuthError):
    """Denied by an organisation's policy, an explicit deny, or a missing permission; final within `scope`."""

    def __init__(
        self, message: str, *, scope: Scope = "region", hints: Sequence[str] = (), details: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints, details=details)
        self.scope = scope


class LimitError(CloudError):
    """A launch would exceed a limit that the server's administrator has set for a user or project.

    Nothing was started.
    """


class ThrottledError(CloudError):
    """The cloud limits the rate of requests: back off, then retry."""


class InvalidRequestError(CloudError):
    """The cloud rejected the request as invalid: a retry would fail again."""


class MissingPackageError(InvalidRequestError):
    """A Python package that the cloud's adapter requires is not installed."""


class TransientError(CloudError):
    """A temporary failure: retry."""


class UnreachedError(TransientError):
    """The node `node_id` has never responded; it may still be booting."""

    def __init__(self, message: str, *, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class UnknownOutcomeError(CloudError):
    """The call may have succeeded: list the resources before retrying."""
