"""Recommend a way to train a model on its data: accelerators, their number, layout, cost and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from broker.advisor.infeasible import explain_deadline, explain_memory, explain_prices
from broker.advisor.layout import Layout, Training, find_layout
from broker.errors import NoOfferError
from broker.frozen import frozen
from broker.optimizer.network import find_network_gbs
from broker.optimizer.planner import make_plan
from broker.optimizer.rating import HOUR_VALUE_SHARE
from broker.optimizer.roofline import Hardware
from broker.types import AcceleratorFigures, CheckpointSpec, Estimate, Goal, Offer, Resources, Task

# Evaluation, late input data, restarts after program errors. Our choice: Llama 2 took 1.3 to 1.4 times its steps' time
# in this model, and Llama 3 405B about as long; preemptions and checkpoints are counted by the plan.
OVERHEAD = 1.1
BATCH_WORTH = 1.03  # a smaller batch with less speedup is not mentioned
SAME_COST = 1.01  # of two options this close in cost, the faster is recommended, as in `broker plan`
HORIZON_HOURS = 30 * 24.0  # without a deadline, longer options are not recommended
GPUS_MAX = 512
SPOT_GANG_GPUS = 512  # above this number in one spot gang, warn: our assumption, because clouds publish no figure
SMALL_NODE_COUNT_MAX = 8  # of nodes with fewer than four cards: larger gangs of them are not used in practice
PRICED_MAX = 60  # layouts for which a plan is computed: the cheapest by their lowest price
# A step pauses while every card copies its states to the host; restoring reads them from storage.
COPY_GIBS = 8.0
LOAD_GIBS = 1.0
START_S = 300.0

# Cards on which a PyTorch program with NCCL or RCCL does not run unchanged; `--gpus` may still request them.
OTHER_PROGRAMS = ("TPU", "Inferentia", "Trainium", "AI100", "Gaudi", "Radeon", "MI25")
# Cards before Ampere lack bfloat16, cards before Volta also lack tensor cores.
WITHOUT_BF16 = ("V100", "V100-32GB", "T4", "T4g", "RTX6000", "P100", "P4", "K80", "M60")
WITHOUT_FP16 = ("P100", "P4", "K80", "M60")


@frozen
class TrainingRequest:
    """The user's request. `spot=None` allows both; empty `gpus` allows every card that supports the precision.

    `hour_value_usd=None` means the default of `broker plan`.
    """

    training: Training
    gpus: tuple[str, ...] = ()
    deadline_hours: float | None = None
    budget_usd: float | None = None
    confidence: float = 0.9
    gpus_max: int = GPUS_MAX
    spot: bool | None = None
    hour_value_usd: float | None = None


@frozen
class Option:
    """A layout with its cheapest place. `work_hours` is fault-free; the estimate includes preemptions."""

    layout: Layout
    task: Task
    work_hours: float
    estimate: Estimate

    @property
    def gpu_count(self) -> int:
        """Number of GPUs on all nodes."""
        return self.layout.hardware.accelerators * self.layout.node_count

    @property
    def usd(self) -> float:
        """Expected cost to finish, in USD."""
        assert self.estimate.expected_usd is not None, "work was given"
        return self.estimate.expected_usd

    @property
    def hours(self) -> float:
        """Expected hours to finish, with preemptions."""
        assert self.estimate.expected_hours is not None, "work was given"
        return self.estimate.expected_hours


@frozen
class Advice:
    """The recommended option, then others by increasing cost: one for each card and number of cards per node.

    `options` is never empty. `faster` has the options that are faster than the first, in order of decreasing time.
    Costs include that of time, of which an hour is worth `hour_value_usd`.
    """

    options: tuple[Option, ...]
    faster: tuple[Option, ...]
    prices_as_of: str
    hour_value_usd: float


def make_advice(
    request: TrainingRequest, offers: Sequence[Offer], figures: Mapping[str, AcceleratorFigures], *, prices_as_of: str
) -> Advice:
    """Rank ways to train by their expected cost in USD, including the value of time. Pure.

    Raises NoOfferError, which states the size of the miss, if nothing fits the memory, the deadline or the budget.
    """
    kinds = group_offers(request, offers, figures)
    if not kinds:
        raise NoOfferError(
            "no offered GPU of known speed is among the requested ones"
            if request.gpus
            else "no offered GPU of known speed supports this precision",
            hints=["pass other `--gpus`, or another `--dtype`; list all with `broker gpus`"],
        )
    layouts = [(layout, sold) for hardware, sold in kinds.items() for layout in list_layouts(request, hardware)]
    if not layouts:
        raise explain_memory(request.training, list(kinds), request.gpus_max)
    limit = request.deadline_hours or HORIZON_HOURS
    in_time = [each for each in layouts if find_hours(request.training, each[0]) <= limit]
    if not in_time:
        hours = {layout: find_hours(request.training, layout) for layout, _ in layouts}
        raise explain_deadline(request.training, hours, limit, gpus_max=request.gpus_max)
    hour_value_usd = find_hour_value(request, in_time)
    priced = _price_all(request, in_time, hour_value_usd, prices_as_of)
    met = [each for each in priced if _is_met(request, each, limit)]
    if not met:
        found = [(each.usd, each.hours, _is_met(replace(request, budget_usd=None), each, limit)) for each in priced]
        raise explain_prices(found, limit=limit, budget_usd=request.budget_usd)
    met.sort(key=lambda each: (_score(each, hour_value_usd), each.hours))
    by_card: dict[tuple[str, int], list[Option]] = {}
    for each in met:
        by_card.setdefault((each.layout.hardware.figures.name, each.layout.hardware.accelerators), []).append(each)
    best = [prefer_faster(own, hour_value_usd) for own in by_card.values()]
    best.sort(key=lambda each: (_score(each, hour_value_usd), each.hours))
    first = prefer_faster(best, hour_value_usd)
    return Advice(
        options=(first, *(each for each in best if each is not first)),
        faster=_find_faster(met, first),
        prices_as_of=prices_as_of,
        hour_value_usd=hour_value_usd,
    )


def find_hour_value(request: TrainingRequest, layouts: Sequence[tuple[Layout, Sequence[Offer]]]) -> float:
    """Return the value of an hour in USD: the user's, else a share of the price of the cheapest gang on-demand.

    `broker plan` has the same default, for the gangs of one task. It is 0 if nothing is offered on-demand.
    """
    if request.hour_value_usd is not None:
        return request.hour_value_usd
    gangs = list[tuple[float, float]]()  # USD to finish, USD per hour
    for layout, sold in layouts:
        prices = [each.ondemand_usd_hour for each in sold if each.ondemand_usd_hour is not None]
        if prices:
            usd_hour = min(prices) * layout.node_count
            gangs.append((find_hours(request.training, layout) * usd_hour, usd_hour))
    return HOUR_VALUE_SHARE * min(gangs, default=(0.0, 0.0))[1]


def prefer_faster(options: Sequence[Option], hour_value_usd: float = 0.0) -> Option:
    """Return the fastest of the options whose cost, time included, is within `SAME_COST` of the least."""
    scores = [_score(option, hour_value_usd) for option in options]
    most = min(scores) * SAME_COST
    return min(
        (option for option, score in zip(options, scores, strict=True) if score <= most),
        key=lambda each: (each.hours, each.usd),
    )


def _score(option: Option, hour_value_usd: float) -> float:
    return option.usd + hour_value_usd * option.hours


def find_hours(training: Training, layout: Layout) -> float:
    """Return the hours of a training without faults."""
    return training.steps * layout.step.total_s * OVERHEAD / 3600


def find_field_speedup(training: Training, layout: Layout) -> float:
    """Return the speedup of a program with all of Megatron-LM's layouts on the same gang; 1 if there is none."""
    field = find_layout(replace(training, trainer="megatron"), layout.hardware, layout.node_count)
    return max(1.0, layout.step.total_s / field.step.total_s) if field is not None else 1.0


