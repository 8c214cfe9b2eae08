"""`broker check` for Google: login, project, API, permissions, quotas.

Each failure comes with the command that fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.findings import CheckResult, TypeCheckResult
from broker.clouds.gcp.errors import DisabledError, NotFoundError
from broker.clouds.gcp.firewall import find_network
from broker.clouds.gcp.login import find_login
from broker.clouds.gcp.policy import PERMISSIONS, ROLE, write_role
from broker.clouds.gcp.quotas import ALL_REGIONS, GPU_METRICS, Quota, format_quota_request, read_project_quotas
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients, Sdk
from broker.clouds.gcp.settings import load_settings
from broker.clouds.gcp.startable import judge_types
from broker.config import Config
from broker.errors import AuthError
from broker.types import Offer

LOGIN_COMMAND = "gcloud auth application-default login"
ASKED_GPUS = 8  # one machine of the largest kinds
HOME_REGION = "us-central1"  # shown if no region has quota; Google's largest
NAMED_MAX = 4  # at most this many regions or permissions are named in a note


async def inspect(config: Config, *, clock: Clock) -> Sequence[CheckResult]:
    """See `Inspector`."""
    login = find_login(load_settings(config.home))
    if login is None:
        return [CheckResult(name="credentials", is_ok=False, note="none are found", command=LOGIN_COMMAND)]
    return await inspect_project(Sdk(login))


async def inspect_types(config: Config, *, clock: Clock, offers: Sequence[Offer]) -> Sequence[TypeCheckResult]:
    """See `InspectsTypes`."""
    login = find_login(load_settings(config.home))
    if login is None or not login.project:
        raise AuthError("no login or no project found", hints=("run `broker check gcp`",))
    return await judge_types(Sdk(login), offers)


def write_policy(config: Config) -> str:
    """Return YAML for `gcloud iam roles create`."""
    login = find_login(load_settings(config.home))
    return write_role(login.project if login else "")


async def inspect_project(sdk: Sdk) -> Sequence[CheckResult]:
    """Check in order of dependency, stopping at the first failure.

    Raises CloudError only if Google cannot be reached.
    """
    login = sdk.login
    try:
        await sdk.call(_refresh)
    except AuthError as error:
        return [CheckResult(name="credentials", is_ok=False, note=error.message, command=LOGIN_COMMAND)]
    findings = [CheckResult(name="credentials", is_ok=True, note=login.source)]
    if not login.project:
        command = "gcloud config set project PROJECT"
        return [*findings, CheckResult(name="project", is_ok=False, note="none is named", command=command)]
    findings.append(CheckResult(name="project", is_ok=True, note=login.project))
    quotas: Mapping[str, Mapping[str, float]] = {}
    try:
        quotas = await sdk.call(_list_gpu_quotas)
    except DisabledError as error:
        command = f"gcloud services enable compute.googleapis.com --project={login.project}"
        return [*findings, CheckResult(name="api", is_ok=False, note=error.message, command=command)]
    except AuthError:
        pass  # the API responds; missing permissions are reported below
    findings.append(CheckResult(name="api", is_ok=True, note="Compute Engine responds"))
    findings.append(await _inspect_permissions(sdk))
    if not findings[-1].is_ok and findings[-1].is_needed:
        return findings
    findings.append(await _inspect_network(sdk))
    everywhere = judge_project_quota(await sdk.call(read_project_quotas), login.project)
    return [*findings, everywhere, *judge_quotas(quotas, login.project)]


async def _inspect_permissions(sdk: Sdk) -> CheckResult:
    try:
        return judge_permissions(await sdk.call(_list_permissions), sdk.login.project)
    except AuthError as error:
        command = f"gcloud services enable cloudresourcemanager.googleapis.com --project={sdk.login.project}"
        note = f"unknown: {error.message}"
        return CheckResult(name="permissions", is_ok=False, note=note, command=command, is_needed=False)


async def _inspect_network(sdk: Sdk) -> CheckResult:
    name = sdk.login.settings.network
    try:
        await sdk.call(_check_network)
    except NotFoundError as error:
        command = f"gcloud compute networks create {name} --subnet-mode=auto --project={sdk.login.project}"
        return CheckResult(name="network", is_ok=False, note=error.message, command="" if "/" in name else command)
    return CheckResult(name="network", is_ok=True, note=name)


def require(findings: Sequence[CheckResult]) -> None:
    """Raise AuthError for the first result that prevents launches."""
    for finding in findings:
        if finding.is_needed and not finding.is_ok:
            hint = f"run `{finding.command}`" if finding.command else "run `broker check gcp` for details"
            raise AuthError(f"{finding.name}: {finding.note}", hints=(hint,))


def judge_permissions(allowed: frozenset[str], project: str) -> CheckResult:
    """Report the required permissions that the login lacks, with the commands that grant them by a role."""
    missing = [name for name in PERMISSIONS if name not in allowed]
    if not missing:
        return CheckResult(name="permissions", is_ok=True, note=f"all {len(PERMISSIONS)} required permissions")
    named = ", ".join(missing[:NAMED_MAX]) + (f" and {len(missing) - NAMED_MAX} more" if missing[NAMED_MAX:] else "")
    command = (
        f"broker check --policy gcp > broker-role.yaml && gcloud iam roles create {ROLE} --project={project} "
        f"--file=broker-role.yaml && gcloud projects add-iam-policy-binding {project} --member=user:EMAIL "
        f"--role=projects/{project}/roles/{ROLE}"
    )
    return CheckResult(name="permissions", is_ok=False, note=f"missing: {named}", command=command)


def judge_project_quota(quotas: Mapping[str, Quota], project: str) -> CheckResult:
    """Check the limit that new projects reach first, regardless of the limits of their regions."""
    quota = quotas.get(ALL_REGIONS)
    limit, used = (quota.limit, quota.usage) if quota else (0.0, 0.0)
    note = f"{used:g} of {limit:g} in use" if limit else "0: no region can start on-demand GPUs"
    name, command = "quota of all GPUs", "" if limit else format_quota_request(project, ALL_REGIONS, "", ASKED_GPUS)
    return CheckResult(name=name, is_ok=limit > 0, note=note, command=command, is_needed=False)


def judge_quotas(quotas: Mapping[str, Mapping[str, float]], project: str) -> list[CheckResult]:
    """Return one line per accelerator. Missing quotas do not prevent launches: other accelerators and clouds remain."""
    findings = []
    for accelerator, metric in GPU_METRICS.items():
        limits = {
            region: max(found.get(metric, 0.0), found.get(f"PREEMPTIBLE_{metric}", 0.0))
            for region, found in quotas.items()
        }
        best = sorted((region for region in limits if limits[region]), key=lambda region: (-limits[region], region))
        note = ", ".join(f"{region} {limits[region]:g}" for region in best[:NAMED_MAX])
        more = f" and {len(best) - NAMED_MAX} more regions" if best[NAMED_MAX:] else ""
        region = next((region for region, found in quotas.items() if metric in found), HOME_REGION)
        command = format_quota_request(project, metric, region, ASKED_GPUS)
        findings.append(
            CheckResult(
                name=f"quota {accelerator}",
                is_ok=bool(best),
                note=f"{note}{more}" if best else "none in any region",
                command="" if best else command,
                is_needed=False,
            )
        )
    return findings


def _refresh(clients: Clients) -> None:
    """Refresh the token: only then are the credentials known to be valid."""
    from google.auth.transport.requests import Request

    if clients.login.endpoint is None:
        clients.credentials.refresh(Request())


def _list_permissions(clients: Clients) -> frozenset[str]:
    """List which of our permissions the login has.

    API: https://cloud.google.com/resource-manager/reference/rest/v1/projects.
    """
    import google.api_core.exceptions as api

    url = f"{clients.login.resource_manager_url}/v1/projects/{clients.login.project}:testIamPermissions"
    answer: Any = clients.session.post(url, json={"permissions": list(PERMISSIONS)}, timeout=TIMEOUT_S)
    if answer.status_code != 200:
        raise api.from_http_response(answer)  # type: ignore[no-untyped-call]
    return frozenset(answer.json().get("permissions", ()))


def _check_network(clients: Clients) -> None:
    path = find_network(clients)  # projects/P/global/networks/N, or without its project
    project = path.split("projects/")[-1].split("/")[0] if "projects/" in path else clients.login.project
    clients.get("Networks").get(project=project, network=path.rpartition("/")[2], timeout=TIMEOUT_S)


def _list_gpu_quotas(clients: Clients) -> Mapping[str, Mapping[str, float]]:
    """region -> metric -> limit."""
    regions = clients.get("Regions").list(project=clients.login.project, timeout=TIMEOUT_S)
    return {region.name: {quota.metric: quota.limit for quota in region.quotas} for region in regions}
