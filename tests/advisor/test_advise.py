"""Training advice: compared with published runs, and the errors that users see when it is infeasible."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.advisor.advise import (
    OVERHEAD,
    Advice,
    Option,
    TrainingRequest,
    find_better_batch,
    find_field_speedup,
    find_hours,
    list_layouts,
    make_advice,
    prefer_faster,
)
from broker.advisor.amounts import show_amount
from broker.advisor.infeasible import explain_deadline
from broker.advisor.layout import Training, find_layout, find_smallest_memory
from broker.advisor.task_file import find_learning_rate, name_strategy, write_task
from broker.errors import NoOfferError
from broker.optimizer.memory_model import find_usable_bytes
from broker.optimizer.model_shape import ModelShape, guess_shape
from broker.optimizer.planner import make_plan
from broker.optimizer.roofline import Hardware
from broker.task.loader import load_tasks_text
from broker.types import AcceleratorFigures, Offer

CARDS = {
    each.name: each
    for each in (
        AcceleratorFigures(
            name="A100-80GB", memory_gib=80, bf16_dense_tflops=312, memory_bandwidth_gbs=2039, nvlink_gbs=600
        ),
        AcceleratorFigures(
            name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350, nvlink_gbs=900
        ),
        AcceleratorFigures(name="L4", memory_gib=24, bf16_dense_tflops=121, memory_bandwidth_gbs=300, nvlink_gbs=0),
        AcceleratorFigures(name="T4", memory_gib=16, bf16_dense_tflops=65, memory_bandwidth_gbs=320, nvlink_gbs=0),
    )
}


def sell(
    name: str, count: int, ondemand: float, spot: float, *, cloud: str = "aws", kind: str = "p5.48xlarge"
) -> Offer:
    return Offer(
        cloud=cloud, region="r", zone="ra", instance_type=kind, vcpus=96, memory_gib=1000, accelerator=name,
        accelerator_count=count, accelerator_memory_gib=CARDS[name].memory_gib, ondemand_usd_hour=ondemand,
        spot_usd_hour=spot, interruption_band=5, as_of="2026-01-01",
    )  # fmt: skip


OFFERS = [
    sell("A100-80GB", 8, 32, 12, kind="p4de.24xlarge"),
    sell("H100", 8, 60, 25),
    sell("L4", 1, 0.8, 0.3, kind="g6.xlarge"),
    sell("T4", 1, 0.5, 0.2, kind="g4dn.xlarge"),
]


def train(parameters: float, tokens: float, *, sequence: int = 4096, batch: int = 512) -> Training:
    return Training(shape=guess_shape(parameters), tokens=tokens, sequence=sequence, batch=batch)


def ask(parameters: float = 7e9, tokens: float = 20e9, **request: object) -> Advice:
    return make_advice(
        TrainingRequest(training=train(parameters, tokens), **request),  # type: ignore[arg-type]
        OFFERS,
        CARDS,
        prices_as_of="2026-01-01",
    )


# GPU hours of whole published runs: Touvron 2023 (Llama 2), table 2, A100-80GB, 2 trillion tokens in batches of
# 4 million at 4,096; Dubey 2024 (Llama 3.1 model card), H100, 15.6 trillion at 8,192 for 405B.
RUNS = [
    pytest.param(
        ModelShape(layers=32, width=4096, heads=32, vocabulary=32000, mlp_width=1.5 * 11008),
        "A100-80GB", 128, 2e12, 4096, 1024, 184_320, id="llama2-7b",
    ),
    pytest.param(
        ModelShape(layers=40, width=5120, heads=40, vocabulary=32000, mlp_width=1.5 * 13824),
        "A100-80GB", 128, 2e12, 4096, 1024, 368_640, id="llama2-13b",
    ),
    pytest.param(
        ModelShape(layers=80, width=8192, heads=64, kv_heads=8, vocabulary=32000, mlp_width=1.5 * 28672),
        "A100-80GB", 256, 2e12, 4096, 1024, 1_720_320, id="llama2-70b",
    ),
    pytest.param(
        ModelShape(layers=126, width=16384, heads=128, kv_heads=8, vocabulary=128256, mlp_width=1.5 * 53248),
        "H100", 1024, 15.6e12, 8192, 2048, 30_840_000, id="llama3-405b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "card", "nodes", "tokens", "sequence", "batch", "gpu_hours"), RUNS)
def test_published_gpu_hours_are_met_within_a_factor_of_1_35(
    shape: ModelShape, card: str, nodes: int, tokens: float, sequence: int, batch: int, gpu_hours: float
) -> None:
    training = Training(shape=shape, tokens=tokens, sequence=sequence, batch=batch)
    # Meta's Research SuperCluster: 8 x 200 Gbit/s a node; the H100 cluster 8 x 400.
    network = 200.0 if card == "A100-80GB" else 400.0
    layout = find_layout(training, Hardware(figures=CARDS[card], accelerators=8, network_gbs=network), nodes)
    assert layout is not None
    assert gpu_hours / 1.35 < find_hours(training, layout) * 8 * nodes < gpu_hours * 1.35


def test_llama2_70b_needs_more_than_one_node_of_a100s() -> None:
    hardware = Hardware(figures=CARDS["A100-80GB"], accelerators=8, network_gbs=200)
    training = train(70e9, 1e12, batch=1024)
    assert find_layout(training, hardware, 1) is None  # 16 bytes per parameter alone are 1,040 GiB
    layout = find_layout(training, hardware, 8)
    assert layout is not None
    assert layout.memory.total <= find_usable_bytes(80)
    assert layout.sharding.accelerators == 64


@given(st.floats(1e8, 3e10), st.integers(0, 5))
def test_every_layout_fits_and_uses_every_card(parameters: float, power: int) -> None:
    hardware = Hardware(figures=CARDS["H100"], accelerators=8, network_gbs=400)
    layout = find_layout(train(parameters, 1e10), hardware, 2**power)
    if layout is not None:
        assert layout.memory.fits(80)
        assert layout.sharding.accelerators == 8 * 2**power
        assert layout.sharding.data * layout.micro_batch <= 512
        assert 0 < layout.mfu < 0.6


@given(st.floats(1e9, 1e11), st.integers(0, 4))
def test_memory_per_node_falls_with_the_number_of_nodes(parameters: float, power: int) -> None:
    hardware = Hardware(figures=CARDS["H100"], accelerators=8, network_gbs=400)
    few, many = (find_smallest_memory(train(parameters, 1e10), hardware, 2**each) for each in (power, power + 1))
    assert few is not None and many is not None
    assert many.total <= few.total * 1.0001


def test_options_are_ranked_by_dollars_and_each_card_is_listed_once() -> None:
    advice = ask()
    dollars = [each.usd for each in advice.options]
    assert dollars[1:] == sorted(dollars[1:])
    assert dollars[0] <= min(dollars) * 1.01
    cards = [each.layout.hardware.figures.name for each in advice.options]
    assert len(set(cards)) == len(cards)
    assert "T4" not in cards, "there is no bfloat16 before Ampere"
    hours = [each.hours for each in (advice.options[0], *advice.faster)]
    assert hours == sorted(hours, reverse=True)


def test_dollars_are_those_of_the_plan_with_spot_risk() -> None:
    option = ask(spot=True).options[0]
    assert option.estimate.placement.is_spot
    assert option.hours > option.work_hours
    assert (option.estimate.expected_preemptions or 0) > 0
    parts = option.estimate.breakdown
    assert parts is not None and parts.waiting_hours > 0, "waiting takes time but costs nothing"
    assert option.usd == pytest.approx(parts.spot_hours * parts.spot_usd_hour, rel=0.05)


def test_no_spot_flag_excludes_spot() -> None:
    assert not any(each.estimate.placement.is_spot for each in ask(spot=False).options)


def test_a_deadline_selects_more_cards() -> None:
    relaxed, pressed = (ask(gpus=("A100-80GB",), **request) for request in ({}, {"deadline_hours": 12.0}))
    assert pressed.options[0].gpu_count > relaxed.options[0].gpu_count
    assert all((each.estimate.deadline_chance or 0) >= 0.9 for each in pressed.options)


def test_named_cards_are_the_only_ones() -> None:
    assert {each.layout.hardware.figures.name for each in ask(gpus=("A100-80GB",)).options} == {"A100-80GB"}


def test_a_model_that_is_too_large_reports_its_requirement_and_a_remedy() -> None:
    with pytest.raises(
        NoOfferError, match=r"8 x A100-80GB, requires \d+\.\d GiB per GPU, but only 73\.2 are usable"
    ) as caught:
        ask(70e9, gpus=("A100-80GB",), gpus_max=8)
    enough = int(caught.value.hints[0].split("--max-gpus ")[1].rstrip("`"))
    assert ask(70e9, 1e9, gpus=("A100-80GB",), gpus_max=enough).options
    with pytest.raises(NoOfferError):
        ask(70e9, 1e9, gpus=("A100-80GB",), gpus_max=enough // 2)


def test_a_deadline_that_is_too_early_reports_by_how_much() -> None:
    with pytest.raises(
        NoOfferError, match=r"the fastest option, 16 x H100, takes .* times the limit of 5\.0 h"
    ) as caught:
        ask(deadline_hours=5.0, gpus_max=16)
    assert any("--max-gpus" in hint for hint in caught.value.hints)
    assert any("--deadline" in hint for hint in caught.value.hints)


def test_the_suggested_deadline_can_be_met() -> None:
    with pytest.raises(NoOfferError) as caught:
        ask(deadline_hours=5.0, gpus_max=16)
    hint = next(each for each in caught.value.hints if "--deadline" in each)
    hours = float(hint.split("--deadline ")[1].split("h")[0])
    assert ask(deadline_hours=hours, gpus_max=16, spot=False).options


def test_a_budget_that_is_too_small_reports_the_cheapest_cost() -> None:
    with pytest.raises(NoOfferError, match=r"the cheapest is expected to cost .* USD") as caught:
        ask(budget_usd=10)
    budget = float(caught.value.hints[0].split("--budget ")[1].rstrip("`"))
    with pytest.raises(NoOfferError, match="exceeds the budget"):
        ask(budget_usd=0)
    assert ask(budget_usd=budget).options


def test_no_matching_offer_is_reported() -> None:
    for gpus, words in (((), "supports this precision"), (("H100",), "is among the requested ones")):
        with pytest.raises(NoOfferError, match=f"no offered GPU of known speed {words}"):
            make_advice(TrainingRequest(training=train(7e9, 1e9), gpus=gpus), [], CARDS, prices_as_of="")


@pytest.mark.parametrize("parameters", [125e6, 7e9, 70e9])
@pytest.mark.parametrize("cards", [("A100-80GB",), ("H100",)])
def test_the_task_file_loads_plans_as_promised_and_the_trainer_takes_its_flags(
    parameters: float, cards: tuple[str, ...]
) -> None:
    from trainers.config import Config, parse_config

    request = TrainingRequest(training=train(parameters, 4e9), gpus=cards, deadline_hours=400.0, budget_usd=1e6)
    advice = make_advice(request, OFFERS, CARDS, prices_as_of="2026-01-01")
    option = advice.options[0]
    (task,) = load_tasks_text(write_task(request, option), "advice.yaml")
    assert task.num_nodes == option.layout.node_count
    plan = make_plan(task, OFFERS, prices_as_of="2026-01-01")
    assert plan.choice.expected_usd == pytest.approx(option.usd, rel=0.02)

    assert task.setup == "python3 -m trainers.setup", "a cloud's image has no torch"
    assert task.run is not None
    words = task.run.replace("\\\n", " ").replace('"$DATA"', "x").split()
    assert words[:3] == ["python", "-m", "trainers.lm"]
    config: Config = parse_config(words[3:])
    assert config.model.depth == request.training.shape.layers
    assert config.train.batch == 512
    _, mesh = name_strategy(option.layout)
    ranks = 1
    for size in mesh.split("x") if mesh else [str(option.gpu_count)]:
        ranks *= int(size)
    assert ranks == option.gpu_count


def test_the_price_of_a_gang_counts_only_on_the_cloud_that_its_task_file_names() -> None:
    """Another cloud has the cheaper machines to fall back on, which a gang of several nodes does not move to."""
    offers = [
        sell("H100", 8, 90, 20),
        replace(sell("H100", 8, 30, 25, cloud="oci", kind="BM.GPU.H100.8"), spot_usd_hour=None),
    ]
    request = TrainingRequest(training=train(30e9, 20e9), deadline_hours=48.0)
    option = next(
        each for each in make_advice(request, offers, CARDS, prices_as_of="").options if each.layout.node_count > 1
    )
    (task,) = load_tasks_text(write_task(request, option), "t.yaml")
    cloud = option.estimate.placement.offer.cloud
    made = make_plan(task, [each for each in offers if each.cloud == cloud], prices_as_of="")
    assert task.resources[0].cloud == cloud
    assert made.choice.expected_usd == pytest.approx(option.usd, rel=0.01)
    assert made.choice.deadline_chance == option.estimate.deadline_chance


def test_learning_rate_is_near_gpt3s() -> None:
    # Brown 2020, table 2.1: 6.0e-4 at 125M, 2.0e-4 at 1.3B.
    assert find_learning_rate(125e6) == pytest.approx(6.0e-4, rel=0.1)
    assert 2.0e-4 < find_learning_rate(1.3e9) < 4.0e-4


def test_hours_are_steps_times_step_time_and_the_stated_overhead() -> None:
    training = train(7e9, 20e9)
    layout = find_layout(training, Hardware(figures=CARDS["H100"], accelerators=8, network_gbs=400), 1)
    assert layout is not None
    steps = 20e9 / (512 * 4096)
    assert find_hours(training, layout) == pytest.approx(steps * layout.step.total_s * OVERHEAD / 3600)


H100_NODE = Hardware(figures=CARDS["H100"], accelerators=8, network_gbs=400)


def test_more_gpus_are_never_listed_where_they_are_slower() -> None:
    slow_network = Hardware(figures=CARDS["H100"], accelerators=8, network_gbs=1.25)
    for hardware in (H100_NODE, slow_network):
        layouts = list_layouts(TrainingRequest(training=train(7e9, 20e9)), hardware)
        seconds = [each.step.total_s for each in layouts]
        assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)
        assert [each.node_count for each in layouts] == sorted(each.node_count for each in layouts)


def test_of_options_within_a_percent_of_cost_the_faster_is_advised() -> None:
    def option(usd: float, hours: float) -> Option:
        base = ask().options[0]
        return replace(base, estimate=replace(base.estimate, expected_usd=usd, expected_hours=hours))

    cheap, close, dear = option(100.0, 50.0), option(100.9, 20.0), option(101.1, 5.0)
    assert prefer_faster([cheap, close, dear]) is close
    assert prefer_faster([cheap, dear]) is cheap


def test_an_hour_is_worth_what_broker_plan_assumes_unless_the_user_says_otherwise() -> None:
    """2 % of the on-demand price of the gang that is cheapest on-demand; `broker plan` of one gang has the same."""
    advice = ask(gpus=("L4",), gpus_max=1, parameters=3e8, tokens=1e8)
    assert advice.hour_value_usd == pytest.approx(0.02 * 0.8)
    (task,) = load_tasks_text(write_task(TrainingRequest(training=train(3e8, 1e8)), advice.options[0]), "t.yaml")
    plan = make_plan(task, [each for each in OFFERS if each.accelerator == "L4"], prices_as_of="", figures=CARDS)
    assert plan.hour_value_usd == pytest.approx(advice.hour_value_usd)
    free = ask(hour_value_usd=0.0)
    assert free.hour_value_usd == 0.0 and free.options[0].task.goal is not None
    assert free.options[0].task.goal.hour_value_usd == 0.0  # the place is also chosen without it
    assert "hour_value: 0" in write_task(
        TrainingRequest(training=train(7e9, 20e9), hour_value_usd=0.0), free.options[0]
    )
    assert "hour_value" not in write_task(TrainingRequest(training=train(7e9, 20e9)), ask().options[0])


def test_the_more_an_hour_is_worth_the_faster_is_the_advice() -> None:
    """Also beyond the cheapest options of each card, for which alone plans are made."""
    found = [ask(hour_value_usd=value).options[0] for value in (0.0, 100.0, 10_000.0, 1e6)]
    hours, usd = [each.hours for each in found], [each.usd for each in found]
    assert hours == sorted(hours, reverse=True) and usd == sorted(usd) and hours[-1] < hours[0] / 4
    for value, first in zip((100.0, 10_000.0, 1e6), found[1:], strict=True):
        others = [first, *ask(hour_value_usd=0.0).options, *ask(hour_value_usd=0.0).faster]
        scores = [each.usd + value * each.hours for each in others]
        assert scores[0] <= min(scores) * 1.01 + 1e-6


def test_a_smaller_batch_that_is_faster_per_token_is_found() -> None:
    # 70B on 1,024 H100: with one micro-batch per rank no full gradients are kept, and nothing is recomputed.
    training = train(70e9, 1e12, batch=1024)
    layout = find_layout(training, H100_NODE, 128)
    assert layout is not None
    better = find_better_batch(training, layout)
    assert better is not None and better[0] < 1024 and better[1] > 1.03
    small = train(7e9, 1e12, batch=1024)
    layout = find_layout(small, H100_NODE, 1)
    assert layout is not None and find_better_batch(small, layout) is None


def test_layouts_that_the_bundled_trainer_lacks_are_rated_on_the_same_gang() -> None:
    training = train(405e9, 1e12, batch=1024)
    layout = find_layout(training, H100_NODE, 1024)
    assert layout is not None
    assert find_field_speedup(training, layout) > 1.5
    own = replace(training, trainer="megatron")
    field = find_layout(own, H100_NODE, 1024)
    assert field is not None and find_field_speedup(own, field) == 1.0


def test_the_task_file_of_another_trainers_layout_does_not_call_the_bundled_one() -> None:
    training = replace(train(7e9, 20e9), trainer="megatron")
    advice = make_advice(TrainingRequest(training=training), OFFERS, CARDS, prices_as_of="2026-01-01")
    text = write_task(TrainingRequest(training=training), advice.options[0])
    assert "trainers.lm" not in text and "Megatron-LM" in text
    assert load_tasks_text(text, "advice.yaml")[0].num_nodes == advice.options[0].layout.node_count


@pytest.mark.parametrize(
    ("value", "text"),
    [(405e9, "405B"), (15.6e12, "15.6T"), (3.6e12, "3.6T"), (999.9e9, "1T"), (6.74e9, "6.74B"), (2**24, "16.8M"),
     (1.5e15, "1,500T"), (524288, "524K"), (7, "7")],
)  # fmt: skip
def test_amounts_are_written_without_exponents(value: float, text: str) -> None:
    assert show_amount(value) == text


def test_hints_contain_no_exponents() -> None:
    training = train(405e9, 15.6e12, batch=4096)
    layout = find_layout(training, H100_NODE, 1024)
    assert layout is not None
    error = explain_deadline(training, {layout: find_hours(training, layout)}, 1000.0, gpus_max=8192)
    assert "e+" not in " ".join([error.message, *error.hints])
    assert any("as many tokens as fit: `--tokens " in hint for hint in error.hints)
