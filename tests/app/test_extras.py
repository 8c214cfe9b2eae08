"""Missing libraries of clouds are named together with the command that installs them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from broker.app.checking import find_inspector
from broker.app.container import Context
from broker.app.planning import plan_launch
from broker.errors import NoOfferError, UsageError
from broker.types import Plan, Resources, Task


@pytest.fixture(autouse=True)
def _without_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Block the imports as if of Google only `google-cloud-storage` was installed: it has `google.cloud`, too."""
    for module in ("boto3", "google.cloud.compute_v1", "sky"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROKER_SKY_PYTHON", raising=False)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_check_names_the_missing_library(cloud: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_inspector(cloud)
    assert raised.value.hints == (f"install it: `pip install 'intercloud-broker[{cloud}]'`",)


@pytest.mark.parametrize(
    ("cloud", "extra"), [("aws", "aws"), ("gcp", "gcp"), ("runpod", "sky"), ("local", ""), ("slurm", ""), (None, "")]
)
def test_launch_on_a_cloud_without_its_library_names_the_command(cloud: str | None, extra: str) -> None:
    def refuse(task: Task, **options: object) -> Plan:
        raise NoOfferError("no offer fits")

    context = cast(Context, SimpleNamespace(plan=refuse, clouds={}))
    with pytest.raises(NoOfferError) as raised:
        plan_launch(context, Task(run="true", resources=(Resources(cloud=cloud), Resources())))
    expected = f"`{cloud}` requires its library: `pip install 'intercloud-broker[{extra}]'`"
    assert (expected in raised.value.hints) == bool(extra)
    assert sum("pip install" in each for each in raised.value.hints) == bool(extra)
