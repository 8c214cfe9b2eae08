"""The order of the data and the schedule are pure functions; these are their laws."""

import sys
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainers.tokens
from tests.tiers import examples
from trainers import prepare
from trainers.config import DataConfig, TrainConfig
from trainers.data import Corpus, Prefetch, count_windows, permute, samples_of_rank
from trainers.errors import TrainerError
from trainers.image_config import ImagesConfig
from trainers.optimizer import find_learning_rate
from trainers.synthetic_images import SyntheticImages
from trainers.tokenizers import create_tokenizer
from trainers.tokens import open_corpora, open_tokens


@given(first=st.integers(0, 10**9), batch=st.integers(1, 64), world_size=st.integers(1, 64))
def test_order_does_not_depend_on_world_size(first: int, batch: int, world_size: int) -> None:
    world_size = min(batch, world_size)
    read = [sample for rank in range(world_size) for sample in samples_of_rank(first, batch, rank, world_size)]
    assert read == list(range(first, first + batch))


@settings(max_examples=examples(40))
@given(count=st.integers(1, 300), key=st.text(max_size=5))
def test_permutation_contains_every_index_once(count: int, key: str) -> None:
    assert sorted(permute(place, count, key) for place in range(count)) == list(range(count))


def make_corpus(seed: int = 0, context: int = 16, windows: range | None = None) -> Corpus:
    shards = [torch.arange(1000), torch.arange(7) + 5000, torch.arange(500) + 1000]
    count = sum(count_windows(shard, context) for shard in shards)
    return Corpus(shards, "print", context, seed, range(count) if windows is None else windows)


@given(world_size=st.integers(1, 8), step=st.integers(0, 10**6))
def test_windows_are_the_same_for_any_world_size(world_size: int, step: int) -> None:
    corpus = make_corpus(seed=3)
    whole = corpus.read(step * 8, 8)[0].tolist()
    parts = []
    for rank in range(world_size):
        samples = samples_of_rank(step * 8, 8, rank, world_size)
        parts += corpus.read(samples.start, len(samples))[0].tolist()
    assert parts == whole


def test_targets_follow_inputs_and_no_window_spans_two_shards() -> None:
    corpus = make_corpus()
    assert corpus.window_count == 62 + 0 + 31
    inputs, targets = corpus.read(0, corpus.window_count)
    assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (93, 16)
    assert bool((targets == inputs + 1).all())  # true within a shard only
    assert sorted(inputs[:, 0].tolist()) == [*range(0, 62 * 16, 16), *range(1000, 1000 + 31 * 16, 16)]


def test_epochs_and_seeds_differ_in_order_and_not_in_content() -> None:
    corpus, other = make_corpus(seed=0), make_corpus(seed=1)
    count = corpus.window_count
    epochs = [[corpus.window_of(epoch * count + place) for place in range(count)] for epoch in range(2)]
    reseeded = [other.window_of(place) for place in range(count)]
    assert epochs[0] != epochs[1] and epochs[0] != reseeded
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(reseeded) == list(range(count))
    assert corpus.fingerprint != other.fingerprint


