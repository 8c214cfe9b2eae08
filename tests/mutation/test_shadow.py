"""A planted fault is detected, also in processes that the copy starts; the copy without one passes; the tree stays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from tests.mutation import limited
from tests.mutation.apart import find_prefix
from tests.mutation.draw import ROOT
from tests.mutation.judge import KILLS, Judge, Reached, Survey, choose, draw_kills, take
from tests.mutation.limited import run_limited
from tests.mutation.operators import Mutant, find_mutants
from tests.mutation.reach import Reader
from tests.mutation.readers import find_readers
from tests.mutation.shadow import Shadow, make_shadow
from tests.mutation.survey import FOLDERS, RUNTIME, list_folders, read_line

TEST = "tests/mutation/probes.py::test_the_answer_time_is_learned"
PROBES = """
import subprocess, sys
from broker.provision.hedge_timer import update_response_time

def test_the_answer_time_is_learned():
    assert update_response_time(None, 8.0).deviation_s == 4.0
    code = (
        "from broker.provision.hedge_timer import update_response_time; "
        "print(update_response_time(None, 8.0).deviation_s)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"4.0\\n"
"""


# It takes no processor time that counts before the program has begun.
LEFT = """
import os, time
while not os.path.exists("has-begun"):
    time.sleep(0.02)
while True:
    pass
"""
LIMITS = """
import fcntl, subprocess, sys

def test_that_leaves_a_process_at_work():
    with open("lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", "while True: pass"]
        subprocess.Popen(command, start_new_session=True, pass_fds=[lock.fileno()])

def test_that_is_quick():  # unless that process still works
    with open("lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

def test_that_hangs():
    while True:
        pass
"""


@pytest.fixture(scope="module")
def shadow() -> Iterator[Shadow]:
    with make_shadow() as made:
        (made.folder / "tests/mutation/probes.py").write_text(PROBES)
        yield made


def find(file: str, name: str) -> Mutant:
    return next(each for each in find_mutants(file, (ROOT / file).read_text()) if each.name.endswith(name))


def make_judge(shadow: Shadow, function: str) -> Judge:
    test = Reached(name=TEST, cpu_s=0.1, functions=frozenset({function}))
    return Judge(shadow, Survey(tests=[test], plays=[]))


def test_a_planted_fault_is_detected_and_the_work_tree_is_unchanged(shadow: Shadow) -> None:
    before = hashlib.sha256((ROOT / "broker/provision/hedge_timer.py").read_bytes()).hexdigest()
    mutant = find("broker/provision/hedge_timer.py", "arithmetic: / -> *")
    verdict = make_judge(shadow, "broker/provision/hedge_timer.py update_response_time").judge(mutant)
    assert verdict.by == "test" and TEST in verdict.where
    assert hashlib.sha256((ROOT / "broker/provision/hedge_timer.py").read_bytes()).hexdigest() == before
    assert (shadow.folder / "broker/provision/hedge_timer.py").read_text() == shadow.read(
        "broker/provision/hedge_timer.py"
    )


def test_a_fault_that_the_test_does_not_enter_survives_as_does_the_copy_without_one(shadow: Shadow) -> None:
    mutant = find("broker/provision/refusals.py", "constant: 1.0 -> 10.0")
    assert make_judge(shadow, "broker/provision/refusals.py draw_backoff_s").judge(mutant).by == ""


def test_processes_and_packed_agents_are_those_of_the_copy(shadow: Shadow) -> None:
    mutant = find("broker/agent/agent_files.py", "constant: 0o600 -> 0")
    look = (
        "import io, json, subprocess, sys, tarfile, broker.runtime.packing as packing;"
        "archive = tarfile.open(fileobj=io.BytesIO(packing.pack_agent()[1]));"
        "text = archive.extractfile('agent_files.py').read().decode();"
        "inner = subprocess.run([sys.executable, '-c', 'import broker; print(broker.__file__)'], capture_output=True);"
        "print(json.dumps([packing.__file__, inner.stdout.decode().strip(), text]))"
    )
    with shadow.planted(mutant):
        done = subprocess.run(
            [sys.executable, "-c", look], cwd="/", env=shadow.make_environment(), capture_output=True, check=True
        )
    home, inner, text = json.loads(done.stdout)
    assert home.startswith(str(shadow.folder)) and inner.startswith(str(shadow.folder))
    assert text != shadow.read("broker/agent/agent_files.py")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
@pytest.mark.parametrize(("end", "cpu_s_max"), [("while True: pass", 0.5), ("", 60.0)])
def test_a_looping_program_and_all_remaining_processes_are_killed(tmp_path: Path, end: str, cpu_s_max: float) -> None:
    program = f"""
import subprocess, sys
from pathlib import Path
subprocess.Popen([sys.executable, "-c", {LEFT!r}, {str(tmp_path)!r}], start_new_session=True)
Path("has-begun").touch()
{end}
"""
    outer = f"""
import sys
from pathlib import Path
from tests.mutation import limited
limited.WALL_FACTOR = 1000.0
limited.adopt_orphans()
command = [sys.executable, "-c", {program!r}]
folder = Path({str(tmp_path)!r})
ended = limited.run_limited(command, cwd=folder, environment={{}}, output=folder / "output", cpu_s_max={cpu_s_max})
print(ended.returncode)
"""
    done = subprocess.run([sys.executable, "-c", outer], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("None" if end else "0"), done.stderr
    assert (tmp_path / "has-begun").exists() and list_pids(str(tmp_path)) == []


@pytest.mark.skipif(find_prefix() == (), reason="no PID namespace can be made here")
def test_a_program_that_kills_all_it_sees_reaches_none_outside(tmp_path: Path) -> None:
    """Kill only processes with the mark of this test, so that its failure ends no other process of the machine."""
    mark = str(tmp_path)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    program = f"""
import os, signal, subprocess
from pathlib import Path
child = subprocess.Popen({sleep!r}, start_new_session=True)
while {mark!r} not in Path(f"/proc/{{child.pid}}/cmdline").read_text():
    pass  # the kernel shows the command line some time after the program has been started
for entry in Path("/proc").iterdir():
    if entry.name.isdigit() and {mark!r} in (entry / "cmdline").read_text().split("\\0"):
        os.kill(int(entry.name), signal.SIGKILL)
        print("killed")
"""
    outside = subprocess.Popen(sleep)
    try:
        command = [sys.executable, "-c", program]
        ended = run_limited(command, cwd=tmp_path, environment={}, output=tmp_path / "output", cpu_s_max=20.0)
        assert (ended.returncode, ended.output) == (0, "killed\n")
        assert outside.poll() is None and list_pids(mark) == [outside.pid]
    finally:
        outside.kill()
        outside.wait()


def list_pids(word: str) -> list[int]:
    """List processes, other than this one, whose command line has this word."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in (entry / "cmdline").read_text().split("\0"):
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
def test_other_child_processes_are_neither_measured_nor_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\nwhile time.process_time() < 1.0: pass\nprint(flush=True)\nwhile True: pass"
    gate, scans = tmp_path / "gate", list[float]()
    os.mkfifo(gate)

    def measure(others: Set[int]) -> float:
        """End the program once its processor time has been compared with the limit."""
        scans.append(measure_live_s(others))
        if len(scans) == 2:
            gate.write_text("go\n")
        return scans[-1]

    measure_live_s = limited._measure_live_s
    for name, value in (("_measure_live_s", measure), ("MEASURE_S", 0.0), ("WALL_FACTOR", 1000.0)):
        monkeypatch.setattr(limited, name, value)
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout and busy.stdout.readline()
        command = ["sh", "-c", 'read line < "$0"', str(gate)]  # takes no processor time, however slow the machine is
        ended = run_limited(command, cwd=tmp_path, environment={}, output=tmp_path / "output", cpu_s_max=0.9)
        assert ended.returncode == 0 and busy.poll() is None and len(scans) >= 2
    finally:
        busy.kill()
        busy.wait()


def test_functions_that_a_process_enters_are_recorded(tmp_path: Path) -> None:
    with make_shadow() as shadow:
        log = shadow.record_reach()
        code = "from broker.provision.hedge_timer import update_response_time; update_response_time(None, 1.0)"
        subprocess.run([sys.executable, "-c", code], env=shadow.make_environment(), cwd=tmp_path, check=True)
        assert "broker/provision/hedge_timer.py update_response_time" in Reader(log).read()


def test_functions_of_the_trainers_are_recorded_too(tmp_path: Path) -> None:
    with make_shadow() as shadow:
        log = shadow.record_reach()
        code = "from trainers.manifest import CheckpointName; str(CheckpointName(step=1, attempt=1, run='a'))"
        subprocess.run([sys.executable, "-c", code], env=shadow.make_environment(), cwd=tmp_path, check=True)
        assert "trainers/manifest.py CheckpointName.__str__" in Reader(log).read()


def test_entered_functions_are_recorded_even_if_a_test_forbids_opening_files(tmp_path: Path) -> None:
    code = """
import os
from broker.provision.hedge_timer import update_response_time
del os.open
update_response_time(None, 1.0)
"""
    with make_shadow() as shadow:
        log = shadow.record_reach()
        subprocess.run([sys.executable, "-c", code], env=shadow.make_environment(), cwd=tmp_path, check=True)
        assert "broker/provision/hedge_timer.py update_response_time" in Reader(log).read()


def test_entered_functions_are_recorded_for_each_test_even_if_a_test_loads_agent_modules(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.mutation.reach import Reader
import broker
reader = Reader(Path(sys.argv[1]))
sys.path.insert(0, str(Path(broker.__file__).parent / "agent"))
reader.begin()
import agent
import agent_notice
agent_notice.parse_time_s("2026-01-01T00:00:00Z")
reader.begin()
agent_notice.parse_time_s("2026-01-01T00:00:00Z")
print(*reader.read())
"""
    with make_shadow() as shadow:
        log = shadow.record_reach()
        done = subprocess.run(
            [sys.executable, "-c", code, str(log)],
            env=shadow.make_environment(), cwd=tmp_path, check=True, capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout.strip() == "broker/agent/agent_notice.py parse_time_s"


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
def test_a_limit_counts_when_the_test_under_way_reaches_it_alone(
    shadow: Shadow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that leave processes running take more time together than their records say."""
    monkeypatch.setattr("tests.mutation.judge.START_S", 6.0)
    file = "tests/mutation/probes.py"
    names = ("test_that_leaves_a_process_at_work", "test_that_is_quick", "test_that_hangs")
    (shadow.folder / file).write_text(LIMITS)
    tests = [Reached(name=f"{file}::{name}", cpu_s=0.0, functions=frozenset()) for name in names]
    judge = Judge(shadow, Survey(tests=tests, plays=[]))
    assert judge._run_tests(tests[:2])[0] == "", "alone, each ends in time"
    by, where, _ = judge._run_tests(tests)
    assert (by, where) == ("limit", f"tests {file}::test_that_hangs")
    (shadow.folder / file).write_text(PROBES)


def test_a_room_other_than_the_default_ones_is_surveyed_by_the_tests_that_mirror_it() -> None:
    assert list_folders(["broker/jobs/monitor.py"]) == [*FOLDERS]
    assert list_folders(["broker/jobs/monitor.py", "broker/agent/agent.py"]) == [*FOLDERS, *RUNTIME]
    other = ["broker/spot/policies/greedy.py", "broker/clouds/aws/cloud.py", "trainers/checkpoint.py"]
    assert list_folders(other) == ["tests/clouds/aws", "tests/spot", "tests/trainers"]
    assert list_folders(["broker/spot/hazard.py", "broker/state/jobs.py"]) == [*FOLDERS, "tests/spot"]


def test_readers_of_a_constant_are_found_in_a_room_other_than_the_default_ones() -> None:
    readers = find_readers(find("broker/spot/interval.py", "1.0 -> 10.0"))
    assert "broker/spot/interval.py find_best_interval_s" in readers


def test_a_test_that_starts_nodes_comes_after_those_that_only_compute() -> None:
    line = {"name": "a", "cpu_s": 0.1, "functions": ["broker/agent/agent.py main"]}
    nodes = {**line, "functions": ["broker/clouds/local_machine.py main"]}
    assert read_line(line).cpu_s == 0.1 and read_line(nodes).cpu_s > 1.0


def test_tests_of_the_mutants_room_come_first() -> None:
    mutant = find("broker/provision/hedge_timer.py", "arithmetic: / -> *")
    functions = frozenset({"broker/provision/hedge_timer.py update_response_time"})
    names = ("tests/jobs/test_a.py::a", "tests/provision/test_b.py::b", "tests/state/test_c.py::c")
    found = [Reached(name=name, cpu_s=1.0, functions=functions) for name in names]
    assert [each.name for each in choose(found, mutant, 9.0)] == [names[1], names[0], names[2]]


def test_tests_are_taken_while_their_time_lasts_and_kills_are_drawn_by_the_mutant() -> None:
    found = [Reached(name=f"scene {n}", cpu_s=1.0, functions=frozenset(), effects=30) for n in range(3)]
    assert take(found, 2.5) == found[:2] and take(found, 0.1) == found[:1]
    one, two = (find("broker/provision/hedge_timer.py", end) for end in ("8 -> 0", "4 -> 0"))
    assert draw_kills(found, one) == draw_kills(found, one) != draw_kills(found, two)
    assert len(set(draw_kills(found, one))) == KILLS
