"""`broker check` for AWS: login, regions, network, permissions, quotas.

Each failure comes with the command that fixes it.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind, translated
from broker.clouds.aws.image_rules import PLAIN_IMAGE
from broker.clouds.aws.network import Network, RegionNetwork
from broker.clouds.aws.policy import make_policy
from broker.clouds.aws.quotas import QUOTAS, Quota
from broker.clouds.aws.settings import Settings, load_settings
from broker.clouds.aws.startable import judge_types
from broker.clouds.findings import CheckResult, TypeCheckResult
from broker.config import Config
from broker.errors import InvalidRequestError
from broker.types import Offer

LOGIN_COMMAND = "aws configure"
POLICY_COMMAND = (
    "broker check --policy aws > broker-policy.json && "
    "aws iam put-user-policy --user-name {user} --policy-name broker --policy-document file://broker-policy.json"
)
GPU_FAMILIES = {"G (T4, A10G, L4, L40S)": "g", "P (V100, A100, H100, ...)": "p", "P5 (H100, H200)": "p5", "Trn": "trn"}
NAMED_MAX = 4  # at most this many regions are named in a note


async def inspect(config: Config, *, clock: Clock) -> Sequence[CheckResult]:
    """See `Inspector`."""
    return await inspect_account(Clients(), load_settings(config.home), config.owner)


async def inspect_types(config: Config, *, clock: Clock, offers: Sequence[Offer]) -> Sequence[TypeCheckResult]:
    """See `InspectsTypes`."""
    return await judge_types(Clients(), load_settings(config.home), offers, clock=clock)


def write_policy(config: Config) -> str:
    """Return the IAM policy of `broker check --policy aws` as JSON text."""
    return json.dumps(make_policy(config.owner), indent=2) + "\n"


async def inspect_account(clients: Clients, settings: Settings, owner: str) -> Sequence[CheckResult]:
    """Check login, regions, network, permissions and quotas; create nothing. Stop after a failed login."""
    with translated():
        login, user = await _check_login(clients)
        if not login.is_ok:
            return [login]
        home = await clients.find_home()
        regions = await _check_regions(clients, home, settings)
        network, site = await _check_network(clients, settings, home)
        permissions = await _check_permissions(clients, home, site, owner, user)
        quotas = await _check_quotas(clients, settings.regions or [home])
    return [login, regions, network, permissions, *quotas]


async def _check_login(clients: Clients) -> tuple[CheckResult, str]:
    try:
        answer = await clients.read("sts", await clients.find_home(), "get_caller_identity")
    except ApiError as refusal:
        if find_kind(refusal.code, refusal.status) not in ("login", "forbidden"):
            raise
        note = f"{refusal.code}: {refusal.message}"
        return CheckResult(name="credentials", is_ok=False, note=note, command=LOGIN_COMMAND), ""
    who = str(answer["Arn"]).rpartition(":")[2]  # user/NAME, assumed-role/NAME/SESSION, root
    if (partition := str(answer["Arn"]).split(":")[1]) != "aws":
        note = f"account {answer['Account']} is in `{partition}`, where broker starts no machines (docs/AWS.md)"
        return CheckResult(name="credentials", is_ok=False, note=note, command=LOGIN_COMMAND), who
    return CheckResult(name="credentials", is_ok=True, note=f"account {answer['Account']}, {who}"), who


async def _check_regions(clients: Clients, home: str, settings: Settings) -> CheckResult:
    try:
        answer = await clients.read("ec2", home, "describe_regions", AllRegions=True)
    except ApiError as refusal:
        return CheckResult(name="regions", is_ok=False, note=refusal.code, command=POLICY_COMMAND.format(user="USER"))
    is_on = {each["RegionName"]: each.get("OptInStatus") != "not-opted-in" for each in answer["Regions"]}
    off = sorted(name for name in is_on if not is_on[name])
    wanted_off = [name for name in settings.regions if not is_on.get(name)]
    note = f"{sum(is_on.values())} on" + (f", off: {_name(off)}" if off else "")
    command = f"aws account enable-region --region-name {(wanted_off or off)[0]}" if off or wanted_off else ""
    return CheckResult(name="regions", is_ok=not wanted_off, note=note, command=command if wanted_off else "")


async def _check_network(clients: Clients, settings: Settings, home: str) -> tuple[CheckResult, RegionNetwork | None]:
    try:
        site = await Network(clients, settings).find_site(home)
    except InvalidRequestError as error:
        command = f"aws ec2 create-default-vpc --region {home}"
        return CheckResult(name="network", is_ok=False, note=error.message, command=command), None
    except ApiError as refusal:
        command = POLICY_COMMAND.format(user="USER")
        return CheckResult(name="network", is_ok=False, note=refusal.code, command=command), None
    return CheckResult(name="network", is_ok=True, note=f"{home}: {site.vpc}, {len(site.subnets)} zones"), site


async def _check_permissions(
    clients: Clients, home: str, site: RegionNetwork | None, owner: str, user: str
) -> CheckResult:
    """Try creates as dry runs. Deletes need an existing resource and are not tried."""
    parameter = {"Name": PLAIN_IMAGE.format(arch="amd64")}
    needed: list[tuple[str, str, dict[str, Any]]] = [("ssm", "get_parameter", parameter)]
    needed += [("ec2", name, {}) for name in ("describe_instances", "describe_security_groups", "describe_volumes")]
    try:
        image = str((await clients.read("ssm", home, "get_parameter", **parameter))["Parameter"]["Value"])
    except ApiError:
        image = "ami-00000000"
    needed += [("ec2", name, {**asked, "DryRun": True}) for name, asked in make_trials(owner, site, image)]
    tried = await asyncio.gather(*(_may(clients, home, *each) for each in needed))
    missing = [name for name in tried if name]
    if not missing:
        return CheckResult(name="permissions", is_ok=True, note=f"{len(needed)} calls tried")
    note = f"missing: {', '.join(missing)}"
    name = user.removeprefix("user/") if user.startswith("user/") else "USER"
    return CheckResult(name="permissions", is_ok=False, note=note, command=POLICY_COMMAND.format(user=name))


def make_trials(owner: str, site: RegionNetwork | None, image: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a launch with its tags; as dry runs they create nothing."""
    ours = {tags.OWNER: owner, tags.CLUSTER: "check"}
    trials: list[tuple[str, dict[str, Any]]] = [
        (
            "create_placement_group",
            {
                "GroupName": "broker-check",
                "Strategy": "cluster",
                "TagSpecifications": tags.specify_tags(ours, "placement-group"),
            },
        ),
        (
            "create_launch_template",
            {
                "LaunchTemplateName": "broker-check",
                "LaunchTemplateData": {"InstanceType": "m5.large"},
                "TagSpecifications": tags.specify_tags(ours, "launch-template"),
            },
        ),
    ]
    if site is not None:
        card = {"DeviceIndex": 0, "SubnetId": next(iter(site.subnets.values()))}
        group = {"GroupName": "broker-check", "Description": "broker check", "VpcId": site.vpc}
        trials += [
            ("create_security_group", {**group, "TagSpecifications": tags.specify_tags(ours, "security-group")}),
            (
                "run_instances",
                {
                    "ImageId": image,
                    "InstanceType": "m5.large",
                    "MinCount": 1,
                    "MaxCount": 1,
                    "NetworkInterfaces": [card],
                    "TagSpecifications": tags.specify_tags(ours, *tags.TAGGED_AT_LAUNCH),
                },
            ),
        ]
    return trials


