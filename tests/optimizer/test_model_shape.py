"""A shape is guessed from a number of parameters: near in size, and one that can be split over ranks."""

from __future__ import annotations

import pytest

from broker.optimizer.model_shape import guess_shape


@pytest.mark.parametrize(
    ("parameters", "layers", "width", "heads"),
    [
        (5e7, 4, 640, 5),
        (5.5e7, 5, 640, 5),  # small models may have an odd number of layers
        (1.25e8, 8, 896, 7),
        (3.5e8, 10, 1536, 12),
        (7.6e8, 12, 2048, 16),
        (1.3e9, 24, 2048, 16),  # GPT-3 XL (Brown 2020, table 2.1), and below it GPT-3 2.7B, 13B and 175B
        (2.7e9, 24, 3072, 24),
        (7e9, 32, 4096, 32),  # Llama 2 7B
        (1.3e10, 40, 5120, 40),
        (50304.0 * 8192 + 720 * 8192**2, 64, 8192, 64),  # 60 layers of this width exactly: rounded to a multiple of 8
        (7e10, 72, 9216, 72),
        (1.75e11, 96, 12288, 96),
        (1e12, 168, 22528, 176),
    ],
)
def test_shapes_are_those_of_known_models_or_near_them(parameters: float, layers: int, width: int, heads: int) -> None:
    shape = guess_shape(parameters)
    assert (shape.layers, shape.width, shape.heads) == (layers, width, heads)


def test_layers_are_a_multiple_of_four_from_twelve_on_and_of_eight_from_sixty_on() -> None:
    for step in range(60):
        shape = guess_shape(5e7 * 1.19**step)
        assert shape.layers % (8 if shape.layers >= 64 else 4 if shape.layers >= 14 else 1) == 0
        assert shape.heads % (8 if shape.heads >= 32 else 4 if shape.heads >= 8 else 1) == 0


def test_guessed_shape_keeps_a_given_number_of_layers() -> None:
    assert guess_shape(7e9, layers=31).layers == 31
