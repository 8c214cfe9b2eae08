"""Values of `envs` and `secrets` as the text that SkyPilot passes to a program: `str` of the value in YAML 1.1.

`true` and `yes` become `True`, `1.10` becomes `1.1`, `[1, 2]` becomes `[1, 2]`. Programs in SkyPilot's task files
compare with these texts. Other fields follow YAML 1.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from broker.task.allowed import ENV_VALUE
from broker.task.shapes import Schema, Text
from broker.task.yaml_reader import Marked

_FLAGS = ("True", "False")
# Variables that the agent of each node sets, whatever the task says (`agent/agent_environment.py`).
SET_BY_AGENT = (
    "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_SETUP_NODE_RANK", "SKYPILOT_SETUP_NODE_IPS", "SKYPILOT_SETUP_NUM_GPUS_PER_NODE",
    "SKYPILOT_INTERNAL_JOB_ID",
    "BROKER_MASTER_PORT", "BROKER_PROGRESS_FILE", "BROKER_PREEMPTION_FILE", "BROKER_GANG_PEM", "BROKER_GANG_FILE",
)  # fmt: skip


class EnvValue(Text):
    """Any value, as the text that a program receives. Errors do not show it."""

    def __init__(self) -> None:
        super().__init__(rule=ENV_VALUE, also_scalar=True, is_hidden=True)

    def parse(self, marked: Marked) -> str | None:
        text = render_value(marked)
        return text if ENV_VALUE.admits(text) else None

    def admits_kind(self, value: Any) -> bool:
        return value is not None

    def describe(self) -> Schema:
        return {**super().describe(), "type": ["string", "number", "boolean", "array", "object"]}


def render_value(marked: Marked) -> str:
    """Return the text of a value that is not null; quoted text, and text that YAML does not convert, is unchanged."""
    return str(_convert(marked))


def list_texts(marked: Marked) -> Iterator[str]:
    """Yield every text in a value as written in the file, which may differ from the text that a program receives."""
    if isinstance(marked.value, (dict, list)):
        for each in marked.value.values() if isinstance(marked.value, dict) else marked.value:
            yield from list_texts(each)
    elif marked.value is not None:
        yield marked.text


def is_changed(marked: Marked, text: str) -> bool:
    """Return whether `text` differs from the file in a surprising way: a version or a time that became a number.

    A different spelling of `true`, and a shorter form of a number with an exponent, do not surprise programs.
    """
    if isinstance(marked.value, (dict, list)) or text == marked.text:
        return False
    is_same_flag = text in _FLAGS and marked.text.lower() == text.lower()
    return not is_same_flag and not (isinstance(marked.value, float) and "e" in marked.text.lower())


def refers_to_variable(text: str, name: str) -> bool:
    """Return whether a value was meant to be replaced: it is another variable, or extends its own (`PATH: /x:$PATH`).

    Others, such as a command for `eval`, may contain a `$` for the program.
    """
    if re.fullmatch(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*(?::?[-=?+][^}]*)?\})", text):
        return True
    return re.search(rf"\$(?:{re.escape(name)}\b|\{{{re.escape(name)}\}})", text) is not None


def _convert(marked: Marked) -> Any:
    if isinstance(marked.value, dict):
        return {_read_plain(key): _convert(each) for key, each in marked.value.items()}
    if isinstance(marked.value, list):
        return [_convert(each) for each in marked.value]
    return _read_plain(marked.text) if marked.is_plain else marked.value


def _read_plain(text: str) -> Any:
    """Read an unquoted scalar by YAML 1.1; an invalid one, such as a date with day 99, remains text."""
    resolver, constructor = _make_reader()
    tag = resolver.resolve(yaml.ScalarNode, text, (True, False))
    try:
        return constructor.construct_object(yaml.ScalarNode(tag, text))
    except (ValueError, yaml.YAMLError, OverflowError):
        return text


@cache
def _make_reader() -> tuple[Any, Any]:
    return yaml.resolver.Resolver(), yaml.constructor.SafeConstructor()
