"""The seam to other people's machines: four verbs, and one Protocol for each extra ability."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.types import MachineSpec, Node, NodeList, NodeRequest

if TYPE_CHECKING:
    from broker.clouds.tape import Listener


class Cloud(Protocol):
    """Every method may be called again after a crash and must then do no second harm."""

    name: ClassVar[str]
    settle_s: ClassVar[float]  # how long `list_nodes` may lag behind `create_nodes`

    async def check(self) -> None:
        """Raise AuthError naming the missing login, or return."""

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Ask for the whole gang and return at once; the same token gives the same nodes.

        Raises CapacityError, QuotaError (nothing was made), UnknownOutcomeError (look before asking again).
        """

    async def list_nodes(self, owner: str) -> NodeList:
        """All nodes tagged with `owner`, recently terminated ones too; absence proves nothing before `settle_s`.

        Regions that give no answer are named in the list. Raises CloudError only where none gives one.
        """

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Begin to end these nodes, each in its own region; already gone is success. `list_nodes` tells when they are.

        All are asked for, whatever becomes of one; then the first failure is raised.
        """


class MakeCloud(Protocol):
    """What stands in the registry, in a module that imports no SDK."""

    def __call__(self, config: Config, *, clock: Clock) -> Cloud | None:
        """None where a glance at environment and files finds no login; nothing is asked of the cloud itself."""


@runtime_checkable
class HasAccounts(Protocol):
    """Clouds where one shell may be logged in to one account today and to another tomorrow."""

    async def find_account(self) -> str:
        """The account that this login reaches: AWS account id, Google project. Raises CloudError."""


@runtime_checkable
class CanStop(Protocol):
    """Clouds whose nodes can be stopped with their disk kept, and started again."""

    async def stop_nodes(self, ids: Sequence[str]) -> None: ...

    async def start_nodes(self, ids: Sequence[str]) -> None: ...


@runtime_checkable
class CanPrepare(Protocol):
    """Clouds whose library takes seconds to import."""

    def prepare(self) -> None:
        """Begin in a thread with what the first call will need, and return at once; twice does no harm."""


@runtime_checkable
class CanExtend(Protocol):
    """Clouds where a node that is made later is reached by all of the same cluster and attempt, and reaches them."""

    extends_gangs: ClassVar[bool]


@runtime_checkable
class CanSweep(Protocol):
    """Clouds where a cluster leaves more behind than nodes: firewall groups, templates, disks."""

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Delete what `owner` made for clusters that are not in `keep`; returns how many things.

        What a machine on its way down still uses stays for the next sweep. `keep` is read before the cloud is listed,
        so it must name every cluster that is there or may be coming up.
        """


@runtime_checkable
class RenewsAccess(Protocol):
    """Clouds whose firewall lets ssh in from the address alone that this machine had when a node was made."""

    async def renew_access(self, nodes: Sequence[Node]) -> bool:
        """Let this machine's present address in to those of these nodes that run; returns whether a rule changed.

        Addresses that were let in before stay. Called again it changes nothing. Raises CloudError.
        """
        ...


@runtime_checkable
class SupportsZoneSearch(Protocol):
    """Clouds where one call looks for room in several zones, and puts the whole gang into one of them or nowhere.

    `create_nodes` is then asked with `Placement.other_zones`; its nodes say which zone it was.
    """

    def is_search_worth(self, spec: MachineSpec, *, zone_count: int) -> bool:
        """Whether that takes less than one call after another."""
        ...


@runtime_checkable
class ProvidesSshHosts(Protocol):
    """Clouds whose nodes are machines that boot with a script and are reached by ssh as `user`.

    A node that shuts itself down there is gone, or stands still without anybody knowing: only a call stops one.
    """

    name: ClassVar[str]

    @property
    def user(self) -> str: ...


@runtime_checkable
class SupportsConsole(Protocol):
    """Clouds that keep what a machine prints while it boots."""

    def name_console(self, node: Node) -> str:
        """The command that shows it."""
        ...


@runtime_checkable
class CanObserve(Protocol):
    """Clouds whose library tells what goes over the wire."""

    def observe(self, hear: Listener) -> None:
        """Tell `hear` of all that is asked and answered from now on, from whichever thread the answer arrives in."""
        ...


@runtime_checkable
class CanPreempt(Protocol):
    """Pretend clouds that can take a node away on demand, as a spot market does."""

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None: ...
