"""Egress of inputs, outputs and checkpoints, and the cost of storing them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.optimizer.data_cost import find_bucket_cloud, measure_restore_s, price_data
from broker.optimizer.egress import GB_PER_GIB, EgressTable
from broker.types import CheckpointSpec, DataSet, EgressPrice, Task
from tests.optimizer.market import offer, plan, read

PRICES = [
    EgressPrice(cloud="aws", from_region="*", target="internet", usd_per_gb=0.09),
    EgressPrice(cloud="gcp", from_region="*", target="internet", usd_per_gb=0.12),
    EgressPrice(cloud="gcp", from_region="asia", target="internet", usd_per_gb=0.19),
    EgressPrice(cloud="lambda", from_region="*", target="internet", usd_per_gb=0.0),
]
TABLE = EgressTable.from_prices(PRICES)
GIB = 100.0


def task(**fields: object) -> Task:
    return replace(Task(), **fields)  # type: ignore[arg-type]


def test_a_bucket_of_the_same_cloud_is_free_and_another_clouds_is_not() -> None:
    reading = task(inputs=(DataSet(url="s3://data", size_gib=GIB),))
    assert price_data(reading, "aws", "us-east-1", TABLE).start_usd == 0
    assert price_data(reading, "gcp", "us", TABLE).start_usd == pytest.approx(GIB * GB_PER_GIB * 0.09)


def test_outputs_leave_the_region_where_they_are_made() -> None:
    writing = task(outputs=(DataSet(url="s3://out", size_gib=GIB),))
    assert price_data(writing, "gcp", "asia", TABLE).finish_usd == pytest.approx(GIB * GB_PER_GIB * 0.19)
    assert price_data(writing, "gcp", "us", TABLE).finish_usd == pytest.approx(GIB * GB_PER_GIB * 0.12)
    assert price_data(writing, "aws", "us-east-1", TABLE).finish_usd == 0


def test_two_checkpoints_are_stored_at_the_price_of_a_month_of_hours() -> None:
    saving = task(checkpoint=CheckpointSpec(size_gib=GIB))
    month_usd = 730.0 * price_data(saving, "aws", "us-east-1", TABLE).storage_usd_hour
    assert month_usd == pytest.approx(2 * GIB * GB_PER_GIB * 0.023)


def test_reading_from_r2_is_free_anywhere() -> None:
    reading = task(inputs=(DataSet(url="r2://data", size_gib=GIB),))
    assert price_data(reading, "gcp", "us", TABLE).start_usd == 0


@pytest.mark.parametrize(
    ("to", "envs"),
    [
        ("s3://mine/ckpt", {}),
        (None, {"BROKER_CHECKPOINT_DIR": "s3://mine/ckpt"}),
        ("s3://mine/ckpt", {"BROKER_CHECKPOINT_DIR": "gs://other/ckpt"}),  # the field decides where a job's are written
    ],
)
def test_checkpoints_in_another_clouds_bucket_cost_at_every_write_and_every_restore(
    to: str | None, envs: dict[str, str]
) -> None:
    far = task(checkpoint=CheckpointSpec(size_gib=GIB, to=to), envs=envs)
    priced = price_data(far, "gcp", "us", TABLE)
    assert priced.checkpoint_usd == pytest.approx(GIB * GB_PER_GIB * 0.12)
    assert priced.restore_usd == pytest.approx(GIB * GB_PER_GIB * 0.09)
    near = price_data(far, "aws", "us-east-1", TABLE)
    assert near.checkpoint_usd == near.restore_usd == 0
    assert near.storage_usd_hour == priced.storage_usd_hour > 0


def test_data_draws_the_plan_to_its_cloud() -> None:
    cheap, near = offer("gcp", spot_usd_hour=9.9), offer("aws", spot_usd_hour=10.0)
    work = read("resources: {accelerators: H100:8, use_spot: true}\ngoal: {work: 10h}")
    assert plan(work, [cheap, near]).choice.placement.offer is cheap
    heavy = replace(work, inputs=(DataSet(url="s3://data", size_gib=500),))
    chosen = plan(heavy, [cheap, near], egress=PRICES)
    assert chosen.choice.placement.offer is near
    lost = chosen.estimates[1]
    assert lost.breakdown is not None
    # once at the start, and again after every preemption
    assert lost.breakdown.egress_usd == pytest.approx(
        500 * GB_PER_GIB * 0.09 * (1 + (lost.expected_preemptions or 0.0))
    )
    assert lost.expected_usd == pytest.approx(
        lost.breakdown.compute_usd + lost.breakdown.egress_usd + lost.breakdown.storage_usd
    )


def test_checkpoints_draw_the_plan_to_the_cloud_of_their_bucket() -> None:
    cheap, near = offer("gcp", spot_usd_hour=9.9), offer("aws", spot_usd_hour=10.0)
    text = "resources: {accelerators: H100:8}\ngoal: {work: 10h}\ncheckpoint: {size: 100GB, every: 1h%s}"
    assert plan(text % "", [cheap, near], egress=PRICES).choice.placement.offer is cheap
    assert plan(text % ", to: s3://mine/ckpt", [cheap, near], egress=PRICES).choice.placement.offer is near


@pytest.mark.parametrize("count", [1, 3])
def test_data_that_leave_once_are_charged_once_wherever_the_hours_are(count: int) -> None:
    """A tight deadline: most hours are on-demand, some on spot of several zones, and the output leaves in any case."""
    offers = [offer(zone=f"us-east-1{'abc'[n]}", spot_usd_hour=10.0 + n) for n in range(count)]
    text = "resources: {accelerators: H100:8}\ngoal: {work: 40h, deadline: 43h, hour_value: 0}"
    bare = {each.placement: each for each in plan(text, offers, egress=PRICES).estimates}
    for each in plan(text + "\noutputs: {gs://out: 5000GB}", offers, egress=PRICES).estimates:
        parts, own = each.breakdown, bare[each.placement]
        assert parts is not None and own.breakdown is not None
        assert each.placement.is_spot is False or 0.3 < parts.ondemand_hours / parts.spot_hours < 3
        assert parts.egress_usd == pytest.approx(5000 * GB_PER_GIB * 0.09)
        assert parts.compute_usd == pytest.approx(own.breakdown.compute_usd)
        assert parts.ondemand_usd_hour == pytest.approx(own.breakdown.ondemand_usd_hour)


def test_on_demand_far_from_the_data_costs_what_they_cost_more_there() -> None:
    """Spot is offered beside the bucket, on-demand only elsewhere."""
    near, far = offer(ondemand_usd_hour=None), offer("gcp", spot_usd_hour=None)
    text = "resources: {accelerators: H100:8}\ngoal: {work: 40h, deadline: 43h}\ninputs: {s3://data: 1000GB}"
    spot = next(each for each in plan(text, [near, far], egress=PRICES).estimates if each.placement.is_spot)
    assert spot.breakdown is not None and spot.breakdown.egress_usd == 0
    assert spot.breakdown.ondemand_usd_hour == pytest.approx(40.0 + 1000 * GB_PER_GIB * 0.09 / 40)


def test_egress_prices_have_no_effect_without_data() -> None:
    text = "resources: {accelerators: H100:8}\ngoal: {work: 10h}"
    with_prices, without = plan(text, [offer()], egress=PRICES), plan(text, [offer()])
    assert [each.expected_usd for each in with_prices.estimates] == [each.expected_usd for each in without.estimates]


@pytest.mark.parametrize(
    ("url", "cloud"),
    [
        ("s3://a/b", "aws"),
        ("gs://a", "gcp"),
        ("az://a", "azure"),
        ("r2://a", "cloudflare"),
        ("/data", None),
        ("", None),
    ],
)
def test_url_scheme_determines_the_cloud_of_a_bucket(url: str, cloud: str | None) -> None:
    assert find_bucket_cloud(url) == cloud


@given(st.floats(0.1, 1e5))
def test_restore_time_is_proportional_to_the_size_in_bits(size_gib: float) -> None:
    assert measure_restore_s(size_gib) * 10e9 / 8 / 2**30 == pytest.approx(size_gib)  # at 10 Gbit/s
