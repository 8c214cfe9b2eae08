"""The adapter's memory and its lists: all pages are read, what is remembered belongs to one place, and it expires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from broker.clouds.aws import clients
from broker.clouds.aws.cloud import REGIONS_KNOWN_S
from broker.errors import AuthError, CapacityError, CloudError, DeniedError, QuotaError, UnknownOutcomeError
from broker.types import MachineSpec, NodeState
from tests.clouds.aws.bed import OFFER, AwsBed
from tests.clouds.contract import OWNER, make_request, settle, wait_state

WEST = replace(OFFER, region="us-west-2", zone="us-west-2a")
P_ONDEMAND, P_SPOT = "L-417A185B", "L-7212CCBC"


def count_calls(bed: AwsBed, action: str) -> int:
    return [name for name, _, _ in bed.account.calls].count(f"ec2:{action}")


def test_a_sweep_reads_every_page_in_every_region(bed: AwsBed) -> None:
    """A resource on a later page, or in another region than the first, must not remain and be billed forever."""
    for region in ("us-east-1", "us-west-2"):
        for number in range(3):
            bed.account.volumes[f"vol-{region}-{number}"] = {
                "region": region, "VolumeId": f"vol-{region}-{number}", "State": "available",
                "Tags": [{"Key": "broker-owner", "Value": OWNER}, {"Key": "broker-cluster", "Value": f"c{number}"}],
            }  # fmt: skip

    async def act() -> None:
        for offer in (OFFER, WEST, replace(OFFER, zone=None), replace(WEST, zone=None)):
            bed.offer = offer
            for number in range(3):
                await bed.cloud.create_nodes(make_request(bed, cluster=f"c{number}{offer.zone}"))
        await settle(bed)
        found = await bed.cloud.list_nodes(OWNER)
        assert len(found.nodes) == 12
        await bed.cloud.terminate_nodes(found.nodes)
        await bed.clock.sleep(60)
        bed.account.page_size = 1
        assert {node.state for node in await bed.cloud.list_nodes(OWNER)} == {NodeState.TERMINATED}
        # disks, groups of four offers, templates of the two without a zone
        assert await bed.adapter.sweep(OWNER, ()) == 6 + 12 + 6

    bed.run(act())
    assert bed.list_orphans() == []


def test_pages_without_an_end_are_an_error_and_the_last_allowed_page_is_read(
    bed: AwsBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PAGES_MAX", 3)

    async def act() -> None:
        request = make_request(bed, node_count=3)
        await bed.cloud.create_nodes(request)
        await settle(bed)
        bed.account.page_size = 1
        assert len((await bed.cloud.list_nodes(OWNER)).nodes) == 3
        monkeypatch.setattr(clients, "PAGES_MAX", 2)
        listed = await bed.cloud.list_nodes(OWNER)
        assert listed.unseen.keys() == {"us-east-1"} and not listed.nodes, "a part of a list is not a list"

    bed.run(act())


def test_regions_are_read_again_after_an_hour_and_an_outage_hides_none(bed: AwsBed) -> None:
    async def act() -> None:
        bed.account.disabled_regions = {"us-west-2"}
        bed.account.fail("DescribeRegions", "UnauthorizedOperation", status=403)
        with pytest.raises(DeniedError):
            await bed.adapter.list_nodes(OWNER)
        assert list((await bed.adapter.list_nodes(OWNER)).unseen) == []
        bed.account.disabled_regions = set()
        await bed.clock.sleep(REGIONS_KNOWN_S - 1)
        assert list(await bed.adapter.list_regions()) == ["eu-central-1", "us-east-1"]
        await bed.clock.sleep(1)
        bed.account.fail("DescribeRegions", "UnauthorizedOperation", status=403)
        assert list(await bed.adapter.list_regions()) == ["eu-central-1", "us-east-1"]
        assert list(await bed.adapter.list_regions()) == ["eu-central-1", "us-east-1", "us-west-2"]
        before = count_calls(bed, "DescribeRegions")
        await bed.adapter.list_regions()
        assert count_calls(bed, "DescribeRegions") == before

    bed.run(act())


def test_a_quota_is_remembered_for_ten_minutes_by_region_and_kind(bed: AwsBed) -> None:
    for region in ("us-east-1", "us-west-2"):
        for code in (P_ONDEMAND, P_SPOT):
            bed.account.quotas[region, code] = 192.0
    bed.account.quotas["us-east-1", P_ONDEMAND] = 95.0

    async def act() -> None:
        with pytest.raises(QuotaError, match="limit is 95"):
            await bed.cloud.create_nodes(make_request(bed))
        assert len(await bed.cloud.create_nodes(make_request(bed, is_spot=True, node_count=2))) == 2
        bed.offer = WEST
        assert len(await bed.cloud.create_nodes(make_request(bed))) == 1
        bed.offer, bed.account.quotas["us-east-1", P_ONDEMAND] = OFFER, 96.0
        await bed.clock.sleep(590)
        with pytest.raises(QuotaError):
            await bed.cloud.create_nodes(make_request(bed))
        await bed.clock.sleep(10)
        assert len(await bed.cloud.create_nodes(make_request(bed))) == 1, "a quota that suffices exactly"

    bed.run(act())


def test_a_doubted_zone_is_tried_again_and_doubted_again_later(bed: AwsBed) -> None:
    """Scores and doubts are of one zone, machine and size of gang; both are forgotten after ten minutes."""
    bed.account.scores = {"us-east-1a": 4, "us-east-1b": 1}

    async def create(count: int = 1) -> None:
        await bed.cloud.create_nodes(make_request(bed, is_spot=True, node_count=count))

    async def act() -> None:
        with pytest.raises(CapacityError, match="in us-east-1a at 4"):
            await create()
        await create()
        with pytest.raises(CapacityError):
            await create(2)
        assert count_calls(bed, "GetSpotPlacementScores") == 2
        await bed.clock.sleep(595)
        await create()
        await bed.clock.sleep(10)
        with pytest.raises(CapacityError):
            await create()
        assert count_calls(bed, "GetSpotPlacementScores") == 3
        bed.account.scores = {"us-east-1a": 4, "us-east-1b": 2}
        await bed.clock.sleep(600)
        await create(3)
        bed.account.scores = {"us-west-2b": 9, "us-west-2a": 1}
        bed.offer = WEST
        with pytest.raises(CapacityError, match="in us-west-2b at 9"):
            await create(3)

    bed.run(act())


def test_nodes_of_several_regions_are_stopped_by_a_process_that_never_listed_them(bed: AwsBed) -> None:
    async def act() -> None:
        requests = []
        for offer in (OFFER, WEST):
            bed.offer = offer
            requests.append(make_request(bed, node_count=2, cluster=offer.region))
            await bed.cloud.create_nodes(requests[-1])
        nodes = [node for each in requests for node in await wait_state(bed, each.token, NodeState.RUNNING, 2)]
        ids = [node.id for node in nodes]
        bed.account.calls.clear()
        await bed.reopen().stop_nodes(ids)  # type: ignore[attr-defined]
        stops = {
            region: asked["InstanceIds"] for name, region, asked in bed.account.calls if name == "ec2:StopInstances"
        }
        assert stops == {"us-east-1": ids[:2], "us-west-2": ids[2:]}
        for each in requests:
            await wait_state(bed, each.token, NodeState.STOPPED, 2)
        await bed.reopen().start_nodes(ids)  # type: ignore[attr-defined]
        for each in requests:
            await wait_state(bed, each.token, NodeState.RUNNING, 2)

    bed.run(act())


def test_access_is_renewed_for_each_cluster_with_a_running_node(bed: AwsBed) -> None:
    """Two clusters in two regions; of a third, every node has ended."""

    async def act() -> None:
        made = {}
        for offer, cluster in ((OFFER, "one"), (WEST, "two"), (OFFER, "gone")):
            bed.offer = offer
            request = make_request(bed, node_count=2, cluster=cluster)
            await bed.cloud.create_nodes(request)
            made[cluster] = await wait_state(bed, request.token, NodeState.RUNNING, 2)
        await bed.cloud.terminate_nodes([*made["gone"], made["one"][1]])
        await bed.clock.sleep(60)
        bed.settings = replace(bed.settings, ssh_from=("198.51.100.9/32", "2001:db8::/32"))
        moved: Any = bed.reopen()
        nodes = [node for each in made.values() for node in each]
        assert await moved.renew_access(nodes) is True
        for group in bed.account.groups.values():
            is_gone = group["GroupName"].endswith("-gone")
            assert list_sources(group) == {"203.0.113.7/32"} | (set() if is_gone else set(moved._settings.ssh_from))
        assert await moved.renew_access(nodes) is False

    bed.run(act())


def list_sources(group: Mapping[str, Any]) -> set[str]:
    rules = [rule for rule in group["rules"] if rule.get("FromPort") == 22]
    old = {each["CidrIp"] for rule in rules for each in rule.get("IpRanges", ())}
    return old | {each["CidrIpv6"] for rule in rules for each in rule.get("Ipv6Ranges", ())}


def test_a_group_that_is_listed_on_a_later_page_is_not_created_twice(bed: AwsBed) -> None:
    async def act() -> None:
        bed.account.page_size = 1
        for token in ("1" * 32, "2" * 32):
            await bed.cloud.create_nodes(make_request(bed, token=token, spec=MachineSpec(group="rl")))
        assert count_calls(bed, "CreateSecurityGroup") == 2 == len(bed.account.groups)

    bed.run(act())


def test_a_login_is_read_once_and_named_in_every_list(bed: AwsBed) -> None:
    async def act() -> None:
        assert await bed.adapter.find_account() == "123456789012"
        assert (await bed.adapter.list_nodes(OWNER)).account == "123456789012"
        bed.account.fail("GetCallerIdentity", "ExpiredToken", status=403, times=9)
        assert (await bed.adapter.list_nodes(OWNER)).account == "123456789012"
        other: Any = bed.reopen()
        with pytest.raises(CloudError):
            await other.list_nodes(OWNER)

    bed.run(act())


def test_nothing_more_is_created_in_a_region_whose_latest_list_failed(bed: AwsBed) -> None:
    """It was listed before; a permission has been withdrawn since."""

    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed))
        bed.account.fail("DescribeInstances", "UnauthorizedOperation", status=403, times=2, region="us-east-1")
        assert (await bed.cloud.list_nodes(OWNER)).unseen.keys() == {"us-east-1"}
        with pytest.raises(DeniedError):
            await bed.cloud.create_nodes(make_request(bed))
        assert count_calls(bed, "RunInstances") == 1
        await bed.cloud.create_nodes(make_request(bed))

    bed.run(act())


def test_a_subnet_that_appears_between_two_tries_makes_no_second_gang(bed: AwsBed) -> None:
    """The fleet's zones differ from those of the first call, so EC2 refuses the token, and its nodes are found."""
    bed.offer = replace(OFFER, zone=None)
    bed.account.bare_zones = {"us-east-1a"}
    bed.account.lose_answer("CreateFleet")

    async def act() -> None:
        request = make_request(bed, node_count=2)
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(request)
        await settle(bed)
        bed.account.bare_zones = set()
        again = await bed.reopen().create_nodes(request)
        assert {node.id for node in again} == set(bed.account.instances) and len(again) == 2

    bed.run(act())


