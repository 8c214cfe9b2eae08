"""Activation checkpointing and compilation of a model's blocks; neither changes the loss."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from trainers.errors import TrainerError


def prepare_blocks(model: nn.Module, *, recompute: str, is_compiled: bool) -> None:
    """Recompute blocks in the backward pass (`none`, every second one: `selective`, or `full`), and compile them.

    Parameter names do not change, so a checkpoint can be loaded under any of these settings.
    """
    if recompute == "none" and not is_compiled:
        return
    blocks = find_blocks(model)
    if not blocks and is_compiled:
        _compile(model)
    if blocks and is_compiled:
        import torch._dynamo

        # Otherwise DistributedDataParallel makes the compiler cut each block at the bounds of its buckets, so that they
        # can be sent early: blocks are graphs of their own already.
        torch._dynamo.config.optimize_ddp = False
    for place, block in enumerate(blocks):
        if recompute == "full" or (recompute == "selective" and place % 2 == 0):
            block.forward = _recompute(block.forward)
        if is_compiled:
            _compile(block)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: its attribute `blocks`, or the children of its outermost module lists."""
    blocks: Any = getattr(model, "blocks", None)
    if isinstance(blocks, Iterable):
        return list(blocks)
    blocks_found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks_found += [block for block in child if next(block.parameters(), None) is not None]
        else:
            blocks_found += find_blocks(child)
    return blocks_found


def find_shared(model: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to the same parameter, such as tied embeddings."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def check_shared(model: nn.Module, before: list[list[str]], strategy: str) -> None:
    """Raise a TrainerError if a strategy split a shared parameter into copies, which would silently diverge."""
    after = find_shared(model)
    for names in before:
        if names not in after:
            raise TrainerError(
                f"`{strategy}` would split {' and '.join(names)}, which share weights\n\n"
                "hint: `--model.tie_embeddings false`"
            )


def _recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return run


def _compile(block: nn.Module) -> None:
    try:
        # In place, so that no wrapper changes parameter names. Identical blocks share one compilation.
        block.compile()
    except RuntimeError as error:
        raise TrainerError(f"`--compile` is not supported here: {error}") from error
