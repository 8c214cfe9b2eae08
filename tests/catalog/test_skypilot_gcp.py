"""Google's machines and accelerators are rows of their own in SkyPilot's catalog; an offer is one of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.catalog.skypilot_gcp import compose
from broker.types import Offer

MACHINE = Offer(
    cloud="gcp", region="r", zone="r-a", instance_type="", vcpus=8, memory_gib=30, ondemand_usd_hour=1.0,
    spot_usd_hour=0.25,
)  # fmt: skip
NAMES = (
    "n1-standard-8", "n1-highmem-8", "n1-standard-16", "n1-standard-32", "n1-standard-64", "g2-standard-4",
    "g2-standard-24", "a2-highgpu-8g", "a2-megagpu-16g", "a3-megagpu-8g",
)  # fmt: skip
MACHINES = [replace(MACHINE, instance_type=name) for name in NAMES]
PLAIN = {name for name in NAMES if name.startswith("n1-")}


def sell(accelerator: str | None, count: float, *, zone: str = "r-a") -> Offer:
    return replace(
        MACHINE, instance_type="", zone=zone, accelerator=accelerator, accelerator_count=count, ondemand_usd_hour=2.0,
        spot_usd_hour=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accelerator", "count", "names"),
    [
        ("A100", 8, ["a2-highgpu-8g"]),
        ("A100", 16, ["a2-megagpu-16g"]),
        ("H100-MEGA", 8, ["a3-megagpu-8g"]),
        ("L4", 1, ["g2-standard-4"]),
        ("L4", 2, ["g2-standard-24"]),
        ("T4", 1, ["n1-standard-8+1xT4", "n1-highmem-8+1xT4"]),
        ("T4", 2, ["n1-standard-16+2xT4"]),
        ("V100", 8, ["n1-standard-64+8xV100"]),
        ("T4", 3, []),
        ("A100", 4, []),
    ],
)
def test_an_accelerator_is_sold_with_the_machines_that_carry_it(
    accelerator: str, count: float, names: list[str]
) -> None:
    offers = [each for each in compose(MACHINES, [sell(accelerator, count)]) if each.accelerator]
    assert [each.instance_type for each in offers] == names
    assert all(each.accelerator_count == count for each in offers)
    assert all((each.ondemand_usd_hour, each.spot_usd_hour) == (3.0, None) for each in offers), "the sum, if both sell"


def test_a_nameless_accelerator_and_one_in_another_zone_are_not_joined() -> None:
    offers = list(compose(MACHINES, [sell("T4", 1, zone="r-b")]))
    assert {each.instance_type for each in offers} == PLAIN
    assert [each.instance_type for each in compose(MACHINES, [sell(None, 2)])][-1] == "n1-standard-16+2x"


def test_machines_of_families_with_accelerators_are_not_sold_without_them() -> None:
    assert {each.instance_type for each in compose(MACHINES, [])} == PLAIN


def test_a_slice_is_sold_whole_and_counted_in_chips() -> None:
    (v4, v5e) = (next(compose([], [sell(name, 1)])) for name in ("tpu-v4-8", "tpu-v5litepod-8"))
    assert (v4.instance_type, v4.accelerator, v4.accelerator_count) == ("tpu-v4-8", "TPU-v4", 4)
    assert (v5e.accelerator, v5e.accelerator_count) == ("TPU-v5e", 8)
