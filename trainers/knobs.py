"""Turn a field of a config into a flag with its own help. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def knob(default: Any, help_text: str, choices: Sequence[str] = ()) -> Any:
    """Declare a field that is also a flag."""
    return field(default=default, metadata={"help": help_text, "choices": tuple(choices)})
