"""Progress of a job in experiment trackers: MLflow over HTTP, an event file of TensorBoard, and any URL."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker.app.forwarding import make_login
from broker.app.tensorboard import encode_varint, find_crc32c, mask
from broker.cli.main import main
from broker.types import JobStatus, Progress
from tests.dashboard.conftest import Story


class FakeTracker(BaseHTTPRequestHandler):
    """Stands for an MLflow server, and takes any other POST."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.received.append((self.path.rpartition("mlflow/")[2], body, dict(self.headers)))
        status, answer = server.answer(self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        if server.location:
            self.send_header("Location", server.location)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        server: Any = self.server
        server.received.append((self.path, None, dict(self.headers)))
        self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """The tracker's memory: its experiments and runs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeTracker)
        self.received: list[tuple[str, Any, dict[str, str]]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: list[str] = []
        self.status = 200
        self.location = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {}
        match path.rpartition("mlflow/")[2]:
            case "experiments/search":
                return 200, {"experiments": [{"experiment_id": "7"}]} if self.experiments else {}
            case "experiments/create":
                self.experiments.append(body["name"])
                return 200, {"experiment_id": "7"}
            case "runs/search":
                wanted = body["filter"].split("'")[1]
                found = [run for run in self.runs.values() if run["tags"][0]["value"] == wanted]
                return 200, {"runs": [{"info": {"run_id": run["id"]}} for run in found]} if found else {}
            case "runs/create":
                run_id = f"run{len(self.runs)}"
                self.runs[run_id] = {**body, "id": run_id, "metrics": []}
                return 200, {"run": {"info": {"run_id": run_id}}}
            case "runs/log-batch":
                self.runs[body["run_id"]]["metrics"] += body["metrics"]
            case "runs/update":
                self.runs[body["run_id"]]["status"] = body["status"]
        return 200, {}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def forward(job: str, *arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit, match=rf"^{code}$"):
        main(("jobs", "forward", job, *arguments))


@pytest.fixture
def ended(story: Story) -> Story:
    """The story, in which job 1 ends with its newest step."""
    story.store.jobs.set_progress(1, Progress(step=40, total=100, loss=2.125, tokens_per_s=900.0, checkpoint_step=30))
    story.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    return story


def test_run_in_mlflow_is_made_once_and_gets_progress_and_end(ended: Story, server: Server) -> None:
    for _ in range(2):  # a forwarder that is started again continues the run
        forward("1", "--mlflow", server.url, "--experiment", "spot")
    ((run_id, run),) = server.runs.items()
    assert server.experiments == ["spot"] and run["run_name"] == "train" and run["status"] == "FINISHED"
    metrics = {each["key"]: (each["value"], each["step"]) for each in run["metrics"]}
    assert metrics == {"loss": (2.125, 40), "tokens_per_s": (900.0, 40), "checkpoint_step": (30.0, 40)}
    job = ended.store.jobs.get(1)
    assert job is not None and run["tags"] == [{"key": "broker.job", "value": job.stem}]
    assert run_id == "run0"


def test_named_run_is_used_and_nothing_is_searched(ended: Story, server: Server) -> None:
    server.runs["mine"] = {"id": "mine", "metrics": [], "tags": [{"value": ""}]}
    forward("1", "--mlflow", server.url, "--run-id", "mine")
    assert [path for path, _, _ in server.received] == ["runs/log-batch", "runs/update"]
    assert len(server.runs["mine"]["metrics"]) == 3


def test_url_gets_each_line_and_the_end_as_json(ended: Story, server: Server) -> None:
    forward("1", "--url", f"{server.url}/hook")
    line, end = (body for _, body, _ in server.received)
    assert (line["step"], line["total"], line["loss"], line["name"]) == (40, 100, 2.125, "train")
    assert end["status"] == "SUCCEEDED" and end["job"] == line["job"]


def test_progress_is_sent_while_the_job_runs(story: Story, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(seconds: float) -> None:
        job = story.store.jobs.get(1)
        assert job is not None and job.progress is not None
        step = job.progress.step + 1
        story.store.jobs.set_progress(1, Progress(step=step, total=100, loss=1.0))
        if step == 34:
            story.store.jobs.set_status(1, JobStatus.FAILED, "exit code 1")

    monkeypatch.setattr("broker.cli.jobs_forward.pause", advance)
    forward("1", "--url", server.url)
    assert [body.get("step") for _, body, _ in server.received] == [31, 32, 33, 34, None]


def test_tracker_that_refuses_is_reported_and_the_others_get_the_line(
    ended: Story, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 503
    forward("1", "--url", server.url, "--tensorboard", str(tmp_path / "events"))
    assert "HTTP 503" in capsys.readouterr().err
    assert len(read_records(next((tmp_path / "events").iterdir()))) == 2
    forward("1", "--mlflow", server.url, code=1)  # without a run, nothing could be forwarded
    forward("1", "--mlflow", "localhost:5000", code=2)
    forward("1", code=2)


@pytest.mark.parametrize("status", [301, 302, 303, 307])
def test_redirect_is_refused_and_takes_no_login_along(
    ended: Story, server: Server, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "swordfish")
    server.status, server.location = status, f"{server.url}/elsewhere"
    forward("1", "--mlflow", server.url, code=1)
    assert f"HTTP {status}" in capsys.readouterr().err
    assert [path for path, _, _ in server.received] == ["experiments/search"]


def read_records(path: Path) -> list[bytes]:
    """Read the records of an event file, and check their checksums."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        (length_crc,), (crc,) = struct.unpack("<I", data[8:12]), struct.unpack("<I", data[12 + length : 16 + length])
        assert length_crc == mask(find_crc32c(data[:8])) and crc == mask(find_crc32c(data[12 : 12 + length]))
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_event_file_has_the_scalars_of_each_line(ended: Story, tmp_path: Path) -> None:
    forward("1", "--tensorboard", str(tmp_path))
    (path,) = tmp_path.glob("events.out.tfevents.*")
    version, event = read_records(path)
    assert b"brain.Event:2" in version
    assert event[9:11] == b"\x10\x28"  # step 40
    assert b"\x0a\x04loss\x15" + struct.pack("<f", 2.125) in event
    assert b"\x0a\x0ctokens_per_s\x15" + struct.pack("<f", 900.0) in event


def test_event_file_is_what_tensorboard_itself_reads(ended: Story, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    forward("1", "--tensorboard", str(tmp_path))
    events = loader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(40, 2.125)]


def test_numbers_are_encoded_in_groups_of_seven_bits() -> None:
    assert encode_varint(0) == b"\0" and encode_varint(300) == b"\xac\x02" and len(encode_varint(-1)) == 10


def test_login_comes_from_mlflow_s_own_variables() -> None:
    assert make_login({"MLFLOW_TRACKING_TOKEN": "t", "MLFLOW_TRACKING_USERNAME": "u"}) == {"Authorization": "Bearer t"}
    login = make_login({"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"})
    assert login == {"Authorization": "Basic dTpw"} and make_login({}) == {}
