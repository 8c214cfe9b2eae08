"""Restores of checkpoints so large that reading them takes longer than any step: verified by all ranks, and no hang."""

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.jobs.monitor import AttemptMonitor
from broker.runtime.reports import parse_progress
from broker.types import RunStatus
from tests.simulation.world import Report
from tests.tiers import long
from trainers import restore_progress
from trainers import watchdog as watchdog_module
from trainers.checkpoint import CheckpointManager
from trainers.errors import CheckpointError
from trainers.launch import find_free_port
from trainers.manifest import DamagedFile, FileChecksum, check_seal, divide
from trainers.progress import Progress
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.restore_progress import LocalCounter, RestoreProgress, RestoreStatus
from trainers.storage import FolderStorage
from trainers.verified_reader import HashedFile
from trainers.watchdog import Watchdog

from .test_checkpoint import Counter, folder_of, open_manager, restore, save_steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEP_LIMIT_S = 1.0


class VirtualClock:
    """Time that passes only on request."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class SlowFolder(FolderStorage):
    """A folder whose files arrive in small parts; `pause` is called before each."""

    def __init__(self, root: Path, pause: Callable[[str], None]) -> None:
        super().__init__(root)
        self._pause = pause

    def stream(self, path: str) -> Iterator[bytes]:
        for part in super().stream(path):
            for begin in range(0, len(part), 64):
                self._pause(path)
                yield part[begin : begin + 64]


def test_long_restore_is_not_a_stall_to_watchdog_or_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path / "checkpoints", 5)
    clock = VirtualClock()
    monkeypatch.setattr(watchdog_module.time, "monotonic", clock)
    watchdog, watch = Watchdog(60.0, start_s=300.0), AttemptMonitor("job-1-1")
    lines_out = Progress(tmp_path / "progress.jsonl", total=9, is_silent=False)
    stalls_s: list[float] = []

    def report_status(found: RestoreStatus) -> None:
        lines_out.report(step=found.step, event="restoring", busy_s=watchdog.timeout_s, read_gb=found.read_bytes / 1e9)

    def look(path: str) -> None:
        clock.now_s += 15.0
        progress.update()
        assert watchdog.find_hang() is None
        lines = progress_lines(tmp_path)
        line = parse_progress(lines[-1]) if lines else None
        report = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=line)
        stalls_s.append(watch.measure_stall_s(report, clock.now_s))

    progress = RestoreProgress(LocalCounter(), beat=watchdog.beat, report=report_status, now_s=clock)
    monkeypatch.setattr(restore_progress, "UPDATE_S", 3600.0)  # the slow folder updates it instead
    counter = Counter()
    manager = CheckpointManager(
        SlowFolder(tmp_path / "checkpoints", look),
        Ranks(rank=0, world_size=1, device=torch.device("cpu")),
        attempt=2, keep=3, shared={"counter": counter}, own={"own": Counter()},
    )  # fmt: skip
    begin_s = clock.now_s
    assert manager.restore(progress) == 5 and counter.count == 5
    assert clock.now_s - begin_s > 1200.0
    assert max(stalls_s) <= 30.0, "`stall_timeout` of a minute would have ended it"
    clock.now_s += 61.0
    assert watchdog.find_hang() is not None, "without a byte read it is one"


def progress_lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_rank_that_waits_for_others_hangs_only_if_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shared = VirtualClock(), LocalCounter()
    monkeypatch.setattr(watchdog_module.time, "monotonic", clock)
    watchdogs = [Watchdog(60.0), Watchdog(60.0)]
    statuses: list[RestoreStatus] = []
    reading, waiting = (
        RestoreProgress(shared, beat=each.beat, report=report, now_s=clock)
        for each, report in zip(watchdogs, (statuses.append, lambda found: None), strict=True)
    )
    reading.note_wanted(1000)
    for _ in range(100):
        clock.now_s += 20.0
        reading.note_read(10)
        reading.update()
        waiting.update()
        assert not any(each.find_hang() for each in watchdogs)
    assert statuses[-1] == RestoreStatus(step=0, read_bytes=1000, wanted_bytes=1000)
    for _ in range(4):
        clock.now_s += 20.0
        reading.update()
        waiting.update()
    assert all(each.find_hang() for each in watchdogs)


def test_second_checkpoint_that_is_tried_is_progress_though_nothing_of_it_is_read_yet() -> None:
    beats = list[str]()
    progress = RestoreProgress(LocalCounter(), beat=beats.append, report=lambda status: None)
    for step in (90, 50):  # the first one is damaged
        with progress.follow(step, f"step-{step}"):
            pass
    assert beats == ["restoring step 90", "restoring step 50"]


def test_start_has_a_limit_of_its_own_and_the_first_beat_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(watchdog_module.time, "monotonic", clock)
    watchdog = Watchdog(60.0, start_s=1800.0)
    clock.now_s += 1700.0
    assert watchdog.find_hang() is None
    watchdog.beat("in step 2")
    assert watchdog.find_hang() is None, "the time before counts for nothing"
    clock.now_s += 61.0
    hang = watchdog.find_hang()
    assert hang is not None and hang.doing == "in step 2"
    watchdog.beat("saving", limit_s=0.0)
    clock.now_s += 1e6
    assert watchdog.find_hang() is None
    for off in (Watchdog(0.0, start_s=1800.0), Watchdog(0.0)):
        off.beat("saving", limit_s=7200.0)
        clock.now_s += 1e6
        assert off.find_hang() is None


def run_rank(rank: int, port: int, scenario: str, path: Path, answers: Any) -> None:
    """Run one of two processes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answers.put((rank, SCENARIOS[scenario](path)))
    except BaseException as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
        raise
    finally:
        leave_ranks()


