"""The cloud of Kubernetes clusters: a gang is n pods with one label, and the API server is the only record of them.

create     one pod per rank; the names come from the token, so that a repeated request finds the first one's pods
list       the pods with the owner's label, of the entry's namespace
terminate  delete: the kubelet kills the processes. A finalizer keeps the object, so that a list can confirm the end
sweep      remove the finalizer of ended pods
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from broker.clock import Clock
from broker.clouds import local_machine
from broker.clouds.kubernetes import node_program
from broker.clouds.kubernetes.api import KubernetesApi, RunKubectl, call_all, try_read
from broker.clouds.kubernetes.manifest import find_pool, make_pod, name_gang, read_record
from broker.clouds.kubernetes.nodes import count_room
from broker.clouds.kubernetes.states import find_obstacle, find_state, is_kept, is_outlived
from broker.clouds.sent_source import read_source
from broker.config import Config
from broker.errors import (
    AuthError,
    BrokerError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites import find_file
from broker.sites.backends import find_other_backend
from broker.sites.facts import find_facts
from broker.sites.kubectl import run_kubectl
from broker.sites.kubernetes import KubernetesContext, Pool, read_contexts, read_pools
from broker.types import Node, NodeList, NodeRequest, NodeState
from broker.user_files import UserFile

log = logging.getLogger(__name__)

KEPT_S = 3600.0  # an ended pod of a live cluster stays readable for this time
Read = Callable[[], tuple[Mapping[str, KubernetesContext], Mapping[str, Sequence[Pool]]]]


def make_cloud(config: Config, *, clock: Clock) -> KubernetesCloud | None:
    """Make the cloud; None without a file of contexts."""
    path = find_file("kubernetes", config.home)
    if path is None:
        return None
    facts = find_facts("kubernetes", config.home)
    file = UserFile(path, lambda: (read_contexts(path, facts), read_pools(facts)), beside=[facts])
    return KubernetesCloud(file.read, clock=clock)


class KubernetesCloud:
    """`Cloud`, `CanSweep` and `ReadsSites` for the contexts of `kubernetes.yaml`, which is read at every call."""

    name: ClassVar[str] = "kubernetes"
    settle_s: ClassVar[float] = 0.0
    extends_gangs: ClassVar[bool] = True
    queue_s: ClassVar[float] = 2700.0  # in Kueue's queue, or while nodes are added

    def __init__(self, read: Read, *, clock: Clock, run: RunKubectl = run_kubectl) -> None:
        self._read = read
        self._clock = clock
        self._run = run

    async def check(self) -> None:
        """Return if any context answers; otherwise raise the first one's error."""
        apis = self._list_apis()
        answers = await call_all([partial(api.list_pods, owner="check") for api in apis])
        if not apis:
            raise AuthError(
                "`kubernetes.yaml` names no context", hints=("run `broker check kubernetes` to use the current one",)
            )
        if all(isinstance(answer, BaseException) for answer in answers):
            raise next(answer for answer in answers if isinstance(answer, BaseException))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Create the gang's pods and return its nodes, pending or not; pods of the same token are returned instead.

        Raises CapacityError, QuotaError, DeniedError or InvalidRequestError (nothing was created), and
        UnknownOutcomeError if an answer is lost (list the nodes before retrying).
        """
        contexts, pools = self._read_files()
        region = request.placement.offer.region
        if region not in contexts or contexts[region].is_off:
            raise InvalidRequestError(
                f"`kubernetes.yaml` has no context `{region}`", hints=("restore its entry, or plan again",)
            )
        api = self._make_api(contexts[region])
        pool = find_pool(pools.get(region, ()), request)
        nodes = self._make_nodes(api.context, await api.list_pods(gang=name_gang(request)))
        ranks = {node.rank for node in nodes}
        missing = [rank for rank in range(request.placement.node_count) if rank not in ranks]
        if not missing or any(node.state is NodeState.TERMINATED for node in nodes):
            return sorted(nodes, key=lambda node: node.rank)
        await self._check_room(api, pool, request)
        sources = read_source(node_program.__file__), read_source(local_machine.__file__)
        make = partial(make_pod, api.context, pool, request, sources=sources, now_s=self._clock.now_s())
        await self._create_pods(api, [make(rank) for rank in missing])
        try:
            pods = await api.list_pods(gang=name_gang(request))
        except CloudError as error:
            raise UnknownOutcomeError(f"the pods were created, but cannot be listed: {error.message}") from error
        return sorted(self._make_nodes(api.context, pods), key=lambda node: node.rank)

    async def list_nodes(self, owner: str) -> NodeList:
        """List the pods of every context. A context that does not answer is reported as an unseen region.

        Pods that have not started within the time that `find_obstacle` gives them are deleted, and those in which only
        containers of others still run.
        """
        apis = self._list_apis()
        answers = await call_all([partial(self._list_context, api, owner) for api in apis])
        unseen = {
            api.context.name: answer
            for api, answer in zip(apis, answers, strict=True)
            if isinstance(answer, CloudError)
        }
        if unseen and len(unseen) == len(apis):
            raise next(iter(unseen.values()))
        nodes: list[Node] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, CloudError):
                raise answer
            nodes += () if isinstance(answer, BaseException) else answer
        return NodeList(nodes=tuple(nodes), unseen=unseen)

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Delete the pods. Pods that are gone, or whose cluster is off, count as success; a list confirms the end.

        Every pod is attempted, then the first failure is raised. Raises TransientError if a server does not answer.
        """
        contexts, _ = self._read_files()
        calls = []
        others = [other for node in nodes if (other := find_other_backend(node, is_native=True))]
        for node in (node for node in nodes if not find_other_backend(node, is_native=True)):
            region, namespace = node.region, find_namespace(node)
            # An entry that has left the file: its context may still be in the kubeconfig.
            context = contexts.get(region) or KubernetesContext(name=region, context=region)
            if context.is_off:
                continue
            calls.append(partial(self._make_api(context).delete, node.id, namespace))
        raise_first([*await call_all(calls), *others])

    def find_removal(self, region: str, node: Node | None = None) -> CloudError | None:
        """Return an AuthError for a context that the file does not list, or lists with another namespace."""
        if node is not None and (other := find_other_backend(node, is_native=True)):
            return other
        contexts, _ = self._read_files()
        if region not in contexts:
            return AuthError(
                f"context `{region}` is no longer in use, so nodes there cannot be checked",
                hints=(
                    f"add `{region}: {{}}` to `kubernetes.yaml`; remove it after its nodes have ended",
                    f"if the cluster was shut down for good, add `{region}: {{is_off: true}}`",
                ),
            )
        if contexts[region].is_off:
            return None
        if node is None or (namespace := find_namespace(node)) == contexts[region].namespace:
            return None
        return AuthError(
            f"node `{node.id}` is in namespace `{namespace}` of context `{region}`, which is no longer in use there, "
            "so it cannot be checked",
            hints=(f"set `namespace: {namespace}` of `{region}` in `kubernetes.yaml` until the node has ended",),
        )

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Remove the records of ended pods; those of clusters in `keep` stay for an hour. Return their number.

        A context that does not answer does not keep the others from it; its error is raised at the end.
        """
        calls, apis = [], self._list_apis()
        answers = await call_all([partial(api.list_pods, owner=owner) for api in apis])
        for api, answer in zip(apis, answers, strict=True):
            for pod in () if isinstance(answer, BaseException) else answer:
                record = read_record(pod)
                if record is None or not is_kept(pod):
                    continue
                state, _, ended_s = find_state(pod, is_spot=record["is_spot"])
                is_recent = ended_s is None or self._clock.now_s() - ended_s < KEPT_S
                if state is NodeState.TERMINATED and not (record["cluster"] in keep and is_recent):
                    calls.append(partial(self._forget, api, pod["metadata"]["name"]))
        raise_first([*await call_all(calls), *answers])
        return len(calls)

    async def _forget(self, api: KubernetesApi, name: str) -> None:
        await api.delete(name, api.context.namespace)  # a pod that ended by itself has not been deleted
        await api.forget(name)

    async def _list_context(self, api: KubernetesApi, owner: str) -> Sequence[Node]:
        pods = await api.list_pods(owner=owner)
        ours = [pod for pod in pods if read_record(pod) and not pod["metadata"].get("deletionTimestamp")]
        stuck = [pod["metadata"]["name"] for pod in ours if is_outlived(pod) or self._is_stuck(api.context, pod)]
        # One pod that cannot be deleted must not hide all others; the next list tries again.
        for result in await call_all([partial(api.delete, name, api.context.namespace) for name in stuck]):
            if isinstance(result, CloudError):
                log.warning("a pod that does not start cannot be deleted: %s", result.message)
            elif isinstance(result, BaseException):
                raise result
        return self._make_nodes(api.context, pods)

    def _is_stuck(self, context: KubernetesContext, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod will not start: its image cannot be pulled, or no node has had room for it for long."""
        obstacle = find_obstacle(pod)
        if obstacle is None:
            return False
        why, limit_s, since_s = obstacle
        if why.startswith("no room") and (context.is_autoscaled or context.queue):
            return False  # the launch itself ends after `queue_s`
        return since_s is not None and self._clock.now_s() - since_s >= limit_s

    async def _check_room(self, api: KubernetesApi, pool: Pool, request: NodeRequest) -> None:
        """Raise CapacityError if the pool's nodes have no room for the gang: its pods would only wait.

        A login that may not read the pods of all namespaces does not know; then the pods wait for a while.
        """
        if api.context.is_autoscaled or api.context.queue:
            return
        nodes = await try_read(api, "/api/v1/nodes")
        pods = await try_read(api, "/api/v1/pods?fieldSelector=status.phase!%3DSucceeded,status.phase!%3DFailed")
        if nodes is None or pods is None:
            return
        room = count_room(nodes, pods, pool, request, context=api.context)
        if room < request.placement.node_count:
            offer = request.placement.offer
            raise CapacityError(
                f"pool `{pool.name}` of context `{offer.region}` has room for {room} of "
                f"{request.placement.node_count} pods of {offer.instance_type}",
                scope="zone",
                hints=("if its nodes are added on demand: `autoscaled: true` in `kubernetes.yaml`",),
            )

    async def _create_pods(self, api: KubernetesApi, pods: Sequence[Mapping[str, Any]]) -> None:
        """Create all pods. If one is refused, delete those that this call created, then raise the refusal."""
        results = await call_all([partial(api.create, pod) for pod in pods])
        errors = [each for each in results if isinstance(each, BaseException)]
        if not errors:
            return
        if lost := [each for each in errors if isinstance(each, UnknownOutcomeError)]:
            raise lost[0]
        made = [pod["metadata"]["name"] for pod, result in zip(pods, results, strict=True) if result is True]
        try:
            raise_first(await call_all([partial(self._forget, api, name) for name in made]))
        except CloudError as error:
            raise UnknownOutcomeError(f"a part of the gang was created: {error.message}") from error
        raise errors[0]

    def _make_nodes(self, context: KubernetesContext, pods: Sequence[Mapping[str, Any]]) -> Sequence[Node]:
        """Return a node for each of our pods."""
        return [self._make_node(context, pod, record) for pod in pods if (record := read_record(pod)) is not None]

    def _make_node(self, context: KubernetesContext, pod: Mapping[str, Any], record: Mapping[str, Any]) -> Node:
        state, reason, ended_s = find_state(pod, is_spot=record["is_spot"])
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if state is NodeState.TERMINATED:  # the server's clock may be ahead
            ended_s = min(ended_s or self._clock.now_s(), self._clock.now_s())
        return Node(
            id=name,
            cloud=self.name,
            owner=record["owner"],
            cluster=record["cluster"],
            attempt=record["attempt"],
            rank=record["rank"],
            state=state,
            address=pod.get("status", {}).get("podIP", ""),
            region=context.name,
            zone=record["zone"],
            token=record["token"],
            is_spot=record["is_spot"],
            usd_hour=record["usd_hour"],
            created_s=record["created_s"],
            ended_s=ended_s,
            reason=reason,
            handle=f"k8s://{quote(context.name, safe='')}/{namespace}/{name}",
        )

    def _list_apis(self) -> Sequence[KubernetesApi]:
        contexts, _ = self._read_files()
        return [self._make_api(context) for context in contexts.values() if not context.is_off]

    def _make_api(self, context: KubernetesContext) -> KubernetesApi:
        return KubernetesApi(context, run=self._run)

    def _read_files(self) -> tuple[Mapping[str, KubernetesContext], Mapping[str, Sequence[Pool]]]:
        try:
            return self._read()
        except BrokerError as error:  # the file may be half-written
            raise TransientError(error.message, hints=error.hints) from error


def find_namespace(node: Node) -> str:
    """Return the namespace of a node's pod, from `k8s://CONTEXT/NAMESPACE/POD`."""
    return node.handle.removeprefix("k8s://").split("/")[1]


def raise_first(results: Sequence[object]) -> None:
    """Raise the first error among results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
