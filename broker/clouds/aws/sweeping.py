"""Resources that outlive a cluster's nodes: security groups, placement groups, templates, disks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind
from broker.frozen import frozen


@frozen
class Kind:
    """The calls that list and delete orphans of one kind. `is_paged` is False if EC2 lists without pages."""

    lists: str
    key: str
    id_key: str
    deletes: str
    parameter: str
    is_paged: bool = True
    filters: tuple[tuple[str, str], ...] = ()


KINDS = (
    Kind(
        lists="describe_security_groups", key="SecurityGroups", id_key="GroupId",
        deletes="delete_security_group", parameter="GroupId",
    ),
    Kind(
        lists="describe_placement_groups", key="PlacementGroups", id_key="GroupName",
        deletes="delete_placement_group", parameter="GroupName", is_paged=False,
    ),
    Kind(
        lists="describe_launch_templates", key="LaunchTemplates", id_key="LaunchTemplateId",
        deletes="delete_launch_template", parameter="LaunchTemplateId",
    ),
    Kind(
        lists="describe_volumes", key="Volumes", id_key="VolumeId",
        deletes="delete_volume", parameter="VolumeId", filters=(("status", "available"),),
    ),
)  # fmt: skip
STILL_USED = ("DependencyViolation", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse", "VolumeInUse")
GONE = (
    *("InvalidGroup.NotFound", "InvalidPlacementGroup.Unknown", "InvalidVolume.NotFound"),
    *("InvalidLaunchTemplateId.NotFound", "InvalidLaunchTemplateName.NotFoundException"),
)


class Sweeper:
    """Delete tagged resources whose cluster no longer exists."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def sweep(self, regions: Sequence[str], owner: str, keep: Collection[str]) -> int:
        """Delete resources tagged with this owner that belong to no cluster in `keep`; return how many.

        Resources still used by a machine that is shutting down are left for the next sweep. Raises the first ApiError
        at the end.
        """
        outcomes = await asyncio.gather(
            *(self._sweep_kind(region, kind, owner, keep) for region in regions for kind in KINDS),
            return_exceptions=True,
        )
        count = 0
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            count += outcome
        return count

    async def _sweep_kind(self, region: str, kind: Kind, owner: str, keep: Collection[str]) -> int:
        found = await self._list(region, kind, owner)
        lost = [each for each in found if tags.read_tags(each).get(tags.CLUSTER) not in keep]
        return sum([await self._delete(region, kind, each[kind.id_key]) for each in lost])

    async def _list(self, region: str, kind: Kind, owner: str) -> Sequence[Mapping[str, Any]]:
        filters = tags.match_tags(owner=owner)
        filters += [{"Name": name, "Values": [value]} for name, value in kind.filters]
        if kind.is_paged:
            return await self._clients.read_all(region, kind.lists, kind.key, Filters=filters)
        answer = await self._clients.read("ec2", region, kind.lists, Filters=filters)
        return list(answer.get(kind.key, ()))

    async def _delete(self, region: str, kind: Kind, identity: str) -> bool:
        try:
            await self._clients.change(region, kind.deletes, **{kind.parameter: identity})
        except ApiError as refusal:
            if refusal.code in GONE or refusal.code in STILL_USED:
                return False
            if find_kind(refusal.code, refusal.status) in ("transient", "unknown", "throttled"):
                return False
            raise
        return True
