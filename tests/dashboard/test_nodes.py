"""The resource usage of the nodes of a job: on its page as in `jobs why --json`, and in the lists of the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from broker.cli.dashboard import list_lines
from broker.cli.jobs_watch import list_view
from broker.cli.main import main
from broker.dashboard import pages
from broker.dashboard.model import read_job, read_overview
from broker.dashboard.node_charts import GAP_S, MEASURES, draw_measure, show_nodes
from broker.formatting import format_bytes, format_part, format_share
from broker.jobs.node_samples import POINTS_MAX, SampleRecorder
from broker.types import NodeHistory, NodeSample
from tests.dashboard.conftest import Story, make_sample
from tests.dashboard.test_model import read_json


@pytest.fixture
def frozen(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    return story


def test_job_page_shows_the_newest_sample_of_each_node_as_json_has_it(
    frozen: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    told: Any = read_json(capsys, "jobs", "why", "1")
    job = frozen.store.jobs.get(1)
    assert job is not None
    shown = pages.show_job(read_job(frozen.context, job), []).show("t")
    assert [node["rank"] for node in told["nodes"]] == [0, 1] and all(node["is_current"] for node in told["nodes"])
    for node in told["nodes"]:
        newest = node["samples"][-1]
        for text in (
            f"{format_share(newest['cpu_ratio'])} of 16",
            format_part(newest["memory_used_bytes"], newest["memory_bytes"]),
            format_part(newest["disk_used_bytes"], newest["disk_bytes"]),
            f"{format_bytes(newest['network_received_bytes_s'])}/s, {format_bytes(newest['network_sent_bytes_s'])}/s",
            f"{format_bytes(newest['disk_read_bytes_s'])}/s, {format_bytes(newest['disk_written_bytes_s'])}/s",
        ):
            assert f">{text}</td>" in shown
        for gpu in newest["gpus"]:
            assert f">{format_share(gpu['ratio'])}</td>" in shown and f">{gpu['power_watts']:.0f} W</td>" in shown
            memory = format_part(gpu["memory_used_bytes"], gpu["memory_bytes"])
            assert f">{memory}</td>" in shown and f">{gpu['temperature_celsius']:.0f} °C</td>" in shown
    assert ">1 of Xid 79</td>" in shown and shown.count("<figure>") == len(MEASURES)


def test_overview_and_top_show_the_mean_of_the_nodes_as_json_has_it(
    frozen: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    told: Any = read_json(capsys, "top")
    usage = next(each["usage"] for each in told["jobs"] if each["id"] == 1)
    assert usage["nodes"] == 2 and usage["xids"] == 1
    assert usage["gpu_ratio"] == pytest.approx(
        sum(make_sample(frozen.now_s, rank).gpus[0].ratio or 0 for rank in (0, 1)) / 2
    )
    overview = read_overview(frozen.context)
    cells = [format_share(usage["cpu_ratio"]), format_share(usage["gpu_ratio"])]
    assert "".join(f'<td class="number">{cell}</td>' for cell in cells) in pages.show_overview(overview)
    (line,) = [line.split() for line in list_lines(overview) if line.split()[:2] == ["1", "train"]]
    assert line[-3:-1] == cells
    assert [each["usage"] for each in told["jobs"] if each["id"] != 1] == [None, None]


def test_watch_has_the_usage_in_its_view_and_in_its_json(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    line = next(line for line in frozen.store.jobs.list_lines() if line.id == 1)
    usage = next(each for each in read_overview(frozen.context).jobs if each.line.id == 1).usage
    assert usage is not None
    view = list_view([line], [], now_s=frozen.now_s, usage={1: usage})
    assert view[1].split()[-2:] == [format_share(usage.cpu_ratio), format_share(usage.gpu_ratio)]
    assert list_view([line], [], now_s=frozen.now_s)[1].split()[-2:] == ["-", "-"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("jobs", "watch", "3", "--json"))
    assert '"usage": null' in capsys.readouterr().out  # it has ended


def make_history(*times_s: float, is_current: bool = True) -> NodeHistory:
    return NodeHistory(
        rank=0, is_current=is_current, samples=tuple(NodeSample(time_s=each, cpu_ratio=0.5) for each in times_s)
    )


def test_lines_are_cut_where_a_node_did_not_report() -> None:
    read, is_share = MEASURES["CPU"]
    chart = draw_measure("CPU", [make_history(0, 10, 20 + GAP_S, 30 + GAP_S)], read, is_share)
    assert chart is not None and chart.count("<polyline") == 2 and "CPU: 50%" in chart
    assert draw_measure("GPU", [make_history(0, 10)], *MEASURES["GPU"]) is None


def test_node_that_is_gone_has_its_last_samples_and_no_present_values() -> None:
    shown = show_nodes([make_history(0, 10, is_current=False)])
    assert "No node is reporting now" in shown and "<table" not in shown and "<polyline" in shown
    assert show_nodes([]) == ""


def test_history_is_thinned_and_ends_with_the_newest_sample(frozen: Story) -> None:
    recorder = SampleRecorder(frozen.context.config.logs, 3)
    recorder.record([(0, NodeSample(time_s=float(number))) for number in range(1, 501)])
    job = frozen.store.jobs.get(3)
    assert job is not None
    (node,) = read_job(frozen.context, job).nodes
    assert len(node.samples) <= POINTS_MAX and node.samples[-1].time_s == 500


def test_part_of_bytes_has_its_unit_once_where_both_have_the_same() -> None:
    assert format_part(20 * 2.0**30, 64 * 2.0**30) == "20.0 of 64.0 GiB"
    assert format_part(512 * 2.0**20, 64 * 2.0**30) == "512 MiB of 64.0 GiB"
    assert (
        format_part(None, 2.0**40) == "- of 1.00 TiB" and format_bytes(1023) == "1.00 KiB" and format_bytes(7) == "7 B"
    )
