"""A mixture of experts in place of a block's perceptron: a router sends each token to a few of many perceptrons.

One expert a token and a capacity as Switch has it (arXiv:2101.03961); two and no limit as Mixtral (arXiv:2401.04088).
Plain PyTorch: no strategy, precision or device is known here.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.models.cuts import Exchange


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of the tokens of one pass. An assignment is one use of an expert by a token: `tokens x per token`."""

    order: Tensor  # assignments that are computed, sorted by expert; within one, in the order of tokens
    counts: Tensor  # of them, for each expert
    weights: Tensor  # `[tokens, per token]`: what an expert's output counts
    loss: Tensor  # of the router, a scalar


class MixtureOfExperts(nn.Module):
    """Each token is transformed by the experts that the router prefers for it, and their outputs are added up."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the router and stacks of experts; those of Llama are gated. Experts have no biases."""
        super().__init__()
        self.expert_count = config.experts
        self.exchange: Exchange | None = None
        self.loss_scale = 1.0
        hidden_width, is_gated = config.find_hidden_width(), config.kind == "llama"
        self.router = Router(config)
        self.gate = ExpertLinear(config.experts, config.width, hidden_width) if is_gated else None
        self.expand = ExpertLinear(config.experts, config.width, hidden_width)
        self.project = ExpertLinear(config.experts, hidden_width, config.width)
        self.approximation = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform `[batch, time, width]`. A token of which no expert has capacity left becomes zero."""
        tokens = hidden.flatten(0, 1)
        routing = self.router(tokens)
        uses = routing.weights.shape[1]
        # Indexes are unique wherever rows are gathered, so no sum of the backward pass depends on an order.
        rows = tokens.unsqueeze(1).expand(-1, uses, -1).flatten(0, 1).index_select(0, routing.order)
        if self.exchange is None:
            results = self.compute(rows, routing.counts)
        else:
            results = self.exchange(rows, routing.counts, self.compute)
        placed = results.new_zeros(len(tokens) * uses, results.shape[1]).index_copy(0, routing.order, results)
        mixed = (placed.unflatten(0, (-1, uses)) * routing.weights.unsqueeze(2)).sum(1)
        # The router's weights are float32; full sharding may have chosen another type for what passes through.
        outputs: Tensor = self.dropout(mixed.view_as(hidden).to(hidden.dtype))
        add: Any = AddLoss.apply
        with_loss: Tensor = add(outputs, routing.loss, self.loss_scale)
        return with_loss

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts that are here to rows sorted by expert, `counts` of each. Waits for the device."""
        stacks = [layer.list_weights() for layer in (self.expand, self.project)]
        gates = self.gate.list_weights() if self.gate is not None else [None] * len(stacks[0])
        results = []
        for part, expand, project, gate in zip(rows.split(counts.tolist()), *stacks, gates, strict=True):
            middle = functional.linear(part, expand)
            if gate is None:
                middle = functional.gelu(middle, approximate=self.approximation)
            else:
                middle = functional.silu(functional.linear(part, gate)) * middle
            results.append(functional.linear(middle, project))
        return torch.cat(results)

    def list_expert_layers(self) -> list[nn.Module]:
        """Return the stacks."""
        return [layer for layer in (self.gate, self.expand, self.project) if layer is not None]


class Router(nn.Module):
    """Chooses experts. Computed in float32, whatever the arithmetic around it (Switch, section 2.4)."""

    def __init__(self, config: ModelConfig) -> None:
        """Build one row of weights for each expert."""
        super().__init__()
        self.uses, self.capacity = config.experts_per_token, config.expert_capacity
        self.balance_weight, self.z_weight = config.balance_weight, config.router_z_weight
        self.weight = nn.Parameter(torch.zeros(config.experts, config.width))

    def forward(self, tokens: Tensor) -> Routing:
        """Route `[tokens, width]`.

        With experts A and B, one use and capacity 1.0, tokens that prefer A, A, B, A: A takes the first two, B the
        third, and the fourth skips the block.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(tokens.float(), self.weight.float())
        chances = logits.softmax(dim=-1)
        weights, chosen = chances.topk(self.uses, dim=-1)
        if self.uses > 1:  # of a single one, the chance itself: the router learns from it
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = functional.one_hot(experts, len(self.weight)).sum(0)
        loss = self._measure(logits, chances, counts)
        if self.capacity:
            most = math.ceil(self.capacity * len(experts) / len(self.weight))
            ranks = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[experts[order]]
            order, counts = order[ranks < most], counts.clamp(max=most)
        return Routing(order=order, counts=counts, weights=weights, loss=loss)

    def _measure(self, logits: Tensor, chances: Tensor, counts: Tensor) -> Tensor:
        """Return Switch's balance loss (equations 4 to 6), 1 where all are equally busy, and ST-MoE's z-loss
        (arXiv:2202.08906, equation 5), weighted."""
        busy = counts / counts.sum()
        loss = self.balance_weight * len(busy) * (busy * chances.mean(0)).sum()
        if self.z_weight:
            loss = loss + self.z_weight * logits.logsumexp(dim=-1).square().mean()
        return loss


class ExpertLinear(nn.Module):
    """A linear layer for each expert, in one parameter `[experts, outputs, inputs]`."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        """Allocate; the decoder draws the weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs, inputs))

    def list_weights(self) -> list[Tensor]:
        """Return the matrix of each expert that is on this rank."""
        weight: Any = self.weight
        here: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return list(here.unbind(0))  # one backward step for all of them


class AddLoss(torch.autograd.Function):
    """Passes a tensor on, and in the backward pass adds the gradient of a loss that no output depends on."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, loss: Tensor, scale: float) -> Tensor:
        """Return the tensor."""
        context.scale, context.loss = scale, (loss.shape, loss.dtype, loss.device)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient as it came, and that of the scaled loss."""
        shape, dtype, device = context.loss
        return outer, torch.full(shape, context.scale, dtype=dtype, device=device), None


def count_idle_parameters(config: ModelConfig) -> int:
    """Count the parameters of the experts that a token does not use, in all blocks."""
    if not config.experts:
        return 0
    matrices = 3 if config.kind == "llama" else 2
    expert = matrices * config.width * config.find_hidden_width()
    return config.depth * (config.experts - config.experts_per_token) * expert