def run_two(scenario: str, path: Path) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), find_free_port()
    ranks = [context.Process(target=run_rank, args=(rank, port, scenario, path, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    found = dict(answers.get(timeout=300) for _ in ranks)
    for each in ranks:
        each.join(timeout=300)
    return found


def open_two(path: Path, ranks: Ranks, attempt: int, pause: Callable[[str], None]) -> tuple[CheckpointManager, Counter]:
    counter, own = Counter(), Counter()
    own.set(-1 - ranks.rank)
    storage = SlowFolder(path, pause)
    manager = CheckpointManager(
        storage, ranks, attempt=attempt, keep=9, shared={"counter": counter}, own={"own": own}
    )  # fmt: skip
    return manager, counter


def save_two(path: Path, ranks: Ranks) -> None:
    manager, counter = open_two(path, ranks, 1, lambda path: None)
    for step in (5, 10):
        counter.set(step)
        manager.save(step)
        manager.wait_for_copy()
    manager.wait()


def restore_slowly(path: Path) -> Any:
    """Rank 1 reads for longer than a step may take, while rank 0 has long read its part."""
    ranks = join_ranks(start_s=300.0, checkpoint_s=300.0)
    save_two(path, ranks)
    is_paused = False

    def pause(file: str) -> None:
        nonlocal is_paused
        if ranks.rank == 1 and not is_paused:
            is_paused = True
            time_out(2.5 * STEP_LIMIT_S)

    manager, counter = open_two(path, ranks, 2, pause)
    ranks.limit_steps(STEP_LIMIT_S)
    return manager.restore(), counter.count, is_paused


def time_out(seconds: float) -> None:
    """Let real time pass: the limits of process groups know no other."""
    threading.Event().wait(seconds)


def restore_damaged(path: Path) -> Any:
    """Flip a byte of what rank 1 alone wrote in the newest checkpoint, and restore."""
    ranks = join_ranks(start_s=300.0, checkpoint_s=300.0)
    save_two(path, ranks)
    if ranks.is_first:
        file = folder_of(path, 10) / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    ranks.share(None)
    manager, counter = open_two(path, ranks, 2, lambda path: None)
    return manager.restore(), counter.count, bool((counter.values == 5).all())


SCENARIOS = {"slow": restore_slowly, "damaged": restore_damaged}


@long
def test_restore_may_take_longer_than_a_step(tmp_path: Path) -> None:
    assert run_two("slow", tmp_path) == {0: (10, 10, False), 1: (10, 10, True)}


@long
def test_all_ranks_skip_a_checkpoint_that_one_finds_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_two("damaged", tmp_path) == {0: (5, 5, True), 1: (5, 5, True)}
    assert capfd.readouterr().err.count("skipping checkpoint `step-00000010") == 1
    # Another number of ranks reads no random numbers of the others, but the file that holds them must be whole.
    manifest = folder_of(tmp_path, 10) / "manifest.json"
    manifest.unlink()
    file = folder_of(tmp_path, 5) / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert open_manager(tmp_path, Counter(), 3).restore() is None
    assert "`__1_0.distcp` does not match its checksum" in capfd.readouterr().err


def test_damaged_checkpoint_leaves_no_trace_in_a_fresh_start(tmp_path: Path) -> None:
    """It was being read when the damage was found: nothing of it may be in what then starts from the beginning."""
    save_steps(tmp_path, 5)
    shard = folder_of(tmp_path, 5) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # everything before it is as it was written
    shard.write_bytes(content)
    counter = Counter()
    counter.set(7)
    assert open_manager(tmp_path, counter, 2).restore() is None
    assert counter.count == 7 and bool((counter.values == 7).all())


def test_storage_failure_is_not_treated_as_damage(tmp_path: Path) -> None:
    """An older checkpoint would throw work away that may be there."""
    save_steps(tmp_path, 5, 10)

    def fail(path: str) -> None:
        raise OSError("the login expired")

    manager = CheckpointManager(
        SlowFolder(tmp_path, fail), Ranks(rank=0, world_size=1, device=torch.device("cpu")),
        attempt=2, keep=3, shared={"counter": Counter()}, own={},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="checkpoints cannot be reached: the login expired"):
        manager.restore()
    assert restore(tmp_path, attempt=3) == 10


def test_each_file_is_read_once(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    read: dict[str, int] = {}

    def count(path: str) -> None:
        read[path] = read.get(path, 0) + 1

    manager = CheckpointManager(
        SlowFolder(tmp_path, count), Ranks(rank=0, world_size=1, device=torch.device("cpu")),
        attempt=2, keep=3, shared={"counter": Counter()}, own={"own": Counter()},
    )  # fmt: skip
    assert manager.restore() == 5
    sizes = {path: (tmp_path / path).stat().st_size for path in read}
    assert read == {path: -(-size // 64) for path, size in sizes.items()} and len(read) == 1


def test_parts_are_cut_out_of_chunks_of_any_size_and_the_rest_is_hashed() -> None:
    content = bytes(range(256)) * 4
    seal = FileChecksum(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    for size in (1, 7, 256, 2000):
        chunks = (content[begin : begin + size] for begin in range(0, len(content), size))
        file = HashedFile(chunks, note_read=lambda count: None, check=lambda found: check_seal("f", seal, found))
        assert file.read_part(3, 10).read() == content[3:13]
        assert file.read_part(300, 0).read() == b""
        assert file.read_part(500, 100).read() == content[500:600]
        file.finish()
    short = HashedFile(
        iter([content[:100]]), note_read=lambda count: None, check=lambda found: check_seal("f", seal, found)
    )
    with pytest.raises(DamagedFile, match="`f` does not match its checksum"):
        short.read_part(50, 100)


def test_shares_cover_every_file_once() -> None:
    files = [f"__{number}_0.distcp" for number in range(13)]
    orders = [files[rank:] + files[:rank] for rank in range(4)]  # each rank has a set of its own
    shares = [divide(order, rank=rank, world_size=4) for rank, order in enumerate(orders)]
    assert sorted(file for share in shares for file in share) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
