"""`broker check kubernetes`: contact every context, test its permissions, and record its node pools as offers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.clock import Clock
from broker.clouds.findings import CheckResult, report_invalid_file
from broker.clouds.kubernetes.api import KubernetesApi, RunKubectl, try_read
from broker.clouds.kubernetes.nodes import list_pools
from broker.config import Config
from broker.errors import BrokerError, CloudError, StateError
from broker.sites import find_file
from broker.sites.facts import find_facts
from broker.sites.kubectl import find_kubectl, run_kubectl
from broker.sites.kubernetes import KubernetesContext, Pool, read_contexts, read_pools, write_pools

# What broker does with pods. `kubectl exec` needs `get` for the WebSocket, and `create` since Kubernetes 1.35.
VERBS = (
    ("create", "pods"), ("get", "pods"), ("list", "pods"), ("delete", "pods"), ("patch", "pods"),
    ("get", "pods/exec"), ("create", "pods/exec"),
)  # fmt: skip
POLICY = """\
# kubectl apply -f - ; then bind the user, group or service account of your login.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: broker, namespace: {namespace}}}
rules:
  - {{apiGroups: [""], resources: [pods], verbs: [create, get, list, delete, patch]}}
  - {{apiGroups: [""], resources: [pods/exec], verbs: [get, create]}}
---
# Reads node sizes and free room. Without `pods` broker cannot see free room, and waits for it instead.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: broker-reader}}
rules:
  - {{apiGroups: [""], resources: [nodes, pods], verbs: [list]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: broker, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: broker}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: USER}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: broker-reader}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: broker-reader}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: USER}}]
"""


async def inspect(config: Config, *, clock: Clock, run: RunKubectl = run_kubectl) -> Sequence[CheckResult]:
    """Report kubectl, and each context with its pools; those of a context that does not answer are kept."""
    path = find_file("kubernetes", config.home)
    assert path is not None, "only called for native clusters"
    try:
        find_kubectl()
    except StateError as error:
        return [CheckResult(name="kubectl", is_ok=False, note=error.message, command=error.hints[0])]
    facts = find_facts("kubernetes", config.home)
    try:
        contexts = read_contexts(path, facts)
    except BrokerError as error:
        return report_invalid_file("contexts", path, error)
    if not contexts:
        found = await find_current(run)
        if isinstance(found, CheckResult):
            return [found]
        contexts = {found.name: found}
    else:
        found_contexts = await find_namespaces(run, contexts, path, facts)
        contexts = {name: each for name, each in found_contexts.items() if not each.is_off}
    answers = dict(
        zip(contexts, await asyncio.gather(*(_read_pools(run, each) for each in contexts.values())), strict=True)
    )
    old = read_pools(facts)
    namespaces = {name: each.namespace for name, each in contexts.items()}
    pools: dict[str, Sequence[Pool]] = {name: old.get(name, ()) for name in contexts}
    for name, answer in answers.items():
        if not isinstance(answer, CloudError):
            namespaces[name], pools[name] = answer[0].namespace, answer[1]
    write_pools(facts, namespaces, pools)
    is_alone = len(contexts) == 1
    results = await asyncio.gather(
        *(_report(run, contexts[name], answer, is_needed=is_alone) for name, answer in answers.items())
    )
    return [result for each in results for result in each]


def write_policy(config: Config) -> str:
    """Return the Role and ClusterRole that suffice, in the namespace of the first entry."""
    path = find_file("kubernetes", config.home)
    contexts = read_contexts(path, find_facts("kubernetes", config.home)) if path else {}
    return POLICY.format(namespace=next((each.namespace for each in contexts.values()), "default"))


async def find_current(run: RunKubectl) -> KubernetesContext | CheckResult:
    """Return an entry for the kubeconfig's current context, or the result of a check that says how to set one."""
    found = await _view(run, KubernetesContext(name="", context=""))
    if found is None:
        note = "the kubeconfig has no current context"
        return CheckResult(name="context", is_ok=False, note=note, command="kubectl config use-context NAME")
    return KubernetesContext(name=found[0], context=found[0], namespace=found[1])