@given(batch=st.integers(1, 12), portions=st.lists(st.integers(1, 5), min_size=1, max_size=4), is_jumping=st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_reading_ahead_changes_nothing(batch: int, portions: list[int], is_jumping: bool) -> None:
    corpus = make_corpus()
    ahead = Prefetch(corpus, batch, is_pinned=False)
    for step in range(4):
        first = step * batch + (1000 * (step == 2) if is_jumping else 0)
        for count in portions:
            inputs, targets = ahead.read(first, count)
            expected = corpus.read(first, count)
            assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
            first += count
    assert len(ahead._ahead) <= 2 * len(portions)


def test_batches_for_a_gpu_are_pinned_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a strided tensor, the copy would wait for the device, pinned or not."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    corpus = make_corpus()
    ahead = Prefetch(corpus, 2, is_pinned=True)
    for first in (0, 2):
        batch = ahead.read(first, 2)
        assert all(torch.equal(*pair) for pair in zip(batch, corpus.read(first, 2), strict=True))
        assert all(any(tensor is each for each in pinned) for tensor in batch)
    assert all(tensor.is_contiguous() for tensor in pinned)


def test_text_shipped_with_python_is_large_and_stable() -> None:
    tokens = open_tokens(DataConfig())
    assert len(tokens.training[0]) > 500_000 and tokens.vocabulary == 256
    assert tokens.fingerprint == open_tokens(DataConfig()).fingerprint


def test_a_share_is_kept_for_evaluation_and_never_trained_on() -> None:
    config = DataConfig(validation_share=0.1)
    training, validation = open_corpora(config, open_tokens(config), 128)
    assert validation is not None and validation.window_count == (training.window_count + validation.window_count) // 10
    # Ends of the text: what is kept comes after all that is trained on.
    assert max(map(training.window_of, range(training.window_count))) < min(
        map(validation.window_of, range(validation.window_count))
    )
    assert open_corpora(DataConfig(validation_share=0.0), open_tokens(config), 128)[1] is None


def test_prepared_text_is_read_back_in_shards_and_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("ä first\n" * 900)
    (texts / "b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    (texts / "ignored.bin").write_bytes(b"x")
    output = tmp_path / "tokens"
    flags = [str(texts), "--output", str(output), "--shard-tokens", "3000", "--validation-share", "0.2"]
    assert prepare.main(flags) == 0
    tokens = open_tokens(DataConfig(path=str(output)))
    assert [len(shard) for shard in tokens.training][:-1] == [3000] * (len(tokens.training) - 1)
    text = b"".join(bytes(shard.tolist()) for shard in [*tokens.training, *tokens.validation])
    assert text == "ä first\n".encode() * 900 + b"\0second\0third\0"
    kept = sum(map(len, tokens.validation))
    assert 0.1 < kept / len(text) < 0.3
    assert f"{len(text) - kept:,} tokens for training and {kept:,} for evaluation" in capsys.readouterr().out
    # Once more would mix two texts.
    assert prepare.main(flags) == 1 and "already contains token files" in capsys.readouterr().err


def test_token_files_of_nanogpt_are_read_as_they_are(tmp_path: Path) -> None:
    ids = array("H", [50256, 1, 2, 3, 65535])
    (tmp_path / "train.bin").write_bytes(ids.tobytes())
    (tmp_path / "val.bin").write_bytes(ids[:3].tobytes())
    tokens = open_tokens(DataConfig(path=str(tmp_path)))
    assert tokens.training[0].tolist() == ids.tolist() and tokens.validation[0].tolist() == ids[:3].tolist()
    assert (tokens.tokenizer, tokens.vocabulary) == ("gpt2", 50257)
    training, validation = open_corpora(DataConfig(), tokens, 2)
    assert training.read(0, 1)[0].shape == (1, 2) and validation is not None
    before = tokens.fingerprint
    (tmp_path / "train.bin").write_bytes(ids.tobytes()[::-1])
    assert open_tokens(DataConfig(path=str(tmp_path))).fingerprint != before


def test_token_width_is_read_from_the_metadata_file(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").write_bytes(array("I", [128000, 7]).tobytes())
    (tmp_path / "tokens.json").write_text('{"dtype": "uint32", "tokenizer": "o200k_base", "vocabulary": 200019}')
    tokens = open_tokens(DataConfig(path=str(tmp_path)))
    assert tokens.training[0].tolist() == [128000, 7] and tokens.vocabulary == 200019
    (tmp_path / "tokens.json").write_text('{"dtype": "int8"}')
    with pytest.raises(TrainerError, match="is not what `trainers"):
        open_tokens(DataConfig(path=str(tmp_path)))


def test_folder_of_texts_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("later")
    (tmp_path / "a.txt").write_text("sooner")
    assert bytes(open_tokens(DataConfig(path=str(tmp_path))).training[0].tolist()) == b"sooner\0later"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, None, "does not exist"),
        ("x.csv", "a,b", "no file in .* ends in one of"),
        ("x.jsonl", '{"body": "x"}', "x.jsonl:1: no JSON object with a `text`; see `--data.column`"),
        ("val.bin", "abcd", "no token file to train on"),
    ],
)
def test_unreadable_data_is_an_error_with_the_reason(
    tmp_path: Path, name: str | None, content: str | None, message: str
) -> None:
    if name is not None:
        (tmp_path / name).write_text(str(content))
    with pytest.raises(TrainerError, match=message):
        open_tokens(DataConfig(path=str(tmp_path if name else tmp_path / "missing")))


