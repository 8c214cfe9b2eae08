"""The experts of a mixture, as the bundled trainer has them, derived from its active and idle parameters."""

from __future__ import annotations

from dataclasses import replace

from broker.frozen import frozen
from broker.optimizer.model_shape import ModelShape

EXPERTS_PER_TOKEN = 2  # as in Mixtral; the trainer's default
# Ranks share experts evenly, so their number is rounded: to eight for the ranks of a whole node, or to two if there are
# so few that eight would change the model too much.
FEW_EXPERTS, FEW_MULTIPLE, MANY_MULTIPLE = 32, 2, 8


@frozen
class Experts:
    """`count` experts in each block, of which a token uses `per_token`; `width` is an expert's hidden width."""

    count: int
    per_token: int
    width: int


def find_experts(shape: ModelShape) -> Experts | None:
    """Return the experts of a shape; None if it has none.

    The active part of a block's MLP is divided among the experts that a token uses, so the idle parameters give the
    number of the other experts: with 2 active ones of 4.3 billion parameters each, 34 billion idle ones are 8 others.
    """
    if not shape.idle_parameters:
        return None
    active = shape.active_expert_parameters
    count = EXPERTS_PER_TOKEN + shape.idle_parameters / (active / EXPERTS_PER_TOKEN)
    multiple = FEW_MULTIPLE if count < FEW_EXPERTS else MANY_MULTIPLE
    width = round((shape.mlp_width or 4 * shape.width) / EXPERTS_PER_TOKEN)
    return Experts(count=max(4, round(count / multiple) * multiple), per_token=EXPERTS_PER_TOKEN, width=width)


def round_experts(shape: ModelShape) -> ModelShape:
    """Return the shape with a whole number of experts; the total of its parameters changes accordingly."""
    experts = find_experts(shape)
    if experts is None:
        return shape
    idle = shape.active_expert_parameters * (experts.count - experts.per_token) / experts.per_token
    return replace(shape, idle_parameters=idle, experts_per_token=experts.per_token)