def test_all_of_a_region_are_terminated_though_one_is_unknown(bed: AwsBed) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=4)
        await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, request.token, NodeState.RUNNING, 4)
        unknown = replace(nodes[0], id="i-00000000000000abc")
        for place in range(5):
            listed = [*nodes[:place], unknown, *nodes[place:]]
            bed.account.calls.clear()
            await bed.reopen().terminate_nodes(listed)
            asked = [given["InstanceIds"] for name, _, given in bed.account.calls if name == "ec2:TerminateInstances"]
            assert asked[0] == [node.id for node in listed]
            assert sorted(asked[1:]) == sorted([node.id] for node in listed)
        await wait_state(bed, request.token, NodeState.TERMINATED, 4)

    bed.run(act())


def test_renewed_credentials_are_read_again_in_the_middle_of_a_run(
    bed: AwsBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary ones in a file or variable last for an hour, and botocore would keep the first ones forever."""

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        bed.account.expired_keys = {"AKIDFAKE"}
        with pytest.raises(AuthError):
            await bed.cloud.terminate_nodes([node])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDNEXT")
        await bed.cloud.terminate_nodes([node])
        await wait_state(bed, request.token, NodeState.TERMINATED)

    bed.run(act())


def test_a_login_after_the_first_refusal_needs_no_restart(bed: AwsBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon or server keeps its clients for weeks, and botocore would keep having no credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)

    async def act() -> None:
        with pytest.raises(AuthError):
            await bed.cloud.list_nodes(OWNER)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, bed.aws.environment[name])
        assert (await bed.cloud.list_nodes(OWNER)).unseen == {}

    bed.run(act())


def test_a_process_that_lives_for_days_launches_the_image_that_a_parameter_names_now(bed: AwsBed) -> None:
    """The older image may be deleted, and then every launch would be refused until a restart."""

    async def act() -> None:
        for number, date in enumerate(("-2026-11-01", "-2026-11-02")):
            bed.account.image_date = date
            await bed.cloud.create_nodes(make_request(bed, cluster=f"c{number}"))
            await bed.clock.sleep(86400)

    bed.run(act())
    launched = [given["ImageId"] for name, _, given in bed.account.calls if name == "ec2:RunInstances"]
    assert [image[-2:] for image in launched] == ["01", "02"]


def test_a_renewed_login_for_another_account_is_not_taken_over(bed: AwsBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lists lack our nodes, which would seem to be gone, and their programs would be started twice."""

    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed))
        await settle(bed)
        bed.account.expired_keys = {"AKIDFAKE"}
        bed.account.number = "210987654321"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOTHER")
        with pytest.raises(AuthError):
            await bed.cloud.list_nodes(OWNER)
        bed.account.number = "123456789012"
        assert len((await bed.cloud.list_nodes(OWNER)).nodes) == 1

    bed.run(act())
