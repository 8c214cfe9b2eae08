"""The networks by name. A new one is a new file and one line in this table."""

import importlib
from typing import Any

# Import paths as text, so that choosing one does not import the others.
LANGUAGE_MODELS = {
    "gpt": "trainers.models.gpt:GPT",
    "llama": "trainers.models.llama:Llama",
}


def create_language_model(kind: str, config: Any) -> Any:
    """Build the model of that kind with weights drawn from the current torch generator."""
    module_name, _, class_name = LANGUAGE_MODELS[kind].partition(":")
    return getattr(importlib.import_module(module_name), class_name)(config)
