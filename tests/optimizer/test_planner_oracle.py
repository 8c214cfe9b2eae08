"""Plans against an independent statement of what a request admits, and bills computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import NoOfferError
from broker.optimizer.egress import GB_PER_GIB, REGION_GBIT_S, EgressTable, price_transfer
from broker.optimizer.ranking import SAME_SCORE
from broker.optimizer.terms import list_terms
from broker.types import AcceleratorFigures, EgressPrice, Offer, Quantity, Resources, Task
from tests.optimizer.market import offer, plan, read
from tests.tiers import examples

prices = st.one_of(st.none(), st.integers(1, 99).map(float))
sold = st.builds(
    Offer,
    cloud=st.sampled_from(["aws", "gcp", "local"]),
    region=st.sampled_from(["us-east-1", "EU-west-1"]),
    zone=st.sampled_from([None, "a", "B"]),
    instance_type=st.sampled_from(["Small", "n1-standard-4+1xT4"]),
    vcpus=st.sampled_from([4.0, 8.0]),
    memory_gib=st.sampled_from([15.0, 32.0]),
    accelerator=st.sampled_from([None, "T4", "H100"]),
    accelerator_count=st.sampled_from([0.5, 1.0, 2.0]),
    ondemand_usd_hour=prices,
    spot_usd_hour=prices,
)
quantities = st.one_of(
    st.none(), st.builds(Quantity, value=st.sampled_from([4.0, 8.0, 15.0]), is_minimum=st.booleans())
)
asked = st.builds(
    Resources,
    cloud=st.sampled_from([None, None, "aws", "GCP", "local"]),
    region=st.sampled_from([None, None, "eu-west-1", "us-east-1"]),
    zone=st.sampled_from([None, None, "A", "b"]),
    instance_type=st.sampled_from([None, None, "small", "n1-standard-4", "N1-standard-4+1xt4"]),
    accelerator=st.sampled_from([None, "t4", "H100"]),
    accelerator_count=st.sampled_from([0.5, 1.0, 2.0]),
    cpus=quantities,
    memory_gib=quantities,
    memory_gib_per_vcpu=st.sampled_from([None, None, 4.0]),
    use_spot=st.sampled_from([None, False, True]),
    usd_hour_max=st.sampled_from([None, None, 50.0]),
)


def is_same(request: str | None, name: str | None) -> bool:
    return request is None or request.lower() == (name or "").lower()


def admits(request: Resources, each: Offer) -> bool:
    """State what the documentation of `resources:` says about one offer."""
    is_host = (request.instance_type or "").lower() == "n1-standard-4" and each.instance_type.startswith("n1-")
    counts = {request.accelerator_count} | ({1.0} if request.accelerator_count < 1 else set())
    return (
        (each.cloud != "local" if request.cloud is None else is_same(request.cloud, each.cloud))
        and is_same(request.region, each.region)
        and is_same(request.zone, each.zone)
        and (is_same(request.instance_type, each.instance_type) or (is_host and request.accelerator is not None))
        and is_same(request.accelerator, each.accelerator)
        and (request.accelerator is None or each.accelerator_count in counts)
        and (request.cpus is None or request.cpus.admits(each.vcpus))
        and (
            each.memory_gib >= request.memory_gib_per_vcpu * each.vcpus
            if request.memory_gib_per_vcpu is not None
            else request.memory_gib is None or request.memory_gib.admits(each.memory_gib)
        )
    )


def find_price(each: Offer, *, is_spot: bool) -> float | None:
    return each.spot_usd_hour if is_spot else each.ondemand_usd_hour


@given(st.lists(sold, max_size=12), asked, st.integers(1, 3))
@settings(max_examples=examples(400))
def test_a_plan_lists_exactly_what_the_request_admits_cheapest_first(
    offers: list[Offer], request: Resources, nodes: int
) -> None:
    is_spot = bool(request.use_spot)
    found = [find_price(each, is_spot=is_spot) for each in offers if admits(request, each)]
    limit = request.usd_hour_max or 1e9
    expected = sorted(nodes * price for price in found if price is not None and price <= limit)
    try:
        made = plan(Task(resources=(request,), num_nodes=nodes), offers)
    except NoOfferError:
        assert expected == []
        return
    assert [each.placement.usd_hour for each in made.estimates] == expected
    assert all(each.placement.is_spot is is_spot and admits(request, each.placement.offer) for each in made.estimates)


@given(st.lists(sold, min_size=1, max_size=12), asked)
def test_each_offer_with_the_accelerator_is_listed_or_counted_by_one_filter(
    offers: list[Offer], request: Resources
) -> None:
    priced = [replace(each, ondemand_usd_hour=9.0) for each in offers]
    try:
        made = plan(Task(resources=(replace(request, use_spot=False),)), priced)
    except NoOfferError:
        return
    of_card = [each for each in priced if is_same(request.accelerator, each.accelerator)]
    assert len(made.estimates) + sum(each.count for each in made.rejections) == len(of_card)


def test_offers_of_clouds_that_are_not_set_up_are_counted_and_the_first_is_named() -> None:
    offers = [offer("gcp"), offer("gcp", "eu"), offer("oci"), offer("aws")]
    (rejected,) = plan("resources: {accelerators: H100:8}", offers, usable_clouds=frozenset({"aws"})).rejections
    assert (rejected.filter, rejected.count, rejected.nearest) == ("cloud not set up", 3, "gcp")


def test_the_bill_of_an_on_demand_run_with_its_data_is_the_sum_worked_out_by_hand() -> None:
    """10 h of work with a stall of 6 min each hour are 11 h on 2 nodes at 40 USD; one GiB is 1.0737 GB.

    The start of 5 min and 8.6 s, in which a checkpoint could be read back, precedes them. Half of the first 30 s and
    another 30 s of it are not billed.
    100 GiB are read from S3 once, 50 GiB are written to it, and 10 checkpoints of 10 GiB too; two of them are kept.
    """
    text = (
        "resources: {accelerators: H100:8, use_spot: false}\nnum_nodes: 2\n"
        "goal: {work: 10h, deadline: 11.1h, budget: 917}\ncheckpoint: {every: 1h, stall: 6m, size: 10GB}\n"
        "inputs: {s3://in: 100GB}\noutputs: {s3://out: 50GB}\nenvs: {BROKER_CHECKPOINT_DIR: s3://mine/ckpt}"
    )
    egress = [
        EgressPrice(cloud="aws", from_region="*", target="internet", usd_per_gb=0.09),
        EgressPrice(cloud="gcp", from_region="*", target="internet", usd_per_gb=0.12),
    ]
    (found,) = plan(text, [offer("gcp")], egress=egress).estimates
    parts = found.breakdown
    assert parts is not None
    start = (300 + GB_PER_GIB * 10 * 8 / REGION_GBIT_S) / 3600
    hours, billed = 11 + start, 11 + start - 45 / 3600
    machines = 2 * billed * 40.0
    transfer = GB_PER_GIB * (100 * 0.09 + 50 * 0.12 + 10 * 10 * 0.12)
    storage = GB_PER_GIB * 10 * 2 * 0.023 / 730 * hours
    assert (parts.work_hours, parts.stall_hours, parts.recovery_hours) == pytest.approx((10, 1, start))
    assert found.expected_hours == pytest.approx(hours)
    assert (parts.compute_usd, parts.egress_usd, parts.storage_usd) == pytest.approx((machines, transfer, storage))
    assert found.expected_usd == pytest.approx(machines + transfer + storage)
    assert (found.deadline_chance, found.budget_chance) == (1.0, 1.0)
    assert (parts.spot_hours, parts.ondemand_hours, parts.ondemand_usd_hour) == pytest.approx((0, billed, 80))


def test_places_above_the_price_limit_are_not_places_to_move_to() -> None:
    """The only place within the limit is full at the moment, so the job waits, whatever is open above the limit."""
    text = "resources: {accelerators: H100:8, use_spot: true, max_hourly_cost: %s}\ngoal: {work: 40h}"
    offers = [offer(), *(offer(region=f"r{number}", spot_usd_hour=11.0) for number in range(5))]

    def find_hours(limit: float, offers: list[Offer]) -> float:
        made = plan(text % limit, offers, is_refused=lambda each: each.offer.region == "us-east-1")
        return next(each for each in made.estimates if each.placement.offer.region == "us-east-1").expected_hours or 0.0

    assert find_hours(10.5, offers) == find_hours(10.5, offers[:1]) > find_hours(11, offers)


def test_the_egress_table_prices_each_kind_of_move_by_the_leaving_cloud() -> None:
    table = EgressTable.from_prices(
        [
            EgressPrice(cloud="gcp", from_region="us", target="same_region", usd_per_gb=0.01),
            EgressPrice(cloud="gcp", from_region="*", target="same_cloud_other_region", usd_per_gb=0.02),
            EgressPrice(cloud="gcp", from_region="*", target="internet", usd_per_gb=0.12),
        ]
    )
    here = offer("gcp", "us")

    def move(target: Offer, source: Offer = here) -> tuple[float, float, bool]:
        found = price_transfer(source, target, 100.0, table)
        return found.usd / (100 * GB_PER_GIB), found.hours * 3600 / (800 * GB_PER_GIB), found.is_assumed

    assert move(here) == pytest.approx((0.01, 1 / 10, False))
    assert move(offer("gcp", "eu")) == pytest.approx((0.02, 1 / 5, False))
    assert move(offer("aws")) == pytest.approx((0.12, 1 / 5, False))
    assert move(offer("gcp", "eu"), offer("gcp", "eu")) == pytest.approx((0.0, 1 / 10, False))
    assert move(here, offer("unknown")) == pytest.approx((0.12, 1 / 5, True))
    assert price_transfer(offer("unknown"), here, 0.0, table).is_assumed is False


def test_a_task_whose_work_is_done_costs_nothing_more() -> None:
    task = read("resources: {accelerators: H100:8}\ngoal: {work: 1h}\ncheckpoint: {every: 1h}")
    assert task.goal is not None
    found = plan(replace(task, goal=replace(task.goal, work_hours=0.0)), [offer()])
    assert [(each.expected_usd, each.expected_hours) for each in found.estimates] == [(0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("hour_value", [0, 5, 500])
def test_the_whole_ranking_is_in_the_order_of_cost_and_the_value_of_time(hour_value: int) -> None:
    """The machines of two alternatives take different hours, so the order by dollars differs."""
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("H100", 900.0), ("A100", 300.0))
    }
    offers = [
        offer(region=f"r{index}", accelerator=name, instance_type=name, ondemand_usd_hour=30.0 + usd, spot_usd_hour=usd)
        for index, (name, usd) in enumerate([("A100", 3.0), ("H100", 11.0), ("A100", 5.0), ("H100", 8.0)])
    ]
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 90, "on": "A100:8"}, hour_value: %d}'
    found = plan(text % hour_value, offers, figures=figures).estimates
    scores = [(each.expected_usd or 0) + hour_value * (each.expected_hours or 0) for each in found]
    assert len(found) == 8 and scores[1:] == sorted(scores[1:]) and scores[0] <= min(scores) * SAME_SCORE


def test_a_few_minutes_on_demand_are_not_listed_next_to_the_hours_on_spot() -> None:
    (found,) = plan("resources: {accelerators: H100:8, use_spot: true}\ngoal: {work: 10h}", [offer()]).estimates
    assert found.breakdown is not None

    def find_machines(hours: float) -> str:
        parts = replace(found.breakdown, ondemand_hours=hours, ondemand_usd_hour=40.0)  # type: ignore[type-var]
        return dict(list_terms(Task(), replace(found, breakdown=parts)))["machines"]

    assert "on-demand" not in find_machines(0.04) and "on-demand" in find_machines(0.06)


def test_offers_of_other_accelerators_are_not_counted_as_excluded() -> None:
    offers = [offer(), offer(region="eu"), offer(accelerator="A100"), offer(accelerator="A100", region="eu")]
    made = plan("resources: {accelerators: h100:8, region: us-east-1}", offers)
    assert [(each.filter, each.count, each.nearest) for each in made.rejections] == [("region", 1, "eu")]
