"""The interface to boto3: one client per region, and calls in a bounded set of threads.

Every error is raised as one exception type.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from broker.clouds.aws.errors import ApiError
from broker.clouds.aws.listening import listen
from broker.clouds.tape import Listener

CALLS_MAX = 16  # at once; more than the regions of most accounts, and far below EC2's request rate limits
CONNECT_S_MAX = 5.0
ANSWER_S_MAX = 60.0  # RunInstances of a large gang takes seconds
READ_TRIES = 4  # for calls that change nothing
PAGES_MAX = 1000
HOME_REGION = "us-east-1"  # for data that is the same everywhere, if the login names no region
# Refusals after which credentials are read again: botocore reads those in files and variables once, though another
# program may renew them every hour (https://github.com/boto/botocore/issues/704).
OUTDATED = frozenset(
    ("AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException")
)

Result = TypeVar("Result")


class Clients:
    """boto3 clients. Creates and imports nothing before the first call."""

    def __init__(self, open_session: Callable[[], Any] | None = None) -> None:
        """Make the clients. `open_session` creates the boto3 session; None: from the user's own settings."""
        self._make_session = open_session or _open_boto3_session
        self._lock = threading.Lock()
        self._session: Any = None
        self._account = ""  # of the login, once it is known
        self._listener: Listener | None = None
        self._clients: dict[tuple[str, str, int], Any] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def read(self, service: str, region: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make a call that changes nothing; botocore retries it. Raises ApiError."""
        return await self._in_thread(self._call, service, region, operation, parameters, READ_TRIES)

    async def read_once(self, service: str, region: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Like `read`, but without retries: optional information must not delay a launch."""
        return await self._in_thread(self._call, service, region, operation, parameters, 1)

    async def change(self, region: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make an EC2 call that creates or deletes something.

        It is sent once, so that the caller decides what a lost response means.
        """
        return await self._in_thread(self._call, "ec2", region, operation, parameters, 1)

    async def read_all(self, region: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        """Read all pages of an EC2 list."""
        found: list[Any] = []
        more: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            page = await self.read("ec2", region, operation, **parameters, **more)
            found += page.get(key, ())
            if not page.get("NextToken"):
                return found
            more = {"NextToken": page["NextToken"]}
        raise ApiError("InvalidPaginationToken", "pages have no end", operation=operation, region=region)

    async def find_home(self) -> str:
        """Return the region of the login."""
        return await self._in_thread(self._find_home)

    def observe(self, listener: Listener) -> None:
        """Report all requests and responses to `listener` from now on."""
        with self._lock:
            self._listener = listener
            self._session = None
            self._clients.clear()  # existing clients would not report

    def prepare(self) -> None:
        """Import boto3 and read EC2's model in a thread, which takes about a second."""
        self._open_threads().submit(self._prepare)

    def _prepare(self) -> None:
        from botocore.exceptions import BotoCoreError

        try:
            self._find_client("ec2", self._find_home(), READ_TRIES)
        except (BotoCoreError, ApiError):
            pass  # the first call reports the error

    def _open_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="aws")
            return self._threads

    def _find_home(self) -> str:
        from botocore.exceptions import BotoCoreError

        try:
            with self._lock:
                return str(self._open_session().region_name or HOME_REGION)
        except BotoCoreError as error:  # a missing profile, an unreadable file
            raise ApiError(name_exception(error), str(error), operation="login", region=HOME_REGION) from error

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._open_threads(), work, *arguments)

    def _call(
        self, service: str, region: str, operation: str, parameters: Mapping[str, Any], tries: int
    ) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
        from botocore.parsers import ResponseParserError

        client: Any = None
        try:
            client = self._find_client(service, region, tries)
            answer = getattr(client, operation)(**parameters)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in OUTDATED and self._renew_login(client):
                return self._call(service, region, operation, parameters, tries)  # a refused login has done nothing
            details = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(details.get("Code", "")) or f"HTTP {status}"
            message = str(details.get("Message", ""))
            raise ApiError(code, message, operation=operation, region=region, status=status) from error
        except (BotoCoreError, ResponseParserError) as error:
            if (
                isinstance(error, NoCredentialsError)
                and client is not None
                and self._renew_login(client, had_none=True)
            ):
                return self._call(service, region, operation, parameters, tries)  # the user has logged in since
            raise ApiError(name_exception(error), str(error), operation=operation, region=region) from error
        assert isinstance(answer, dict)
        if operation == "get_caller_identity":
            self._account = str(answer["Account"])
        return answer

    def _renew_login(self, refused: Any, *, had_none: bool = False) -> bool:
        """Read the credentials again after a refusal; return whether they differ, so that the call may be repeated.

        Credentials that expire by a known time renew themselves. A login for another account is not taken over: its
        lists lack the nodes that this process knows.
        """
        from botocore.credentials import Credentials
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            if refused not in self._clients.values():
                return True  # another thread has renewed it
            before, self._session = self._session, None
            is_new = False
            try:
                session = self._open_session()
                # A session without credentials looks for them at each call, but its clients do not.
                old, new = None if had_none else before.get_credentials(), session.get_credentials()
                is_other = type(new) is Credentials and (
                    not old or new.get_frozen_credentials() != old.get_frozen_credentials()
                )
                if is_other or (had_none and new is not None):
                    sts = session.client("sts", region_name=session.region_name or HOME_REGION)
                    is_new = not self._account or sts.get_caller_identity()["Account"] == self._account
            except (BotoCoreError, ClientError):
                pass  # the refusal of the old login is reported
            if is_new:
                self._clients.clear()
            else:
                self._session = before
            return is_new

    def _find_client(self, service: str, region: str, tries: int) -> Any:
        from botocore.config import Config

        with self._lock:  # creating a client is not thread-safe; using one is
            key = (service, region, tries)
            if key not in self._clients:
                settings = Config(
                    retries={"total_max_attempts": tries, "mode": "standard"},
                    connect_timeout=CONNECT_S_MAX,
                    read_timeout=ANSWER_S_MAX,
                    max_pool_connections=CALLS_MAX,
                )
                self._clients[key] = self._open_session().client(service, region_name=region, config=settings)
            return self._clients[key]

    def _open_session(self) -> Any:
        if self._session is None:
            self._session = self._make_session()
            if self._listener is not None:
                listen(self._session, self._listener)
        return self._session


def _open_boto3_session() -> Any:
    import boto3

    return boto3.Session()


def name_exception(error: Exception) -> str:
    """Return the class in the table that this exception is, or derives from."""
    from broker.clouds.aws.errors import KINDS

    names: Sequence[str] = [each.__name__ for each in type(error).__mro__]
    return next((name for name in names if name in KINDS), names[0])
