"""Expand a task's own variables in its paths, as SkyPilot does: `$NAME` and `${NAME}` of `envs` and `secrets`.

Only `workdir`, `file_mounts`, `volumes` and `service` are expanded; `setup` and `run` receive variables in their
environment.

The state file has these fields, and messages show them, so secrets stay out of them. In `readiness_probe`, references
to secrets are kept, and `fill_probe` fills them in where the request is sent. The login in the URL of a repository is
filled in, because only the clone's folder is stored. Everywhere else, a reference to a secret is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from broker.task.reading import Reader
from broker.task.yaml_reader import BYTES_MAX, Marked
from broker.types import ReadinessProbe, Secret

PROBE = "readiness_probe"
FIELDS = ("workdir", "file_mounts", "volumes", "service")
_LOGIN = r"(?<=//)[^/@]*@"  # in a URL: a user, a token, or both
_VARIABLE = r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))"


def expand_variables(
    reader: Reader, document: Marked, values: Mapping[str, str], secret_names: Collection[str] = ()
) -> Marked:
    """Return the document with the fields above expanded; an unknown variable is left as written.

    A field that refers to one of the secrets, where it would be stored, is reported and has no value.
    """
    if not values and not secret_names:
        return document
    expander = _Expander(values)
    public = _Expander({name: value for name, value in values.items() if name not in secret_names})
    fields = dict(document.value)
    for name in FIELDS:
        if name in fields:
            if _refuse_secrets(reader, name, fields[name], secret_names):
                fields[name] = replace(fields[name], value=None)
                continue
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


def _refuse_secrets(reader: Reader, field: str, marked: Marked, secret_names: Collection[str]) -> bool:
    """Report each reference to a secret that would be stored; return whether there is one."""
    found = [
        (place, name)
        for place, text in (_list_texts(marked, field) if secret_names else ())
        for name in find_variables(text)
        if name in secret_names
    ]
    for (line, column), name in found:
        message = f"`{field}` refers to the secret `{name}`, but it is stored and shown in clear text"
        reader.note(line, column, message, f"declare `{name}` under `envs` if it may be seen, or use it in `setup`")
    return bool(found)


def _list_texts(marked: Marked, field: str) -> Iterator[tuple[tuple[int, int], str]]:
    """List the texts of a field that are stored, with their positions."""
    if isinstance(marked.value, str):
        yield (marked.line, marked.column), marked.value
    elif isinstance(marked.value, list):
        for each in marked.value:
            yield from _list_texts(each, field)
    elif isinstance(marked.value, dict):
        for key, each in marked.value.items():
            yield marked.keys[key], key
            if field == "workdir" and key == "url" and isinstance(each.value, str):
                yield (each.line, each.column), re.sub(_LOGIN, "", each.value)
            elif not (field == "service" and key == PROBE):
                yield from _list_texts(each, field)


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
            return replace(marked, value=text, text=text, is_plain=marked.is_plain and text == marked.value)
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
