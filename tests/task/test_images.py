"""Images of machines belong to a region: neither a file nor a flag starts one in another region."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.errors import TaskError
from broker.task.loader import load_tasks_text
from broker.task.override import override_resources
from broker.types import Resources, Task


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


def load_resources(text: str) -> Sequence[Resources]:
    return load(f"resources: {text}").resources


def find_message(text: str) -> str:
    with pytest.raises(TaskError) as caught:
        load(text)
    return " ".join(each.message for each in caught.value.issues)


def test_region_without_an_image_is_refused_instead_of_moved() -> None:
    """The task started in us-east-1, although its file says eu-west-1."""
    images = "image_id: {us-east-1: ami-1, us-west-2: ami-2}"
    message = "`image_id` has no image for the region `eu-west-1`"
    assert message in find_message(f"resources: {{infra: aws/eu-west-1, {images}}}")
    assert message in find_message(f"resources: {{cloud: aws, {images}, any_of: [{{region: eu-west-1}}]}}")
    any_region = load_resources("{infra: aws/eu-west-1, image_id: {null: ami-1}}")
    assert [(each.region, each.image_id) for each in any_region] == [("eu-west-1", "ami-1")]


@pytest.mark.parametrize(
    ("infra", "expected"),
    [
        ("aws/us-west-2", [("aws", "us-west-2", "ami-2")]),
        ("aws", [("aws", "us-east-1", "ami-1"), ("aws", "us-west-2", "ami-2")]),
        ("*", [("aws", "us-east-1", "ami-1"), ("aws", "us-west-2", "ami-2")]),
        ("local", [("local", None, "ami-1"), ("local", None, "ami-2")]),  # with a notice that prevents the launch
    ],
)
def test_flag_for_a_place_selects_the_image_of_its_region(infra: str, expected: list[tuple[str, str, str]]) -> None:
    task = load("resources: {infra: aws, image_id: {us-east-1: ami-1, us-west-2: ami-2}}")
    moved = override_resources(task, infra=infra).resources
    assert [(each.cloud, each.region, each.image_id) for each in moved] == expected


@pytest.mark.parametrize("infra", ["aws/eu-west-1", "gcp", "k8s"])
def test_flag_for_a_place_without_an_image_is_refused(infra: str) -> None:
    task = load("resources: {infra: aws, image_id: {us-east-1: ami-1, us-west-2: ami-2}}")
    with pytest.raises(TaskError, match=f"`image_id` has no image for `{infra}`"):
        override_resources(task, infra=infra)


def test_flag_for_a_place_keeps_a_container_and_a_global_image() -> None:
    container = load("resources: {infra: aws/us-east-1, image_id: 'docker:ubuntu'}")
    moved = override_resources(container, infra="gcp/us-central1").resources
    assert [(each.region, each.image_id) for each in moved] == [("us-central1", "docker:ubuntu")]
    image = "projects/p/global/images/i"
    family = load(f"resources: {{infra: gcp/us-central1, image_id: {image}}}")
    moved = override_resources(family, infra="gcp/europe-west4").resources
    assert [(each.region, each.image_id) for each in moved] == [("europe-west4", image)]
    mapped = load("resources: {infra: aws, image_id: {us-east-1: 'docker:a', us-west-2: 'docker:b'}}")
    moved = override_resources(mapped, infra="aws/us-west-2").resources
    assert [(each.region, each.image_id) for each in moved] == [("us-west-2", "docker:b")]
