"""Google's errors as our error classes: one table by error code. Message text is passed on, never matched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    DeniedError,
    InvalidRequestError,
    QuotaError,
    Scope,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)


class DisabledError(AuthError):
    """The project has not enabled Compute Engine."""


class UnpaidError(AuthError):
    """The project has no billing account that pays for machines."""


class NotFoundError(InvalidRequestError):
    """The resource does not exist; for most verbs this is a result, not a fault."""


class ExistsError(InvalidRequestError):
    """The name is taken. Names derive from the request, so an earlier call of ours took it."""


class BusyError(TransientError):
    """Another operation on the resource is in progress."""


INCOMPLETE = "VM_MIN_COUNT_NOT_REACHED"  # of `bulkInsert`, beside the reason if Google names one
# `errors[].reason` of an HTTP answer (camelCase) and `error.errors[].code` of an operation (capitals):
# https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation,
# https://cloud.google.com/compute/docs/reference/rest/v1/zoneOperations
CODES: dict[str, type[CloudError]] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": CapacityError,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": CapacityError,
    "REGION_RESOURCE_POOL_EXHAUSTED": CapacityError,
    "RESOURCE_POOL_EXHAUSTED": CapacityError,
    INCOMPLETE: CapacityError,
    "insufficientCapacity": CapacityError,
    "QUOTA_EXCEEDED": QuotaError,
    "LIMIT_EXCEEDED": QuotaError,
    "quotaExceeded": QuotaError,
    "limitExceeded": QuotaError,
    "RESOURCE_OPERATION_RATE_EXCEEDED": ThrottledError,
    "RATE_LIMIT_EXCEEDED": ThrottledError,
    "rateLimitExceeded": ThrottledError,
    "userRateLimitExceeded": ThrottledError,
    "dailyLimitExceeded": ThrottledError,
    "concurrentLimitExceeded": ThrottledError,
    "PERMISSIONS_ERROR": AuthError,
    "IAM_PERMISSION_DENIED": AuthError,
    "ACCESS_TOKEN_SCOPE_INSUFFICIENT": AuthError,
    "CONSUMER_INVALID": AuthError,
    "USER_PROJECT_DENIED": AuthError,
    "BILLING_DISABLED": UnpaidError,
    "UREQ_PROJECT_BILLING_NOT_FOUND": UnpaidError,
    "UREQ_PROJECT_BILLING_NOT_OPEN": UnpaidError,
    "FORBIDDEN": AuthError,
    "SERVICE_DISABLED": DisabledError,
    "accessNotConfigured": DisabledError,
    "authError": AuthError,
    "expired": AuthError,
    "forbidden": AuthError,
    "insufficientPermissions": AuthError,
    "unauthorized": AuthError,
    "RESOURCE_NOT_FOUND": NotFoundError,
    "notFound": NotFoundError,
    "RESOURCE_ALREADY_EXISTS": ExistsError,
    "alreadyExists": ExistsError,
    "duplicate": ExistsError,
    "RESOURCE_NOT_READY": BusyError,
    "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE": BusyError,
    # An organisation's policy, such as constraints/compute.vmExternalIpAccess or gcp.resourceLocations. A call with a
    # fingerprint gets the same answer if another writer was faster: `instances.relabel` is the only one.
    "CONDITION_NOT_MET": DeniedError,
    "conditionNotMet": DeniedError,
    "POLICY_VIOLATION": DeniedError,
    "resourceInUseByAnotherResource": BusyError,
    "resourceNotReady": BusyError,
    "INTERNAL_ERROR": TransientError,
    "OPERATION_CANCELED_BY_USER": TransientError,
    "backendError": TransientError,
    "internalError": TransientError,
    "INVALID_FIELD_VALUE": InvalidRequestError,
    "INVALID_USAGE": InvalidRequestError,
    "UNSUPPORTED_OPERATION": InvalidRequestError,
    "badRequest": InvalidRequestError,
    "invalid": InvalidRequestError,
    "invalidParameter": InvalidRequestError,
    "required": InvalidRequestError,
    "parseError": InvalidRequestError,
    # Google's catalogue: https://docs.cloud.google.com/compute/docs/reference/rest/v1/errors (read 2026-11-22)
    "FIELD_SIZE_TOO_LARGE": InvalidRequestError,
    "MISSING_REQUIRED_FIELD": InvalidRequestError,
    "PROJECT_NOT_FOUND": AuthError,
    "NETWORK_NOT_FOUND": NotFoundError,
    "SERVICE_UNAVAILABLE_FOR_LOCATION": TransientError,
    # Reasons that all of Google's APIs share: `google/api/error_reason.proto`
    "RESOURCE_QUOTA_EXCEEDED": QuotaError,
    "EMULATOR_QUOTA_EXCEEDED": QuotaError,
    "GCP_SUSPENDED": AuthError,
    "CONSUMER_SUSPENDED": AuthError,
    "RESOURCE_PROJECT_INVALID": AuthError,
    "SERVICE_NOT_VISIBLE": AuthError,
    "MCP_SERVER_DISABLED": DisabledError,
    "SYSTEM_PARAMETER_UNSUPPORTED": InvalidRequestError,
    **dict.fromkeys(
        (
            *(
                "API_KEY_INVALID",
                "API_KEY_SERVICE_BLOCKED",
                "API_KEY_HTTP_REFERRER_BLOCKED",
                "API_KEY_IP_ADDRESS_BLOCKED",
            ),
            *(
                "API_KEY_ANDROID_APP_BLOCKED",
                "API_KEY_IOS_APP_BLOCKED",
                "ACCESS_TOKEN_EXPIRED",
                "ACCOUNT_STATE_INVALID",
            ),
            *(
                "ACCESS_TOKEN_TYPE_UNSUPPORTED",
                "CREDENTIALS_MISSING",
                "SESSION_COOKIE_INVALID",
                "OVERLOADED_CREDENTIALS",
            ),
            *("CREDENTIAL_ANDROID_APP_INVALID", "JWT_TOKEN_INVALID", "CREDENTIAL_TYPE_UNSUPPORTED", "MISSING_ORIGIN"),
            *("ACCOUNT_TYPE_UNSUPPORTED", "USER_BLOCKED_BY_ADMIN"),
        ),
        AuthError,
    ),
    **dict.fromkeys(
        (
            *("LOCATION_ORG_POLICY_VIOLATED", "LOCATION_POLICY_VIOLATED", "LOCATION_TAX_POLICY_VIOLATED"),
            *("ORG_RESTRICTION_VIOLATION", "ORG_RESTRICTION_HEADER_INVALID", "RESOURCE_USAGE_RESTRICTION_VIOLATED"),
            *("SECURITY_POLICY_VIOLATED", "TLS_ORG_POLICY_VIOLATED", "TLS_CIPHER_RESTRICTION_VIOLATED"),
            "ENDPOINT_USAGE_RESTRICTION_VIOLATED",
        ),
        DeniedError,
    ),
}
CAPACITY_SCOPES: dict[str, Scope] = {"REGION_RESOURCE_POOL_EXHAUSTED": "region"}  # all others: the zone

# If the response has no code from the table, its HTTP status decides.
STATUSES: dict[int, type[CloudError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    408: TransientError,
    409: ExistsError,
    412: DeniedError,
    429: ThrottledError,
}


QUOTAS_URL = "https://console.cloud.google.com/iam-admin/quotas"
# By class, the most specific first; hints from the caller come before these.
HINTS: tuple[tuple[type[CloudError], str], ...] = (
    (DisabledError, "run `gcloud services enable compute.googleapis.com`"),
    (UnpaidError, "run `gcloud billing projects link PROJECT --billing-account=ACCOUNT`"),
    (
        DeniedError,
        "An organisation's policy forbids it: `gcloud org-policies list --project=PROJECT` names the policies. If "
        "public addresses or images are forbidden, set `uses_private_addresses` or `images` in `gcp.toml`.",
    ),
    (AuthError, "run `broker check gcp` to list missing permissions"),
    (QuotaError, f"request more: {QUOTAS_URL}"),
)


def make_error(code: str, message: str, *, status: int = 0, hints: tuple[str, ...] = ()) -> CloudError:
    """Make the error by the table, otherwise by HTTP status, otherwise by class.

    A 4xx status is our mistake; all others may be transient.
    """
    kind = CODES.get(code) or STATUSES.get(status)
    if kind is None:
        kind = InvalidRequestError if 400 <= status < 500 else TransientError
    text = f"{message.strip().rstrip('.')} ({code or status})"
    if kind is CapacityError:
        return CapacityError(text, scope=CAPACITY_SCOPES.get(code, "zone"), hints=hints)
    usual = [hint for each, hint in HINTS if issubclass(kind, each)]
    return kind(text, hints=hints or tuple(usual[:1]))


def read_operation_error(operation: Any) -> CloudError | None:
    """Read the error of an operation that is DONE.

    A capacity error takes precedence over the errors that follow from it, and a refusal over the statement that the
    gang is incomplete, because other zones would refuse it, too.
    """
    errors = [
        (error.code, make_error(error.code, error.message or error.code, hints=_find_quota_hint(error)))
        for error in operation.error.errors
    ]
    if not errors:
        status = operation.http_error_status_code
        return make_error("", operation.http_error_message or "the operation failed", status=status) if status else None
    causes = [error for code, error in errors if code != INCOMPLETE]
    decisive = next((each for each in causes if isinstance(each, CapacityError | QuotaError)), None)
    refusal = next((each for each in causes if isinstance(each, AuthError | InvalidRequestError)), None)
    incomplete = next((error for code, error in errors if code == INCOMPLETE), None)
    return decisive or (refusal or incomplete if incomplete else causes[0])


def _find_quota_hint(error: Any) -> tuple[str, ...]:
    """Name the quota that was exceeded, which Google reports even where it cannot be queried."""
    for detail in error.error_details:
        quota = detail.quota_info
        if quota.limit_name or quota.metric_name:
            place = ", ".join(f"{key} {value}" for key, value in sorted(quota.dimensions.items()))
            name = quota.limit_name or quota.metric_name
            return (f"request more: {QUOTAS_URL} (filter `{name}`{f', {place}' if place else ''})",)
    return ()


def translate(error: Exception, *, does_change: bool) -> CloudError | None:
    """Translate an exception of Google's library; None if the cause is not external.

    A response lost after a call that changes something is an UnknownOutcomeError.
    """
    import google.api_core.exceptions as api
    import google.auth.exceptions as auth
    import requests

    lost = UnknownOutcomeError if does_change else TransientError
    if isinstance(error, auth.TransportError):
        return TransientError(f"Google's login service cannot be reached: {error}")
    if isinstance(error, auth.GoogleAuthError):
        hint = "run `gcloud auth application-default login`, or set `GOOGLE_APPLICATION_CREDENTIALS`"
        return AuthError(f"Google refuses the login: {str(error)[:200]}", hints=(hint,))
    if isinstance(error, api.GoogleAPICallError):
        code, message = _read_answer(error)
        cloud_error = make_error(code, message, status=int(error.code or 0))
        is_clear = (error.code or 500) < 500 or isinstance(cloud_error, CapacityError | QuotaError | ThrottledError)
        return cloud_error if is_clear else lost(cloud_error.message)
    if isinstance(error, api.RetryError | requests.RequestException | OSError):
        return lost(f"no response from Compute Engine: {type(error).__name__}")
    return None


def _read_answer(error: Any) -> tuple[str, str]:
    """Read code and message.

    The newer `reason` is more specific (a project without billing is only `forbidden` in the older one); the library
    puts method and URL before the older message.
    """
    entries = [each for each in error.errors or () if isinstance(each, Mapping)]
    codes = [str(error.reason or ""), *(str(each.get("reason") or "") for each in entries)]
    code = next((each for each in codes if each in CODES), next(filter(None, codes), ""))
    message = next((str(each["message"]) for each in entries if each.get("message")), "")
    return code, message or error.message or ""