async def find_namespaces(
    run: RunKubectl, contexts: Mapping[str, KubernetesContext], path: Path, facts: Path
) -> Mapping[str, KubernetesContext]:
    """Return the entries of the file, with the kubeconfig's namespace where they state none; record them."""
    views = await asyncio.gather(*(_view(run, each) for each in contexts.values()))
    found = {name: view[1] if view else "default" for name, view in zip(contexts, views, strict=True)}
    write_pools(facts, found, read_pools(facts))
    return read_contexts(path, facts)


async def _view(run: RunKubectl, context: KubernetesContext) -> tuple[str, str] | None:
    """Return name and namespace of a context of the kubeconfig; None if it is not there."""
    try:
        done = await run(context, ["config", "view", "--minify", "--output=json"], b"")
        found = json.loads(done.stdout)["contexts"][0]
        return found["name"], found["context"].get("namespace") or "default"
    except (CloudError, ValueError, LookupError, TypeError):
        return None


async def _read_pools(
    run: RunKubectl, context: KubernetesContext
) -> tuple[KubernetesContext, Sequence[Pool]] | CloudError:
    api = KubernetesApi(context, run=run)
    try:
        nodes = (await api.get("/api/v1/nodes"))["items"]
        pods = await try_read(api, "/api/v1/pods?fieldSelector=spec.nodeName!%3D")
    except CloudError as error:
        return error
    return context, list_pools(nodes, pods or (), context)


async def _report(
    run: RunKubectl,
    context: KubernetesContext,
    answer: tuple[KubernetesContext, Sequence[Pool]] | CloudError,
    *,
    is_needed: bool,
) -> Sequence[CheckResult]:
    if isinstance(answer, CloudError):
        command = answer.hints[0] if answer.hints else f"kubectl --context={context.context} get nodes"
        return [CheckResult(name=context.name, is_ok=False, note=answer.message, command=command, is_needed=is_needed)]
    denied = [f"{verb} {resource}" for verb, resource in VERBS if not await _can(run, context, verb, resource)]
    if denied:
        note = f"namespace `{context.namespace}` does not permit: {', '.join(denied)}; an administrator can grant it"
        command = "broker check --policy kubernetes"
        return [CheckResult(name=context.name, is_ok=False, note=note, command=command, is_needed=is_needed)]
    return [judge_pools(context, answer[1], is_needed=is_needed)]


async def _can(run: RunKubectl, context: KubernetesContext, verb: str, resource: str) -> bool:
    """Return whether the login may do this: the request of `kubectl auth can-i`, in JSON."""
    name, _, part = resource.partition("/")
    asked = {"namespace": context.namespace, "verb": verb, "resource": name, "subresource": part}
    try:
        return await KubernetesApi(context, run=run).is_permitted(asked)
    except CloudError:
        return False


def judge_pools(context: KubernetesContext, pools: Sequence[Pool], *, is_needed: bool) -> CheckResult:
    """Report the pools, the missing ones of the entry, and whether their prices are known."""
    names = {each.name for each in pools}
    command = f"kubectl --context={context.context} get nodes"
    if missing := [name for name in context.pools if name not in names]:
        note = f"no pool {', '.join(f'`{name}`' for name in missing)}; there are {', '.join(sorted(names)) or 'none'}"
        return CheckResult(name=context.name, is_ok=False, note=note, command=command, is_needed=is_needed)
    if not pools:
        note = "no node is ready without a taint that keeps pods away"
        return CheckResult(name=context.name, is_ok=False, note=note, command=command, is_needed=is_needed)
    descriptions = [_describe(context, each) for each in pools if not context.pools or each.name in context.pools]
    note = f"namespace `{context.namespace}`: {', '.join(descriptions)}"
    return CheckResult(name=context.name, is_ok=True, note=note, command="")


def _describe(context: KubernetesContext, pool: Pool) -> str:
    price: float | Mapping[str, float] = context.get_usd_hour(pool.name)
    shown_price = f"{price:g} USD/h" if price else "0 USD/h: set `usd_hour`"
    return f"{pool.name} ({pool.node_count} x {pool.machine.name}{', spot' if pool.is_spot else ''}, {shown_price})"
