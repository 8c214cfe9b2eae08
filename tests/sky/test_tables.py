"""Our tables against SkyPilot's own: every exception, every cloud, what its machines can do."""

from __future__ import annotations

import builtins
import json
import subprocess

from broker.clouds import CLOUDS, WITHOUT_SELF_TERMINATION
from broker.clouds.sky.errors import KINDS
from broker.optimizer.abilities import LACKS
from broker.optimizer.filters import OWN_CLOUDS
from broker.task.fields_places import CLOUDS as KNOWN_CLOUDS
from tests.sky.conftest import PYTHON

ASK = """
import inspect, json
import sky
from sky import exceptions
from sky.clouds import CloudImplementationFeatures as Features
from sky.provision import common
from sky.skylet import constants
from sky.utils import registry
from sky.utils.resources_utils import DiskTier

found = dict(vars(exceptions), ProvisionerError=common.ProvisionerError, StopFailoverError=common.StopFailoverError)
classes = {n: c for n, c in found.items() if inspect.isclass(c) and c.__module__.startswith("sky.")}
names = [n for n, c in classes.items() if issubclass(c, Exception)]
barred, lacking = [], {}
for name in constants.ALL_CLOUDS:
    cloud = registry.CLOUD_REGISTRY.from_str(name)
    table = getattr(type(cloud), "_CLOUD_UNSUPPORTED_FEATURES", {})
    if Features.AUTODOWN in table or Features.AUTO_TERMINATE in table:
        barred.append(name)
    if name not in ("kubernetes", "slurm", "ssh"):  # their answer depends on the machines there
        for feature in type(cloud)._unsupported_features_for_resources(sky.Resources()):
            lacking.setdefault(feature.name, []).append(name)
        check = getattr(type(cloud), "check_disk_tier", None)
        if check and not check(None, DiskTier.ULTRA)[0]:
            lacking.setdefault("ULTRA_DISK_TIER", []).append(name)
print(json.dumps([names, list(constants.ALL_CLOUDS), barred, lacking]))
"""


def ask() -> tuple[list[str], list[str], list[str], dict[str, list[str]]]:
    done = subprocess.run([PYTHON, "-c", ASK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names, clouds, barred, lacking = json.loads(done.stdout.splitlines()[-1])
    return names, clouds, barred, lacking


def test_every_exception_has_a_row_and_every_cloud_an_adapter() -> None:
    names, clouds, barred, _ = ask()
    assert len(names) > 60
    assert not set(names) - set(KINDS), "SkyPilot raises errors that we do not know"
    others = {name for name in KINDS if hasattr(builtins, name)} | {"NotForSaleError"}
    assert not set(KINDS) - set(names) - others, "rows for errors that SkyPilot does not raise"
    assert set(clouds) <= set(CLOUDS) and set(clouds) <= set(KNOWN_CLOUDS)
    behind = {name for name, path in CLOUDS.items() if path.startswith("broker.clouds.sky.makers")}
    assert behind <= set(clouds)
    assert sorted(barred) == sorted(WITHOUT_SELF_TERMINATION)


def test_clouds_are_planned_for_what_skypilot_can_do_there() -> None:
    *_, lacking = ask()
    behind = {name for name, path in CLOUDS.items() if path.startswith("broker.clouds.sky.makers")} - OWN_CLOUDS
    for each in LACKS:
        left = {"CUSTOM_NETWORK_TIER": {"nebius"}, "STORAGE_MOUNTING": {"hyperbolic", "seeweb", "shadeform", "verda"}}
        expected = (set(lacking[each.feature]) & behind) - left.get(each.feature, set())
        assert sorted(each.clouds) == sorted(expected), each.name
