"""Explain why no way to train was found: the size of the miss, and what would be enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from broker.advisor.amounts import show_amount
from broker.advisor.layout import Layout, Training, find_layout, find_smallest_memory
from broker.errors import NoOfferError
from broker.formatting import format_count
from broker.optimizer.memory_model import find_usable_bytes
from broker.optimizer.roofline import Hardware

SEARCH_GPUS_MAX = 2**17


def explain_memory(training: Training, kinds: Sequence[Hardware], gpus_max: int) -> NoOfferError:
    """Name the kind of node that comes closest to holding the model, and the number of GPUs that would hold it."""
    nearest: tuple[float, Hardware, int, float] | None = None
    for hardware in kinds:
        node_count = 1
        while node_count * hardware.accelerators <= gpus_max:
            memory = find_smallest_memory(training, hardware, node_count)
            if memory is not None:
                ratio = memory.total / max(1.0, find_usable_bytes(hardware.figures.memory_gib))
                if nearest is None or ratio < nearest[0]:
                    nearest = ratio, hardware, node_count, memory.total
            node_count *= 2
    if nearest is None:
        return NoOfferError(
            f"a node of the requested GPUs has more than {gpus_max} of them, or more of them than the batch has "
            f"sequences ({training.batch})",
            hints=["raise `--max-gpus` or `--batch`"],
        )
    _, hardware, node_count, need = nearest
    name, cards = hardware.figures.name, hardware.accelerators * node_count
    usable = find_usable_bytes(hardware.figures.memory_gib)
    hints = []
    enough = _find_enough(training, hardware, node_count)
    if enough:
        hints.append(f"{enough} x {name} are enough: pass `--max-gpus {enough}`")
    hints.append("drop `--gpus` or `--infra`, or shorten `--seq`")
    return NoOfferError(
        f"{show_amount(training.shape.parameters)} parameters do not fit on at most {format_count(gpus_max, 'GPU')}: "
        f"the closest option, {cards} x {name}, requires {need / 2**30:.1f} GiB per GPU, but only "
        f"{usable / 2**30:.1f} are usable",
        hints=hints,
    )


def explain_deadline(training: Training, hours: Mapping[Layout, float], limit: float, *, gpus_max: int) -> NoOfferError:
    """Name the fastest layout, and a larger gang of its kind that would be fast enough. `limit` is in hours."""
    fastest = min(hours, key=lambda layout: hours[layout])
    took = hours[fastest]
    hardware = fastest.hardware
    name, cards = hardware.figures.name, hardware.accelerators * fastest.node_count
    hints = []
    count = 2 * fastest.node_count
    while count * hardware.accelerators <= SEARCH_GPUS_MAX:
        layout = find_layout(training, hardware, count)
        if layout is not None and took * layout.step.total_s / fastest.step.total_s <= limit:
            total = count * hardware.accelerators
            if total > gpus_max:
                hints.append(f"{total} x {name} are enough: pass `--max-gpus {total}`")
            break
        count *= 2
    hints.append(f"pass `--deadline {math.ceil(took * 1.1)}h`")
    tokens = training.tokens * limit / took
    hints.append(f"or train on as many tokens as fit: `--tokens {show_amount(tokens).replace(',', '')}`")
    return NoOfferError(
        f"{gpus_max} GPUs are not fast enough: the fastest option, {cards} x {name}, takes {_days(took)} without "
        f"failures, {took / limit:.1f} times the limit of {_days(limit)}",
        hints=hints,
    )


def explain_prices(
    found: Sequence[tuple[float, float, bool]], *, limit: float, budget_usd: float | None
) -> NoOfferError:
    """Explain why no priced option is acceptable. `found` has USD, expected hours, and whether in time, of each."""
    if not found:
        return NoOfferError(
            "no location offers the GPUs with the requested pricing", hints=["drop `--spot` or `--no-spot`"]
        )
    timely = [each for each in found if each[2]]
    if timely:
        usd, hours, _ = min(timely)
        assert budget_usd is not None, "an option in time is refused for its price only"
        times = f", {usd / budget_usd:.1f} times the budget of {budget_usd:,.0f} USD" if budget_usd > 0 else ""
        return NoOfferError(
            f"every option that finishes in time exceeds the budget: the cheapest is expected to cost {usd:,.0f} USD "
            f"in {_days(hours)}{times}",
            hints=[f"pass `--budget {math.ceil(usd * 1.05)}`", "extend `--deadline`, or train on fewer `--tokens`"],
        )
    usd, hours, _ = min(found, key=lambda each: each[1])
    return NoOfferError(
        f"with preemptions, no option finishes in time: the fastest is expected to take {_days(hours)} and cost "
        f"{usd:,.0f} USD; the limit is {_days(limit)}",
        hints=[f"pass `--deadline {math.ceil(hours * 1.2)}h`, or `--no-spot`"],
    )


def _find_enough(training: Training, hardware: Hardware, node_count: int) -> int | None:
    """Return the smallest number of cards, in doublings, that holds the model."""
    while node_count * hardware.accelerators <= SEARCH_GPUS_MAX:
        if find_layout(training, hardware, node_count) is not None:
            return node_count * hardware.accelerators
        node_count *= 2
    return None


def _days(hours: float) -> str:
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"
