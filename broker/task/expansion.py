"""Expand a task's own variables in its paths, as SkyPilot does: `$NAME` and `${NAME}` of `envs` and `secrets`.

Only `workdir`, `file_mounts`, `volumes` and `service` are expanded; `setup` and `run` receive variables in their
environment.

Secrets are left out of `readiness_probe`, because a service's row in the state file has its probe: `fill_probe` adds
them where the request is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from broker.task.reading import Reader
from broker.task.yaml_reader import BYTES_MAX, Marked
from broker.types import ReadinessProbe, Secret

PROBE = "readiness_probe"
FIELDS = ("workdir", "file_mounts", "volumes", "service")
_VARIABLE = r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))"


def expand_variables(
    reader: Reader, document: Marked, values: Mapping[str, str], secret_names: Collection[str] = ()
) -> Marked:
    """Return the document with the fields above expanded; an unknown variable is left as written."""
    if not values:
        return document
    expander = _Expander(values)
    public = _Expander({name: value for name, value in values.items() if name not in secret_names})
    fields = dict(document.value)
    for name in FIELDS:
        if name in fields:
            fields[name] = _expand_service(fields[name], expander, public)
            if max(expander.size, public.size) > BYTES_MAX:
                reader.fault(document.value[name], f"`{name}` is too large after filling in variables")
                fields[name] = replace(fields[name], value=None)
    return replace(document, value=fields)


def fill_probe(probe: ReadinessProbe, secrets: Mapping[str, Secret]) -> ReadinessProbe:
    """Return a probe with the values of the secrets that it refers to, which is not to be stored or shown."""
    if not secrets:
        return probe
    values = {name: secret.value for name, secret in secrets.items()}
    plain, quoted = _Expander(values), _Expander({name: json.dumps(each)[1:-1] for name, each in values.items()})
    return replace(
        probe,
        path=plain.fill(probe.path),
        headers={name: plain.fill(value) for name, value in probe.headers.items()},
        post_data=None if probe.post_data is None else quoted.fill(probe.post_data),
    )


def _expand_service(marked: Marked, expander: _Expander, public: _Expander) -> Marked:
    """Expand a field, and the probe of a service without secrets."""
    if not isinstance(marked.value, dict) or PROBE not in marked.value:
        return expander.expand(marked)
    probe = public.expand(marked.value[PROBE])
    rest = expander.expand(replace(marked, value={**marked.value, PROBE: replace(probe, value=None)}))
    return replace(rest, value={**rest.value, PROBE: probe})


def find_variables(text: str) -> tuple[str, ...]:
    """Return the names of the variables in a text, which after `expand_variables` are those without a value."""
    return tuple(name for _, name in _split(text) if name)


class _Expander:
    """Counts its output: a small file can otherwise expand to a huge one."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.size = 0

    def expand(self, marked: Marked) -> Marked:
        if self.size > BYTES_MAX:
            return marked
        if isinstance(marked.value, str):
            text = self.fill(marked.value)
            return replace(marked, value=text, text=text)
        if isinstance(marked.value, list):
            return replace(marked, value=[self.expand(each) for each in marked.value])
        if isinstance(marked.value, dict):
            pairs = {self.fill(key): (key, each) for key, each in marked.value.items()}
            return replace(
                marked,
                value={key: self.expand(each) for key, (_, each) in pairs.items()},
                keys={key: marked.keys[old] for key, (old, _) in pairs.items()},
            )
        return marked

    def fill(self, text: str) -> str:
        """Return a text with its variables filled in, or as it is once the output is too large."""
        filled = []
        for part in _split(text):
            value = self._values.get(part[1], part[0]) if part[1] else part[0]
            self.size += len(value)
            if self.size > BYTES_MAX:
                return text
            filled.append(value)
        return "".join(filled)


def _split(text: str) -> list[tuple[str, str]]:
    """Split the text into literal pieces and variable names."""
    pieces, end = [], 0
    for found in re.finditer(_VARIABLE, text):
        pieces += [(text[end : found.start()], ""), (found[0], found[1] or found[2])]
        end = found.end()
    return [*pieces, (text[end:], "")]