async def _may(clients: Clients, region: str, service: str, operation: str, asked: Mapping[str, Any]) -> str | None:
    """Return the operation's name if it is forbidden."""
    try:
        await clients.read(service, region, operation, **asked)
    except ApiError as refusal:
        return operation if find_kind(refusal.code, refusal.status) == "forbidden" else None
    return None


async def _check_quotas(clients: Clients, regions: Sequence[str]) -> list[CheckResult]:
    """Return one line per family of machines, on-demand and spot.

    None prevents launches: other families and clouds remain.
    """
    try:
        listed = await asyncio.gather(*(_list_quotas(clients, each) for each in regions))
    except ApiError as refusal:
        command = POLICY_COMMAND.format(user="USER")
        return [CheckResult(name="quotas", is_ok=False, note=refusal.code, command=command, is_needed=False)]
    by_code: dict[str, list[Quota]] = defaultdict(list)
    for region, quotas in zip(regions, listed, strict=True):
        for code, vcpus in quotas.items():
            by_code[code].append(Quota(code=code, region=region, vcpus=vcpus))
    findings = []
    for title, family in GPU_FAMILIES.items():
        for kind, code in zip(("on-demand", "spot"), QUOTAS[family], strict=True):
            limits = sorted(by_code.get(code, ()), key=lambda each: (-each.vcpus, each.region))
            if family == "p5" and kind == "on-demand":
                continue  # counts under P
            findings.append(_judge_quota(f"quota {title} {kind}", limits, Quota(code=code, region=regions[0], vcpus=0)))
    return findings


def _judge_quota(name: str, limits: Sequence[Quota], missing: Quota) -> CheckResult:
    some = [limit for limit in limits if limit.vcpus]
    note = ", ".join(f"{each.region} {each.vcpus:g} vCPUs" for each in some[:NAMED_MAX])
    worst = limits[-1] if limits else missing
    return CheckResult(
        name=name, is_ok=bool(some), note=note or "0 vCPUs", command="" if some else worst.command, is_needed=False
    )


async def _list_quotas(clients: Clients, region: str) -> dict[str, float]:
    """Return quota code -> vCPUs."""
    found: dict[str, float] = {}
    more: dict[str, Any] = {}
    for _ in range(100):
        page = await clients.read("service-quotas", region, "list_service_quotas", ServiceCode="ec2", **more)
        found.update((each["QuotaCode"], float(each["Value"])) for each in page.get("Quotas", ()))
        if not page.get("NextToken"):
            break
        more = {"NextToken": page["NextToken"]}
    return found


def _name(regions: Sequence[str]) -> str:
    more = len(regions) - NAMED_MAX
    return ", ".join(regions[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