def find_better_batch(training: Training, layout: Layout) -> tuple[int, float] | None:
    """Return a smaller batch, in sequences, that takes less time per token on the same gang, and its speedup.

    With it, the bundled trainer avoids accumulating micro-batches, for which every rank keeps full float32 gradients.
    """
    best: tuple[float, int] = (BATCH_WORTH, 0)
    for halvings in (1, 2, 3):
        batch = training.batch >> halvings
        found = batch and find_layout(replace(training, batch=batch), layout.hardware, layout.node_count)
        if found:
            speedup = layout.step.total_s / training.batch / (found.step.total_s / batch)
            best = max(best, (speedup, batch))
    return (best[1], best[0]) if best[1] else None


def group_offers(
    request: TrainingRequest, offers: Sequence[Offer], figures: Mapping[str, AcceleratorFigures]
) -> dict[Hardware, list[Offer]]:
    """Group offers by the factors of their speed: card, cards per node, network. Cards of unknown speed are skipped."""
    kinds: dict[Hardware, list[Offer]] = {}
    for offer in offers:
        card = figures.get(offer.accelerator or "")
        count = int(offer.accelerator_count)
        if card is None or count < 1 or count != offer.accelerator_count or offer.cloud == "local":
            continue
        if not card.training_tflops or not card.memory_bandwidth_gbs or not can_train(request, card.name):
            continue
        network = find_network_gbs(offer.cloud, offer.instance_type)
        kinds.setdefault(Hardware(figures=card, accelerators=count, network_gbs=network), []).append(offer)
    return kinds


