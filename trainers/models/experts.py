"""A mixture of experts in place of a block's perceptron: a router sends each token to a few of many perceptrons.

Switch (arXiv:2101.03961) uses one expert per token and a capacity, Mixtral (arXiv:2401.04088) two and no limit.
This is plain PyTorch, independent of strategy, precision and device.
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
    """The routing of the tokens of one pass. An assignment is one use of an expert by one token."""

    order: Tensor  # computed assignments, sorted by expert and then by token
    counts: Tensor  # [experts]: number of computed assignments
    weights: Tensor  # `[tokens, per token]`: factors of the experts' outputs
    loss: Tensor  # auxiliary loss of the router, a scalar


class MixtureOfExperts(nn.Module):
    """Applies to each token the experts that the router chooses, and returns their weighted sum."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the router and the stacked experts, which have no biases and are gated for `llama`."""
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
        """Transform `[batch, time, width]`. A token whose experts are all at capacity becomes zero."""
        tokens = hidden.flatten(0, 1)
        routing = self.router(tokens)
        uses = routing.weights.shape[1]
        # Gathered indexes are unique, so no sum in the backward pass depends on an order.
        rows = tokens.unsqueeze(1).expand(-1, uses, -1).flatten(0, 1).index_select(0, routing.order)
        if self.exchange is None:
            results = self.compute(rows, routing.counts)
        else:
            results = self.exchange(rows, routing.counts, self.compute)
        placed = results.new_zeros(len(tokens) * uses, results.shape[1]).index_copy(0, routing.order, results)
        mixed = (placed.unflatten(0, (-1, uses)) * routing.weights.unsqueeze(2)).sum(1)
        # The router's weights are float32, but FSDP may have cast its inputs.
        outputs: Tensor = self.dropout(mixed.view_as(hidden).to(hidden.dtype))
        add: Any = AddLoss.apply
        with_loss: Tensor = add(outputs, routing.loss, self.loss_scale)
        return with_loss

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply this rank's experts to rows sorted by expert, `counts` for each. The host waits for the device."""
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
        """Return the layers whose parameters are stacked by expert."""
        return [layer for layer in (self.gate, self.expand, self.project) if layer is not None]


class Router(nn.Module):
    """Chooses experts, in float32 regardless of the model's precision (Switch, section 2.4)."""

    def __init__(self, config: ModelConfig) -> None:
        """Build one row of weights per expert."""
        super().__init__()
        self.uses, self.capacity = config.experts_per_token, config.expert_capacity
        self.balance_weight, self.z_weight = config.balance_weight, config.router_z_weight
        self.weight = nn.Parameter(torch.zeros(config.experts, config.width))

    def forward(self, tokens: Tensor) -> Routing:
        """Route tokens `[tokens, width]`.

        Example: experts A and B, one expert per token, capacity 1.0, and tokens that prefer A, A, B, A. A takes the
        first two, B the third, and the fourth skips the block.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(tokens.float(), self.weight.float())
        chances = logits.softmax(dim=-1)
        weights, chosen = chances.topk(self.uses, dim=-1)
        if self.uses > 1:  # with a single expert the weight is its probability, from which the router learns
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
        """Return the weighted sum of Switch's balance loss and ST-MoE's z-loss.

        The first is 1 if all experts are equally busy (equations 4 to 6); the second is arXiv:2202.08906, equation 5.
        """
        busy = counts / counts.sum()
        loss = self.balance_weight * len(busy) * (busy * chances.mean(0)).sum()
        if self.z_weight:
            loss = loss + self.z_weight * logits.logsumexp(dim=-1).square().mean()
        return loss


class ExpertLinear(nn.Module):
    """A linear layer per expert, stacked in one parameter `[experts, outputs, inputs]`."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        """Allocate the parameter; the decoder draws the weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs, inputs))

    def list_weights(self) -> list[Tensor]:
        """Return the matrix `[outputs, inputs]` of each expert on this rank."""
        weight: Any = self.weight
        here: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return list(here.unbind(0))  # one autograd node for all of them


class AddLoss(torch.autograd.Function):
    """The identity, which in the backward pass also starts the gradient of an auxiliary loss."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, loss: Tensor, scale: float) -> Tensor:
        """Return `outputs` unchanged."""
        context.scale, context.loss = scale, (loss.shape, loss.dtype, loss.device)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the incoming gradient, and `scale` as the gradient of the auxiliary loss."""
        shape, dtype, device = context.loss
        return outer, torch.full(shape, context.scale, dtype=dtype, device=device), None


def count_idle_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, over all blocks, of experts that a token does not use."""
    if not config.experts:
        return 0
    matrices = 3 if config.kind == "llama" else 2
    expert = matrices * config.width * config.find_hidden_width()
    return config.depth * (config.experts - config.experts_per_token) * expert
