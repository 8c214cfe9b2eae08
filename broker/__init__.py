"""broker finishes a training job on the cheapest machines of any cloud.

From Python: `broker.plan("train.yaml").choice` is what `broker plan train.yaml` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.api import plan as plan
    from broker.api import read_task as read_task
    from broker.errors import BrokerError as BrokerError
    from broker.errors import NoOfferError as NoOfferError
    from broker.errors import TaskError as TaskError
    from broker.types import Estimate as Estimate
    from broker.types import Offer as Offer
    from broker.types import Placement as Placement
    from broker.types import Plan as Plan
    from broker.types import Task as Task

__version__ = "0.1.0"

# name -> the module that has it, imported on first use: `import broker` costs nothing.
_HOMES = {
    "plan": "broker.api",
    "read_task": "broker.api",
    "BrokerError": "broker.errors",
    "NoOfferError": "broker.errors",
    "TaskError": "broker.errors",
    "Estimate": "broker.types",
    "Offer": "broker.types",
    "Placement": "broker.types",
    "Plan": "broker.types",
    "Task": "broker.types",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `broker` has no `{name}`")
    import importlib

    found: object = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
