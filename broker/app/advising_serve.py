"""Recommendations for serving a model: GPUs, batch, replicas, and dollars per million tokens with spot risk."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.app.advising import read_shape
from broker.app.container import Context
from broker.errors import NoOfferError, UsageError
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.advisor.serving import ServingGoal, ServingLayout
    from broker.optimizer.roofline import Hardware
    from broker.serve.placement import ReplicaPlacement, SpotPlace
    from broker.types import Offer

PLACED_MAX = 12  # node types considered for placement: the cheapest by list price
REPLICAS_MAX = 64


@frozen
class ServingRequest:
    """The model, its load and the limits, as written by the user."""

    params: str | None = None
    active_params: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    kv_heads: int | None = None
    rps: float = 1.0
    input_tokens: int = 512
    output_tokens: int = 128
    ttft: str | None = None
    tpot: str | None = None
    availability: float = 0.99
    gpus: str | None = None
    infra: str | None = None
    spot: bool | None = None


@frozen
class ServingOption:
    """A layout with its replicas, the cheapest set of places for them, and the cost per million tokens.

    `price_dates` are the (cloud, is spot, ISO date) of the prices of those places.
    """

    layout: ServingLayout
    replicas: int
    placement: ReplicaPlacement
    usd_per_million: float
    price_dates: tuple[tuple[str, bool, str], ...]

    @property
    def spot_count(self) -> int:
        """Number of replicas on spot."""
        return sum(bool(each.is_spot) for each in self.placement.slots)


@frozen
class ServingAdvice:
    """Options, cheapest first; never empty."""

    goal: ServingGoal
    options: tuple[ServingOption, ...]
    prices_as_of: str
    task: str


def advise_serving(context: Context, request: ServingRequest) -> ServingAdvice:
    """Rank ways to serve by price. Raises UsageError for an invalid amount, NoOfferError if nothing fits."""
    goal = make_goal(request)
    kinds = _group_offers(context, request)
    fitting = {hardware: sold for hardware, sold in kinds.items() if can_split(request, goal, hardware)}
    found = [(_find_least_usd(request, sold), layout, sold) for layout, sold in _list_layouts(goal, fitting)]
    found = [each for each in found if each[0] < math.inf and each[1].count_replicas(goal.rps) <= REPLICAS_MAX]
    if not found:
        raise NoOfferError(
            "no GPU can serve this load within the limits",
            hints=["allow a longer `--ttft` or `--tpot`, fewer `--rps`, or pass other `--gpus`"],
        )
    found.sort(key=lambda each: each[0] * each[1].count_replicas(goal.rps))
    options = [_place(request, goal, layout, sold) for _, layout, sold in found[:PLACED_MAX]]
    placed = [each for each in options if each.placement.usd_hour < math.inf]
    placed.sort(key=lambda each: each.usd_per_million)
    if not placed:
        raise NoOfferError("no location offers these GPUs", hints=["change `--infra`, or drop `--spot`"])
    return ServingAdvice(
        goal=goal, options=tuple(placed), prices_as_of=context.book.as_of, task=write_service(request, goal, placed[0])
    )


def make_goal(request: ServingRequest) -> ServingGoal:
    """Read the amounts of a request. Raises UsageError."""
    from broker.advisor.serving import KV_HEADS, ServingGoal, share_heads

    shape = read_shape(
        request.params, request.layers, request.hidden, request.heads, request.vocab, active=request.active_params
    )
    return ServingGoal(
        shape=share_heads(shape, request.kv_heads or KV_HEADS),
        rps=request.rps, input_tokens=request.input_tokens, output_tokens=request.output_tokens,
        ttft_s=read_s(request.ttft, "--ttft"), tpot_s=read_s(request.tpot, "--tpot"),
    )  # fmt: skip


def read_s(text: str | None, flag: str) -> float | None:
    """Read a latency such as `0.5s` or `50ms`, in seconds. Raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text.strip())
    value = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else 0.0
    if value <= 0:
        raise UsageError(f"invalid time `{text}` for `{flag}`", hints=[f"for example `{flag} 0.5s` or `{flag} 50ms`"])
    return value


def _group_offers(context: Context, request: ServingRequest) -> dict[Hardware, list[Offer]]:
    from broker.advisor.advise import TrainingRequest, group_offers
    from broker.advisor.layout import Training
    from broker.app.advising import find_offers

    names = tuple(context.book.resolve_accelerator(each.strip()) for each in (request.gpus or "").split(",") if each)
    # The model is arbitrary: only the precision and the requested GPUs matter here.
    training = Training(shape=make_goal(request).shape, tokens=1.0, sequence=1024, batch=1, dtype="bf16")
    parsed = TrainingRequest(training=training, gpus=names, spot=request.spot)
    return group_offers(parsed, find_offers(context, parsed, request.infra), context.book.read_figures())


def _list_layouts(goal: ServingGoal, kinds: dict[Hardware, list[Offer]]) -> list[tuple[ServingLayout, list[Offer]]]:
    """Return one layout for each GPU type and count: a replica does not depend on the network between nodes."""
    from broker.advisor.serving import find_serving_layout

    merged: dict[tuple[str, int], tuple[Hardware, list[Offer]]] = {}
    for hardware, sold in kinds.items():
        merged.setdefault((hardware.figures.name, hardware.accelerators), (hardware, []))[1].extend(sold)
    found = [(find_serving_layout(goal, hardware), sold) for hardware, sold in merged.values()]
    return [(layout, sold) for layout, sold in found if layout is not None]


