"""Amazon EC2 as a cloud: four verbs, stopping, and the sweep of resources that outlive clusters."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from broker.clock import Clock
from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind, translated
from broker.clouds.aws.launching import NodeLauncher
from broker.clouds.aws.nodes import read_nodes
from broker.clouds.aws.quotas import Quotas
from broker.clouds.aws.settings import Settings, load_settings
from broker.clouds.aws.sweeping import Sweeper
from broker.clouds.tape import Listener
from broker.config import Config
from broker.errors import AuthError, CapacityError, CloudError, DeniedError, InvalidRequestError, UnknownOutcomeError
from broker.types import MachineSpec, Node, NodeList, NodeRequest, NodeState

REGIONS_KNOWN_S = 3600.0
GONE = "InvalidInstanceID.NotFound"
SEARCHED_ZONES_MIN = 3  # a fleet without a result takes three calls; RunInstances takes one per zone
LOGIN_VARIABLES = (  # botocore, "Credentials": each is enough for a login
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
START_HINT = "a stopped machine starts only in its own zone: try later, or terminate it with `broker down` and relaunch"
NO_SPOT_STOP = "AWS cannot stop these spot nodes, only terminate them"
NO_SPOT_STOP_HINTS = ("terminate them with `broker down`; on-demand nodes (`use_spot: false`) can be stopped",)
# https://docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_temp_enable-regions.html
TOKEN_HINTS = ("regions that were enabled by hand accept session tokens of regional STS endpoints only",)
LOGIN_FILES = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
VENDOR = Path("/sys/class/dmi/id/sys_vendor")  # "Amazon EC2" on its machines, "Xen" on those of early generations
XEN_UUID = Path("/sys/hypervisor/uuid")  # begins with "ec2" there


def make_cloud(config: Config, *, clock: Clock) -> AwsCloud | None:
    """Make the cloud for the registry; None without boto3 or a login."""
    if importlib.util.find_spec("boto3") is None or not has_login():
        return None
    return AwsCloud(load_settings(config.home), clock=clock)


def has_login() -> bool:
    """Return whether credentials may exist; only AWS can say whether they are valid."""
    files = (Path(os.getenv(variable) or Path.home() / path) for variable, path in LOGIN_FILES.items())
    if any(os.getenv(variable) for variable in LOGIN_VARIABLES) or any(file.exists() for file in files):
        return True
    return os.getenv("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and _is_on_ec2()


def _is_on_ec2() -> bool:
    """Return whether this machine may have the login of an instance profile; asks no metadata service.

    EC2 User Guide, "Detect whether a host is an EC2 instance".
    """
    for path, start in ((VENDOR, "Amazon EC2"), (XEN_UUID, "ec2")):
        try:
            if path.read_text().startswith(start):
                return True
        except OSError:
            pass
    return False


class AwsCloud:
    """Cloud, HasAccounts, CanStop, CanSweep, RenewsAccess, SetsIdentity and CanObserve."""

    name: ClassVar[str] = "aws"
    programs: ClassVar[tuple[str, ...]] = ("ssh",)
    settle_s: ClassVar[float] = 20.0  # "eventual consistency" has no bound; beyond seconds it is an outage
    extends_gangs: ClassVar[bool] = True

    def is_search_worth(self, spec: MachineSpec, *, zone_count: int) -> bool:
        """Return whether a fleet is worth its overhead: a launch template, created and deleted.

        Its machines have one network card.
        """
        return zone_count >= SEARCHED_ZONES_MIN and spec.network_tier != "best"

    def __init__(self, settings: Settings, *, clock: Clock, open_session: Callable[[], Any] | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._clients = Clients(open_session)
        self._quotas = Quotas(self._clients, clock=clock)
        self._launcher = NodeLauncher(self._clients, settings, self._quotas, clock=clock)
        self._sweeper = Sweeper(self._clients)
        self._regions: tuple[float, Sequence[str]] = (0.0, ())
        self._regions_by_id: dict[str, str] = {}
        self._listable: set[str] = set()  # regions whose latest list succeeded
        self._account = ""
        self._ended_s: dict[str, float] = {}  # nodes whose end EC2 does not date: when we first saw it

    def prepare(self) -> None:
        """Start importing the SDK in a thread, and return at once. Idempotent."""
        self._clients.prepare()

    def set_identity(self, cluster: str, identity: str) -> None:
        """Give the machines of `cluster` an instance profile of their own."""
        self._launcher.set_identity(cluster, identity)

    def observe(self, listener: Listener) -> None:
        """Report every request and response of boto3 to `listener`."""
        self._clients.observe(listener)

    @property
    def user(self) -> str:
        """The login user of the images, from `aws.toml`."""
        return self._settings.user

    def name_console(self, node: Node) -> str:
        """Return the AWS CLI command for the newest console output."""
        return f"aws ec2 get-console-output --region {node.region} --instance-id {node.id} --latest --output text"

    async def check(self) -> None:
        """Verify the login by its identity. Raises AuthError."""
        with translated():
            await self._clients.read("sts", await self._clients.find_home(), "get_caller_identity")

    async def find_account(self) -> str:
        """Return the account, read from AWS once: a process keeps the login that it started with."""
        if not self._account:
            with translated():
                home = await self._clients.find_home()
                self._account = str((await self._clients.read("sts", home, "get_caller_identity"))["Account"])
        return self._account

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Create the gang with a client token, which makes a repeated call safe. Raises CloudError."""
        region = request.placement.offer.region
        with translated():
            enabled = await self.list_regions()
        if region not in enabled:
            raise InvalidRequestError(
                f"region {region} is disabled in this account",
                hints=(f"enable it with `aws account enable-region --region-name {region}`",),
            )
        if region not in self._listable:  # create nothing if it could be neither listed nor terminated
            await self._require_listable(region, request.owner)
        with translated(is_create=True):
            try:
                instances = await self._launcher.launch(request)
            except ApiError as refusal:
                if refusal.code not in ("IdempotentParameterMismatch", "IdempotentInstanceTerminated"):
                    raise
                instances = await self._find_made(request, refusal)
        return self._remember(await self._read_nodes(instances, region))

    async def list_nodes(self, owner: str) -> NodeList:
        """List all enabled regions concurrently; regions that fail are reported as unseen."""
        account = await self.find_account()
        with translated():
            regions = await self.list_regions()
        results = await asyncio.gather(
            *(self._list_region(region, owner) for region in regions), return_exceptions=True
        )
        nodes: list[Node] = []
        unseen: dict[str, CloudError] = {}
        for region, listed in zip(regions, results, strict=True):
            if isinstance(listed, CloudError):
                unseen[region] = listed
            elif isinstance(listed, BaseException):
                raise listed
            else:
                nodes += listed
        if unseen and len(unseen) == len(regions):
            raise next(iter(unseen.values()))
        return NodeList(nodes=tuple(nodes), account=account, unseen=unseen)

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Terminate nodes. A node whose region is recorded needs no list, which may be the call that fails."""
        self._regions_by_id.update((node.id, node.region) for node in nodes if node.region)
        await self._change_each("terminate_instances", [node.id for node in nodes])

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Stop nodes with one call per region. Raises InvalidRequestError for (one-time) spot nodes."""
        try:
            await self._change_all("stop_instances", ids)
        except InvalidRequestError as error:
            if await self._has_spot(ids):
                raise InvalidRequestError(NO_SPOT_STOP, hints=NO_SPOT_STOP_HINTS) from error
            raise

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Start nodes with one call per region. Raises CapacityError with a hint."""
        try:
            await self._change_all("start_instances", ids)
        except CapacityError as error:
            raise CapacityError(error.message, hints=(START_HINT,)) from error

    async def renew_access(self, nodes: Sequence[Node]) -> bool:
        """Add this machine's current address to the clusters' security groups; return if one changed."""
        has_changed = False
        for region, owner, cluster in sorted({(node.region, node.owner, node.cluster) for node in nodes}):
            ids = [node.id for node in nodes if (node.region, node.owner, node.cluster) == (region, owner, cluster)]
            with translated():
                instances = await self._launcher.find_instances(region, [{"Name": "instance-id", "Values": ids}])
                if any(node.state is NodeState.RUNNING for node in await self._read_nodes(instances, region)):
                    has_changed |= await self._launcher.renew_access(region, owner=owner, cluster=cluster)
        return has_changed

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Delete security groups, templates and disks of clusters that are not in `keep`."""
        with translated():
            return await self._sweeper.sweep(await self.list_regions(), owner, keep)

    async def list_regions(self) -> Sequence[str]:
        """List the regions from the settings, else all that are enabled in this account: nodes may be in any of them.

        Raises ApiError.
        """
        if self._settings.regions:
            return self._settings.regions
        now_s = self._clock.now_s()
        known_s, known = self._regions
        if not known or now_s - known_s >= REGIONS_KNOWN_S:
            try:
                answer = await self._clients.read("ec2", await self._clients.find_home(), "describe_regions")
            except ApiError:
                if not known:
                    raise
                return known  # an outage of the home region must not hide nodes elsewhere
            known = sorted(each["RegionName"] for each in answer["Regions"])
            self._regions = (now_s, known)
        return known

    async def _require_listable(self, region: str, owner: str) -> None:
        """List a region. Raises CloudError; DeniedError if the login is valid, but not there."""
        try:
            await self._list_region(region, owner)
        except DeniedError:
            raise
        except AuthError as error:
            await self.check()
            raise DeniedError(error.message, hints=TOKEN_HINTS) from error

    async def _list_region(self, region: str, owner: str) -> Sequence[Node]:
        self._listable.discard(region)
        with translated():
            instances = await self._launcher.find_instances(region, tags.match_tags(owner=owner))
        self._listable.add(region)
        return self._remember(await self._read_nodes(instances, region))

    async def _read_nodes(self, instances: Sequence[Mapping[str, Any]], region: str) -> Sequence[Node]:
        nodes = read_nodes(instances, region=region, user=self._settings.user)
        account = await self.find_account() if nodes else ""
        return [replace(node, account=account) for node in nodes]

    async def _find_made(self, request: NodeRequest, refusal: ApiError) -> Sequence[Mapping[str, Any]]:
        """Return what this token created before.

        EC2 reports the token as used if a parameter differs (a newer image), or if all its instances have ended.
        """
        filters = tags.match_tags(owner=request.owner, token=request.token)
        instances = await self._launcher.find_instances(request.placement.offer.region, filters)
        if not instances:
            raise UnknownOutcomeError(f"token {request.token} was used and its nodes are not listed") from refusal
        clusters = {tags.read_tags(each).get(tags.CLUSTER) for each in instances}
        if clusters != {request.cluster}:
            raise InvalidRequestError(f"token {request.token} was used for another request") from refusal
        return instances

    def _remember(self, nodes: Sequence[Node]) -> Sequence[Node]:
        for node in nodes:
            self._regions_by_id[node.id] = node.region
        now_s = self._clock.now_s()
        return [
            replace(node, ended_s=self._ended_s.setdefault(node.id, now_s))
            if node.state is NodeState.TERMINATED and node.ended_s is None
            else node
            for node in nodes
        ]

    async def _change_each(self, operation: str, ids: Sequence[str]) -> None:
        """Change nodes in every region, each of them even if another one fails; then raise the first error."""
        with translated():
            grouped = await self._group(ids)
            works = (self._change_region(region, operation, known) for region, known in grouped.items())
            for result in await asyncio.gather(*works, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    async def _change_region(self, region: str, operation: str, ids: Sequence[str]) -> None:
        """Change nodes of a region.

        EC2 refuses a whole call for one id that is unknown, that the login's policy does not cover, or that a user has
        protected from termination, so the ids then go one by one.
        """
        try:
            await self._clients.change(region, operation, InstanceIds=list(ids))
        except ApiError as refusal:
            if len(ids) > 1 and (
                refusal.code == GONE or find_kind(refusal.code, refusal.status) in ("invalid", "forbidden")
            ):
                works = (self._change_region(region, operation, [node_id]) for node_id in ids)
                for result in await asyncio.gather(*works, return_exceptions=True):
                    if isinstance(result, BaseException):
                        raise result from refusal
            elif refusal.code == "UnauthorizedOperation":
                # A policy that allows this by tag refuses an id that is gone because it has no tags to check.
                filters = [{"Name": "instance-id", "Values": list(ids)}]
                if await self._launcher.find_instances(region, filters):
                    raise
            elif refusal.code != GONE:
                raise

    async def _change_all(self, operation: str, ids: Sequence[str]) -> None:
        with translated():
            for region, known in (await self._group(ids)).items():
                await self._clients.change(region, operation, InstanceIds=known)

    async def _has_spot(self, ids: Sequence[str]) -> bool:
        with translated():
            for region, known in (await self._group(ids)).items():
                filters = [{"Name": "instance-id", "Values": known}]
                nodes = await self._read_nodes(await self._launcher.find_instances(region, filters), region)
                if any(node.is_spot for node in nodes):
                    return True
        return False

    async def _group(self, ids: Sequence[str]) -> Mapping[str, list[str]]:
        """Group ids by region. A node of unknown region is looked up in all regions; if none has it, it is gone."""
        unknown = [node_id for node_id in ids if node_id not in self._regions_by_id]
        if unknown:
            regions = await self.list_regions()
            filters = [{"Name": "instance-id", "Values": unknown}]
            found = await asyncio.gather(*(self._launcher.find_instances(region, filters) for region in regions))
            for region, instances in zip(regions, found, strict=True):
                self._regions_by_id.update((instance["InstanceId"], region) for instance in instances)
        grouped: dict[str, list[str]] = defaultdict(list)
        for node_id in ids:
            if node_id in self._regions_by_id:
                grouped[self._regions_by_id[node_id]].append(node_id)
        return grouped
