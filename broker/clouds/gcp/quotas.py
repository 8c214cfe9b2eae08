"""What a project may have in a region, asked before trying: a create that cannot work is not worth a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.errors import QuotaError
from broker.nouns import noun
from broker.types import NodeRequest, Offer

# Names of the quotas in `regions.get`, https://cloud.google.com/compute/resource-usage. Newer accelerators (H100 and
# after) are counted elsewhere, which `regions.get` does not tell: there the create call itself has to find out.
GPU_METRICS = {
    "T4": "NVIDIA_T4_GPUS",
    "P4": "NVIDIA_P4_GPUS",
    "P100": "NVIDIA_P100_GPUS",
    "V100": "NVIDIA_V100_GPUS",
    "L4": "NVIDIA_L4_GPUS",
    "A100": "NVIDIA_A100_GPUS",
    "A100-80GB": "NVIDIA_A100_80GB_GPUS",
}
ALL_REGIONS = "GPUS_ALL_REGIONS"  # a project's limit for all GPUs; many new projects have 0
# Families with a quota of their own; all others share CPUS.
CPU_FAMILIES = frozenset({"a2", "c2", "c2d", "c3", "m1", "m2", "m3", "n2", "n2a", "n2d", "t2a", "t2d"})


def ask_for_more(project: str, metric: str, region: str, value: float) -> str:
    """The command; `region` is empty for what counts in all of them. Ids as the Cloud Quotas API makes them of metrics:
    https://cloud.google.com/docs/quotas/gcloud-cli-examples."""
    identity = f"{metric.replace('_', '-')}-per-project{'-region' if region else ''}"
    return (
        f"gcloud quotas preferences create --service=compute.googleapis.com --project={project} "
        f"--quota-id={identity} --preferred-value={value:g}{f' --dimensions=region={region}' if region else ''}"
    )


@noun
class Quota:
    """One limit of a region."""

    metric: str
    limit: float
    usage: float

    @property
    def left(self) -> float:
        return self.limit - self.usage


@noun
class QuotaNeed:
    """So much of one quota; `metrics` in the order in which Google draws on them."""

    what: str
    metrics: tuple[str, ...]
    amount: float


def list_needs(request: NodeRequest) -> list[QuotaNeed]:
    """What a gang takes of a region's quotas. A spot machine draws on the preemptible quota where there is one, else
    on the ordinary one; cores of accelerator machines are not counted."""
    offer, is_spot, count = request.placement.offer, request.placement.is_spot, request.placement.node_count
    needs = []
    metric = GPU_METRICS.get(offer.accelerator or "")
    if metric:
        metrics = (f"PREEMPTIBLE_{metric}", metric) if is_spot else (metric, f"PREEMPTIBLE_{metric}")
        needs.append(
            QuotaNeed(what=f"{offer.accelerator} GPUs", metrics=metrics, amount=offer.accelerator_count * count)
        )
    if not offer.accelerator or "+" in offer.instance_type:
        own = _cpu_metric(offer)
        drawn = ("PREEMPTIBLE_CPUS", own) if is_spot else (own,)
        needs.append(QuotaNeed(what="vCPUs", metrics=drawn, amount=offer.vcpus * count))
    return needs


def _cpu_metric(offer: Offer) -> str:
    family = offer.instance_type.partition("-")[0]
    return f"{family.upper()}_CPUS" if family in CPU_FAMILIES else "CPUS"


def read_quotas(clients: Clients, region: str) -> Mapping[str, Quota]:
    found = clients.get("Regions").get(project=clients.login.project, region=region, timeout=TIMEOUT_S)
    return {each.metric: Quota(metric=each.metric, limit=each.limit, usage=each.usage) for each in found.quotas}


def read_project_quotas(clients: Clients) -> Mapping[str, Quota]:
    """Those that hold for all regions together."""
    found = clients.get("Projects").get(project=clients.login.project, timeout=TIMEOUT_S)
    return {each.metric: Quota(metric=each.metric, limit=each.limit, usage=each.usage) for each in found.quotas}


def list_project_needs(request: NodeRequest) -> list[QuotaNeed]:
    """On-demand GPUs of any kind count against one limit; what spot machines count against, Google does not say."""
    offer, count = request.placement.offer, request.placement.node_count
    if not offer.accelerator or request.placement.is_spot:
        return []
    return [QuotaNeed(what="GPUs of any kind", metrics=(ALL_REGIONS,), amount=offer.accelerator_count * count)]


def check_quotas(needs: Sequence[QuotaNeed], quotas: Mapping[str, Quota], *, project: str, region: str = "") -> None:
    """Raises QuotaError with the figures where no quota that may be drawn on has enough left."""
    for need in needs:
        known = [quotas[each] for each in need.metrics if each in quotas]
        if not known or any(quota.left >= need.amount for quota in known):
            continue
        best = max(known, key=lambda quota: quota.left)
        command = ask_for_more(project, best.metric, region, best.usage + need.amount)
        raise QuotaError(
            f"{need.amount:g} {need.what} wanted in {region or 'all regions together'}, {max(0.0, best.left):g} of "
            f"{best.limit:g} left ({best.metric})",
            hints=(f"Ask for more: `{command}`",),
        )
