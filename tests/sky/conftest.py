"""A real SkyPilot API server of our own, with one enabled cloud: Lambda, whose HTTP interface is simulated here.

`make test-sky` names SkyPilot's interpreter in BROKER_TEST_SKY_PYTHON; without it these tests are skipped. Nothing but
the address of Lambda's interface is changed in SkyPilot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clouds.sky.engine import WorkerEngine
from tests.sky.fake_lambda import FakeLambda, serve

PYTHON = os.getenv("BROKER_TEST_SKY_PYTHON", "")
START_S_MAX, END_S_MAX = 300, 60
CATALOG = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_a10,A10,1.0,30.0,200.0,0.75,us-east-1,"{'Gpus': [{'Name': 'A10', 'MemoryInfo': {'SizeInMiB': 24576}}]}",
gpu_1x_a10,A10,1.0,30.0,200.0,0.75,us-west-1,"{'Gpus': [{'Name': 'A10', 'MemoryInfo': {'SizeInMiB': 24576}}]}",
"""
NEBIUS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cpu-e2_4vcpu-16gb,,,4.0,16.0,0.1,eu-north1,,
"""
# Python runs this at each start of SkyPilot's processes; the module it waits for has its URL as a constant.
REDIRECT = """
import importlib.abc, importlib.machinery, os, sys

NAME = "sky.provision.lambda_cloud.lambda_utils"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.API_ENDPOINT = os.environ["TEST_LAMBDA_URL"]
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not PYTHON:
            item.add_marker(pytest.mark.skip(reason="needs SkyPilot: `make test-sky`"))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Temporary homes for SkyPilot and the user; real ones are never touched."""
    home = tmp_path_factory.mktemp("sky-home")
    for cloud, rows in (("lambda", CATALOG), ("nebius", NEBIUS)):
        catalog = home / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
        catalog.parent.mkdir(parents=True)
        catalog.write_text(rows)
    keys = home / ".lambda_cloud" / "lambda_keys"
    keys.parent.mkdir()
    keys.write_text("api_key = test\n")
    (home / "redirect").mkdir()
    (home / "redirect" / "sitecustomize.py").write_text(REDIRECT)
    return home


@pytest.fixture(scope="session")
def fake_lambda() -> Iterator[FakeLambda]:
    with serve() as fake:
        yield fake


@pytest.fixture(scope="session")
def server(home: Path, fake_lambda: FakeLambda) -> Iterator[None]:
    """The API server; the environment leads to it, for this process and those it starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("SKYPILOT_API_SERVER_LOCAL_PORT", str(port))
        patch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
        patch.setenv("TEST_LAMBDA_URL", fake_lambda.url)
        patch.setenv("PYTHONPATH", str(home / "redirect"))
        patch.delenv("SKYPILOT_API_SERVER_ENDPOINT", raising=False)
        try:
            run_sky("api", "start")
            run_sky("check", "lambda")
            yield
        finally:
            run_sky("api", "stop")
            end_all(home)


def run_sky(*words: str) -> str:
    command = [PYTHON, "-c", "from sky.client.cli.command import cli; cli()", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def end_all(home: Path) -> None:
    """End the processes that the server left running, identified by its home folder."""
    end_s = time.monotonic() + END_S_MAX
    while True:
        left = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = f"HOME={home}\0".encode() in (entry / "environ").read_bytes()
                if is_ours and int(entry.name) != os.getpid():
                    left.append(int(entry.name))
        if not left:
            return
        assert time.monotonic() < end_s, f"{left} do not end"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


@pytest.fixture
def engine(server: None) -> Iterator[WorkerEngine]:
    engine = WorkerEngine(PYTHON)
    yield engine
    engine.close()
