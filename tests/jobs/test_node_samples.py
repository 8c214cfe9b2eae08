"""Samples that nodes take of themselves are kept once, in files of bounded size, and summed up for the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from broker.agent import agent_ring
from broker.clock import SystemClock
from broker.jobs.node_samples import (
    CURRENT_S,
    SampleRecorder,
    forget_samples,
    get_folder,
    list_jobs,
    read_history,
    read_newest,
    read_usage,
    sum_usage,
)
from broker.state.store import Store
from broker.types import GpuSample, JobStatus, NodeSample, Resources, Task


def make_sample(time_s: float, **fields: float) -> NodeSample:
    return NodeSample(time_s=time_s, **{"cpu_ratio": 0.5, **fields})  # type: ignore[arg-type]


def read_times(logs: Path, rank: int = 0) -> list[float]:
    histories = {each.rank: each.samples for each in read_history(logs, 1, now_s=time.time())}
    return [sample.time_s for sample in histories.get(rank, ())]


def test_each_sample_is_kept_once_also_after_the_controller_was_restarted(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, 1)
    recorder.record([(0, make_sample(10)), (1, make_sample(11)), (0, make_sample(20))])
    recorder.record([(0, make_sample(20)), (1, make_sample(11)), (1, make_sample(21))])
    SampleRecorder(tmp_path, 1).record([(0, make_sample(10)), (0, make_sample(20)), (0, make_sample(30))])
    assert read_times(tmp_path) == [10, 20, 30] and read_times(tmp_path, rank=1) == [11, 21]


def test_node_whose_clock_is_far_behind_that_of_the_last_one_is_recorded(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, 1)
    recorder.record([(0, make_sample(10_000))])
    recorder.record([(0, make_sample(500))])
    recorder.record([(0, make_sample(510))])
    recorder.record([(0, make_sample(510))])
    assert read_times(tmp_path) == [10_000, 500, 510]


def test_file_of_a_rank_is_bounded(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, 1)
    for number in range(1, 2000):
        recorder.record([(0, make_sample(number, memory_bytes=1e11, network_sent_bytes_s=123456789.0))])
    assert (get_folder(tmp_path, 1) / "0.jsonl").stat().st_size <= agent_ring.BYTES_MAX
    assert read_times(tmp_path)[-1] == 1999


def test_disk_that_is_full_loses_samples_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nodes").write_text("a file where the folder should be")
    recorder = SampleRecorder(tmp_path, 1)
    for number in (1, 2, 3):
        recorder.record([(0, make_sample(number))])
    assert len(caplog.records) == 1
    (tmp_path / "nodes").unlink()
    recorder.record([(0, make_sample(4))])
    assert read_times(tmp_path) == [4]


def test_node_that_has_been_silent_for_a_minute_is_not_shown_as_it_is_now(tmp_path: Path) -> None:
    SampleRecorder(tmp_path, 1).record([(0, make_sample(10)), (1, make_sample(10, cpu_ratio=1.0))])
    usage = read_usage(tmp_path, 1, now_s=time.time())
    assert usage is not None and (usage.nodes, usage.cpu_ratio) == (2, 0.75)
    old_s = time.time() - CURRENT_S - 1
    os.utime(get_folder(tmp_path, 1) / "1.jsonl", (old_s, old_s))
    assert [rank for rank, _ in read_newest(tmp_path, 1, now_s=time.time())] == [0]
    assert [each.is_current for each in read_history(tmp_path, 1, now_s=time.time())] == [True, False]
    assert read_usage(tmp_path, 1, now_s=time.time() + 2 * CURRENT_S) is None


def test_usage_is_the_mean_over_nodes_and_over_gpus_that_report_it() -> None:
    gpus = (GpuSample(ratio=0.8, memory_used_bytes=40.0, memory_bytes=80.0), GpuSample(ratio=0.4), GpuSample())
    usage = sum_usage(
        [
            NodeSample(time_s=1, cpu_ratio=0.2, memory_used_bytes=1.0, memory_bytes=4.0, gpus=gpus, xids={"79": 2}),
            NodeSample(time_s=1, cpu_ratio=0.4, xids={"48": 1}),
        ]
    )
    assert usage is not None and usage.cpu_ratio == pytest.approx(0.3) and usage.memory_ratio == 0.25
    assert usage.gpu_ratio == pytest.approx(0.6) and usage.gpu_memory_ratio == 0.5 and usage.xids == 3
    assert sum_usage([]) is None


def test_samples_of_an_ended_job_are_deleted_with_its_log(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    ended, live = (store.jobs.add(name, Task(run="true", resources=(Resources(),))).id for name in ("a", "b"))
    store.jobs.set_status(ended, JobStatus.SUCCEEDED)
    for job_id in (ended, live):
        SampleRecorder(tmp_path, job_id).record([(0, make_sample(1))])
    forget_samples(store, tmp_path, older_than_s=time.time() - 3600)
    assert list_jobs(tmp_path) == {ended, live}
    SampleRecorder(tmp_path, ended).record([(1, make_sample(1))])
    os.utime(get_folder(tmp_path, ended) / "0.jsonl", (0, 0))
    forget_samples(store, tmp_path, older_than_s=time.time() - 3600)
    assert list_jobs(tmp_path) == {ended, live}, "a rank has newer ones"
    forget_samples(store, tmp_path, older_than_s=time.time() + 3600)
    assert list_jobs(tmp_path) == {live}
    store.close()
