"""The optimizer of a run: torch's fused AdamW or the user's own, with a schedule and state by parameter name.

State by name, instead of by number, can be restored by other ranks and under other strategies
(docs/decisions/0060-torch-adamw.md).
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainers.config import TrainConfig
from trainers.errors import TrainerError
from trainers.offload import HostCopies, place_on_mesh
from trainers.optimizer_values import OptimizerValues

# Adam's usual decay rates for language models (GPT-3, arXiv:2005.14165, appendix B).
BETAS, EPSILON = (0.9, 0.95), 1e-8
# The names of AdamW's moments in checkpoints.
STATE_NAMES = {"exp_avg": "first", "exp_avg_sq": "second"}

MakeOptimizer = Callable[[Mapping[str, Tensor]], torch.optim.Optimizer]  # takes named parameters


class Optimizer:
    """A torch optimizer whose state can be saved, resharded and restored before its first step."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        config: TrainConfig,
        *,
        make: MakeOptimizer | None = None,
        schedule: Callable[[int], float] | None = None,
        is_offloaded: bool = False,
    ) -> None:
        """Optimize named parameters. The state is allocated now, so that a checkpoint can be read into it.

        `make` creates the user's own optimizer; `schedule` maps a step, counted from 0, to a factor of the learning
        rates of its groups. `is_offloaded` keeps the state, and a copy of the parameters, in CPU memory.
        """
        self._config, self._schedule = config, schedule
        self._parameters = {name: value for name, value in parameters if value.requires_grad}
        # AdamW is elementwise, so each rank updates its shard of a parameter as a plain tensor: torch's list operations
        # do not accept sharded and whole tensors together. The user's own optimizer gets DTensors.
        self._is_local = make is None
        self._handles = {
            name: local(value.detach()) if self._is_local else value for name, value in self._parameters.items()
        }
        self._copies: HostCopies | None = None
        if is_offloaded:
            if make is not None:
                raise TrainerError("`--offload optimizer` moves the state of AdamW only, not of your own optimizer")
            self._copies = HostCopies(self._handles)
            self._handles = self._copies.values
        spare_compiler()
        self._optimizer = make(self._handles) if make else make_adamw(self._handles, config)
        self._base_rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._check_parameters()
        # Our own AdamW has none.
        self.values = OptimizerValues(self._optimizer, self._handles) if make else None
        self._blank: set[str] = set()  # parameters with state that only reserves names and shapes
        self._initialize_state()
        self._reserved = frozenset(self._blank)
        self.steps_done = 0
        self._found_inf: Tensor | None = None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group in the next step."""
        return self._find_rates(self.steps_done)[0]

    @property
    def is_finished(self) -> bool:
        """Return whether the run's last step is done."""
        return self.steps_done >= self._config.steps

    @property
    def moves_done(self) -> int | str:
        """The number of updates of the parameters that were not skipped; if they differ, JSON of them by name."""
        counters = {name: state["step"] for name, state in self._iterate_states() if "step" in state}
        updates = read_counters(counters)
        # Of parameters that the optimizer does not count, only the first update matters.
        begun = {name: int(name not in self._blank) for name in self._handles}
        # One number if all parameters were updated equally often: always, unless some got no gradient.
        counts = set((updates or begun).values()) or {0}
        is_equal = len(counts) == 1 and not (self.steps_done and self._blank)
        return counts.pop() if is_equal else json.dumps(begun | updates)

    def skip_unless(self, is_finite: Tensor) -> None:
        """Skip the next update if `is_finite`, a scalar on the device, is false. The host does not wait."""
        self._found_inf = (~is_finite).float()

    def zero_skipped_gradients(self) -> None:
        """Zero the gradients if the next step is skipped, for a strategy that sends them. The host waits."""
        if self._found_inf is not None and bool(self._found_inf):
            with torch.no_grad():
                torch._foreach_zero_([local(gradient) for gradient in self._find_gradients().values()])

    def step(self, *, schedule_step: int | None = None, rate_share: float = 1.0) -> None:
        """Update every parameter once and drop the gradients.

        If several updates make up one step of the run, `schedule_step` is that step, and `rate_share` the share of its
        learning rate for each update.
        """
        schedule_step = self.steps_done if schedule_step is None else schedule_step
        self.steps_done = schedule_step + 1
        for group, rate in zip(self._optimizer.param_groups, self._find_rates(schedule_step), strict=True):
            group["lr"] = rate_share * rate
        if self._copies is not None:
            self._copies.load({name: local(gradient) for name, gradient in self._find_gradients().items()})
            self._found_inf = None if self._found_inf is None else self._found_inf.cpu()
        elif self._is_local:
            for name, gradient in self._find_gradients().items():
                self._handles[name].grad = local(gradient)
        # Fused optimizers read the flag on the device; for others, the host must read it.
        if getattr(self._optimizer, "_step_supports_amp_scaling", False) and not self._is_beginning():
            self._optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]  # as torch's GradScaler sets it
            self._optimizer.step()
            self._optimizer.found_inf = None  # type: ignore[attr-defined]
        elif self._found_inf is None or not bool(self._found_inf):
            self._begin_blank_states()
            self._optimizer.step()
        if self._copies is not None:
            self._copies.store()
        self._found_inf = None
        self._drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint; its tensors are the live ones."""
        state: dict[str, Any] = {}
        for name, values in self._iterate_states():
            for key, value in values.items():
                if key != "step" and isinstance(value, Tensor):
                    spread = self._spread(value, self._parameters[name])
                    state.setdefault(STATE_NAMES.get(key, key), {})[name] = spread
        return {**state, "steps_done": self.steps_done, "moves_done": self.moves_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        keys = {saved: key for key, saved in STATE_NAMES.items()}
        with torch.no_grad():
            for saved, values in state.items():
                for name, value in values.items() if isinstance(values, dict) else ():
                    local(self._optimizer.state[self._handles[name]][keys.get(saved, saved)]).copy_(local(value))
        self.steps_done = state["steps_done"]
        self.load_moves(state["moves_done"])
        if self._copies is not None:
            self._copies.mark_stale()  # the parameters come from the same checkpoint

    def load_moves(self, moves: int | str) -> None:
        """Restore `moves_done`, after `load_state_dict`."""
        updates = json.loads(moves) if isinstance(moves, str) else dict.fromkeys(self._handles, moves)
        with torch.no_grad():
            self._set_updates(updates)
        # Older checkpoints have 0 for all parameters of an optimizer that does not count, or do not name them.
        is_blank = not self.steps_done or isinstance(moves, str)
        self._blank = {name for name in self._reserved if is_blank and updates.get(name) == 0}

    def _iterate_states(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, handle in self._handles.items():
            yield name, self._optimizer.state.get(handle, {})

    def _spread(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Return a state tensor sharded over the ranks like its parameter."""
        if not hasattr(parameter, "device_mesh") or hasattr(value, "device_mesh") or value.dim() == 0:
            return value
        return place_on_mesh(value, parameter) if self._copies is not None else _spread_like(value, parameter)

    def _find_rates(self, step: int) -> list[float]:
        if self._schedule is not None:
            factor = float(self._schedule(step))
            return [rate * factor for rate in self._base_rates]
        if self._is_local:
            return [find_learning_rate(step, self._config)] * len(self._base_rates)
        return list(self._base_rates)

    def _check_parameters(self) -> None:
        given = {id(handle) for handle in self._handles.values()}
        if any(id(parameter) not in given for group in self._optimizer.param_groups for parameter in group["params"]):
            raise TrainerError("the optimizer has a parameter that is not among those it was given")

    def _initialize_state(self) -> None:
        """Allocate the state that torch would allocate in the first step."""
        if isinstance(self._optimizer, torch.optim.AdamW) and self._is_local:
            for handle in self._handles.values():
                self._optimizer.state[handle] = {
                    "step": torch.zeros((), dtype=torch.float32, device=handle.device),
                    "exp_avg": torch.zeros_like(handle),
                    "exp_avg_sq": torch.zeros_like(handle),
                }
            return
        # Others take a step that changes no parameter (as in torch.distributed.checkpoint). The state that it leaves is
        # not always that of a new optimizer, which is therefore created in the first step with a gradient.
        self._blank = {name for name, handle in self._handles.items() if handle not in self._optimizer.state}
        before = [handle.detach().clone() for handle in self._handles.values()]
        for group in self._optimizer.param_groups:
            group.update({key: 0.0 for key in ("lr", "weight_decay") if key in group})
        for handle in self._handles.values():
            handle.grad = torch.zeros_like(handle)
        self._optimizer.step()
        with torch.no_grad():
            for handle, value in zip(self._handles.values(), before, strict=True):
                handle.copy_(value)
        self._set_updates(dict.fromkeys(self._handles, 0))
        self._drop_gradients()
        if self.values is not None:
            self.values.reset_groups()  # they may count updates
            self.values.check()

    def _is_beginning(self) -> bool:
        return bool(self._blank) and not self._blank.isdisjoint(self._find_gradients())

    def _begin_blank_states(self) -> None:
        """Drop reserved state, so that the optimizer creates its own. Call it before an update that is not skipped.

        torch's fused optimizers begin without state for all parameters or for none: fused SGD allocates momenta of all
        of them, does not fill them in a step that `found_inf` skips, and takes no mixture. Those that begin later
        keep the zeros reserved for them.
        """
        begun = self._blank.intersection(self._find_gradients())
        for group in self._optimizer.param_groups:
            values = {id(value) for value in group["params"] if value.grad is not None}
            names = {name for name, handle in self._handles.items() if id(handle) in values}
            if not group.get("fused") or names <= begun:
                for name in names & begun:
                    self._optimizer.state.pop(self._handles[name], None)
        self._blank -= begun

    def _set_updates(self, updates: Mapping[str, int]) -> None:
        for name, handle in self._handles.items():
            state = self._optimizer.state.get(handle, {})
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(updates.get(name, 0))
            elif "step" in state:
                state["step"] = updates.get(name, 0)

    def _find_gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}

    def _drop_gradients(self) -> None:
        for values in (self._parameters, self._handles):
            for value in values.values():
                value.grad = None


