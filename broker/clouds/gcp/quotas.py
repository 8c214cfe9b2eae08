"""A project's quotas in a region, checked before a create call because a call that must fail costs a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.errors import QuotaError
from broker.frozen import frozen
from broker.types import NodeRequest, Offer

# Names of the quotas in `regions.get`, https://cloud.google.com/compute/resource-usage (written 2026-11-21; spelling
# as in `Quota.Metric` of google-cloud-compute, which a test compares). Newer accelerators (H100 and later) are
# counted elsewhere, which `regions.get` does not show: for those, only the create call shows whether there is quota.
GPU_METRICS = {
    "T4": "NVIDIA_T4_GPUS",
    "P4": "NVIDIA_P4_GPUS",
    "P100": "NVIDIA_P100_GPUS",
    "V100": "NVIDIA_V100_GPUS",
    "L4": "NVIDIA_L4_GPUS",
    "A100": "NVIDIA_A100_GPUS",
    "A100-80GB": "NVIDIA_A100_80GB_GPUS",
}
ALL_REGIONS = "GPUS_ALL_REGIONS"  # a project's limit for all GPUs; 0 for many new projects
# Families with a quota of their own; all others share CPUS.
CPU_FAMILIES = frozenset({"a2", "c2", "c2d", "c3", "m1", "m2", "m3", "n2", "n2a", "n2d", "t2a", "t2d"})


def format_quota_request(project: str, metric: str, region: str, value: float) -> str:
    """Return the command that requests a quota; `region` is empty for one of all regions.

    The Cloud Quotas API derives ids from metrics like this: https://cloud.google.com/docs/quotas/gcloud-cli-examples.
    """
    identity = f"{metric.replace('_', '-')}-per-project{'-region' if region else ''}"
    return (
        f"gcloud quotas preferences create --service=compute.googleapis.com --project={project} "
        f"--quota-id={identity} --preferred-value={value:g}{f' --dimensions=region={region}' if region else ''}"
    )


@frozen
class Quota:
    """One limit of a region."""

    metric: str
    limit: float
    usage: float

    @property
    def left(self) -> float:
        """Amount that is not in use."""
        return self.limit - self.usage


@frozen
class QuotaNeed:
    """An amount of one quota; `metrics` in the order in which Google draws on them."""

    what: str
    metrics: tuple[str, ...]
    amount: float


def list_needs(request: NodeRequest) -> list[QuotaNeed]:
    """List the quotas that a gang draws on in a region.

    A spot machine draws on the preemptible quota if there is one, else on the ordinary one, and an on-demand machine
    with GPUs on either if its life is limited; cores of accelerator machines are not counted.
    """
    offer, is_spot, count = request.placement.offer, request.placement.is_spot, request.placement.node_count
    needs = []
    metric = GPU_METRICS.get(offer.accelerator or "")
    if metric:
        preemptible = (f"PREEMPTIBLE_{metric}",) if is_spot or request.spec.is_replaceable else ()
        metrics = (*preemptible, metric) if is_spot else (metric, *preemptible)
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
    """Return the quotas of a region by metric, with their current usage. Raises Google's errors."""
    region_info = clients.get("Regions").get(project=clients.login.project, region=region, timeout=TIMEOUT_S)
    return {
        quota.metric: Quota(metric=quota.metric, limit=quota.limit, usage=quota.usage) for quota in region_info.quotas
    }


def read_project_quotas(clients: Clients) -> Mapping[str, Quota]:
    """Read the quotas of all regions together."""
    project = clients.get("Projects").get(project=clients.login.project, timeout=TIMEOUT_S)
    return {quota.metric: Quota(metric=quota.metric, limit=quota.limit, usage=quota.usage) for quota in project.quotas}


def list_project_needs(request: NodeRequest) -> list[QuotaNeed]:
    """List needs from project-wide quotas.

    On-demand GPUs of any kind share one limit; for spot machines Google does not document it.
    """
    offer, count = request.placement.offer, request.placement.node_count
    if not offer.accelerator or request.placement.is_spot:
        return []
    return [QuotaNeed(what="GPUs of any kind", metrics=(ALL_REGIONS,), amount=offer.accelerator_count * count)]


def check_quotas(needs: Sequence[QuotaNeed], quotas: Mapping[str, Quota], *, project: str, region: str = "") -> None:
    """Raise QuotaError with the figures if none of the applicable quotas suffices."""
    for need in needs:
        candidates = [quotas[metric] for metric in need.metrics if metric in quotas]
        if not candidates or any(quota.left >= need.amount for quota in candidates):
            continue
        best = max(candidates, key=lambda quota: quota.left)
        command = format_quota_request(project, best.metric, region, best.usage + need.amount)
        raise QuotaError(
            f"{need.amount:g} {need.what} requested in {region or 'all regions together'}, {max(0.0, best.left):g} of "
            f"{best.limit:g} left ({best.metric})",
            hints=(f"request more: `{command}`",),
        )
