"""Whole runs of every entry point on worlds forked from a warm process: killed, resumed and compared."""

import dataclasses
import json
import signal
import struct
from pathlib import Path

import pytest
import torch

from tests.tiers import long
from trainers import export
from trainers.allreduce import RESULTS, describe, find_bus_factor, iterate_plan, parse_config, read_results
from trainers.collectives import Collective
from trainers.errors import TrainerError
from trainers.safetensors import SafetensorsFolder, write_safetensors

from .strategies.conftest import TOTAL, Worlds, read_lines, read_losses

# pytest resets the filter that trainers.checkpoint sets for itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IMAGE = ["--train.steps", str(TOTAL), "--train.batch", "12", "--train.micro_batch", "4", "--model.width", "8"]
IMAGE += ["--model.stages", "2", "--data.size", "8", "--checkpoint.every_steps", "2", "--checkpoint.keep", "9"]
LLAMA = ("--model.kind", "llama", "--model.key_value_heads", "2", "--model.tie_embeddings")


@pytest.mark.long
def test_llama_that_recomputes_and_evaluates_resumes_bit_identically(worlds: Worlds, tmp_path: Path) -> None:
    flags = (
        *LLAMA,
        "--recompute",
        "full",
        "--dtype",
        "bfloat16",
        "--evaluate.every_steps",
        "3",
        "--train.z_loss",
        "1e-4",
    )
    whole = worlds.train(tmp_path / "whole", "ddp", *flags, ranks=2)
    worlds.train(tmp_path / "broken", "ddp", *flags, ranks=2, kill_after=5)
    broken = worlds.train(tmp_path / "broken", "ddp", *flags, ranks=2, attempt=2)
    assert sorted(broken) == list(range(1, TOTAL + 1))
    assert all(value == whole[step][0] for step, values in broken.items() for value in values)
    # Neither evaluating nor keeping what could be recomputed changes what is learnt.
    plain = worlds.train(tmp_path / "plain", "ddp", *LLAMA, "--dtype", "bfloat16", "--train.z_loss", "1e-4", ranks=2)
    assert plain == whole
    evaluated = {line["step"]: line["validation_loss"] for line in read_lines(tmp_path / "whole") if "norm" in line
                 and "validation_loss" in line}  # fmt: skip
    assert sorted(evaluated) == [3, 6, 8]
    assert 5.0 < float(str(evaluated[8])) < float(str(evaluated[3])) < 6.0


@pytest.mark.exhaustive
def test_evaluation_is_the_same_however_the_model_is_shared(worlds: Worlds, tmp_path: Path) -> None:
    found = []
    for strategy, ranks in (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("tensor", 2), ("pipeline", 2)):
        folder = tmp_path / f"{strategy}-{ranks}"
        worlds.train(folder, strategy, "--evaluate.every_steps", "4", "--evaluate.samples", "9", ranks=ranks)
        found.append([line["validation_loss"] for line in read_lines(folder) if "validation_loss" in line])
    assert len(found[0]) == 2
    for losses in found[1:]:  # nine samples are nine, for two ranks too
        assert losses == pytest.approx(found[0], abs=1e-4)


@long
def test_classifier_resumes_bit_identically_for_any_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    def train(name: str, *flags: str, ranks: int, kill_after: int = 0, attempt: int = 1) -> dict[int, list[float]]:
        kill_at = f"step {kill_after}/" if kill_after else ""
        ended = worlds.call(
            tmp_path / name, "trainers.image:main", [*IMAGE, *flags], ranks=ranks, kill_at=kill_at, attempt=attempt
        )
        assert ended.codes == [-signal.SIGKILL if kill_after else 0] * ranks, ended.errors
        return read_losses(tmp_path / name)

    whole = train("whole", ranks=2)
    train("broken", ranks=2, kill_after=5)
    broken = train("broken", ranks=2, attempt=2)
    assert sorted(broken) == list(range(1, TOTAL + 1))
    assert all(value == whole[step][0] for step, values in broken.items() for value in values)
    # Another number of ranks and other micro-batches: the same batches, up to the order of sums.
    other = train("other", "--train.micro_batch", "5", "--strategy", "fsdp", ranks=3)
    assert [each[0] for each in other.values()] == pytest.approx([each[0] for each in whole.values()], abs=1e-4)


@pytest.mark.exhaustive
def test_sweep_measures_every_size_once_also_over_a_kill_and_a_notice(worlds: Worlds, tmp_path: Path) -> None:
    flags = ["--smallest", "64", "--largest", "4K", "--runs", "2", "--collectives", "all_reduce,all_gather"]
    flags += ["--results", str(tmp_path / RESULTS)]
    plan = list(iterate_plan(parse_config(flags)))
    assert plan[:2] == [("all_reduce", 64), ("all_reduce", 256)] and len(plan) == 8
    # Enough runs that the kill comes before the end.
    slow = [*flags, "--runs", "1000"]
    ended = worlds.call(tmp_path, "trainers.allreduce:main", slow, ranks=3, kill_at=f"{'all_reduce':<15}{256:>13}")
    assert ended.codes == [-signal.SIGKILL] * 3
    before = read_results(tmp_path / RESULTS, parse_config(flags), 3)
    assert ("all_reduce", 256) in before
    (tmp_path / RESULTS).write_text((tmp_path / RESULTS).read_text() + '{"collective": "all_ga')  # cut short
    (tmp_path / "preempted").touch()
    ended = worlds.call(tmp_path, "trainers.allreduce:main", flags, ranks=3, attempt=2)
    assert ended.codes == [143] * 3, ended.errors
    (tmp_path / "preempted").unlink()
    ended = worlds.call(tmp_path, "trainers.allreduce:main", flags, ranks=3, attempt=3)
    assert ended.codes == [0] * 3, ended.errors
    after = read_results(tmp_path / RESULTS, parse_config(flags), 3)
    assert list(after) == plan and before.items() <= after.items()
    lines = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines() if line.endswith("}")]
    assert len(lines) == len(plan) and all(line["wrong"] == 0 and line["time_us"] > 0 for line in lines)
    last = read_lines(tmp_path)[-1]
    assert (last["event"], last["step"], last["total"], last["wrong"]) == ("finished", 8, 8, 0)


