"""The interface of granters of bucket access: needs, grants, and three verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.frozen import frozen
from broker.types import Secret, Task

FOLDER = "{access}"  # in `Grant.envs`: stands for the folder on the node that holds the files


@frozen
class Need:
    """Keys of one bucket that a task uses.

    `path` "" is the whole bucket, "data" the object `data` and all below `data/`; with `is_open`, all keys that begin
    with `path`. `is_written`: the program must be able to write, which is tried before anything paid starts.
    `is_optional`: granted where possible, and no reason to refuse a launch. `is_made_later`: the launch makes the
    bucket.
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
        """Keys, with `*` for any text: `("data", "data/*")`."""
        if not self.path:
            return ("*",)
        return (f"{self.path}*",) if self.is_open else (self.path, f"{self.path}/*")

    def find_probe(self) -> str:
        """Return the key that is written and deleted to prove the access."""
        name = "broker-access-check"
        return f"{self.path}{name}" if self.is_open else f"{self.path}/{name}".lstrip("/")


@frozen
class Grant:
    """Credentials for nodes: files by name, and variables that point programs to them.

    It ends at `expires_s`, unless a newer one has replaced the files by then; `renew_s` is when to make that one.
    """

    files: Mapping[str, Secret] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)  # variables that are secrets themselves
    issued_s: float = 0.0
    expires_s: float = float("inf")
    renew_s: float = float("inf")
    by: str = ""  # the granting principal, for the user: "your IAM user"
    scope: str = ""  # equal for equal keys: a newer grant replaces older ones of its scope


class Granter(Protocol):
    """Grants access to buckets of one scheme with this machine's login. All verbs block and are idempotent."""

    def find_own(self, task: Task, cloud: str) -> str:
        """Describe how nodes of `cloud` that run `task` have access without a grant; "" if they have none."""
        ...

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Make a grant for exactly these keys; `endpoint`: of the service, if the task overrides the default.

        Raises AuthError if this login cannot grant, with alternatives as hints; InvalidRequestError for a need that no
        grant can express; TransientError if the service does not respond.
        """
        ...

    def prove(self, need: Need, grant: Grant) -> None:
        """Use the grant as a node would: write and delete an object, or list. Raises the errors of `issue`."""
        ...


@runtime_checkable
class CanSweepGrants(Protocol):
    """A granter that creates resources in the account which outlive a grant."""

    def sweep(self) -> int:
        """Delete all resources created for this installation; return their number. Raises CloudError.

        Call this only when no node that uses them is left.
        """
        ...


class MakeGranter(Protocol):
    """The type of the makers in `GRANTERS`. Makes no network calls."""

    def __call__(self, config: Config, *, clock: Clock) -> Granter:
        """Return a granter; no cloud is contacted before its first use."""