def can_split(request: ServingRequest, goal: ServingGoal, hardware: Hardware) -> bool:
    """Return whether engines can split the heads of this model over a node's GPUs.

    vLLM requires that the ranks divide the heads, and divide the key-value heads or are a multiple of them. A shape
    that was derived from the number of parameters has other heads than the model, so only given numbers are checked.
    """
    ranks, kv_heads = hardware.accelerators, request.kv_heads or hardware.accelerators
    return (
        ranks in (1, 2, 4, 8)
        and ranks <= goal.shape.heads
        and not (request.heads or ranks) % ranks
        and not max(kv_heads, ranks) % min(kv_heads, ranks)
    )


def _find_least_usd(request: ServingRequest, sold: list[Offer]) -> float:
    prices = [each.spot_usd_hour for each in sold] if request.spot is not False else []
    prices += [each.ondemand_usd_hour for each in sold] if request.spot is not True else []
    return min((each for each in prices if each is not None), default=math.inf)


def _place(request: ServingRequest, goal: ServingGoal, layout: ServingLayout, sold: Sequence[Offer]) -> ServingOption:
    """Place the replicas of a layout as `broker serve` does."""
    from broker.serve.placement import place_replicas
    from broker.serve.placement_history import COLD_START_S

    count = layout.count_replicas(goal.rps)
    ondemand = [each.ondemand_usd_hour for each in sold if each.ondemand_usd_hour is not None]
    placement = place_replicas(
        count,
        _list_spot_places(layout, sold) if request.spot is not False else (),
        ondemand_usd_hour=math.inf if request.spot is True else min(ondemand, default=math.inf),
        cold_start_hours=COLD_START_S / 3600,
        availability=request.availability,
    )
    tokens_hour = goal.rps * (goal.input_tokens + goal.output_tokens) * 3600
    return ServingOption(
        layout=layout,
        replicas=count,
        placement=placement,
        usd_per_million=placement.usd_hour / tokens_hour * 1e6,
        price_dates=_list_price_dates(placement, sold),
    )


def _list_price_dates(placement: ReplicaPlacement, sold: Sequence[Offer]) -> tuple[tuple[str, bool, str], ...]:
    """List the cloud, pricing model and date of each price: the cheapest of a zone on spot, of all on-demand."""
    ondemand = [(each.ondemand_usd_hour, each) for each in sold if each.ondemand_usd_hour is not None]
    found = list[tuple[str, bool, str]]()
    for slot in placement.slots:
        spot = [
            (each.spot_usd_hour, each)
            for each in sold
            if each.spot_usd_hour is not None and (each.region, each.zone) == (slot.region, slot.zone)
        ]
        if offers := spot if slot.is_spot else ondemand:
            _, offer = min(offers, key=lambda each: each[0])
            found.append((offer.cloud, bool(slot.is_spot), (offer.spot_as_of if slot.is_spot else "") or offer.as_of))
    return tuple(dict.fromkeys(found))


def _list_spot_places(layout: ServingLayout, sold: Sequence[Offer]) -> list[SpotPlace]:
    """List the zones that sell spot of these GPUs, with prices and hazards; own history is excluded."""
    from broker.optimizer.planner import make_plan
    from broker.serve.placement import SpotPlace
    from broker.serve.reconciling import Slot
    from broker.types import Resources, Task

    resources = Resources(
        accelerator=layout.hardware.figures.name, accelerator_count=layout.tensor_parallel, use_spot=True
    )
    try:
        plan = make_plan(Task(resources=(resources,)), sold, prices_as_of="")
    except NoOfferError:
        return []
    found: dict[tuple[str, Slot], SpotPlace] = {}
    for each in plan.estimates:
        offer, usd_hour = each.placement.offer, each.placement.usd_hour
        slot = Slot(is_spot=True, region=offer.region, zone=offer.zone)
        place = SpotPlace(slot=slot, usd_hour=usd_hour, losses_per_hour=each.preemptions_per_hour)
        known = found.get((offer.cloud, slot))
        if known is None or usd_hour < known.usd_hour:
            found[offer.cloud, slot] = place
    return list(found.values())


def write_service(request: ServingRequest, goal: ServingGoal, option: ServingOption) -> str:
    """Return the task of an option as YAML text, for `broker serve up`."""
    from broker.advisor.amounts import show_amount

    layout = option.layout
    in_flight = math.ceil(layout.rps * (layout.ttft_s + goal.output_tokens * layout.tpot_s))  # Little's law
    context = 2 ** math.ceil(math.log2(goal.input_tokens + goal.output_tokens))
    lines = [
        f"# {show_amount(goal.shape.parameters)} parameters, {goal.rps:g} requests/s of {goal.input_tokens:,} + "
        f"{goal.output_tokens:,} tokens: an estimate of `broker advise --serve`",
        "name: llm",
        "",
        "resources:",
        f"  accelerators: {layout.hardware.figures.name}:{layout.tensor_parallel}",
        *([f"  infra: {request.infra}"] if request.infra else []),
        f"  use_spot: {'true' if option.spot_count else 'false'}",
        "  ports: 8000",
        "",
        "service:",
        "  readiness_probe: /health",
        *([f"  availability: {request.availability:g}"] if option.spot_count else []),
        "  replica_policy:",
        f"    min_replicas: {option.replicas}",
        f"    max_replicas: {2 * option.replicas}",
        f"    target_requests_in_flight_per_replica: {in_flight}",
        "",
        "envs:",
        '  MODEL: ""   # name on Hugging Face, or a folder',
        "",
        "setup: python3 -m pip install vllm",
        "run: |",
        '  vllm serve "$MODEL" --port 8000 --tensor-parallel-size '
        f"{layout.tensor_parallel} --max-num-seqs {layout.batch} --max-model-len {context}",
    ]
    return "\n".join(lines) + "\n"
