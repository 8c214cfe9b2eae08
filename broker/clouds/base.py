"""The interface to cloud providers: four verbs, and one Protocol for each optional capability."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.errors import CloudError
from broker.types import MachineSpec, Node, NodeList, NodeRequest, Offer

if TYPE_CHECKING:
    from pathlib import Path

    from broker.clouds.tape import Listener


class Cloud(Protocol):
    """A cloud adapter. Every method is idempotent: calling it again after a crash does no harm."""

    name: ClassVar[str]
    settle_s: ClassVar[float]  # how long `list_nodes` may lag behind `create_nodes`

    async def check(self) -> None:
        """Return if the login works; raise AuthError that names the missing credentials otherwise."""

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Request the whole gang and return without waiting; the same token gives the same nodes.

        Raises CapacityError, QuotaError (nothing was created), UnknownOutcomeError (list the nodes before retrying).
        """

    async def list_nodes(self, owner: str) -> NodeList:
        """List all nodes tagged with `owner`, including recently terminated ones.

        The absence of a node proves nothing before `settle_s` have passed.

        Regions that do not respond are named in the list. Raises CloudError only if no region responds.
        """

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Start terminating these nodes, each in its own region. Nodes that are already gone count as success.

        Returns before the nodes are gone; `list_nodes` shows when they are. Every node is attempted, then the first
        failure is raised.
        """


class MakeCloud(Protocol):
    """The type of a registry entry, in a module that imports no SDK."""

    def __call__(self, config: Config, *, clock: Clock) -> Cloud | None:
        """Return None if environment and files show no login; the cloud itself is not called."""


class ExplainMissingImage(Protocol):
    """The type of an entry of `MISSING_IMAGES`, in a module that imports no SDK."""

    def __call__(self, offer: Offer, home: Path) -> str:
        """Explain why a launch requires `image_id`; empty if it does not, or the settings in `home` name an image."""


@runtime_checkable
class HasQueue(Protocol):
    """A cloud where a gang waits for its turn in a queue, as in a batch system, before its nodes run."""

    queue_s: ClassVar[float]  # how long it may wait there before other places are tried


@runtime_checkable
class HasAccounts(Protocol):
    """A cloud where the same shell may be logged in to different accounts at different times."""

    async def find_account(self) -> str:
        """Return the account that this login reaches: AWS account id, Google project. Raises CloudError."""


@runtime_checkable
class ReadsSites(Protocol):
    """A cloud whose regions and machines a file of the user names. An entry may be removed while nodes run there."""

    def find_removal(self, region: str, node: Node | None = None) -> CloudError | None:
        """Return an AuthError if the file no longer names the region, or the node's machine; None if it does.

        Nodes there can be neither listed nor terminated, so they do not count as gone.
        """
        ...


@runtime_checkable
class CanStop(Protocol):
    """A cloud whose nodes can be stopped, keeping their disk, and started again."""

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Request the stop of these nodes. Already stopped is success; the list shows when they are."""

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Start stopped nodes in their zone. Already running is success. Raises CapacityError."""


@runtime_checkable
class CanPrepare(Protocol):
    """A cloud whose library takes seconds to import."""

    def prepare(self) -> None:
        """Start loading what the first call needs, in a thread, and return at once. Idempotent."""


@runtime_checkable
class CanExtend(Protocol):
    """A cloud where a node created later can reach, and be reached by, all nodes of the same cluster and attempt."""

    extends_gangs: ClassVar[bool]


@runtime_checkable
class CanSweep(Protocol):
    """A cloud where a cluster creates more than nodes: firewall groups, templates, disks."""

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Delete what `owner` created for clusters that are not in `keep`; return the number of resources deleted.

        Resources still used by a machine that is shutting down are left for the next sweep. `keep` is read before the
        cloud is listed, so it must name every cluster that exists or may be starting.
        """


@runtime_checkable
class CanAvoid(Protocol):
    """A cloud of the user's own machines, which gives a machine out again as soon as it is free."""

    def avoid_machine(self, node: Node, *, until_s: float) -> None:
        """Create no node on this node's machine before `until_s`, in Unix time. Idempotent."""
        ...


@runtime_checkable
class RenewsAccess(Protocol):
    """A cloud whose firewall admits ssh only from the address that this machine had when the node was created."""

    async def renew_access(self, nodes: Sequence[Node]) -> bool:
        """Admit this machine's current address to the running nodes among these; return whether a rule changed.

        Addresses admitted earlier stay. Idempotent. Raises CloudError.
        """
        ...


@runtime_checkable
class SetsIdentity(Protocol):
    """A cloud whose machines can have a login of their own: an instance profile, a service account."""

    def set_identity(self, cluster: str, identity: str) -> None:
        """Give this identity to the machines of `cluster` that this process creates.

        Other machines keep the identity from the settings.
        """
        ...


@runtime_checkable
class SupportsZoneSearch(Protocol):
    """A cloud where one call searches several zones for capacity and puts the whole gang into one of them or nowhere.

    `create_nodes` is then called with `Placement.other_zones`; the returned nodes name the zone.
    """

    def is_search_worth(self, spec: MachineSpec, *, zone_count: int) -> bool:
        """Return whether a search is faster than one call per zone."""
        ...


@runtime_checkable
class ProvidesSshHosts(Protocol):
    """A cloud whose nodes are machines that boot with a script and accept ssh as `user`.

    A node that shuts itself down there either disappears or stops without a signal: stopping it takes an API call.
    """

    name: ClassVar[str]

    @property
    def user(self) -> str:
        """The login user of the images."""


@runtime_checkable
class NeedsPrograms(Protocol):
    """A cloud whose nodes are reached with programs of this machine. They are checked before nodes are created."""

    programs: ClassVar[tuple[str, ...]]


@runtime_checkable
class SupportsConsole(Protocol):
    """A cloud that keeps the console output of a booting machine."""

    def name_console(self, node: Node) -> str:
        """Return the command that prints the console output."""
        ...


@runtime_checkable
class CanObserve(Protocol):
    """A cloud whose library can report its requests and responses."""

    def observe(self, listener: Listener) -> None:
        """Report every request and response to `listener` from now on, in the thread that receives the response."""
        ...


@runtime_checkable
class CanPreempt(Protocol):
    """A simulated cloud that can preempt nodes on demand, as a spot market does."""

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None:
        """Preempt nodes after `notice_s` seconds of notice; unknown ones are skipped."""
