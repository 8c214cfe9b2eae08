"""Tables of facts that only a cloud can change name where they come from, and when that was last compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CLOUDS = Path(__file__).parents[2] / "broker/clouds"
SOURCE = re.compile(r'https://\S+|guide, "[^"]+"|, "Find [^"]+"')
DATE = re.compile(r"\b20\d\d-(0[1-9]|1[0-2])-[0-3]\d\b")


def read_comment_above(file: str, name: str) -> str:
    """Return the comment above the assignment of `name`; assignments between both share it."""
    lines = (CLOUDS / file).read_text().splitlines()
    place = next(index for index, line in enumerate(lines) if re.match(rf"{name}\b.*=", line))
    while place and not lines[place].startswith("#"):
        place -= 1
        assert lines[place].strip(), f"{name} has no comment"
    first = place
    while lines[first - 1].startswith("#"):
        first -= 1
    return " ".join(line.lstrip("# ") for line in lines[first : place + 1])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("aws/image_rules.py", "GPU_IMAGE"),
        ("aws/image_rules.py", "NEURON_IMAGE"),
        ("aws/image_rules.py", "PLAIN_IMAGE"),
        ("aws/image_rules.py", "IMAGE_RULES"),
        ("aws/quotas.py", "QUOTAS"),
        ("aws/startable.py", "MANY_CARDS"),
        ("gcp/images.py", "GPU_FAMILIES"),
        ("gcp/images.py", "OLD_GPU_FAMILIES"),
        ("gcp/images.py", "CPU_FAMILIES"),
        ("gcp/images.py", "ARM_FAMILIES"),
        ("gcp/machine.py", "HYPERDISK_MACHINES"),
        ("gcp/machine.py", "RDMA_MACHINES"),
        ("gcp/quotas.py", "GPU_METRICS"),
    ],
)
def test_table_names_its_source_and_when_it_was_compared(file: str, name: str) -> None:
    comment = read_comment_above(file, name)
    assert SOURCE.search(comment), f"no source: {comment}"
    assert DATE.search(comment), f"no date: {comment}"
