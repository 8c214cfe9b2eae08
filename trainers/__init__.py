"""The bundled trainers: programs that broker runs on nodes. They rely on environment variables, never on broker.

`from trainers import train` trains a model of your own (docs/TRAINERS.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.training import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    # On first use: `trainers.setup` runs on Pythons that are too old for the rest.
    if name == "train":
        from trainers.training import train

        return train
    raise AttributeError(f"module `trainers` has no attribute `{name}`")
