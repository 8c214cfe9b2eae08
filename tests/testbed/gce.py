"""A Compute Engine of our own, in memory, for Google's real client library: the REST methods that broker uses.

Strict where Google is: names, fields, quotas, permissions. Nothing happens by itself: an operation takes effect when it
is polled after it is due. `fail` adds faults, `capacity` and `limits` set what is available, `preempt` takes a machine
away.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.testbed.gce_operations import Fault, LostAnswer, Operations, stamp
from tests.testbed.gce_rules import (
    IMAGE_FAMILIES,
    KINDS,
    LOCAL_SSDS,
    MACHINES,
    METRICS,
    NAME,
    REGIONS,
    ZONES,
    GceError,
    Json,
    check_instance,
    count_use,
    find_permissions,
    invalid,
    matches,
    missing,
)


class OnInstance(Protocol):
    """Real machines behind the simulated ones. Each call comes in its own thread and may take long."""

    def started(self, instance: Json) -> None:
        """Start a machine.

        Its startup script is in `metadata`, its addresses in `networkInterfaces`; it is RUNNING on return.
        """

    def ended(self, instance: Json) -> None:
        """End a machine: stopped, deleted or preempted; `started` is called again when it is started again."""


@dataclass(kw_only=True)
class FakeGce(Operations):
    project: str = "pretend"
    list_lag_s: float = 0.0  # a new instance is missing from lists for this many seconds
    page_size: int = 500  # of any list: Google's default
    silent_zones: set[str] = field(default_factory=set)  # Compute Engine cannot look into these
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)  # (zone, machine type) -> machines; else many
    limits: dict[tuple[str, str], float] = field(default_factory=dict)  # (region, metric) -> limit; else 1000
    allowed: set[str] | None = None  # permissions of the caller; None: all
    rollback_failures: set[str] = field(default_factory=set)  # zones in which refused gangs are not removed
    partial_refusals: dict[str, str] = field(default_factory=dict)  # zone -> code of its next gang, after one instance
    disabled: bool = False  # the API is not enabled for the project
    tells_permissions: bool = True  # the Resource Manager API is enabled
    others: set[str] = field(default_factory=set)  # projects of ours with nothing in them
    networks: set[str] = field(default_factory=lambda: {"default"})
    host_project: str = ""  # shares its networks with `project`; its resources are in the same tables
    subnetworks: dict[tuple[str, str], str] = field(default_factory=dict)  # (region, name) -> path of the network
    on_instance: OnInstance | None = None
    allocate: Callable[[int], tuple[str, str]] = lambda n: (f"10.128.{n // 250}.{n % 250 + 2}", f"198.18.0.{n % 250}")
    calls: Counter[str] = field(default_factory=Counter)  # by method and kind of path
    used: set[str] = field(default_factory=set)  # permissions

    def __post_init__(self) -> None:
        super().__post_init__()
        self.instances: dict[tuple[str, str], Json] = {}  # (zone, name)
        self.firewalls: dict[str, Json] = {}

    # Controls for tests

    def preempt(self, name: str) -> None:
        """Preempt as Google takes a spot machine: by its own operation, then the machine is gone or stopped."""
        with self._lock:
            zone = next((zone for zone, known in self.instances if known == name), "")
            if not zone:
                return  # another request came first
            instance = self.instances[zone, name]
            assert instance["scheduling"]["provisioningModel"] == "SPOT", "only spot machines are preempted"
            self._operate(zone, "compute.instances.preempted", instance, lambda: None, user="system@google.com")
            self._remove(zone, name)

    def break_host(self, name: str) -> None:
        """Fail the machine's host: the machine stops, and its disk is kept."""
        self.shut_down(name, kind="compute.instances.hostError")

    def shut_down(self, name: str, *, kind: str = "compute.instances.guestTerminate") -> None:
        """Run the machine's own `shutdown -h now`: it stops, and its disk is kept."""
        with self._lock:
            zone = next((zone for zone, known in self.instances if known == name), "")
            if not zone or self.instances[zone, name]["status"] == "TERMINATED":
                return  # another request came first
            instance = self.instances[zone, name]
            self._halt(instance)
            self._operate(zone, kind, instance, lambda: None, user="system@google.com")

    def find(self, name: str) -> Json:
        with self._lock:
            self._settle()
            return next(instance for (_, known), instance in self.instances.items() if known == name)

    def list_names(self) -> list[str]:
        with self._lock:
            self._settle()
            return sorted(name for _, name in self.instances)

    # Interface for the server

    def answer(self, method: str, path: str, query: dict[str, str], body: Json) -> Json:
        """Answer a request. Raise GceError, or LostAnswer."""
        project, _, rest = path.removeprefix("/compute/v1/projects/").partition("/")
        if path.endswith(":testIamPermissions"):
            return self._answer_permissions(body["permissions"])
        if rest.startswith("global/images/family/"):
            return self._find_family(project, rest)
        with self._lock:
            self._settle()
            self.calls[f"{method} {'/'.join(each for each in rest.split('/') if each in KINDS)}"] += 1
            self._admit(project, find_permissions(method, rest))
            network = body.get("network", "") if rest == "global/firewalls" else ""
            if network.startswith("projects/") and network.split("/")[1] != project:
                raise invalid("resource.network", "Cross project references are not allowed for this resource")
            fault = self._draw(method, rest)
            if project in self.others:
                return _group("instances", [])
            known = self._by_request_id.get(query.get("requestId", ""))
            reply = known or self._serve(method, rest, query, body, fault)
            if "requestId" in query and "operationType" in reply:
                self._by_request_id[query["requestId"]] = reply
        if fault and not fault.code:
            raise LostAnswer
        if rest.endswith("/wait"):
            self._wait(reply)
        with self._lock:
            return copy.deepcopy(reply)

    def _admit(self, project: str, permissions: Sequence[str]) -> None:
        if self.disabled:
            raise GceError(403, "accessNotConfigured", f"Compute Engine API has not been used in project {project}")
        self.used.update(permissions)
        for permission in permissions:
            if self.allowed is not None and permission not in self.allowed:
                raise GceError(403, "forbidden", f"Required '{permission}' permission for 'projects/{project}'")
        if project not in {self.project, self.host_project, *self.others}:
            raise missing(f"projects/{project}")

    def _answer_permissions(self, asked: Sequence[str]) -> Json:
        if not self.tells_permissions:
            raise GceError(403, "accessNotConfigured", "Cloud Resource Manager API has not been used")
        return {"permissions": [each for each in asked if self.allowed is None or each in self.allowed]}

    def _serve(self, method: str, path: str, query: dict[str, str], body: Json, fault: Fault | None) -> Json:
        parts = path.split("/")
        match (method, *parts):
            case (_, "zones", _, "instances", *_):
                return self._serve_instances(method, parts, query, body, fault)
            case (_, "aggregated", kind):
                return self._list_all(kind, query)
            case ("GET", "global", "networks", name) if name in self.networks:
                return {"name": name}
            case (_, "global", "firewalls", *_):
                return self._serve_firewalls(method, parts, query, body, fault)
            case (_, *_, "operations", name, "wait") if name in self.operations:
                return self.operations[name]
            case ("GET", ""):
                return {"name": self.project, "quotas": [self._quota("global", "GPUS_ALL_REGIONS")]}
            case (_, "regions"):
                found, more = self._page([self._region(region) for region in REGIONS], query)
                return {"items": found, **more}
            case (_, "regions", region) if region in REGIONS:
                return self._region(region)
            case ("GET", "regions", region, "subnetworks", name) if (region, name) in self.subnetworks:
                return {"name": name, "network": self.subnetworks[region, name]}
        raise missing(path)

    def _serve_instances(
        self, method: str, parts: list[str], query: dict[str, str], body: Json, fault: Fault | None
    ) -> Json:
        zone = parts[1]
        match (method, *parts[3:]):
            case ("POST", name, "stop"):
                return self._stop(zone, name, query, fault)
            case ("POST",):
                return self._insert(zone, [body], fault, kind="insert")
            case ("POST", "bulkInsert"):
                return self._bulk_insert(zone, body, fault)
            case ("GET", name):
                return self._get(zone, name)
            case ("DELETE", name):
                return self._delete(zone, name, fault)
            case ("POST", name, verb):
                return self._change(zone, name, verb, body, fault)
        raise missing("/".join(parts))

    def _serve_firewalls(
        self, method: str, parts: list[str], query: dict[str, str], body: Json, fault: Fault | None
    ) -> Json:
        if method == "GET":
            found = [each for each in self.firewalls.values() if matches(each, query.get("filter"))]
            found, more = self._page(found, query)
            return {"items": found, **more}
        if method == "POST":
            return self._insert_firewall(body, fault)
        name = parts[-1]
        if name not in self.firewalls:
            raise missing("/".join(parts))
        if method == "PATCH":
            self.firewalls[name] |= body
            return self._operate("", "patch", self.firewalls[name], lambda: None, fault)
        return self._operate("", "delete", self.firewalls[name], lambda: self.firewalls.pop(name, None), fault)

    def _page(self, found: list[Json], query: dict[str, str]) -> tuple[list[Json], Json]:
        """Return a page of a list, and the token of the next one."""
        start, most = int(query.get("pageToken", 0)), int(query.get("maxResults", 500))
        if not 0 < most <= 500:
            raise invalid("maxResults", most)
        end = start + min(most, self.page_size)
        return found[start:end], {"nextPageToken": str(end)} if end < len(found) else {}

    def _list_all(self, kind: str, query: dict[str, str]) -> Json:
        if self.silent_zones and query.get("returnPartialSuccess") != "true":
            raise GceError(503, "backendError", f"No answer from {sorted(self.silent_zones)}")
        if kind == "instances":
            newest_s = self.now() - self.list_lag_s
            found = [each for each in self.instances.values() if each["_made_s"] <= newest_s]
        elif kind == "operations":
            found = list(self.operations.values())
        else:
            found = [
                {"name": name, "zone": zone, "guestCpus": MACHINES[name].vcpus} for name in MACHINES for zone in ZONES
            ]
        found = [each for each in found if str(each.get("zone", "")).rpartition("/")[2] not in self.silent_zones]
        found, more = self._page([each for each in found if matches(each, query.get("filter"))], query)
        grouped = _group(kind, found) | more
        for zone in self.silent_zones:  # as Compute Engine answers while it cannot look into a zone
            grouped["items"][f"zones/{zone}"] = {"warning": {"code": "UNREACHABLE", "message": "no answer"}}
        return grouped

    def _find_family(self, project: str, path: str) -> Json:
        family = path.rpartition("/")[2]
        if (project, family) not in IMAGE_FAMILIES:
            raise missing(f"projects/{project}/{path}")
        return {"name": f"{family}-v20260901", "family": family}

    # Instances

    def _insert(self, zone: str, bodies: list[Json], fault: Fault | None, *, kind: str) -> Json:
        if zone not in ZONES:
            raise missing(f"projects/{self.project}/zones/{zone}")
        for body in bodies:
            if not NAME.fullmatch(body["name"]):
                raise invalid("resource.name", body["name"])
            check_instance(body, zone=zone, is_bulk=kind == "bulkInsert")
            if (zone, body["name"]) in self.instances:
                raise GceError(409, "alreadyExists", f"The resource '{body['name']}' already exists")
        refusal = {"code": fault.code, "message": f"injected {fault.code}"} if fault and fault.code else None
        refusal = refusal or self._find_quota_refusal(zone, bodies)
        made: list[Json] = []
        for body in bodies:
            refusal = refusal or self._find_capacity_refusal(zone, body)
            if refusal is None:
                made.append(self._make(zone, body))
            if len(bodies) > 1 and made and (code := self.partial_refusals.pop(zone, "")):
                refusal = {"code": code, "message": f"injected {code}"}
        target = made[0] if made else self._describe(zone, bodies[0]["name"])

        def settle() -> None:
            for instance in made:
                if refusal is None or zone in self.rollback_failures:
                    self._run(instance)
                else:
                    self._remove(zone, instance["name"])

        return self._operate(zone, kind, target, settle, error=refusal)

    def _bulk_insert(self, zone: str, body: Json, fault: Fault | None) -> Json:
        names = sorted(body["perInstanceProperties"])
        if int(body["count"]) != len(names) or int(body.get("minCount", 0)) != len(names):
            raise invalid("resource.count", body["count"])
        properties = body["instanceProperties"]
        bodies = [copy.deepcopy(properties) | {"name": name} for name in names]
        return self._insert(zone, bodies, fault, kind="bulkInsert")

    def _find_capacity_refusal(self, zone: str, body: Json) -> Json | None:
        machine = body["machineType"].rpartition("/")[2]
        standing = sum(
            1
            for (each, _), one in self.instances.items()
            if each == zone and one["machineType"].endswith(f"/{machine}") and one["status"] != "TERMINATED"
        )
        if standing < self.capacity.get((zone, machine), 10**6):
            return None
        message = f"The zone 'projects/{self.project}/zones/{zone}' does not have enough resources available"
        return {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": message}

    def _find_quota_refusal(self, zone: str, bodies: list[Json]) -> Json | None:
        wanted: Counter[str] = Counter()
        for body in bodies:
            wanted.update(count_use(body))  # type: ignore[arg-type]
        for metric, amount in wanted.items():
            region = "global" if metric == "GPUS_ALL_REGIONS" else zone.rpartition("-")[0]
            limit = self._limit(region, metric)
            plain = metric.removeprefix("PREEMPTIBLE_")
            if self._used(region, metric) + amount <= limit:
                continue
            if plain != metric and self._limit(region, metric) == 0 and amount <= self._limit(region, plain):
                continue  # a spot machine without preemptible quota draws on the ordinary one
            return {
                "code": "QUOTA_EXCEEDED",
                "message": f"Quota '{metric}' exceeded. Limit: {limit} in region {region}.",
            }
        return None

    def _make(self, zone: str, body: Json) -> Json:
        number = next(self._numbers)
        inside, outside = self.allocate(number)
        interfaces = copy.deepcopy(body["networkInterfaces"])
        interfaces[0]["networkIP"] = inside
        for access in interfaces[0].get("accessConfigs", []):
            access["natIP"] = outside
        instance = copy.deepcopy(body) | self._describe(zone, body["name"])
        instance |= {
            "id": str(10**15 + number),
            "machineType": f"{self.base}/zones/{zone}/machineTypes/{body['machineType'].rpartition('/')[2]}",
            "status": "PROVISIONING",
            "creationTimestamp": stamp(self.now()),
            "networkInterfaces": interfaces,
            "labelFingerprint": "0",
            "disks": [*copy.deepcopy(body["disks"]), *LOCAL_SSDS.get(body["machineType"].rpartition("/")[2], ())],
            "_made_s": self.now(),
        }
        self.instances[zone, body["name"]] = instance
        return instance

    def _describe(self, zone: str, name: str) -> Json:
        link = f"{self.base}/compute/v1/projects/{self.project}/zones/{zone}/instances/{name}"
        return {"name": name, "zone": f"{self.base}/compute/v1/projects/{self.project}/zones/{zone}", "selfLink": link}

    def _run(self, instance: Json) -> None:
        instance["status"] = "STAGING"
        instance["lastStartTimestamp"] = stamp(self.now())
        if self.on_instance is None:
            instance["status"] = "RUNNING"
            return
        hook = self.on_instance

        def boot() -> None:
            hook.started(copy.deepcopy(instance))
            with self._lock:
                if instance["status"] == "STAGING":
                    instance["status"] = "RUNNING"

        threading.Thread(target=boot, daemon=True).start()

    def _halt(self, instance: Json) -> None:
        instance["status"] = "TERMINATED"
        instance["lastStopTimestamp"] = stamp(self.now())
        self._report_ended(instance)

    def _remove(self, zone: str, name: str) -> None:
        instance = self.instances.pop((zone, name), None)
        if instance is not None and instance["status"] != "TERMINATED":
            instance["status"] = "DEPROVISIONING"
            self._report_ended(instance)

    def _report_ended(self, instance: Json) -> None:
        if self.on_instance is not None:
            threading.Thread(target=self.on_instance.ended, args=(copy.deepcopy(instance),), daemon=True).start()

    def _get(self, zone: str, name: str) -> Json:
        if (zone, name) not in self.instances:
            raise missing(f"projects/{self.project}/zones/{zone}/instances/{name}")
        return self.instances[zone, name]

    def _delete(self, zone: str, name: str, fault: Fault | None) -> Json:
        instance = self._get(zone, name)
        if fault is None or not fault.code:
            instance["status"] = "STOPPING" if instance["status"] != "TERMINATED" else "TERMINATED"
        return self._operate(zone, "delete", instance, lambda: self._remove(zone, name), fault)

    def _stop(self, zone: str, name: str, query: dict[str, str], fault: Fault | None) -> Json:
        instance = self._get(zone, name)
        if any(disk.get("type") == "SCRATCH" for disk in instance["disks"]) and "discardLocalSsd" not in query:
            message = "VM has a Local SSD attached but an undefined value for `discard-local-ssd`"
            raise GceError(400, "badRequest", message)
        return self._operate(zone, "stop", instance, lambda: self._halt(instance), fault)

    def _change(self, zone: str, name: str, verb: str, body: Json, fault: Fault | None) -> Json:
        instance = self._get(zone, name)
        if verb == "setLabels":
            if body["labelFingerprint"] != instance["labelFingerprint"]:
                raise GceError(
                    412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed"
                )
            instance["labels"] = body["labels"]
            instance["labelFingerprint"] = str(int(instance["labelFingerprint"]) + 1)
            return self._operate(zone, "setLabels", instance, lambda: None, fault)
        refusal = self._find_capacity_refusal(zone, instance)
        effect = (lambda: None) if refusal else (lambda: self._run(instance))
        return self._operate(zone, "start", instance, effect, fault, error=refusal)

    # Everything else

    def _region(self, region: str) -> Json:
        return {"name": region, "quotas": [self._quota(region, each) for each in METRICS]}

    def _quota(self, region: str, metric: str) -> Json:
        """Return a quota; `region` is "global" for totals over all regions."""
        return {"metric": metric, "limit": self._limit(region, metric), "usage": self._used(region, metric)}

    def _limit(self, region: str, metric: str) -> float:
        return self.limits.get((region, metric), 1000.0)

    def _used(self, region: str, metric: str) -> float:
        places = {zone: {zone.rpartition("-")[0], "global"} for zone in ZONES}
        live = (each for (zone, _), each in self.instances.items() if region in places[zone])
        return sum(count_use(each).get(metric, 0.0) for each in live if each["status"] != "TERMINATED")

    def _insert_firewall(self, body: Json, fault: Fault | None) -> Json:
        if body["name"] in self.firewalls:
            raise GceError(409, "alreadyExists", f"The resource '{body['name']}' already exists")
        networks = {"global/networks/default", *self.subnetworks.values()}
        if not NAME.fullmatch(body["name"]) or body.get("network") not in networks:
            raise invalid("resource", body["name"])
        if not body.get("targetTags") or not (body.get("sourceRanges") or body.get("sourceTags")):
            raise invalid("resource.sourceRanges", body)
        if bool(body.get("allowed")) == bool(body.get("denied")):
            raise invalid("resource.allowed", body.get("allowed"))
        rule = body | {
            "selfLink": f"{self.base}/global/firewalls/{body['name']}",
            "creationTimestamp": stamp(self.now()),
        }
        self.firewalls[body["name"]] = rule
        return self._operate("", "insert", rule, lambda: None, fault)


def _group(kind: str, items: list[Json]) -> Json:
    """Return an aggregated list: by zone, with a warning for an empty one."""
    scopes: dict[str, Json] = {}
    for item in items:
        zone = str(item.get("zone", "")).rpartition("/")[2]
        scopes.setdefault(f"zones/{zone}" if zone else "global", {}).setdefault(kind, []).append(item)
    return {"items": scopes or {f"zones/{ZONES[0]}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}}
