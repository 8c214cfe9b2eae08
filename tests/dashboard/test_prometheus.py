"""A real Prometheus scrapes `/metrics` by the shipped configuration; skipped without Debian's `prometheus`."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import yaml

from broker.dashboard.metrics import MetricsPage
from tests.dashboard.conftest import HOSTILE, Served, Story

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
TRIES = 3000  # of 0.1 s: an outer limit, far beyond what a start takes

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no real scrape, no promtool: prometheus is not installed (Debian: prometheus)",
)


def ask(url: str, **headers: str) -> str:
    with urlopen(Request(url, headers=headers), timeout=300) as answer:
        return str(answer.read().decode())


def read_metrics(served: Served, home: Path) -> str:
    token = (home / "metrics-token").read_text()
    return ask(f"{served.base}/metrics", Authorization=f"Bearer {token}")


def test_promtool_accepts_the_metrics(served: Served, tmp_path: Path) -> None:
    text = read_metrics(served, tmp_path / "home")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text())
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (tmp_path / "token").write_text("t")
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(tmp_path / "token")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server with the shipped configuration, every second, for one dashboard."""

    def __init__(self, served: Served, folder: Path, home: Path) -> None:
        folder.mkdir()
        (folder / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text())
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"evaluation_interval": "1s"}
        (scrape,) = config["scrape_configs"]
        scrape["scrape_interval"] = scrape["scrape_timeout"] = "1s"
        scrape["authorization"]["credentials_file"] = str(home / "metrics-token")
        scrape["static_configs"] = [{"targets": [served.base.removeprefix("http://")]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def query(self, expression: str) -> list[Mapping[str, object]]:
        """Return the samples of an expression once there are any."""
        url = f"{self.url}/api/v1/query?{urlencode({'query': expression})}"
        for _ in range(TRIES):
            assert self._process.poll() is None, Path(self._log.name).read_text()
            try:
                if found := json.loads(ask(url))["data"]["result"]:
                    return list(found)
            except URLError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"no sample of {expression}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture
def prometheus(served: Served, tmp_path: Path) -> Iterator[Prometheus]:
    started = Prometheus(served, tmp_path / "prometheus", tmp_path / "home")
    yield started
    started.close()


def test_prometheus_scrapes_what_the_dashboard_shows(prometheus: Prometheus, story: Story) -> None:
    (up,) = prometheus.query('up{job="broker"} == 1')
    assert up["value"][1] == "1"  # type: ignore[index]
    families = set(re.findall(r"^# TYPE (\S+)", MetricsPage().render(story.context), re.MULTILINE))
    known = {str(each["metric"]["__name__"]) for each in prometheus.query('{__name__=~"broker_.+"}')}  # type: ignore[index]
    assert known == families
    (step,) = prometheus.query('broker_job_step{job="1"}')
    assert step["value"][1] == "31"  # type: ignore[index]


@pytest.mark.long
def test_a_hostile_name_stays_one_label_and_the_alert_of_a_failed_job_fires(prometheus: Prometheus) -> None:
    (info,) = prometheus.query('broker_job_info{job="2"}')
    assert info["metric"]["name"] == HOSTILE  # type: ignore[index]
    alerts = prometheus.query('ALERTS{alertname="BrokerJobFailed",alertstate="firing"}')
    assert {each["metric"]["job"] for each in alerts} == {"2", "5"}  # type: ignore[index]