@pytest.mark.parametrize(("package", "call"), [("tiktoken", "tokenizer"), ("pyarrow", "parquet")])
def test_error_names_the_missing_package(
    tmp_path: Path, package: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(TrainerError, match=f"needs the package {package}: `pip install {package}`"):
        create_tokenizer("gpt2") if call == "tokenizer" else open_tokens(DataConfig(path=str(tmp_path)))


def test_too_short_text_says_how_much_is_needed() -> None:
    tokens = open_tokens(DataConfig())
    with pytest.raises(TrainerError, match=f"has {len(tokens.training[0])} tokens in a row; a context of 100000000"):
        open_corpora(DataConfig(), tokens, 100_000_000)


@given(text=st.binary(max_size=300), piece=st.integers(4, 50))
def test_pieces_of_a_document_make_it_whole_again(text: bytes, piece: int) -> None:
    pieces = list(prepare.cut(text, piece))
    assert b"".join(pieces) == text and all(0 < len(each) <= piece for each in pieces)


@given(text=st.text(alphabet="aä€\n", max_size=60), place=st.integers(-5, 100), slack=st.integers(1, 9))
def test_document_is_split_at_the_boundary_between_characters(text: str, place: int, slack: int) -> None:
    document = text.encode()
    parts = prepare.split(document, place, slack)
    assert "".join(part.decode() for part in parts) == text and len(parts) == 1 + (0 < place < len(document))
    assert len(parts) == 1 or place <= len(parts[0]) < place + max(slack + 1, 3)


@given(text=st.text(max_size=100))
def test_pieces_of_text_never_split_a_character(text: str) -> None:
    assert "".join(piece.decode() for piece in prepare.cut(text.encode(), 7)) == text


def test_pictures_are_found_by_number_and_every_class_is_as_frequent() -> None:
    config = ImagesConfig(count=64)
    pictures, validation = SyntheticImages(config, "training"), SyntheticImages(config, "validation")
    images, classes = pictures.read(0, 64)
    assert images.shape == (64, 3, 16, 16) and Counter(classes.tolist()) == dict.fromkeys(range(8), 8)
    again = pictures.read(10, 3)
    assert torch.equal(again[0], images[10:13]) and torch.equal(again[1], classes[10:13])
    assert not torch.equal(validation.read(0, 64)[0], images) and validation.fingerprint != pictures.fingerprint


def test_learning_rate_rises_to_the_peak_and_falls_to_the_minimum() -> None:
    config = TrainConfig(steps=100, warmup_steps=10)
    rates = [find_learning_rate(step, config) for step in range(100)]
    assert max(rates) == rates[9] == config.learning_rate
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert abs(rates[-1] - config.learning_rate_min) < 1e-12


def test_tokens_of_gpt2_end_a_document_with_its_last_id(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(array("H", range(100)).tobytes())
    tokens = open_tokens(DataConfig(path=str(tmp_path)))
    assert (tokens.tokenizer, tokens.separator) == ("gpt2", 50256)


def test_file_that_differs_only_at_its_end_is_other_data(tmp_path: Path) -> None:
    """Of a large file, only pieces are read, the last of them included."""
    path, found = tmp_path / "train.bin", set[str]()
    for last in (1, 2):
        path.write_bytes(bytes(3 * 2**20) + bytes([last, 0]))
        found.add(open_tokens(DataConfig(path=str(tmp_path))).fingerprint)
    assert len(found) == 2


def test_seed_changes_the_order_of_training_and_not_that_of_evaluation() -> None:
    tokens = open_tokens(DataConfig())
    (first, kept), (second, kept_again) = (open_corpora(DataConfig(seed=seed), tokens, 128) for seed in (0, 1))
    assert kept is not None and kept_again is not None
    assert not torch.equal(first.read(0, 8)[0], second.read(0, 8)[0])
    assert torch.equal(kept.read(0, 8)[0], kept_again.read(0, 8)[0])


def test_text_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers.tokens, "TEXT_BYTES_MAX", 10)
    (tmp_path / "a.txt").write_text("eleven char")
    with pytest.raises(TrainerError, match=r"make token files of it first: `python -m trainers.prepare"):
        open_tokens(DataConfig(path=str(tmp_path)))