def can_train(request: TrainingRequest, name: str) -> bool:
    """Return whether the GPU is requested or, without a request, supports the data type."""
    if request.gpus:
        return name in request.gpus
    without = {"bf16": WITHOUT_BF16, "fp16": WITHOUT_FP16, "fp32": ()}[request.training.dtype]
    return name not in without and not name.startswith(OTHER_PROGRAMS)


def list_layouts(request: TrainingRequest, hardware: Hardware) -> list[Layout]:
    """Return the best layout for each number of nodes, doubling up to the maximum of accelerators.

    Larger gangs that are not faster are skipped because they only cost more.
    """
    layouts, least_s = list[Layout](), math.inf
    for node_count in list_node_counts(hardware, request.gpus_max):
        layout = find_layout(request.training, hardware, node_count)
        if layout is not None and layout.step.total_s < least_s:
            least_s = layout.step.total_s
            layouts.append(layout)
    return layouts


def list_node_counts(hardware: Hardware, gpus_max: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    most = gpus_max // hardware.accelerators
    if hardware.accelerators < 4:
        most = min(most, SMALL_NODE_COUNT_MAX)
    counts = {each for power in range(most.bit_length() + 1) for each in (2**power, 3 * 2**power)}
    return sorted(count for count in counts if count <= most)


def write_checkpoint(training: Training, layout: Layout) -> CheckpointSpec:
    """Describe a checkpoint's cost: weights and optimizer states, without gradients."""
    memory, parts = layout.memory, layout.sharding
    own = (memory.weights + memory.optimizer) / 2**30
    # The bundled trainer saves float32 weights and two moments; others also save 16-bit weights.
    states = 12.0 if training.trainer == "bundled" and training.dtype != "fp16" else 14.0
    size = training.shape.parameters * states / 2**30
    # Under plain data parallelism every rank holds everything, and each node writes and reads its part.
    per_node = size / min(layout.node_count, max(1, parts.accelerators))
    stall = max(1.0, own / COPY_GIBS)
    return CheckpointSpec(
        stall_s=round(stall, 1), restart_s=round(START_S + per_node / LOAD_GIBS), size_gib=round(size)
    )


def _price_all(
    request: TrainingRequest, layouts: Sequence[tuple[Layout, list[Offer]]], hour_value_usd: float, prices_as_of: str
) -> list[Option]:
    """Plan the options that could be cheapest, and the best option of every card, at any price."""
    bounds = []
    for layout, sold in layouts:
        hours = find_hours(request.training, layout)
        cheapest = min((_find_price(request, offer) for offer in sold), default=math.inf)
        if cheapest < math.inf:
            bounds.append((hours * (cheapest * layout.node_count + hour_value_usd), hours, layout, sold))
    bounds.sort(key=lambda each: each[:2])
    chosen = bounds[:PRICED_MAX]
    cards = {each[2].hardware.figures.name for each in chosen}
    soonest = math.inf
    for bound in bounds[PRICED_MAX:]:
        name = bound[2].hardware.figures.name
        if name not in cards or bound[1] < soonest * 0.8:
            cards.add(name)
            soonest = min(soonest, bound[1])
            chosen.append(bound)
    options = []
    for _, hours, layout, sold in chosen:
        option = _price(request, layout, sold, hours, prices_as_of, hour_value_usd)
        if option is not None:
            options.append(option)
    return options


def _price(
    request: TrainingRequest,
    layout: Layout,
    sold: Sequence[Offer],
    hours: float,
    prices_as_of: str,
    hour_value_usd: float,
) -> Option | None:
    """Plan as `broker plan` does; with a deadline, choose the cheapest place that meets it, if any.

    A gang of several nodes stays on one cloud, as in its task file: it neither moves to places of others, nor falls
    back on their on-demand machines.
    """
    hardware = layout.hardware
    task = Task(
        resources=(
            Resources(
                accelerator=hardware.figures.name, accelerator_count=hardware.accelerators, use_spot=request.spot
            ),
        ),
        num_nodes=layout.node_count,
        goal=Goal(
            work_hours=hours,
            deadline_hours=request.deadline_hours,
            confidence=request.confidence,
            hour_value_usd=request.hour_value_usd,
        ),
        checkpoint=write_checkpoint(request.training, layout),
    )
    assert task.goal is not None
    by_cloud = dict[str, list[Offer]]()
    for offer in sold:
        by_cloud.setdefault(offer.cloud if layout.node_count > 1 else "", []).append(offer)
    for goal in (task.goal, replace(task.goal, deadline_hours=None)):
        found = list[Option]()
        for own in by_cloud.values():
            with suppress(NoOfferError):
                plan = make_plan(replace(task, goal=goal), own, prices_as_of=prices_as_of)
                found.append(Option(layout=layout, task=task, work_hours=hours, estimate=plan.choice))
        if found:
            return prefer_faster(found, hour_value_usd)
    return None


def _find_price(request: TrainingRequest, offer: Offer) -> float:
    """Return the lowest allowed USD per hour."""
    allowed = [offer.spot_usd_hour] if request.spot is not False else []
    allowed += [offer.ondemand_usd_hour] if request.spot is not True else []
    return min((each for each in allowed if each is not None), default=math.inf)


def _is_met(request: TrainingRequest, option: Option, limit: float) -> bool:
    if request.deadline_hours is None:
        is_timely = option.hours <= limit
    else:  # a plan made without the deadline has no chance for it
        is_timely = (option.estimate.deadline_chance or 0.0) >= request.confidence
    return is_timely and (request.budget_usd is None or option.usd <= request.budget_usd)


def _find_faster(met: Sequence[Option], first: Option) -> tuple[Option, ...]:
    """List options after the first, each at least a tenth faster than the previous one. `met` is sorted by cost."""
    frontier = [first]
    for each in met:
        if each.hours < frontier[-1].hours * 0.9:
            frontier.append(each)
    return tuple(frontier[1:])
