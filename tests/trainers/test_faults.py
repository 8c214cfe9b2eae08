"""A fault of one rank reaches the others, a full disk ends no run, and a run that leaves cannot hang."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainers import bridge
from trainers.checkpoint import CheckpointManager
from trainers.chunk_cache import ChunkCache
from trainers.config import DataConfig, LogConfig, RunConfig, WatchdogConfig
from trainers.errors import CheckpointError, TrainerError
from trainers.manifest import INDEX, CheckpointName, find_newest, list_checkpoints, read_manifest
from trainers.metrics import MetricFiles
from trainers.prepare import PIECE_BYTES, prepare
from trainers.progress import Progress
from trainers.ranks import Ranks
from trainers.restore import decide
from trainers.session import run_session
from trainers.storage import FolderStorage
from trainers.tokenizers import ByteTokenizer
from trainers.tokens import open_tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
FULL = Path("/dev/full")
NAME = CheckpointName(step=1, attempt=1, run="aaaaaaaa")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="Linux has a device that is always full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRanks(Ranks):
    """Rank 0 of two: what it tells the other one is recorded."""

    told: list[Any] = dataclasses.field(default_factory=list)

    def share(self, value: Any, *, is_background: bool = False) -> Any:
        self.told.append(value)
        return value

    def collect(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value]


class Values:
    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Faulty(FolderStorage):
    """Storage of which one call fails with an error that is not the system's."""

    def __init__(self, root: Path, broken: str = "") -> None:
        super().__init__(root)
        self.broken = broken

    def seal(self, path: str) -> tuple[str, int] | None:
        if self.broken == "seal":
            raise KeyError(path)
        return None if self.broken == "vanished" else super().seal(path)

    def create(self, path: str, content: bytes) -> bool:
        if self.broken == "create" and path.endswith("manifest.json"):
            raise RuntimeError("the library of the bucket has failed")
        return super().create(path, content)

    def list_names(self, path: str) -> list[str]:
        names = super().list_names(path)
        return [name for name in names if name != INDEX] if self.broken == "index" else names


def make_manager(storage: FolderStorage, about: dict[Any, Any] | None = None, **ranks: Any) -> CheckpointManager:
    alone = Ranks(rank=0, world_size=1, device=CPU)
    return CheckpointManager(
        storage, ranks.get("ranks", alone), attempt=1, keep=2, shared={"values": Values()}, own={}, about=about
    )


@pytest.mark.parametrize("broken", ["seal", "vanished", "index"])
def test_rank_without_the_checksums_of_its_files_tells_the_others(tmp_path: Path, broken: str) -> None:
    """They wait for its answer, for the two hours that a checkpoint may take."""
    ranks = TwoRanks(rank=0, world_size=2, device=CPU)
    manager = make_manager(storage := Faulty(tmp_path), ranks=ranks)
    for file in ("__0_0.distcp", "__1_0.distcp", INDEX):
        storage.create(f"{NAME}/{file}", b"x")
    assert set(manager._collect_files(str(NAME))) == {"__0_0.distcp", INDEX}
    storage.broken = broken
    with pytest.raises(CheckpointError, match="the checksums of"):
        manager._collect_files(str(NAME))
    assert isinstance(ranks.told[-1][1], CheckpointError)


@pytest.mark.parametrize(("broken", "about"), [("create", {}), ("", {"layout": object()}), ("", {(1, 2): 3})])
def test_manifest_that_cannot_be_written_is_an_answer_for_all_ranks(
    tmp_path: Path, broken: str, about: dict[Any, Any]
) -> None:
    manager = make_manager(storage := Faulty(tmp_path), about)
    storage.broken = broken
    problem = manager._commit(NAME, {})
    assert isinstance(problem, CheckpointError) and "the manifest of" in str(problem)


def test_keys_that_json_turns_into_text_do_not_break_the_checksum(tmp_path: Path) -> None:
    """As numbers they are in another order: every checkpoint of the run would have been skipped as damaged."""
    manager = make_manager(FolderStorage(tmp_path), {"layers": {2: "b", 10: "c", 1: "a"}})
    manager.save(1)
    manager.wait()
    found = find_newest(FolderStorage(tmp_path))
    assert found is not None and found[1].about == {"layers": {"2": "b", "10": "c", "1": "a"}}


def test_any_error_of_the_first_rank_reaches_the_others() -> None:
    ranks = TwoRanks(rank=0, world_size=2, device=CPU)
    for error in (ValueError("x"), OSError("x"), CheckpointError("x")):

        def look(error: Exception = error) -> int:
            raise error

        with pytest.raises(CheckpointError, match="x"):
            decide(ranks, look)
        assert isinstance(ranks.told[-1][1], CheckpointError)


def test_checkpoint_of_a_newer_version_is_neither_skipped_nor_removed(tmp_path: Path) -> None:
    """After a return to an older release, the run would have begun again, and deleted it at its first save."""
    storage = FolderStorage(tmp_path)
    manager = make_manager(storage)
    manager.save(1)
    manager.wait()
    from trainers import manifest as module

    name = list_checkpoints(storage)[0]
    path = tmp_path / str(name) / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("seal")
    content["version"] += 1
    path.write_text(json.dumps({**content, "seal": module.seal_manifest(content)}))
    with pytest.raises(CheckpointError, match="another version of the trainers"):
        make_manager(storage).restore()
    path.write_text(json.dumps({**content, "seal": "0" * 64}))
    with pytest.raises(module.DamagedFile):
        read_manifest(storage, name)
    assert make_manager(storage).restore() is None


# -- a full disk ---------------------------------------------------------------------------------------------------


