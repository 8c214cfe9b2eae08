"""The parts of `config.kubernetes.pod_config` that are merged into pods; SkyPilot merges any part.

A pod has one container of the task, so the list `containers` has one entry, whose name does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from broker.task.reading import Reader
from broker.task.tables import Section
from broker.task.yaml_reader import unmark

METADATA: Mapping[str, type] = {"annotations": dict, "labels": dict}
POD: Mapping[str, type] = {
    "affinity": dict, "imagePullSecrets": list, "nodeSelector": dict, "priorityClassName": str, "runtimeClassName": str,
    "schedulerName": str, "securityContext": dict, "serviceAccountName": str, "tolerations": list, "volumes": list,
}  # fmt: skip
CONTAINER: Mapping[str, type] = {
    "env": list, "envFrom": list, "imagePullPolicy": str, "securityContext": dict, "volumeMounts": list,
}  # fmt: skip
_HINT = "remove it: pods may have the parts in docs/KUBERNETES.md (`/dev/shm` is large without a volume)"


def read_pod_config(reader: Reader, section: Section) -> str:
    """Return the settings as JSON, "" for none. Unsupported parts prevent a launch on Kubernetes."""
    config: Section | None = section.get("config")
    settings = unmark((config.get("kubernetes") or {}).get("pod_config")) if config else None
    if not settings:
        return ""
    assert config is not None
    for part in find_unsupported(settings):
        message = f"`pod_config`: `{part}` is not supported"
        reader.warn(config.find_key("kubernetes"), "kubernetes", message, _HINT, blocks_launch=True, cloud="kubernetes")
    return json.dumps(settings, sort_keys=True)


def find_unsupported(settings: Any) -> Iterator[str]:
    """Yield the paths of parts that cannot be merged, such as `spec.hostNetwork`."""
    if not isinstance(settings, dict):
        yield "pod_config"
        return
    yield from (key for key in settings if key not in ("metadata", "spec", "apiVersion", "kind"))
    yield from _check(settings.get("metadata"), METADATA, "metadata")
    spec = settings.get("spec")
    yield from _check(spec, {**POD, "containers": list}, "spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if isinstance(containers, list) and len(containers) > 1:
        yield "spec.containers.1"
    if isinstance(containers, list) and containers:
        yield from _check(containers[0], {**CONTAINER, "name": str}, "spec.containers.0")


def _check(part: Any, known: Mapping[str, type], path: str) -> Iterator[str]:
    if part is None:
        return
    if not isinstance(part, dict):
        yield path
        return
    for key, value in part.items():
        is_list_of_mappings = not isinstance(value, list) or all(isinstance(each, dict) for each in value)
        if key not in known or not isinstance(value, known[key]) or not is_list_of_mappings:
            yield f"{path}.{key}"
