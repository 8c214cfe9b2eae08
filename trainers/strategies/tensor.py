"""Tensor parallelism: linear layers sharded by columns, then by rows, as DTensors (arXiv:1909.08053)."""

from torch import nn

from trainers.errors import TrainerError
from trainers.models.cuts import Sliceable
from trainers.strategies.base import Strategy


class TensorParallel(Strategy):
    """Ranks of the axis process the same samples; each computes some heads and hidden units of every layer."""

    AXES = ("tensor",)
    MOVES_ALONE = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard each linear layer that its module declares. Raises TrainerError if the model declares none."""
        count = self.grid.size("tensor")
        if count == 1:
            return model
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {
            "column": ColwiseParallel(),
            "row": RowwiseParallel(),
            "whole": ColwiseParallel(output_layouts=Replicate()),
        }
        mesh = self.grid.device_mesh("tensor")
        is_sliced = False
        for module in list(model.modules()):
            for name, slicing in module.slicings().items() if isinstance(module, Sliceable) else ():
                layer = getattr(module, name)
                if layer is None:
                    continue  # on another pipeline stage
                if slicing.pieces % count:
                    raise TrainerError(
                        f"`{name}` has {slicing.pieces} pieces, which {count} ranks cannot divide evenly"
                    )
                parallelize_module(layer, mesh, styles[slicing.way])
                is_sliced = True
        if not is_sliced and self.grid.size("pipeline") == 1:
            raise TrainerError("this model does not declare how its layers may be sharded; `tensor` cannot be used")
        return model
