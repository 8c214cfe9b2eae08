"""The minimal permissions on AWS: create, change and delete resources that carry this installation's tag."""

from __future__ import annotations

from typing import Any

from broker.clouds.aws import tags

LOOK = "Look"  # the statement that changes nothing
LISTED = (
    *("ec2:DescribeAvailabilityZones", "ec2:DescribeImages", "ec2:DescribeInstanceTypes", "ec2:DescribeInstances"),
    *("ec2:DescribeLaunchTemplates", "ec2:DescribePlacementGroups", "ec2:DescribeRegions", "ec2:DescribeVpcs"),
    *("ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVolumes", "ec2:GetSpotPlacementScores"),
    *("servicequotas:GetServiceQuota", "servicequotas:ListServiceQuotas", "ssm:GetParameter"),
)
LAUNCHED = ("instance", "volume", "network-interface")
SHARED = ("security-group", "placement-group", "launch-template")
FOUND = ("image", "subnet", "security-group", "spot-instances-request")  # read only, or Amazon's own
MADE = ("CreateSecurityGroup", "CreatePlacementGroup", "CreateLaunchTemplate", "CreateFleet")
ENDED = (
    *("ec2:TerminateInstances", "ec2:StopInstances", "ec2:StartInstances", "ec2:DeleteVolume"),
    *("ec2:DeleteSecurityGroup", "ec2:DeletePlacementGroup", "ec2:DeleteLaunchTemplate"),
    *("ec2:AuthorizeSecurityGroupIngress", "ec2:AuthorizeSecurityGroupEgress", "ec2:RevokeSecurityGroupIngress"),
)
# an account's first spot machine and first fleet create a role
SERVICES = ("spot.amazonaws.com", "ec2fleet.amazonaws.com")


def make_policy(owner: str, *, instance_profile_role: str | None = None) -> dict[str, Any]:
    """Make an IAM identity policy. `instance_profile_role`: ARN of the nodes' role, if aws.toml names one."""
    is_given = {"StringEquals": {f"aws:RequestTag/{tags.OWNER}": owner}}
    is_ours = {"StringEquals": {f"ec2:ResourceTag/{tags.OWNER}": owner}}
    creates = [*MADE, "RunInstances"]
    statements = [
        _allow(LOOK, LISTED, ["*"]),
        _allow("LaunchTagged", ["ec2:RunInstances"], _arns(*LAUNCHED), is_given),
        _allow("LaunchFrom", ["ec2:RunInstances"], _arns(*FOUND)),
        _allow("LaunchInto", ["ec2:RunInstances"], _arns("placement-group", "launch-template"), is_ours),
        _allow("LaunchFleetFrom", ["ec2:CreateFleet"], _arns("launch-template"), is_ours),
        _allow("MakeTagged", [f"ec2:{name}" for name in MADE], _arns(*SHARED, "fleet"), is_given),
        _allow("MakeInNetwork", ["ec2:CreateSecurityGroup"], _arns("vpc")),
        _allow(
            "TagWhatIsMade", ["ec2:CreateTags"], _arns(*LAUNCHED, *SHARED, "fleet"),
            {"StringEquals": {"ec2:CreateAction": creates, f"aws:RequestTag/{tags.OWNER}": owner}},
        ),
        _allow("RankNodes", ["ec2:CreateTags"], _arns("instance"), is_ours),
        _allow("ChangeAndEnd", ENDED, _arns(*LAUNCHED, *SHARED), is_ours),
        _allow(
            "FirstUse", ["iam:CreateServiceLinkedRole"], ["arn:aws:iam::*:role/aws-service-role/*"],
            {"StringEquals": {"iam:AWSServiceName": list(SERVICES)}},
        ),
    ]  # fmt: skip
    if instance_profile_role:
        statements.append(_allow("GiveRole", ["iam:PassRole"], [instance_profile_role]))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(
    name: str, actions: tuple[str, ...] | list[str], resources: list[str], condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": sorted(actions), "Resource": resources}
    return statement | ({"Condition": condition} if condition else {})


def _arns(*kinds: str) -> list[str]:
    """Return the ARN pattern of a kind. An image belongs to no account, so its ARN has none."""
    return [f"arn:aws:ec2:*:{'' if kind == 'image' else '*'}:{kind}/*" for kind in kinds]
