"""Fields of a task that are stored contain no secret: a reference to one is refused where it would be stored."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from broker.app.repositories import strip_credentials
from broker.errors import TaskError
from broker.task.codec import encode_task
from broker.task.loader import load_tasks_text

CANARY = "canary-8f3a"


def refuse(text: str, *, secrets: Mapping[str, str] | None = None) -> list[str]:
    """Return where a task is refused, and for which name."""
    with pytest.raises(TaskError) as caught:
        load_tasks_text(text, "task.yaml", secrets=secrets)
    assert CANARY not in str(caught.value) + repr(caught.value.issues)
    return [f"{each.line}:{each.column} {each.message.split('`')[3]}" for each in caught.value.issues]


@pytest.mark.parametrize(
    ("field", "places"),
    [
        ("workdir: /data/${TOKEN}", ["3:10"]),
        ("workdir: {url: 'https://x.org/$TOKEN/a.git'}", ["3:16"]),
        ("workdir: {url: 'https://x.org/a.git', ref: $TOKEN}", ["3:44"]),
        ("file_mounts: {/data: 's3://${TOKEN}/x'}", ["3:22"]),
        ("file_mounts: {/data/$TOKEN: s3://bucket/x}", ["3:15"]),
        ("file_mounts: {/data: {source: 's3://b/$TOKEN'}}", ["3:31"]),
        ("file_mounts: {/data: {name: $TOKEN, store: s3, source: [./a, ./$TOKEN]}}", ["3:29", "3:62"]),
        ("volumes: {/data: $TOKEN}", ["3:18"]),
        ("service: {ports: 80, readiness_probe: /, tls: {keyfile: $TOKEN, certfile: c}}", ["3:57"]),
    ],
)
def test_a_secret_that_would_be_stored_is_refused_at_its_place(field: str, places: list[str]) -> None:
    wanted = [f"{place} TOKEN" for place in places]
    assert refuse(f"run: x\nsecrets: {{TOKEN: {CANARY}}}\n{field}") == wanted
    assert refuse(f"run: x\nsecrets: {{TOKEN: null}}\n{field}") == wanted, "also by `plan`, which needs no value"
    assert refuse(f"run: x\nsecrets: [secrets:TOKEN]\n{field}", secrets={"TOKEN": CANARY}) == wanted
    assert refuse(f"run: x\nenvs: {{TOKEN: a}}\n{field}", secrets={"TOKEN": CANARY}) == wanted


def test_only_the_login_of_a_repository_may_be_a_secret_because_it_is_not_stored() -> None:
    text = f"run: x\nsecrets: {{TOKEN: {CANARY}}}\nworkdir: {{url: 'https://me:$TOKEN@x.org/a.git', ref: main}}"
    (task,) = load_tasks_text(text, "task.yaml")
    assert task.repository is not None and task.repository.url == f"https://me:{CANARY}@x.org/a.git"
    assert strip_credentials(task.repository.url) == "https://x.org/a.git", "which the state has"


def test_variables_of_envs_are_filled_in_beside_secrets() -> None:
    text = f"run: echo $TOKEN\nenvs: {{BUCKET: b}}\nsecrets: {{TOKEN: {CANARY}}}\nfile_mounts: {{/data: s3://$BUCKET/$OTHER}}"
    (task,) = load_tasks_text(text, "task.yaml")
    assert task.storage_mounts[0].source == ("s3://b/$OTHER",)
    assert CANARY not in encode_task(task)
