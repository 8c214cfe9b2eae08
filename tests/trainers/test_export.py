"""Weights of a checkpoint as files: the newest complete one, in the dtype that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainers.errors import TrainerError
from trainers.export import convert, copy_tokenizer, find_special_ids, read_checkpoint
from trainers.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, write_safetensors


def test_only_numbers_with_a_fraction_change_their_dtype() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(2, dtype=torch.bool)}
    found = convert(tensors, "bfloat16")
    assert [found[name].dtype for name in "abc"] == [torch.bfloat16, torch.int64, torch.bool]


def test_folder_without_a_checkpoint_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="no complete checkpoint"):
        read_checkpoint(str(tmp_path))
    with pytest.raises(TrainerError, match="is not a folder"):
        read_checkpoint(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("names", "has_tokenizer"),
    [
        (["tokenizer.json", "merges.txt"], True),
        (["tokenizer.model"], True),
        (["generation_config.json"], False),
        ([], False),
    ],
)
def test_files_of_a_tokenizer_are_copied_and_no_others(tmp_path: Path, names: list[str], has_tokenizer: bool) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    for name in (*names, "model.safetensors", "config.json"):
        (source / name).write_text(name)
    assert copy_tokenizer(str(source), output) is has_tokenizer
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    assert copy_tokenizer(None, output) is False


def test_a_separator_of_several_tokens_is_no_end_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair:
        separator = (3, 4)

    monkeypatch.setattr("trainers.export.create_tokenizer", lambda name: Pair())
    assert find_special_ids({}, str(tmp_path))["eos_token_id"] is None


@pytest.mark.parametrize("name", ["x", "xy", "a.long.name"])
def test_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path: Path, name: str) -> None:
    """Readers map the file, and read numbers at their natural places."""
    path = tmp_path / SINGLE_FILE
    write_safetensors(path, {name: torch.arange(3, dtype=torch.int64)}, {"format": "pt"})
    content = path.read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0
    assert SafetensorsFolder(tmp_path).read(name).tolist() == [0, 1, 2]
    assert [each.name for each in tmp_path.iterdir()] == [SINGLE_FILE]
    path.write_bytes(content[:-1])
    with pytest.raises(TrainerError, match="cut off"):
        SafetensorsFolder(tmp_path)


def test_single_file_comes_before_the_index_of_an_earlier_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE_FILE, {"x": torch.ones(1)}, {})
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')
    assert SafetensorsFolder(tmp_path).read("x").tolist() == [1.0]
