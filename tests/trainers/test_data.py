"""The order of the data and the schedule are pure functions; these are their laws."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.config import DataConfig, TrainConfig
from trainers.data import Corpus, permute, read_text, samples_of_rank
from trainers.optimizer import learning_rate


@given(first=st.integers(0, 10**9), batch=st.integers(1, 64), world_size=st.integers(1, 64))
def test_order_does_not_depend_on_world_size(first: int, batch: int, world_size: int) -> None:
    world_size = min(batch, world_size)
    read = [sample for rank in range(world_size) for sample in samples_of_rank(first, batch, rank, world_size)]
    assert read == list(range(first, first + batch))


@settings(max_examples=40)
@given(count=st.integers(1, 300), key=st.text(max_size=5))
def test_permutation_shows_every_place_once(count: int, key: str) -> None:
    assert sorted(permute(place, count, key) for place in range(count)) == list(range(count))


@given(world_size=st.integers(1, 8), step=st.integers(0, 10**6))
def test_same_windows_whatever_the_world_size(world_size: int, step: int) -> None:
    corpus = Corpus(bytes(range(256)) * 8, 16, seed=3)
    whole = corpus.windows(step * 8, 8).tolist()
    parts = []
    for rank in range(world_size):
        samples = samples_of_rank(step * 8, 8, rank, world_size)
        parts += corpus.windows(samples.start, len(samples)).tolist()
    assert parts == whole


def test_epochs_and_seeds_differ_in_order_and_not_in_content() -> None:
    text = bytes(range(256)) * 8
    corpus, other = Corpus(text, 16, seed=0), Corpus(text, 16, seed=1)
    count = corpus.window_count
    epochs = [[corpus.window_of(epoch * count + place) for place in range(count)] for epoch in range(2)]
    reseeded = [other.window_of(place) for place in range(count)]
    assert epochs[0] != epochs[1] and epochs[0] != reseeded
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(reseeded) == list(range(count))


def test_text_shipped_with_python_is_large_and_stable() -> None:
    text = read_text(DataConfig())
    assert len(text) > 500_000 and text == read_text(DataConfig())


def test_learning_rate_rises_to_the_peak_and_falls_to_the_minimum() -> None:
    config = TrainConfig(steps=100, warmup_steps=10)
    rates = [learning_rate(step, config) for step in range(100)]
    assert max(rates) == rates[9] == config.learning_rate
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert abs(rates[-1] - config.learning_rate_min) < 1e-12
