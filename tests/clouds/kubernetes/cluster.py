"""A Kubernetes cluster of our own: a store of objects, a scheduler, and a kubelet whose pods are real process groups.

It follows Kubernetes' documented behaviour as far as broker relies on it: names are unique, deletion waits for the
processes and then for finalizers, evictions set the condition DisruptionTarget, quotas refuse with 403.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from broker.clouds.kubernetes.nodes import Amount, read_amount, sum_requests
from broker.sites.kubernetes import NODE_ROOT

Json = dict[str, Any]
TICK_S = 0.03
MARK = "TEST_POD_UID"


class ApiError(Exception):
    """A Status object: HTTP code, reason, message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class Cluster:
    """All state is guarded by `lock`; a thread schedules pods and watches their processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.nodes: dict[str, Json] = {}
        self.pods: dict[tuple[str, str], Json] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # pod's uid -> its first process
        self.images_missing: set[str] = set()
        self.quota: int | None = None  # pods per namespace
        self.is_scheduling = True
        self._version = 0
        self._kill_s: dict[str, float] = {}  # uid -> when SIGKILL is due
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kill all processes and stop."""
        self._stop.set()
        self._thread.join()
        for uid in list(self.processes):
            kill_marked(uid)
            self.processes.pop(uid).wait()
        for pod in self.pods.values():
            shutil.rmtree(find_root() / pod["metadata"]["name"], ignore_errors=True)

    def add_node(
        self, name: str, *, cpu: str = "8", memory: str = "16Gi", gpus: int = 0,
        labels: Mapping[str, str] | None = None, taints: tuple[Json, ...] = (),
    ) -> None:  # fmt: skip
        """Add a ready node."""
        amount = {"cpu": cpu, "memory": memory, "ephemeral-storage": "100Gi", "pods": "110"}
        amount |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
        self.nodes[name] = {
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
            "spec": {"taints": list(taints)} if taints else {},
            "status": {
                "allocatable": amount, "capacity": amount, "conditions": [{"type": "Ready", "status": "True"}],
            },
        }  # fmt: skip

    def create(self, namespace: str, pod: Json) -> Json:
        """Store a pod, as the API server admits it."""
        with self.lock:
            name = pod["metadata"]["name"]
            if (namespace, name) in self.pods:
                raise ApiError(409, "AlreadyExists", f'pods "{name}" already exists')
            if self.quota is not None and len(self.list(namespace)) >= self.quota:
                raise ApiError(
                    403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: team, requested: pods=1, used: '
                    f"pods={self.quota}, limited: pods={self.quota}",
                )  # fmt: skip
            pod = copy.deepcopy(pod)
            pod["metadata"] |= {"namespace": namespace, "uid": os.urandom(8).hex(), "creationTimestamp": format_now()}
            pod["status"] = {"phase": "Pending", "conditions": []}
            self.pods[namespace, name] = pod
            return self._touch(pod)

    def get(self, namespace: str, name: str) -> Json:
        with self.lock:
            if (namespace, name) not in self.pods:
                raise ApiError(404, "NotFound", f'pods "{name}" not found')
            return copy.deepcopy(self.pods[namespace, name])

    def list(self, namespace: str | None = None, selects: Callable[[Json], bool] = lambda pod: True) -> list[Json]:
        with self.lock:
            found = [pod for (where, _), pod in self.pods.items() if namespace in (None, where) and selects(pod)]
            return copy.deepcopy(found)

    def delete(self, namespace: str, name: str, *, grace_s: float | None = None, disruption: str = "") -> Json:
        """Begin a deletion; an eviction also names its disruption."""
        with self.lock:
            self.get(namespace, name)
            pod = self.pods[namespace, name]
            if disruption:
                set_condition(pod, "DisruptionTarget", "True", disruption)
            given_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
            self._begin_end(pod, given_s if grace_s is None else grace_s)
            pod["metadata"].setdefault("deletionTimestamp", format_now())
            self._finish(pod)
            return copy.deepcopy(pod)

    def patch_finalizers(self, namespace: str, name: str, removed: list[str]) -> Json:
        with self.lock:
            self.get(namespace, name)
            pod = self.pods[namespace, name]
            kept = [each for each in pod["metadata"].get("finalizers", ()) if each not in removed]
            pod["metadata"]["finalizers"] = kept
            self._finish(pod)
            return copy.deepcopy(pod)

    def evict(self, name: str, *, grace_s: float | None = None) -> None:
        """Evict a pod as a drain does."""
        self.delete(self.find(name)["metadata"]["namespace"], name, grace_s=grace_s, disruption="EvictionByEvictionAPI")

    def fail(self, name: str, reason: str) -> None:
        """End a pod at once, as the kubelet of a node under pressure does."""
        with self.lock:
            pod = self.pods[self.find(name)["metadata"]["namespace"], name]
            kill_marked(pod["metadata"]["uid"])
            pod["status"] |= {"phase": "Failed", "reason": reason}

    def lose_node(self, name: str) -> None:
        """Remove a node with its pods, as when a spot machine is taken: the garbage collector marks its pods."""
        with self.lock:
            self.nodes.pop(name)
            for pod in self.pods.values():
                if pod["spec"].get("nodeName") == name and pod["status"]["phase"] not in ("Succeeded", "Failed"):
                    kill_marked(pod["metadata"]["uid"])
                    set_condition(pod, "DisruptionTarget", "True", "DeletionByPodGC")
                    pod["status"]["phase"] = "Failed"
                    pod["metadata"].setdefault("deletionTimestamp", format_now())

    def wait_until(self, is_so: Callable[[list[Json]], bool]) -> None:
        """Wait until the list of all pods is as stated."""
        while not is_so(self.list()):
            time.sleep(TICK_S)

    def find(self, name: str) -> Json:
        """Return the pod of this name, in any namespace."""
        return next(pod for pod in self.list() if pod["metadata"]["name"] == name)

    def make_environment(self, pod: Json) -> dict[str, str]:
        """Return the environment of the processes of a container."""
        uid = pod["metadata"]["uid"]
        home = self.folder / "pods" / uid
        home.mkdir(parents=True, exist_ok=True)
        given = {each["name"]: each["value"] for each in pod["spec"]["containers"][0].get("env", ())}
        return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", MARK: uid, **given}

    def _touch(self, pod: Json) -> Json:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(pod)

    def _work(self) -> None:
        while not self._stop.wait(TICK_S):
            with self.lock:
                for pod in list(self.pods.values()):
                    self._step(pod)

    def _step(self, pod: Json) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        if status["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
            if "nodeName" not in pod["spec"] and self.is_scheduling:
                self._schedule(pod)
            if "nodeName" in pod["spec"]:
                self._start(pod)
        if uid in self._kill_s and time.monotonic() >= self._kill_s[uid]:
            kill_marked(uid)
        process = self.processes.get(uid)
        if process is not None and process.poll() is not None:
            kill_marked(uid)  # the end of the first process ends its container
            del self.processes[uid]
            self._note_end(pod, process.returncode)
        limit_s = pod["spec"].get("activeDeadlineSeconds")
        if limit_s and process is not None and time.time() - status["started_s"] > limit_s:
            status["reason"] = "DeadlineExceeded"
            self._begin_end(pod, 0)
        self._finish(pod)

    def _schedule(self, pod: Json) -> None:
        used = sum_requests(list(self.pods.values()))
        need = read_amount(pod["spec"]["containers"][0].get("resources", {}).get("requests", {}))
        for name, node in self.nodes.items():
            free = read_amount(node["status"]["allocatable"]).subtract(used.get(name, Amount()))
            if is_admitted(pod, node) and free.count(need):
                pod["spec"]["nodeName"] = name
                set_condition(pod, "PodScheduled", "True", "")
                return
        message = f"0/{len(self.nodes)} nodes are available"
        set_condition(pod, "PodScheduled", "False", "Unschedulable", message)

    def _start(self, pod: Json) -> None:
        """Start the container's first process, or report that its image is missing."""
        container, status = pod["spec"]["containers"][0], pod["status"]
        status.setdefault("startTime", format_now())
        if container["image"] in self.images_missing:
            state: Json = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
        else:
            uid = pod["metadata"]["uid"]
            self.processes[uid] = subprocess.Popen(
                [*container["command"], *container.get("args", ())], env=self.make_environment(pod), cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            number = len(self.processes) + int(uid[:4], 16) % 200 * 256
            status |= {
                "phase": "Running",
                "started_s": time.time(),
                "podIP": f"127.77.{number >> 8}.{number % 250 + 1}",
            }
            state = {"running": {"startedAt": format_now()}}
        status["containerStatuses"] = [{"name": container["name"], "image": container["image"], "state": state}]

    def _note_end(self, pod: Json, code: int) -> None:
        shutil.rmtree(find_root() / pod["metadata"]["name"], ignore_errors=True)  # as its file system ends with it
        exit_code = code if code >= 0 else 128 - code
        ended = {"exitCode": exit_code, "finishedAt": format_now(), "reason": "Error" if exit_code else "Completed"}
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
        pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"

    def _begin_end(self, pod: Json, grace_s: float) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self.processes:
            if uid not in self._kill_s and grace_s:
                self.processes[uid].send_signal(signal.SIGTERM)
            due_s = time.monotonic() + grace_s
            self._kill_s[uid] = min(due_s, self._kill_s.get(uid, due_s))

    def _finish(self, pod: Json) -> None:
        """Remove a deleted pod once its processes have ended and no finalizer keeps it."""
        metadata = pod["metadata"]
        is_over = metadata["uid"] not in self.processes
        is_ending = "deletionTimestamp" in metadata and is_over
        if is_ending and "nodeName" in pod["spec"] and pod["status"]["phase"] == "Pending":
            pod["status"]["phase"] = "Failed"  # its container never started
        if "deletionTimestamp" in metadata and is_over and not metadata.get("finalizers"):
            self.pods.pop((metadata["namespace"], metadata["name"]), None)
        self._touch(pod)


def find_root() -> Path:
    """Return the folder of broker's nodes, which all pods here share."""
    return Path(NODE_ROOT.format(user=os.getuid()))


def is_admitted(pod: Json, node: Json) -> bool:
    """Return whether node selector and tolerations admit the pod to the node."""
    labels = node["metadata"]["labels"]
    if any(labels.get(key) != value for key, value in pod["spec"].get("nodeSelector", {}).items()):
        return False
    tolerated = {(each["key"], each["effect"]) for each in pod["spec"].get("tolerations", ())}
    taints = node["spec"].get("taints", ())
    return all((each["key"], each["effect"]) in tolerated for each in taints if each["effect"] != "PreferNoSchedule")


def set_condition(pod: Json, kind: str, value: str, reason: str, message: str = "") -> None:
    """Set a condition; its time changes only with its value."""
    conditions = pod["status"]["conditions"]
    old = next((each for each in conditions if each["type"] == kind), None)
    if old is None:
        old = {"type": kind}
        conditions.append(old)
    if old.get("status") != value:
        old["lastTransitionTime"] = format_now()
    old |= {"status": value, "reason": reason, "message": message}


def kill_marked(uid: str) -> None:
    """Kill every process of a pod, as the end of its PID namespace does."""
    while pids := list(find_marked(uid)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.002)


def find_marked(uid: str) -> Iterator[int]:
    """Yield the living processes of a pod."""
    mark = f"{MARK}={uid}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
            if not is_dead and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def format_now() -> str:
    """Return the time as the API server writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
