"""The interface of granters of bucket access: needs, grants, and three verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.frozen import frozen
from broker.types import Secret, Task

FOLDER = "{access}"  # placeholder in `Grant.envs` for the folder on the node that contains the files


@frozen
class Need:
    """Keys of one bucket that a task uses.

    `path` "" is the whole bucket; "data" is the object `data` and everything below `data/`, or with `is_open`, all keys
    that begin with `path`. `is_written`: the program must be able to write, which is tested before anything is paid
    for. `is_optional`: granted if possible, but not a reason to refuse a launch. `is_made_later`: the launch creates
    the bucket.
    """

    scheme: str
    bucket: str
    path: str = ""
    is_open: bool = False
    is_written: bool = False
    is_read_only: bool = False
    is_optional: bool = False
    is_made_later: bool = False
    source: str = ""  # the field of the task file, for messages

    @property
    def url(self) -> str:
        """URL of the bucket path."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

    def list_patterns(self) -> tuple[str, ...]:
        """Return the keys, with `*` for any text: `("data", "data/*")`."""
        if not self.path:
            return ("*",)
        return (f"{self.path}*",) if self.is_open else (self.path, f"{self.path}/*")

    def find_probe(self) -> str:
        """Return the key that is written and deleted to prove access."""
        name = "broker-access-check"
        return f"{self.path}{name}" if self.is_open else f"{self.path}/{name}".lstrip("/")


@frozen
class Grant:
    """Credentials for nodes: files by name, and variables that point programs to them.

    A grant ends at `expires_s`, unless a newer grant has replaced the files by then; `renew_s` is the time to make it.
    """

    files: Mapping[str, Secret] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)  # variables with secret values
    issued_s: float = 0.0
    expires_s: float = float("inf")
    renew_s: float = float("inf")
    by: str = ""  # the granting principal, for the user: "your IAM user"
    scope: str = ""  # equal for equal keys: a newer grant replaces older ones with the same scope


class Granter(Protocol):
    """Grants access to buckets of one scheme with this machine's login. All verbs block and are idempotent."""

    def find_own(self, task: Task, cloud: str) -> str:
        """Describe the access that nodes of `cloud` running `task` have without a grant; "" if they have none."""
        ...

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Make a grant for exactly these keys; `endpoint`: of the service, if the task overrides the default.

        Raises AuthError, with alternatives as hints, if this login cannot grant access; InvalidRequestError for a need
        that a grant cannot express; TransientError if the service does not respond.
        """
        ...

    def prove(self, need: Need, grant: Grant) -> None:
        """Use the grant as a node would: write and delete an object, or list. Raises the errors of `issue`."""
        ...


@runtime_checkable
class CanSweepGrants(Protocol):
    """A granter that creates resources in the account that outlive a grant."""

    def sweep(self) -> int:
        """Delete all resources created for this installation; return their number. Raises CloudError.

        Call this only when no remaining node uses them.
        """
        ...


class MakeGranter(Protocol):
    """The type of the makers in `GRANTERS`. Makes no network calls."""

    def __call__(self, config: Config, *, clock: Clock) -> Granter:
        """Return a granter, which contacts the cloud on first use."""
