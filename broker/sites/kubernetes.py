"""Kubernetes clusters: `kubernetes.yaml` in the state folder, and the node pools that `broker check kubernetes` found.

gke_lab_europe-west4_train:   # infra: kubernetes/CONTEXT; an empty file means the current context of the kubeconfig
  namespace: ml               # default: the context's
  usd_hour: {gpu: 8, cpu: 1}  # of a whole node by pool, or one number; default 0
  queue: team-a               # Kueue's LocalQueue
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from broker.frozen import frozen
from broker.sites.facts import Machine, write_json
from broker.sites.reading import PATH, OneOrList, read_entries
from broker.task.reading import Reader
from broker.task.shapes import Either, Flag, MapOf, Number, Text
from broker.task.tables import Field, Section, Table
from broker.types import Offer

# Folder of a node in its pod; its name is also unique on a machine, because pods may share a file system (hostPath).
NODE_ROOT = "/tmp/broker-pod-{user}"
# EKS names contexts by ARN (`arn:aws:eks:...:cluster/train`), kops and kind with `@` and `.`.
CONTEXT_NAME = re.compile(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]{0,252}")
CONTAINER_NAME = "node"  # in its pod
IMAGE = "python:3.12-slim"  # a bare Python is enough: setup and the trainers bring the rest, as on other nodes
LABEL = r"(?=.{1,253}$)([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
DNS_NAME = Text(pattern=r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", expected="a Kubernetes name", also_scalar=True)
PRICE = Number(above=None)
CONTEXT = Table(
    name="kubernetes_context",
    fields={
        "kubeconfig": Field(shape=PATH, about="Default: as kubectl finds it."),
        "context": Field(shape=Text(), about="Name in the kubeconfig, if it differs from the entry's."),
        "namespace": Field(shape=DNS_NAME, about="Namespace of the pods; default: the context's."),
        "service_account": Field(shape=DNS_NAME, about="Service account of the pods; no token is mounted."),
        "image": Field(shape=Text(), about=f"Image for tasks without `image_id`; default `{IMAGE}`."),
        "image_pull_secrets": Field(shape=OneOrList(), about="Secrets of the namespace with registry logins."),
        "usd_hour": Field(
            shape=Either(shapes=[PRICE, MapOf(value=PRICE)]), about="Price of a whole node per hour, by pool."
        ),
        "pools": Field(shape=OneOrList(), about="Node pools to use; default: all."),
        "spot_pools": Field(shape=OneOrList(), about="Pools that may be preempted, beyond those with known labels."),
        "autoscaled": Field(shape=Flag(), about="Nodes are added on demand: wait for them instead of refusing."),
        "tolerations": Field(shape=OneOrList(), about="Taints to tolerate, as `KEY` or `KEY=VALUE`."),
        "node_selector": Field(
            shape=MapOf(value=Text(also_scalar=True), key=LABEL, key_expected="a label"),
            about="Labels of the nodes to use.",
        ),
        "queue": Field(shape=DNS_NAME, about="Kueue's LocalQueue; its admission then decides when a gang starts."),
        "priority_class": Field(shape=DNS_NAME, about="Priority class of the pods."),
        "hours_max": Field(shape=Number(), about="Maximum lifetime of a pod; default: until its lease ends."),
        "is_off": Field(shape=Flag(), about="The cluster was shut down; its pods have ended."),
    },
    about="One context.",
)


@frozen
class KubernetesContext:
    """One entry of the file. `context` is the name in the kubeconfig."""

    name: str
    context: str
    kubeconfig: Path | None = None
    namespace: str = "default"
    service_account: str | None = None
    image: str = IMAGE
    image_pull_secrets: tuple[str, ...] = ()
    usd_hour: Mapping[str, float] | float = 0.0
    pools: tuple[str, ...] = ()
    spot_pools: tuple[str, ...] = ()
    is_autoscaled: bool = False
    tolerations: tuple[str, ...] = ()
    node_selector: Mapping[str, str] | None = None
    queue: str | None = None
    priority_class: str | None = None
    hours_max: float | None = None
    is_off: bool = False

    def get_usd_hour(self, pool: str) -> float:
        """Return the price of a whole node of the pool in USD per hour; 0 if the file states none."""
        return self.usd_hour.get(pool, 0.0) if isinstance(self.usd_hour, Mapping) else self.usd_hour


@frozen
class Pool:
    """Equal nodes of one pool. `machine`: the largest pod that an idle node can hold.

    `selector` and `tolerations` place a pod there; `resource` is the name of its cards, such as `nvidia.com/gpu`.
    """

    name: str
    machine: Machine
    node_count: int
    is_spot: bool = False
    selector: Mapping[str, str]
    tolerations: Sequence[Mapping[str, str]] = ()
    resource: str = ""
    disk_gib: float = 0.0


def read_contexts(path: Path, facts: Path) -> Mapping[str, KubernetesContext]:
    """Return the contexts of the file, or those of the last check if it has no entries. Raises TaskError."""
    namespaces, _ = _read_facts(facts)
    found = read_entries(
        path,
        CONTEXT,
        lambda reader, name, section: _read_context(reader, name, section, namespaces.get(name, "default")),
        name=CONTEXT_NAME,
    )
    return found or {
        name: KubernetesContext(name=name, context=name, namespace=namespace) for name, namespace in namespaces.items()
    }


def _read_context(reader: Reader, name: str, section: Section, namespace: str) -> KubernetesContext:
    kubeconfig = section.get("kubeconfig")
    return KubernetesContext(
        name=name,
        context=section.get("context", name),
        kubeconfig=Path(kubeconfig).expanduser() if kubeconfig else None,
        namespace=section.get("namespace", namespace),
        service_account=section.get("service_account"),
        image=section.get("image", IMAGE),
        image_pull_secrets=section.get("image_pull_secrets", ()),
        usd_hour=section.get("usd_hour", 0.0),
        pools=section.get("pools", ()),
        spot_pools=section.get("spot_pools", ()),
        is_autoscaled=section.get("autoscaled", False),
        tolerations=section.get("tolerations", ()),
        node_selector=section.get("node_selector"),
        queue=section.get("queue"),
        priority_class=section.get("priority_class"),
        hours_max=section.get("hours_max"),
        is_off=section.get("is_off", False),
    )


def read_pools(facts: Path) -> Mapping[str, Sequence[Pool]]:
    """Return the pools that `broker check kubernetes` found, by entry."""
    return _read_facts(facts)[1]


def write_pools(facts: Path, namespaces: Mapping[str, str], pools: Mapping[str, Sequence[Pool]]) -> None:
    """Replace the recorded namespaces and pools, by entry."""
    write_json(
        facts,
        {
            name: {"namespace": namespace, "pools": [asdict(each) for each in pools.get(name, ())]}
            for name, namespace in namespaces.items()
        },
    )


def _read_facts(facts: Path) -> tuple[dict[str, str], dict[str, Sequence[Pool]]]:
    try:
        found = json.loads(facts.read_bytes())
        namespaces = {name: str(each["namespace"]) for name, each in found.items()}
        pools: dict[str, Sequence[Pool]] = {
            name: [Pool(**{**pool, "machine": Machine(**pool["machine"])}) for pool in each["pools"]]
            for name, each in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}, {}  # `broker check kubernetes` writes it again
    return namespaces, pools


def list_offers(contexts: Mapping[str, KubernetesContext], facts: Path) -> Sequence[Offer]:
    """Return the pods that fit an idle node of each pool; a pod costs its share of the node."""
    known = read_pools(facts)
    offers = {
        (offer.region, offer.zone, offer.instance_type): offer
        for context in contexts.values()
        if not context.is_off
        for pool in known.get(context.name, ())
        if not context.pools or pool.name in context.pools
        for offer in _list_pool_offers(context, pool)
    }
    return list(offers.values())


def _list_pool_offers(context: KubernetesContext, pool: Pool) -> Iterator[Offer]:
    usd_hour = context.get_usd_hour(pool.name)
    for share, machine in divide_machine(pool.machine):
        price = round(usd_hour * share, 6)
        yield machine.make_offer(
            "kubernetes",
            context.name,
            zone=pool.name,
            ondemand_usd_hour=None if pool.is_spot else price,
            spot_usd_hour=price if pool.is_spot else None,
        )


def divide_machine(machine: Machine) -> Iterator[tuple[float, Machine]]:
    """Yield the whole machine, then parts of it with a power of two of cards, or of vCPUs: 8 cards -> 8, 4, 2, 1.

    A node of 8 vCPUs has about 7.9 for pods: 7.9 -> 7.9, 4, 2, 1.
    """
    yield 1.0, machine
    units = machine.accelerator_count or machine.vcpus
    part = 1 << max(0, int(units).bit_length() - 1)
    while part >= 1:
        if part < units:
            share = part / units
            yield (
                share,
                Machine(
                    vcpus=int(machine.vcpus * share * 10) / 10 if machine.accelerator else part,
                    memory_gib=int(machine.memory_gib * share * 100) / 100,
                    accelerator=machine.accelerator,
                    accelerator_count=part if machine.accelerator else 0,
                ),
            )
        part //= 2
