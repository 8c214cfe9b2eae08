"""The program of a gateway, as it runs on a machine: unpacked, started, restarted, stopped."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.errors import UsageError
from broker.runtime import node_python
from broker.serve import gateway_program, gateway_task
from broker.serve.files import ServiceFolder
from broker.serve.gateway_task import check_places, find_listener, make_gateway_task, write_program
from broker.types import GatewayPlace, GatewaySpec, Resources, Service, Task

SERVICE = Service(name="web", uid="u", version=1, host="0.0.0.0", port=30001, created_s=0.0)
PRETENDER = """\
import os, sys, time
with open(os.path.join(sys.argv[-1], "started"), "a") as file:
    file.write("%d\\n" % os.getpid())
time.sleep(600)
"""


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("module", [gateway_program, node_python])
def test_programs_of_nodes_need_no_newer_python(module: object) -> None:
    path = Path(str(getattr(module, "__file__", "")))
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    assert any(isinstance(each, ast.FunctionDef) for each in tree.body)


def test_balancer_waits_for_its_routing_file_is_restarted_when_killed_and_ends_with_its_supervisor(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "exchange"
    folder.mkdir()
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(gateway_program.__file__).parent)!r})\n"
        "import gateway_program as g\n"
        f"g.supervise([sys.executable, '-c', {PRETENDER!r}, {str(folder)!r}], {str(folder)!r}, dict(os.environ))"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    started = folder / "started"

    def list_started() -> list[int]:
        return [int(line) for line in started.read_text().splitlines()] if started.exists() else []

    try:
        assert list_started() == []
        (folder / gateway_program.ROUTING).write_text("{}")
        wait_for(lambda: len(list_started()) == 1)
        os.kill(list_started()[0], signal.SIGKILL)
        wait_for(lambda: len(list_started()) == 2)
        supervisor.terminate()
        assert supervisor.wait(300) == 0
        wait_for(lambda: not Path(f"/proc/{list_started()[1]}").exists())
    finally:
        supervisor.kill()
        supervisor.wait()


def test_shipped_folder_is_complete_and_unpacks_the_broker_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ServiceFolder(path=tmp_path / "service")
    program = write_program(folder, is_here=True)
    assert sorted(path.name for path in program.iterdir()) == [
        "broker.whl", "gateway_program.py", "node_python.py", "settings.json",
    ]  # fmt: skip
    assert write_program(folder, is_here=True) == program != write_program(folder, is_here=False)
    settings = json.loads((program / "settings.json").read_text())
    assert settings["python"] == sys.executable and any(name == "aiohttp" for name, _ in settings["needs"])
    monkeypatch.setattr(gateway_program, "FOLDER", str(program))
    release = gateway_program.unpack(str(tmp_path / "releases"), settings["digest"])
    source = Path(gateway_program.__file__)
    assert (Path(release) / "broker" / "serve" / source.name).read_bytes() == source.read_bytes()
    (program / "broker.whl").write_bytes(b"half")
    with pytest.raises(SystemExit, match="damaged"):
        gateway_program.unpack(str(tmp_path / "others"), settings["digest"])


def test_gateways_are_on_demand_open_one_port_and_are_where_the_file_says(tmp_path: Path) -> None:
    task = Task(name="web", resources=(Resources(cloud="gcp", accelerator="L4"),))
    spec = GatewaySpec(count=2, places=(GatewayPlace(cloud="aws", region="us-east-1"), GatewayPlace(cloud="gcp")))
    made = [make_gateway_task(SERVICE, task, spec, number, tmp_path) for number in (1, 2)]
    first, second = (each.resources[0] for each in made)
    assert (first.cloud, first.region, second.cloud) == ("aws", "us-east-1", "gcp")
    assert first.ports == second.ports == ("30001",) and first.use_spot is False and first.accelerator is None
    assert str(first.cpus) == "2+" and made[0].secrets == {}
    assert find_listener(SERVICE, task, spec, 2) == gateway_task.GatewayListener(host="0.0.0.0", port=30001)


def test_local_replicas_have_local_gateways_on_adjacent_ports() -> None:
    task = Task(name="web", resources=(Resources(cloud="local"),))
    spec = GatewaySpec(count=2)
    check_places(task, spec)
    assert find_listener(SERVICE, task, spec, 2) == gateway_task.GatewayListener(host="127.0.0.1", port=30002)
    with pytest.raises(UsageError, match="cannot reach replicas on the local cloud"):
        check_places(task, GatewaySpec(places=(GatewayPlace(cloud="aws"),)))
    with pytest.raises(UsageError, match="either all on this machine"):
        check_places(task, GatewaySpec(count=2, places=(GatewayPlace(cloud="aws"), GatewayPlace(cloud="local"))))
