"""Operations of Google: its `wait` returns after two minutes, whether or not the operation is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.cloud import compute_v1

from broker.clouds.gcp import operations
from broker.clouds.gcp.sdk import Clients
from broker.errors import QuotaError, UnknownOutcomeError

RUNNING = compute_v1.Operation(status="RUNNING")
DONE = compute_v1.Operation(status="DONE")
REFUSED = compute_v1.Operation(status="DONE", error={"errors": [{"code": "QUOTA_EXCEEDED", "message": "full"}]})


def wait(*answers: compute_v1.Operation, is_global: bool) -> int:
    """Wait for an operation whose calls of `wait` have these answers; return the number of calls."""
    asked = list[dict[str, Any]]()

    def answer(**fields: Any) -> compute_v1.Operation:
        asked.append(fields)
        return answers[min(len(asked), len(answers)) - 1]

    kind = "GlobalOperations" if is_global else "ZoneOperations"
    clients = cast(Clients, SimpleNamespace(get={kind: SimpleNamespace(wait=answer)}.__getitem__))
    if is_global:
        operations.wait_global(clients, "p", SimpleNamespace(name="op-1"))
    else:
        operations.wait_zone(clients, "p", "z", SimpleNamespace(name="op-1"))
    assert {each["operation"] for each in asked} == {"op-1"}
    return len(asked)


@pytest.mark.parametrize("is_global", [False, True], ids=["zone", "global"])
def test_an_operation_is_waited_for_until_it_is_done(is_global: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(DONE, is_global=is_global) == 1
    assert wait(RUNNING, RUNNING, DONE, is_global=is_global) == 3
    with pytest.raises(QuotaError):
        wait(RUNNING, REFUSED, is_global=is_global)
    monkeypatch.setattr(operations, "OPERATION_S_MAX", -1.0)
    with pytest.raises(UnknownOutcomeError, match="op-1"):
        wait(RUNNING, is_global=is_global)
