"""Compiled graphs are kept beside the checkpoints: used on another machine, never if torn or of another kind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainers.blocks import prepare_blocks
from trainers.compile_cache import (
    CompileCache,
    describe_code,
    hash_cpu,
    make_archive,
    open_archive,
    place_kernel,
)
from trainers.config import Config, TrainConfig, parse_config
from trainers.manifest import DamagedFile
from trainers.restore_progress import LocalCounter
from trainers.storage import FolderStorage

from .strategies.conftest import TINY, Worlds, read_lines

REPOSITORY = Path(__file__).parents[2]
ABOUT = {"torch": "2.13.0", "device": "cpu x86_64 0123"}
CPU = torch.device("cpu")


def compile_on_new_machine(storage: Path, folder: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainers.compile_checks", str(storage)],
        cwd=REPOSITORY,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def list_files(storage: Path) -> list[Path]:
    return sorted(file for file in (storage / "compiled").rglob("*") if file.is_file())


@pytest.mark.exhaustive
def test_second_machine_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    first = compile_on_new_machine(tmp_path / "store", tmp_path / "first")
    assert first["loaded"] == first["hits"] == 0 < first["misses"]
    before = list_files(tmp_path / "store")
    assert len(before) == 1
    second = compile_on_new_machine(tmp_path / "store", tmp_path / "second")
    assert second["misses"] == 0 < second["loaded"]
    assert second["hits"] == first["misses"]
    assert list_files(tmp_path / "store") == before


@pytest.mark.parametrize("damage", ["torn", "empty", "flipped", "foreign"])
def test_damaged_or_foreign_file_is_deleted_and_not_used(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(content: bytes) -> None:
        raise AssertionError("torch was given the artifacts")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)
    whole = make_archive({**ABOUT, "keys": ["a/b"], "kernels": []}, b"artifacts" * 100, {})
    cache = CompileCache(FolderStorage(tmp_path), ABOUT, LocalCounter())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    foreign = make_archive({**ABOUT, "device": "another", "keys": ["a/b"], "kernels": []}, b"artifacts", {})
    content = {"torn": whole[:-7], "empty": b"", "flipped": bytes(flipped), "foreign": foreign}[damage]
    path = f"{cache._folder}/0123"
    FolderStorage(tmp_path).create(path, content)
    assert cache.load() == 0
    errors = capsys.readouterr().err
    assert ("another device" if damage == "foreign" else "does not match its checksum") in errors
    assert not (tmp_path / path).exists()


def test_whole_file_of_this_kind_is_given_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []

    def take(content: bytes) -> bool:
        given.append(content)
        return True

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", take)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "node"))
    cache = CompileCache(FolderStorage(tmp_path), ABOUT, LocalCounter())
    about = {**ABOUT, "keys": ["a/b", "kernels/ab/c.so"], "kernels": ["ab/c.so"]}
    FolderStorage(tmp_path).create(f"{cache._folder}/0123", make_archive(about, b"artifacts", {"ab/c.so": b"code"}))
    assert cache.load() == 2
    assert given == [b"artifacts"]
    assert (tmp_path / "node/ab/c.so").read_bytes() == b"code"


def test_failure_of_torch_or_the_storage_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*content: Any) -> None:
        raise RuntimeError("no such artifact")

    cache = CompileCache(FolderStorage(tmp_path), ABOUT, LocalCounter())
    content = make_archive({**ABOUT, "keys": [], "kernels": []}, b"artifacts", {})
    FolderStorage(tmp_path).create(f"{cache._folder}/0123", content)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fail)
    assert cache.load() == 0
    cache.save()
    assert capsys.readouterr().err.count("no such artifact") == 2


def test_kernel_is_not_written_outside_of_the_cache(tmp_path: Path) -> None:
    for name in ("../a.so", "/a.so", "b/../../a.so"):
        with pytest.raises(DamagedFile, match="outside"):
            place_kernel(tmp_path / "cache", name, b"code")
    assert not list(tmp_path.iterdir())


def test_archive_names_what_is_different() -> None:
    content = make_archive({**ABOUT, "keys": []}, b"", {})
    with pytest.raises(DamagedFile, match="compiled for another torch"):
        open_archive(content, {**ABOUT, "torch": "2.14.0"})
    with pytest.raises(DamagedFile, match="missing"):
        open_archive(None, ABOUT)


def test_key_covers_what_changes_code_and_nothing_else() -> None:
    base = describe_code(Config(), CPU)
    for flags in (
        ["--model.width", "64"],
        ["--dtype", "bfloat16"],
        ["--strategy", "fsdp"],
        ["--train.micro_batch", "2"],
        ["--recompute", "full"],
        ["--lora.rank", "4"],
    ):
        assert describe_code(parse_config(flags), CPU) != base, flags
    same = ["--train.steps", "7", "--checkpoint.every_steps", "9", "--train.learning_rate", "1e-5", "--data.seed", "4"]
    assert describe_code(parse_config(same), CPU) == base
    assert describe_code(Config(train=TrainConfig(steps=3)), CPU) == base


def test_processors_with_other_instructions_do_not_share_kernels(tmp_path: Path) -> None:
    """Kernels are compiled for this processor: one with fewer instructions would end with SIGILL."""
    x86 = "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: B\n"
    digests = []
    for name, mhz, flags in (("a", 2100, "sse avx2"), ("b", 3300, "sse avx2"), ("c", 2100, "sse avx2 avx512f")):
        (tmp_path / name).write_text(x86.format(mhz=mhz, flags=flags))
        digests.append(hash_cpu(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiled kernels on a CPU need g++")
def test_preempted_run_restarts_without_compiling_a_kernel(worlds: Worlds, tmp_path: Path) -> None:
    """On a machine with an empty cache of its own; bit-identical to a run that was not preempted."""
    compiler, calls = tmp_path / "bin/g++", tmp_path / "calls"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)

    def train(folder: Path, machine: str, attempt: int, code: int = 0) -> list[list[int]]:
        calls.write_text("")
        counted = tmp_path / f"counted-{folder.name}-{attempt}"
        path = f"{compiler.parent}:{os.environ['PATH']}"
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / machine), "PATH": path, "COUNTED": str(counted)}
        ended = worlds.call(
            folder,
            "tests.trainers.compile_checks:train_and_count",
            ["--strategy", "ddp", "--compile", *TINY, "--sample.tokens", "0"],  # a text compiles graphs of its own
            ranks=2,
            attempt=attempt,
            environment=variables,
        )
        assert ended.codes == [code] * 2, ended.errors
        assert "warning" not in ended.errors, ended.errors
        return [json.loads(line) for line in counted.read_text().splitlines()]

    train(tmp_path / "whole", "first", 1)
    assert ".main.so" in calls.read_text()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "preempted").touch()
    train(broken, "first", 1, code=143)
    (broken / "preempted").unlink()
    assert len(list_files(broken / "checkpoints")) == 1  # of both ranks, which compiled the same
    counts = train(broken, "second", 2)
    assert len(counts) == 2
    assert all(hits > 0 == misses for hits, misses in counts), counts
    # Others are torch's probes of this processor's instruction sets, which every machine makes.
    kernels = [path.name for path in (tmp_path / "second").rglob("*.main.so")]
    assert kernels and not [name for name in kernels if name in calls.read_text()]
    (resumed,) = [line for line in read_lines(broken) if line["event"] == "resumed"]
    assert int(str(resumed["compiled_artifacts"])) > 0
    losses = {
        folder: {line["step"]: float(str(line["loss"])).hex() for line in read_lines(tmp_path / folder) if line["loss"]}
        for folder in ("whole", "broken")
    }
    assert losses["whole"] == losses["broken"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from imports of the compiler
def test_compiled_blocks_are_not_cut_at_the_bounds_of_ddp_s_buckets() -> None:
    """A whole model is: its gradients could not be sent before the end of the backward pass otherwise."""
    from torch._dynamo import config

    whole, blocks = nn.Sequential(nn.Linear(2, 2)), nn.Module()
    blocks.layers = nn.ModuleList([nn.Linear(2, 2)])
    with config.patch(optimize_ddp=True):
        for model, is_cut in ((whole, True), (blocks, False)):
            prepare_blocks(model, recompute="none", is_compiled=True)
            assert config.optimize_ddp is is_cut