@needs_full
def test_run_goes_on_though_its_progress_and_metrics_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(FULL, total=9, is_silent=False, screen=sys.stdout)
    files = MetricFiles(LogConfig(metrics=str(FULL)), 1, is_silent=False)
    for step in (1, 2):
        progress.report(step=step, loss=1.0)
        files.write(step, {"loss": 1.0})
    shown = capsys.readouterr()
    assert "step 2/9" in shown.out and shown.err.count("No space left") == 2, "one warning for each"


@needs_full
def test_program_of_the_user_goes_on_though_its_progress_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bridge, "_State", type("_State", (), dict(vars(bridge._State))))
    monkeypatch.setattr(bridge, "is_first", lambda: True)
    monkeypatch.setenv("BROKER_PROGRESS_FILE", str(FULL))
    for step in (1, 2):
        bridge.progress(step, 9, 1.0)
    shown = capsys.readouterr()
    assert "step 2/9" in shown.out and shown.err.count("No space left") == 1


@pytest.mark.parametrize(("number", "is_read"), [(28, True), (5, False)], ids=["full", "broken"])
def test_chunk_that_cannot_be_written_leaves_none_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_read: bool
) -> None:
    """A full disk is needed to save requests only; one that fails may be no place for the data."""
    cache = ChunkCache(tmp_path, lambda chunk: b"x" * 10, bytes_max=10_000, open_max=2)
    write = Path.write_bytes

    def fill(path: Path, content: bytes) -> int:
        write(path, content[:5])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fill)
    if is_read:
        assert cache.read(1)[:10] == b"x" * 10
    else:
        with pytest.raises(TrainerError, match=r"Input/output error\n\nhint: `--data.cache` on another disk"):
            cache.read(1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
    monkeypatch.undo()
    assert cache.read(1)[:10] == b"x" * 10


def test_token_files_of_an_interrupted_conversion_are_refused(tmp_path: Path) -> None:
    """Without `tokens.json`, the bytes of a text were read as pairs, and those as tokens of GPT-2."""
    text, output = tmp_path / "text.txt", tmp_path / "tokens"
    text.write_text("a line of text\n" * (2 * PIECE_BYTES // 15))

    class Interrupted(ByteTokenizer):
        pieces = 0

        def encode(self, text: bytes) -> Any:
            self.pieces += 1
            if self.pieces > 1:
                raise KeyboardInterrupt
            return super().encode(text)

    with pytest.raises(KeyboardInterrupt):
        prepare([text], output, Interrupted(), PIECE_BYTES // 4, 0.0, "text")
    assert list(output.glob("train-*.bin"))
    for config in (DataConfig(path=str(output)), DataConfig(stream=str(output))):
        with pytest.raises(TrainerError, match=r"incomplete\n\nhint: `trainers.prepare` was interrupted"):
            open_tokens(config)
    whole = tmp_path / "whole"
    prepare([text], whole, ByteTokenizer(), PIECE_BYTES // 4, 0.0, "text")
    for config in (DataConfig(path=str(whole)), DataConfig(stream=str(whole))):
        assert open_tokens(config).tokenizer == "bytes"
    assert not list(whole.glob("*.partial"))


# -- the end of a run ----------------------------------------------------------------------------------------------


def test_rank_that_hangs_while_it_leaves_ends_with_the_result_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, nothing watched it, and a job whose work was done held its machines."""
    codes: list[int] = []
    is_over = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        is_over.set()

    destroy = dist.destroy_process_group

    def hang() -> None:
        assert is_over.wait(300)
        destroy()

    def build(*arguments: Any) -> Any:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise TrainerError("this run has no data")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(dist, "destroy_process_group", hang)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *arguments, **named: None)
    for name in [name for name in os.environ if name.startswith(("BROKER_", "SKYPILOT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BROKER_CHECKPOINT_DIR", str(tmp_path))
    config = RunConfig(watchdog=WatchdogConfig(timeout_s=0.5, start_s=300.0))
    assert run_session(config, build) == 1
    assert codes[0] == 1
    assert "while leaving the process group" in capfd.readouterr().err


# -- callbacks of frameworks that are not installed here -------------------------------------------------------------


def test_lightning_callback_saves_each_step_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches whose gradients are accumulated do not change the step: it was written again over itself."""
    lightning: Any = ModuleType("lightning")
    lightning.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    monkeypatch.delitem(sys.modules, "trainers.bridge_lightning", raising=False)
    for name in ("BROKER_PROGRESS_FILE", "BROKER_PREEMPTION_FILE", "BROKER_ATTEMPT", "CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BROKER_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setattr(bridge, "_State", type("_State", (), dict(vars(bridge._State))))
    monkeypatch.setattr(bridge, "listen", lambda: None)
    callback = importlib.import_module("trainers.bridge_lightning").BridgeLightningCallback(every_steps=2)
    saves: list[int] = []

    class Trainer(SimpleNamespace):
        def save_checkpoint(self, path: Path) -> None:
            saves.append(self.global_step)
            path.write_text("state")

    strategy = SimpleNamespace(barrier=lambda: None)
    trainer = Trainer(global_step=2, max_steps=5, is_global_zero=True, strategy=strategy)
    callback.on_train_start(trainer, None)
    for step in (2, 3, 3, 4, 4, 5):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, None, {"loss": 1.0}, None, 0)
    assert saves == [4, 5] and bridge.resume()[0] == 5


def test_hugging_face_s_folder_with_a_name_is_not_a_checkpoint_to_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers: Any = ModuleType("transformers")
    transformers.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.delitem(sys.modules, "trainers.bridge_hugging_face", raising=False)
    module = importlib.import_module("trainers.bridge_hugging_face")
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-best", "checkpoint-200"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-200":
            (tmp_path / name / module.LAST_FILE).touch()
    assert module.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")
    monkeypatch.delitem(sys.modules, "trainers.bridge_hugging_face")