def read_counters(counters: Mapping[str, Any]) -> dict[str, int]:
    """Return numbers that are Python's or scalar tensors; the host waits for a GPU once, not for each of them."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in counters.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, {})[name] = value
    numbers = {name: int(value) for name, value in counters.items() if not isinstance(value, Tensor)}
    for tensors in by_device.values():
        numbers |= zip(tensors, map(int, torch.stack(list(tensors.values())).tolist()), strict=True)
    return {name: numbers[name] for name in counters}


def spare_compiler() -> None:
    """Keep torch.optim from importing torch's compiler, which takes as long as torch itself.

    Four methods of every optimizer are hidden from the compiler by a wrapper that imports it in its first call and then
    calls what `__dynamo_disable` names (torch/_compile.py, torch 2.13). Nothing compiles these methods here. With
    another torch, this has no effect.
    """
    base = torch.optim.Optimizer
    for method in (base.add_param_group, base.load_state_dict, base.state_dict, base.zero_grad):
        hidden: Any = getattr(method, "__wrapped__", None)
        if hidden is not None and not hasattr(hidden, "__dynamo_disable"):
            setattr(hidden, "__dynamo_disable", hidden)


class SparedAdamW(torch.optim.AdamW):
    """AdamW whose step does not import torch's compiler only to mark a graph break: see `spare_compiler`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def make_adamw(parameters: Mapping[str, Tensor], config: TrainConfig) -> torch.optim.AdamW:
    """Create AdamW; weight decay applies to matrices, not to biases and norms, as in GPT-2 and Llama."""
    matrices = [value for value in parameters.values() if value.dim() >= 2]
    others = [value for value in parameters.values() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return SparedAdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=BETAS, eps=EPSILON, fused=True
    )


def find_learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up to the peak, half a cosine to the minimum.

    It is a pure function of the step, so the schedule has no state.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    half_cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate_min + (config.learning_rate - config.learning_rate_min) * half_cosine


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, which shares memory with the shard of a DTensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _spread_like(value: Tensor, parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    return DTensor.from_local(
        value, placed.device_mesh, placed.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
