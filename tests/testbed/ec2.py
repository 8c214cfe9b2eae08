"""A fake AWS on loopback for real boto3: EC2 as strict as the original about tokens, tags, states and permissions.

Deterministic: it advances only with its clock, one call at a time. The account's `on_started` and `on_ended` connect
real machines: a test may put a real host behind an instance, set its addresses, and say when it `is_ready`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.testbed.ec2_access import list_targets
from tests.testbed.ec2_account import Account
from tests.testbed.ec2_policy import is_allowed
from tests.testbed.ec2_roles import ROLE_ACTIONS, check_profile, find_key_policy
from tests.testbed.ec2_server import AwsServer, HangUp
from tests.testbed.ec2_surroundings import ACTIONS
from tests.testbed.ec2_wire import ApiError

DENIED = {"ec2": ("UnauthorizedOperation", 403), "ssm": ("AccessDeniedException", 400)}


class FakeAws:
    """Start, hand `environment` to boto3, arrange things in `account`, close."""

    def __init__(self, account: Account, *, address: str = "127.0.0.1") -> None:
        self.account = account
        # Called with each action: before it takes effect, and (True) before its answer leaves. May raise HangUp.
        self.on_call: Callable[[str, bool], None] = lambda action, is_after: None
        self.calls_at_once_max = 0
        self._calls_at_once = 0
        self.lock = threading.RLock()  # hold it to change the account from another thread
        self._count_lock = threading.Lock()
        self._server = AwsServer(self._serve, address=address)
        self.url = self._server.url

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that should take this for AWS."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIDFAKE",
            "AWS_SECRET_ACCESS_KEY": "canary-aws-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def close(self) -> None:
        self._server.close()

    def _serve(self, key: str, service: str, region: str, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        with self._count_lock:
            self._calls_at_once += 1
            self.calls_at_once_max = max(self.calls_at_once_max, self._calls_at_once)
        try:
            return self._answer(key, service, region, name, parameters)
        finally:
            with self._count_lock:
                self._calls_at_once -= 1

    def _answer(self, key: str, service: str, region: str, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            account = self.account
            action = f"{service}:{name}"
            account.tick()
            account.calls.append((action, region, parameters))
            self.on_call(action, False)
            if not account.has_login:
                raise ApiError("InvalidClientTokenId" if service == "sts" else "AuthFailure", status=401)
            if key in account.expired_keys:
                raise ApiError("ExpiredToken")
            fault = account.take_fault(name, region, is_after=False)
            if fault is not None and fault.error is not None:
                raise fault.error
            account.caller = key
            self._check_access(key, service, action, region, parameters)
            if parameters.pop("DryRun", False):
                raise ApiError("DryRunOperation", status=412)
            known = ACTIONS | ROLE_ACTIONS
            if action not in known:
                raise ApiError("InvalidAction", f"this fake knows no {action}")
            answer = known[action](account, region, parameters)
            self.on_call(action, True)
            if account.take_fault(name, region, is_after=True):
                raise HangUp
            return answer

    def _check_access(self, key: str, service: str, action: str, region: str, parameters: dict[str, Any]) -> None:
        policy = find_key_policy(self.account, key)
        if action == "ec2:RunInstances":
            check_profile(self.account, parameters, policy)
        if policy is None or action == "sts:GetCallerIdentity":  # which needs no permission
            return
        for needed, targets in list_targets(self.account, action, region, parameters):
            if not is_allowed(policy, needed, targets):
                code, status = DENIED.get(service, ("AccessDeniedException", 400))
                raise ApiError(code, f"not allowed: {needed} on {[each.arn for each in targets]}", status)
