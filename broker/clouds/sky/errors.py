"""SkyPilot's exceptions as our error classes: one table by exception name. Message text is never matched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    DeniedError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.frozen import frozen

CHECK_HINT = "run `sky check` to see which clouds SkyPilot can use, and how to enable the others"
SERVER_HINT = "start SkyPilot's API server with `sky api start`, or look at it with `sky api info`"
POLICY_HINT = (
    "A policy or a missing permission forbids it there: ask the account's administrator, or choose another location "
    "with `--infra`."
)
QUOTA_HINT = "request a higher quota in the cloud's console, or choose another location with `--infra`"
COLORS = re.compile(r"\x1b\[[0-9;]*m")
MESSAGE_MAX = 400


class ClusterNotFoundError(InvalidRequestError):
    """The cluster does not exist."""


class NotInstalledError(AuthError):
    """The interpreter lacks SkyPilot, or the part of SkyPilot that a cloud requires."""


# All of `sky.exceptions` of 0.14.1, and those of `sky.provision.common` that a failover history may hold. An entry for
# a parent class covers only that class, because SkyPilot's classes are listed one by one.
KINDS: dict[str, type[CloudError]] = {
    "APINotSupportedError": InvalidRequestError,
    "APIVersionMismatchError": AuthError,
    "AWSAzFetchingError": AuthError,
    "ApiServerAuthenticationError": AuthError,
    "ApiServerConnectionError": TransientError,
    "CachedClusterUnavailable": TransientError,
    "ClientError": InvalidRequestError,
    "CloudError": TransientError,
    "CloudUserIdentityError": AuthError,
    "ClusterDoesNotExist": ClusterNotFoundError,
    "ClusterNotUpError": TransientError,
    "ClusterOwnerIdentityMismatchError": AuthError,
    "ClusterSetUpError": TransientError,
    "ClusterStatusFetchingError": TransientError,
    "CommandError": TransientError,
    "CommandFailureException": TransientError,
    "ConcurrentWorkerExhaustedError": ThrottledError,
    "ExecutionPausedError": TransientError,
    "ExecutionPoolFullError": ThrottledError,
    "ExecutionRetryableError": TransientError,
    "FetchClusterInfoError": TransientError,
    "GitError": InvalidRequestError,
    "InconsistentHighAvailabilityError": InvalidRequestError,
    "InvalidCloudConfigs": InvalidRequestError,
    "InvalidCloudCredentials": AuthError,
    "InvalidClusterNameError": InvalidRequestError,
    "InvalidRecipeNameError": InvalidRequestError,
    "InvalidSkyPilotConfigError": InvalidRequestError,
    "InvalidWorkspaceNameError": InvalidRequestError,
    "KubeAPIUnreachableError": TransientError,
    "KubernetesValidationError": InvalidRequestError,
    "ManagedJobReachedMaxRetriesError": TransientError,
    "ManagedJobStatusError": TransientError,
    "ManagedJobUserCancelledError": TransientError,
    "NetworkError": TransientError,
    "NoCloudAccessError": AuthError,
    "NoClusterLaunchedError": TransientError,
    "NoWorkspaceAccessError": AuthError,
    "NonExistentStorageAccountError": InvalidRequestError,
    "NotSupportedError": InvalidRequestError,
    "PermissionDeniedError": AuthError,
    "PoolDoesNotExistError": InvalidRequestError,
    "PortDoesNotExistError": InvalidRequestError,
    "ProvisionPrechecksError": InvalidRequestError,
    "ProvisionUnsupportedError": InvalidRequestError,
    "ProvisionerError": CapacityError,
    "RecipeAlreadyExistsError": InvalidRequestError,
    "RequestAlreadyExistsError": TransientError,
    "RequestCancelled": TransientError,
    "RequestInterruptedError": TransientError,
    "ResourcesMismatchError": InvalidRequestError,
    "ResourcesUnavailableError": CapacityError,
    "RestfulPolicyError": TransientError,
    "ServeUserTerminatedError": TransientError,
    "ServerTemporarilyUnavailableError": ThrottledError,
    "SkyPilotExcludeArgsBaseException": TransientError,
    "SkyletInternalError": TransientError,
    "SkyletMethodNotImplementedError": TransientError,
    "SkyletUnavailableError": TransientError,
    "StopFailoverError": TransientError,
    "StorageBucketCreateError": InvalidRequestError,
    "StorageBucketDeleteError": TransientError,
    "StorageBucketGetError": InvalidRequestError,
    "StorageError": InvalidRequestError,
    "StorageExternalDeletionError": InvalidRequestError,
    "StorageInitError": InvalidRequestError,
    "StorageModeError": InvalidRequestError,
    "StorageNameError": InvalidRequestError,
    "StorageSourceError": InvalidRequestError,
    "StorageSpecError": InvalidRequestError,
    "StorageUploadError": TransientError,
    "UserRequestRejectedByPolicy": InvalidRequestError,
    "VolumeNotFoundError": InvalidRequestError,
    "VolumeNotReadyError": TransientError,
    "VolumeTopologyConflictError": InvalidRequestError,
    "WorkspaceAmbiguousError": InvalidRequestError,
    "NotForSaleError": CapacityError,  # our worker's: the price book has an offer that SkyPilot's catalog lacks
    # Python's own exceptions, as SkyPilot raises them
    "AssertionError": InvalidRequestError,
    "ImportError": NotInstalledError,
    "KeyError": InvalidRequestError,
    "ModuleNotFoundError": NotInstalledError,
    "NotImplementedError": InvalidRequestError,
    "TypeError": InvalidRequestError,
    "ValueError": InvalidRequestError,
}
# Error codes of the cloud itself, where SkyPilot passes them on: `ProvisionerError.errors[].code`,
# `CloudError.error_type`.
CODES: dict[str, type[CloudError]] = {
    "QUOTA_EXCEEDED": QuotaError,
    "quotaExceeded": QuotaError,
    "QuotaExceeded": QuotaError,
    "LimitExceeded": QuotaError,
    "OperationNotAllowed": QuotaError,  # Azure's code for a quota of cores
    "global-soft-quota-exceeded": QuotaError,  # Lambda's code
    "instance-operations/launch/insufficient-capacity": CapacityError,
    "SkuNotAvailable": CapacityError,
    "AllocationFailed": CapacityError,
    "ZonalAllocationFailed": CapacityError,
    "NotAuthenticated": AuthError,
    "InvalidAuthenticationToken": AuthError,
    "ClientAuthenticationError": AuthError,
    "ReadOnlyDisabledSubscription": AuthError,
    "SubscriptionNotFound": AuthError,
    # Policies and missing permissions: https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/
    # common-deployment-errors (read 2026-11-22), AWS's and Google's as in the tables of their own adapters.
    "RequestDisallowedByPolicy": DeniedError,
    "RequestDisallowedByAzure": DeniedError,
    "AuthorizationFailed": DeniedError,
    "LinkedAuthorizationFailed": DeniedError,
    "ScopeLocked": DeniedError,
    "UnauthorizedOperation": DeniedError,
    "AccessDenied": DeniedError,
    "AccessDeniedException": DeniedError,
    "CONDITION_NOT_MET": DeniedError,
    "conditionNotMet": DeniedError,
}

# more specific than "this place could not serve the request"
CLEAR = (QuotaError, AuthError, DeniedError, InvalidRequestError)


@frozen
class SkyError:
    """An exception of SkyPilot as its worker describes it. `history`: the error of each location that was tried."""

    type: str
    message: str = ""
    module: str = ""
    codes: tuple[str, ...] = ()
    history: tuple[SkyError, ...] = ()

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> SkyError:
        """Read an error as the worker reported it."""
        return cls(
            type=str(found["type"]),
            message=str(found.get("message", "")),
            module=str(found.get("module", "")),
            codes=tuple(str(code) for code in found.get("codes", ())),
            history=tuple(cls.parse(each) for each in found.get("history", ())),
        )


def translate(fault: SkyError, *, does_change: bool = False) -> CloudError:
    """Translate by the cloud's own code, else by the table.

    An unknown error may be transient and may have had its effect.
    """
    kind = _find_kind(fault)
    said = [each for each in fault.history if each.message or each.codes]
    clearest = next((each for each in said if _find_kind(each) in CLEAR), said[-1] if said else None)
    if kind is CapacityError and clearest is not None and _find_kind(clearest) in CLEAR:
        kind = _find_kind(clearest)
    message = shorten(clearest.message if clearest and clearest.message else fault.message) or fault.type
    text = f"SkyPilot: {message} ({fault.type})"
    if kind is None:
        return (UnknownOutcomeError if does_change else TransientError)(text)
    if kind is CapacityError:
        return CapacityError(text, scope="zone")
    if kind is QuotaError:
        return QuotaError(text, hints=(QUOTA_HINT,))
    if kind is DeniedError:
        return DeniedError(text, hints=(POLICY_HINT,))
    if issubclass(kind, AuthError):
        return kind(text, hints=(CHECK_HINT,))
    if fault.type == "ApiServerConnectionError":
        return TransientError(text, hints=(SERVER_HINT,))
    return kind(text)


def _find_kind(fault: SkyError) -> type[CloudError] | None:
    coded = next((CODES[code] for code in fault.codes if code in CODES), None)
    return coded or KINDS.get(fault.type)


def shorten(message: str) -> str:
    """Return the first paragraph without colours, on one line."""
    lines = [line.strip() for line in COLORS.sub("", message).strip().split("\n\n")[0].splitlines()]
    return " ".join(line for line in lines if line).rstrip(".")[:MESSAGE_MAX]
