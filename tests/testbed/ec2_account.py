"""Contents of an AWS account in the fake: its machines and their lifecycles, and the faults a test arranged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.testbed.ec2_wire import ApiError

ACCOUNT = "123456789012"
ZONES = {
    "us-east-1": ("us-east-1a", "us-east-1b", "us-east-1c"),
    "us-west-2": ("us-west-2a", "us-west-2b"),
    "eu-central-1": ("eu-central-1a",),
}
# vCPUs, how many Elastic Fabric Adapters it takes, and how many network cards it has, if these are not as many
TYPES: dict[str, dict[str, Any]] = {
    "m5.large": {"vcpus": 2, "efa": 0},
    "t3.nano": {"vcpus": 2, "efa": 0},
    "c6g.xlarge": {"vcpus": 4, "efa": 0},
    "g5.xlarge": {"vcpus": 4, "efa": 0},
    "p4d.24xlarge": {"vcpus": 96, "efa": 4},
    "p5.48xlarge": {"vcpus": 192, "efa": 32},
    "trn1.32xlarge": {"vcpus": 128, "efa": 8},
    "g6e.48xlarge": {"vcpus": 192, "efa": 2, "cards": 4},
    "hpc6id.32xlarge": {"vcpus": 64, "efa": 4, "cards": 2},
}
QUOTA_VCPUS = 1000.0
KEPT_S = 3600.0  # a terminated instance is described for about an hour
LIVING = ("pending", "running", "stopping", "stopped")


class HasTime(Protocol):
    def now_s(self) -> float: ...


@dataclass(kw_only=True)
class Instance:
    """One machine. `due` is the transition under way: when it is over, and what the machine is then."""

    id: str
    region: str
    zone: str
    type: str
    index: int
    is_spot: bool
    tags: dict[str, str]
    launched_s: float
    visible_s: float
    parameters: Mapping[str, Any]  # as RunInstances or the launch template gave them
    user_data: bytes = b""
    private_address: str = ""
    public_address: str = ""
    state: str = "pending"
    due: tuple[float, str] | None = None
    is_ready: Callable[[], bool] = lambda: True  # a real machine behind it may take its own time
    is_protected: bool = False  # from termination by the API: `DisableApiTermination`
    reason_code: str = ""
    reason: str = ""


@dataclass(kw_only=True)
class Fault:
    """A fixed answer to the next `times` calls of this action, in `region` where one is named.

    `is_after`: the call takes effect, its answer is lost.
    """

    action: str
    error: ApiError | None
    times: int
    is_after: bool = False
    region: str = ""


@dataclass(kw_only=True)
class Account:
    clock: HasTime
    boot_s: float = 5.0
    shutdown_s: float = 3.0
    list_lag_s: float = 2.0
    page_size: int = 1000
    partial_fleet: int | None = None  # the next fleet gets this many machines, whatever it asked for
    partial_is_silent: bool = False  # and without a reason
    fleet_group_size: int = 1000  # machines in each element of `Instances` in the answer
    fleet_errors: Mapping[str, str] = field(default_factory=dict)  # zone -> why a fleet gets nothing there
    policy: Mapping[str, Any] | None = None  # None: everything is allowed
    has_login: bool = True
    number: str = ACCOUNT  # of the account that the login reaches
    partition: str = "aws"
    caller: str = ""  # access key of the present call
    expired_keys: set[str] = field(default_factory=set)  # access keys
    disabled_regions: set[str] = field(default_factory=set)
    has_default_vpc: bool = True
    image_date: str = ""  # the end of the id of the image that each public parameter names
    bare_zones: set[str] = field(default_factory=set)  # the VPC has no subnet there
    full: set[tuple[str, str]] = field(default_factory=set)  # (zone, instance type)
    room: dict[tuple[str, str], int] = field(default_factory=dict)  # (zone, instance type) -> machines; else many
    quotas: dict[tuple[str, str], float] = field(default_factory=dict)  # (region, quota code) -> vCPUs
    scores: dict[str, int] = field(default_factory=dict)  # zone -> spot placement score
    on_started: Callable[[Instance], None] = lambda instance: None
    on_ended: Callable[[Instance], None] = lambda instance: None
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # "ec2:RunInstances", region, parameters
    faults: list[Fault] = field(default_factory=list)
    fault_counts: dict[str, int] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    placement_groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by region and name
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    roles: dict[str, dict[str, Any]] = field(default_factory=lambda: {"reader": {"path": "/", "policies": {}}})
    profiles: dict[str, str | None] = field(default_factory=lambda: {"reader": "reader"})  # name -> its role
    launches: dict[tuple[str, str], tuple[str, Any]] = field(default_factory=dict)  # (scope, token) -> what it made

    def __post_init__(self) -> None:
        self._serials = itertools.count(1)

    def make_id(self, kind: str) -> str:
        return f"{kind}-{next(self._serials):017x}"

    def fail(self, action: str, code: str, *, status: int = 400, times: int = 1, region: str = "") -> None:
        self.faults.append(Fault(action=action, error=ApiError(code, status=status), times=times, region=region))

    def lose_answer(self, action: str, *, times: int = 1) -> None:
        """Carry out the next such calls, and close the connection instead of answering."""
        self.faults.append(Fault(action=action, error=None, times=times, is_after=True))

    def take_fault(self, action: str, region: str, *, is_after: bool) -> Fault | None:
        for fault in self.faults:
            is_here = fault.region in ("", region)
            if fault.action == action and is_here and fault.is_after is is_after and fault.times > 0:
                fault.times -= 1
                code = fault.error.code if fault.error else "lost"
                self.fault_counts[code] = self.fault_counts.get(code, 0) + 1
                return fault
        return None

    def tick(self) -> None:
        """Advance every machine to its state by now."""
        now_s = self.clock.now_s()
        for instance in list(self.instances.values()):
            if instance.due and instance.due[0] <= now_s and (instance.due[1] != "running" or instance.is_ready()):
                instance.state, instance.due = instance.due[1], None
            if instance.state == "terminated" and now_s - self._ended_s(instance) > KEPT_S:
                del self.instances[instance.id]

    def _ended_s(self, instance: Instance) -> float:
        return float(instance.tags.get("fake:ended", self.clock.now_s()))

    def boot(self, instance: Instance) -> None:
        instance.launched_s = self.clock.now_s()
        instance.state, instance.due = "pending", (instance.launched_s + self.boot_s, "running")
        instance.reason_code = instance.reason = ""
        instance.tags.pop("fake:ended", None)
        if not instance.private_address:
            number = int(instance.id[2:], 16)
            instance.private_address = f"172.31.{number // 250}.{number % 250 + 4}"
        if instance.parameters["NetworkInterfaces"][0].get("AssociatePublicIpAddress"):
            number = next(self._serials)
            instance.public_address = f"198.51.{100 + number // 250}.{number % 250 + 1}"
        self.on_started(instance)

    def end(self, instance: Instance, code: str, reason: str, *, after_s: float | None = None) -> None:
        """Move the machine towards `terminated`, irreversibly."""
        if instance.state in ("shutting-down", "terminated"):
            return
        end_s = self.clock.now_s() + (self.shutdown_s if after_s is None else after_s)
        instance.state, instance.due = "shutting-down", (end_s, "terminated")
        instance.reason_code, instance.reason = code, reason
        instance.tags["fake:ended"] = str(end_s)
        self.on_ended(instance)

    def halt(self, instance: Instance) -> None:
        instance.state, instance.due = "stopping", (self.clock.now_s() + self.shutdown_s, "stopped")
        instance.public_address = ""
        instance.reason_code, instance.reason = "Client.UserInitiatedShutdown", "User initiated"
        instance.tags["fake:ended"] = str(self.clock.now_s())
        self.on_ended(instance)

    def preempt(self, instance_id: str) -> None:
        """Preempt as the spot market does, at the end of the machine's notice."""
        self.end(self.instances[instance_id], "Server.SpotInstanceTermination", "Server.SpotInstanceTermination")

    def end_from_inside(self, instance_id: str) -> None:
        """Run `shutdown -h` on the machine: the effect was set at its launch."""
        instance = self.instances[instance_id]
        if instance.parameters.get("InstanceInitiatedShutdownBehavior") == "terminate":
            self.end(instance, "Client.InstanceInitiatedShutdown", "User initiated shutdown")
        else:
            self.halt(instance)

    def list_living(self, region: str) -> Iterator[Instance]:
        return (each for each in self.instances.values() if each.region == region and each.state in LIVING)

    def find_actions(self) -> set[str]:
        return {action for action, _, _ in self.calls}
