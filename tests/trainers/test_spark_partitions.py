"""The Spark template commits partitions to a folder that all hosts share. PySpark itself is a stand-in here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("pyspark", "pyspark.sql"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["pyspark.sql"], "SparkSession", None, raising=False)
    monkeypatch.delitem(sys.modules, "trainers.frameworks.spark_partitions", raising=False)
    from trainers.frameworks import spark_partitions

    return spark_partitions


def test_executors_of_two_hosts_with_one_pid_commit_a_partition_side_by_side(
    partitions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark computes a partition again on another host if the first is slow; in containers, pids are alike."""
    save, calls = np.save, list[str]()

    def save_slowly(file: Any, values: Any) -> None:
        calls.append(file.name)
        if len(calls) == 1:
            partitions.compute(tmp_path, 0)  # the other host, from begin to end
        save(file, values)

    monkeypatch.setattr(np, "save", save_slowly)
    partitions.compute(tmp_path, 0)
    assert len(calls) == 2 and [path.name for path in tmp_path.iterdir()] == ["part-00000.npy"]
    assert len(np.load(tmp_path / "part-00000.npy")) == partitions.SAVE_STEPS
