"""A parameter server: rank 0 keeps parameters and moments, the others send it gradients (Li et al., OSDI 2014).

Without staleness, the gradients of all workers are averaged for one step. With staleness s, each is applied as it
arrives, and a worker may be at most s steps ahead of the slowest (Ho et al., NIPS 2013).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.checkpoint import HeldByOne
from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.ranks import make_timeout
from trainers.strategies.base import Strategy
from trainers.strategies.grid import Share

# A header is [step, part of the loss, whether to stop] to the server, and [step to stop after, 0, 0] from it.
HEAD_TAG, BODY_TAG, HEAD_SIZE = 1, 2, 3
NEVER = 2**53  # above any step, and exactly representable as float64


class ParameterServer(Strategy):
    """Each rank has a `ServerRole` or a `Worker`; a single process trains without either.

    Messages are sent between CPUs. At a checkpoint all ranks wait for the slowest.
    """

    AXES = ("server",)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Assign the roles. Raises TrainerError if the model has state other than its parameters."""
        self._role: ServerRole | Worker | None = None
        self._is_stop_asked = False
        worker_count = self.ranks.world_size - 1
        if not worker_count:
            return model
        if len(model.state_dict()) > len(list(model.named_parameters(remove_duplicate=False))):
            raise TrainerError("a parameter server keeps only parameters, but this model has other state")
        self._group = dist.new_group(backend="gloo", timeout=make_timeout(self.ranks.start_s))
        if self.ranks.is_first:
            self.share = Share(index=0, count=0)
            self._role = ServerRole(model, self._group, worker_count, self.options.parameter_server.staleness_max)
        else:
            self.share = Share(index=self.ranks.rank - 1, count=worker_count, draw=self.ranks.rank)
            self._role = Worker(model, self._group)
        return model

    def clip(self, model: nn.Module, norm_max: float) -> Tensor:
        """Clip on the rank with the gradient of the next update: a synchronous server, or otherwise each worker.

        A synchronous server first waits for the gradients of all workers. Other ranks return 0.
        """
        is_synchronous = not self.options.parameter_server.staleness_max
        if isinstance(self._role, ServerRole) and is_synchronous:
            self._role.collect_mean()
        if self._role is None or isinstance(self._role, ServerRole) == is_synchronous:
            return super().clip(model, norm_max)
        return torch.zeros((), dtype=torch.float64, device=self.ranks.device)

    def has_equal_work(self) -> bool:
        """Return whether this rank is a worker: the server computes no passes."""
        return not isinstance(self._role, ServerRole)

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Exchange gradients for parameters: workers send, the server updates and answers."""
        if self._role is None:
            optimizer.step()
        elif isinstance(self._role, ServerRole):
            self._role.step(optimizer)
        else:
            optimizer.zero_skipped_gradients()
            self._role.step(loss.item(), is_stop_asked=self._is_stop_asked)

    def all_reduce_loss(self, loss: Tensor, *, weight: float, is_stop_asked: bool) -> Tensor:
        """Return the mean loss on the server, and its own on a worker. The worker's next message carries the stop."""
        if self._role is None:
            return super().all_reduce_loss(loss, weight=weight, is_stop_asked=is_stop_asked)
        self._is_stop_asked = is_stop_asked
        if isinstance(self._role, ServerRole):
            mean, is_stopping = self._role.tally(is_stop_asked=is_stop_asked)
        else:
            mean, is_stopping = loss.item() / weight, self._role.is_stopping
        return torch.tensor([mean, float(is_stopping)], dtype=torch.float64)

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the state of the server. A save first copies its parameters to every worker."""
        if self._role is None:
            return super().shared_state(model, optimizer)
        is_server = self.ranks.is_first
        return {
            "model": HeldByOne(SynchronizedModel(model, self._group), is_holder=is_server),
            "optimizer": HeldByOne(optimizer, is_holder=is_server),
        }


class Worker:
    """Sends a gradient and waits for parameters."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        """Exchange the parameters of `model` within `group`."""
        self._parameters, self._group = list_trained(model), group
        self._steps_done, self._stop_step = 0, NEVER

    @property
    def is_stopping(self) -> bool:
        """Return whether the step just taken is the one to stop after."""
        return self._steps_done >= self._stop_step

    def step(self, loss_part: float, *, is_stop_asked: bool) -> None:
        """Send the gradient and receive parameters; return when the server allows the next step."""
        self._steps_done += 1
        head = torch.tensor([self._steps_done, loss_part, is_stop_asked], dtype=torch.float64)
        dist.send(head, 0, group=self._group, tag=HEAD_TAG)
        dist.send(_flatten([_gradient(tensor) for tensor in self._parameters]), 0, group=self._group, tag=BODY_TAG)
        for parameter in self._parameters:
            parameter.grad = None
        dist.recv(head, 0, group=self._group, tag=HEAD_TAG)
        self._stop_step = int(head[0].item())
        body = _flatten(self._parameters)
        dist.recv(body, 0, group=self._group, tag=BODY_TAG)
        _unflatten(body, self._parameters)


class ServerRole:
    """Receives gradients as they arrive, and answers with parameters."""

    def __init__(self, model: nn.Module, group: Any, worker_count: int, staleness_max: int) -> None:
        """Serve one model to ranks 1 to `worker_count`."""
        self.staleness_max = staleness_max
        self.lead_max = 0  # maximum lead of a worker over the slowest at the start of a step
        self._parameters, self._group = list_trained(model), group
        self._done = {rank: 0 for rank in range(1, worker_count + 1)}
        self._waiting: set[int] = set()
        self._losses: dict[int, float] = {}
        self._steps_done, self._stop_step = 0, NEVER
        self._step_begun: int | None = None

    def collect_mean(self) -> None:
        """Set the gradients to the mean over one gradient of each worker, summed in the order of ranks."""
        total = torch.zeros_like(_flatten(self._parameters))
        for rank in self._done:
            total += self._receive(rank)[1]
        self._put(total / len(self._done))

    def step(self, optimizer: Optimizer) -> None:
        """Return when every worker has made one more step."""
        if not self.staleness_max:
            optimizer.step()
            self._answer()
        if self._step_begun is None:
            self._step_begun = optimizer.steps_done
        while min(self._done.values()) <= self._steps_done:
            rank, gradient = self._receive(None)
            self._put(gradient)
            # One step of all workers has the total learning rate of one synchronous step.
            schedule_step = self._step_begun + self._done[rank] - 1
            optimizer.step(schedule_step=schedule_step, rate_share=1.0 / len(self._done))
            self._answer()
        self._steps_done += 1

    def tally(self, *, is_stop_asked: bool) -> tuple[float, bool]:
        """Return the mean loss of the step just taken, and whether to stop."""
        if is_stop_asked:
            self._stop_soon()
        return self._losses.pop(self._steps_done), self._steps_done >= self._stop_step

    def _receive(self, rank: int | None) -> tuple[int, Tensor]:
        """Receive a gradient from one worker, or from any if `rank` is None. That worker then waits for an answer."""
        head, body = torch.empty(HEAD_SIZE, dtype=torch.float64), _flatten(self._parameters)
        source = dist.recv(head, rank, group=self._group, tag=HEAD_TAG)
        dist.recv(body, source, group=self._group, tag=BODY_TAG)
        step, loss_part, is_stop_asked = int(head[0].item()), head[1].item(), bool(head[2].item())
        self.lead_max = max(self.lead_max, step - 1 - min(self._done.values()))
        self._done[source] = step
        self._waiting.add(source)
        self._losses[step] = self._losses.get(step, 0.0) + loss_part
        if is_stop_asked:
            self._stop_soon()
        return source, body

    def _answer(self) -> None:
        """Answer the waiting workers that are within the staleness bound."""
        slowest = min(self._done.values())
        ready = sorted(rank for rank in self._waiting if self._done[rank] - slowest <= self.staleness_max)
        if not ready:
            return
        head = torch.tensor([self._stop_step, 0, 0], dtype=torch.float64)
        body = _flatten(self._parameters)
        for rank in ready:
            dist.send(head, rank, group=self._group, tag=HEAD_TAG)
            dist.send(body, rank, group=self._group, tag=BODY_TAG)
        self._waiting.difference_update(ready)

    def _stop_soon(self) -> None:
        """Stop after the latest step that any worker may have started, so that all are notified in time."""
        begun = max(done + (rank not in self._waiting) for rank, done in self._done.items())
        self._stop_step = min(self._stop_step, begun)

    def _put(self, gradient: Tensor) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.empty_like(parameter)
        _unflatten(gradient, [_gradient(tensor) for tensor in self._parameters])


class SynchronizedModel:
    """A model whose parameters become those of the server, on every rank, before they are saved."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        """Wrap `model`."""
        self._model, self._group = model, group

    def state_dict(self) -> dict[str, Any]:
        """Broadcast the parameters of the server and return the state. A collective call."""
        parameters = list(self._model.parameters())
        body = _flatten(parameters)
        dist.broadcast(body, 0, group=self._group)
        _unflatten(body, parameters)
        state: dict[str, Any] = self._model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state into the model."""
        self._model.load_state_dict(state)


def list_trained(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters, which are exchanged; frozen ones are equal on all ranks."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).cpu()


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for part, to in zip(parts, tensors, strict=True):
            to.copy_(part.view_as(to))


def _gradient(parameter: Tensor) -> Tensor:
    gradient: Tensor | None = parameter.grad
    assert gradient is not None, "a parameter took no part in the loss"
    return gradient