def test_wrong_checksums_are_counted(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{__name__}:find_planted_errors", [], ranks=2)
    assert ended.codes == [0, 0], ended.errors


def test_bandwidths_are_those_of_nccl_tests() -> None:
    def measure(name: str) -> tuple[float, float]:
        collective = Collective(name=name, size=8_000_000, prepare=list, run=list, count_wrong=lambda: 0)
        result = describe(collective, 8_000_000, 0.004, 0, "float32", 4)
        return result.algorithm_gb_s, result.bus_gb_s

    assert measure("all_reduce") == (2.0, 3.0)  # 2 (n - 1) / n
    assert measure("all_gather") == measure("reduce_scatter") == (2.0, 1.5)  # (n - 1) / n
    assert measure("broadcast") == (2.0, 2.0)
    assert find_bus_factor("all_reduce", 8) == 1.75


def test_an_invalid_size_and_an_unknown_collective_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--largest", "1T"], "`1T` is not a size"),
        (["--collectives", "all_to_all"], "`all_to_all`"),
    ):
        with pytest.raises(SystemExit) as caught:
            parse_config(flags)
        assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.long
def test_weights_are_exported_as_safetensors_whatever_strategy_saved_them(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy, ranks in (("ddp", 1), ("fsdp", 2)):
        worlds.train(tmp_path / strategy, strategy, *LLAMA, ranks=ranks)
        flags = [str(tmp_path / f"{strategy}.safetensors"), "--checkpoint", str(tmp_path / strategy / "checkpoints")]
        assert export.main(flags) == 0
    found = {name: read_safetensors(tmp_path / f"{name}.safetensors") for name in ("ddp", "fsdp")}
    assert found["ddp"].keys() == found["fsdp"].keys() and "blocks.1.attention.key.weight" in found["ddp"]
    assert found["ddp"]["blocks.1.attention.key.weight"].shape == (16, 32)
    for name, tensor in found["ddp"].items():
        torch.testing.assert_close(found["fsdp"][name], tensor, rtol=1e-3, atol=1e-4)
    assert f"weights of step {TOTAL} are in" in capsys.readouterr().out
    assert export.main([str(tmp_path / "x"), "--checkpoint", str(tmp_path)]) == 1
    assert "no complete checkpoint is in" in capsys.readouterr().err


def test_half_precision_weights_are_read_back_and_the_file_is_aligned(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3).bfloat16(), "a": torch.arange(6).view(2, 3), "c": torch.tensor(True)}
    write_safetensors(tmp_path / "x", tensors, {"format": "pt"})
    assert struct.unpack("<Q", (tmp_path / "x").read_bytes()[:8])[0] % 8 == 0
    found = read_safetensors(tmp_path / "x")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_safetensors_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.empty(0, 3)}
    for name, tensor in tensors.items():
        write_safetensors(tmp_path / f"{name}.safetensors", {name: tensor}, {"format": "pt"})
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = SafetensorsFolder(tmp_path)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    assert "a" in folder and "d" not in folder


def test_model_that_was_exported_over_a_larger_one_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001.safetensors", {"a": torch.zeros(2)}, {})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)}, {})
    assert SafetensorsFolder(tmp_path).read("a").tolist() == [1.0, 1.0]


def test_file_that_was_copied_in_part_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(2), "b": torch.ones(2)}, {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TrainerError, match=r"no readable safetensors: `model.safetensors` is cut off in `b`"):
        SafetensorsFolder(tmp_path)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file by the format's description, independently of the writer."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    tensors = {}
    for name, about in header.items():
        begin, end = (8 + length + offset for offset in about["data_offsets"])
        part = torch.frombuffer(bytearray(content[begin:end]), dtype=kinds[about["dtype"]])
        tensors[name] = part.view(about["shape"])
    assert end == len(content)
    return tensors


def find_planted_errors(_: list[str]) -> int:
    """Check in a world of two ranks that a collective that does nothing is detected, and a working one is not."""
    from trainers.collectives import create_collective
    from trainers.ranks import join_ranks, leave_ranks

    ranks = join_ranks()
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        collective = create_collective(name, 4096, "float32", ranks)
        idle = dataclasses.replace(collective, run=lambda: None)
        is_source = name == "broadcast" and ranks.is_first  # it has what it should have from the beginning
        assert (idle.check() > 0) != is_source, name
        assert collective.check() == 0, name
    leave_ranks()
    return 0
