"""The requests to an API server: `kubectl ... --raw`, one process per request, which needs no discovery."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from broker.clouds.kubernetes.manifest import FINALIZER, GANG_LABEL, OWNER_LABEL
from broker.clouds.kubernetes.states import ObjectExistsError, ObjectMissingError, find_error
from broker.errors import AuthError, BrokerError, CloudError, DeniedError, TransientError, UnknownOutcomeError
from broker.sites.kubectl import run_kubectl
from broker.sites.kubernetes import KubernetesContext
from broker.sites.openssh import Completed

PROCESSES_MAX = 8  # a start of kubectl costs about 0.1 s of CPU
END_S = 1  # between SIGTERM and SIGKILL: a deleted node gets no notice; 0 would delete the object unconfirmed
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
UNFINALIZE = json.dumps({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}})

# Runs one kubectl command for an entry, as `run_kubectl` does; tests substitute a fake.
RunKubectl = Callable[[KubernetesContext, Sequence[str], bytes], Awaitable[Completed]]
Result = TypeVar("Result")


class KubernetesApi:
    """The requests about the pods of one entry. They raise the CloudError to which the server's answer maps."""

    def __init__(self, context: KubernetesContext, *, run: RunKubectl = run_kubectl) -> None:
        self.context = context
        self._run = run
        self._pods = f"/api/v1/namespaces/{context.namespace}/pods"

    async def list_pods(self, *, owner: str = "", gang: str = "") -> Sequence[Mapping[str, Any]]:
        """List the pods of an owner or of a gang, with those that have ended and are kept."""
        selector = f"{GANG_LABEL}={gang}" if gang else f"{OWNER_LABEL}={owner}"
        found: Sequence[Mapping[str, Any]] = (await self.get(f"{self._pods}?labelSelector={quote(selector)}"))["items"]
        return found

    async def get(self, path: str) -> Any:
        """Return the answer to a GET request. An answer that is lost is a temporary failure."""
        try:
            return json.loads(await self._call(["get", "--raw", path]))
        except UnknownOutcomeError as error:
            raise TransientError(error.message) from error
        except ValueError as error:
            raise TransientError(f"context `{self.context.name}`: the answer is not JSON") from error

    async def create(self, pod: Mapping[str, Any]) -> bool:
        """Create a pod; return whether this call created it, not an earlier one with the same name.

        Raises UnknownOutcomeError if the answer is lost.
        """
        try:
            await self._call(["create", "--raw", self._pods, "--filename=-"], json.dumps(pod).encode())
        except ObjectExistsError:
            return False
        return True

    async def is_permitted(self, asked: Mapping[str, str]) -> bool:
        """Return whether the login may do what `asked` (ResourceAttributes) describes."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = await self._call(["create", "--raw", REVIEWS, "--filename=-"], json.dumps(review).encode())
        return bool(json.loads(answer)["status"]["allowed"])

    async def delete(self, name: str, namespace: str) -> None:
        """Start deleting a pod: its processes are killed, and its object is kept. A pod that is gone is success."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds={END_S}"
        await self._end(["delete", "--raw", path])

    async def forget(self, name: str) -> None:
        """Let the API server remove the object of a deleted pod."""
        words = ["patch", "pod", name, f"--namespace={self.context.namespace}", "--type=strategic"]
        await self._end([*words, f"--patch={UNFINALIZE}", "--output=name"])

    async def _end(self, words: Sequence[str]) -> None:
        try:
            await self._call(words)
        except ObjectMissingError:
            return
        except UnknownOutcomeError as error:
            raise TransientError(error.message) from error

    async def _call(self, words: Sequence[str], stdin: bytes = b"") -> bytes:
        try:
            done = await self._run(self.context, words, stdin)
        except TransientError as error:  # it did not end in time: the request may have arrived
            raise UnknownOutcomeError(error.message) from error
        except CloudError:
            raise
        except BrokerError as error:
            raise AuthError(error.message, hints=error.hints) from error
        if done.returncode:
            raise find_error(done.stderr.decode(errors="replace"), self.context.context)
        return done.stdout


async def call_all(calls: Sequence[Callable[[], Awaitable[Result]]]) -> Sequence[Result | BaseException]:
    """Make all calls, a few at a time, and return their results or errors in order."""
    slots = asyncio.Semaphore(PROCESSES_MAX)

    async def call(each: Callable[[], Awaitable[Result]]) -> Result:
        async with slots:
            return await each()

    return await asyncio.gather(*(call(each) for each in calls), return_exceptions=True)


async def try_read(api: KubernetesApi, path: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the items of a list that this login may not be permitted to read; None if it is not."""
    try:
        found: Sequence[Mapping[str, Any]] = (await api.get(path))["items"]
    except DeniedError:
        return None
    return found
