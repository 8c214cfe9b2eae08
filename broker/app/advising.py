"""Recommend GPUs and parallelism for a model, with time and cost, from the user's amounts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from broker.app.container import Context
from broker.errors import UsageError
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.advisor.advise import Advice, TrainingRequest
    from broker.optimizer.model_shape import ModelShape
    from broker.types import Offer

Precision = Literal["bf16", "fp16", "fp32"]
Trainer = Literal["bundled", "megatron"]
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBT]?)", re.IGNORECASE)
BATCH_SLACK = 0.05
MLP_MULTIPLE = 64  # of the width of an MLP, so that tensor ranks share it evenly
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@frozen
class AdviceRequest:
    """The model, its data and the limits, as written by the user: `params` 7B, `tokens` 140B, `deadline` 5d."""

    params: str | None = None
    active_params: str | None = None
    tokens: str = ""
    sequence: int = 4096
    batch: str | None = None  # tokens; None: by the model's size
    deadline: str | None = None
    budget_usd: float | None = None
    dtype: Precision = "bf16"
    gpus: str | None = None
    infra: str | None = None
    gpus_max: int = 512
    spot: bool | None = None
    hour_value_usd: float | None = None
    trainer: Trainer | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None


@frozen
class Recommendation:
    """Options for the training run, and the task file of the first as YAML text."""

    request: TrainingRequest
    advice: Advice
    task: str


def advise(context: Context, request: AdviceRequest) -> Recommendation:
    """Rank layouts by cost. Raises UsageError for an invalid amount, NoOfferError if nothing fits."""
    from broker.advisor.advise import make_advice
    from broker.advisor.task_file import write_task

    parsed = read_request(context, request)
    offers = find_offers(context, parsed, request.infra)
    advice = make_advice(parsed, offers, context.book.read_figures(), prices_as_of=context.book.as_of)
    return Recommendation(
        request=parsed, advice=advice, task=write_task(parsed, advice.options[0], infra=request.infra)
    )


def read_request(context: Context, request: AdviceRequest) -> TrainingRequest:
    """Read the amounts of a request. Raises UsageError."""
    from broker.advisor.advise import TrainingRequest
    from broker.advisor.experts import round_experts
    from broker.advisor.layout import Training

    if not request.tokens:
        raise UsageError(
            "`--tokens` is required",
            hints=["for example 20 per parameter: `broker advise --params 7B --tokens 140B`"],
        )
    shape = read_shape(
        request.params, request.layers, request.hidden, request.heads, request.vocab, active=request.active_params
    )
    trainer = request.trainer or ("megatron" if shape.idle_parameters else "bundled")
    if trainer == "bundled":
        shape = round_experts(shape)
    step_tokens = read_amount(request.batch, "--batch") if request.batch else choose_batch(shape.parameters)
    tokens = read_amount(request.tokens, "--tokens")
    for flag, text, amount in (("--batch", request.batch, step_tokens), ("--tokens", request.tokens, tokens)):
        if text and amount < request.sequence:
            raise UsageError(
                f"`{flag} {text}` is less than a sequence of {request.sequence:,} tokens",
                hints=[f"pass at least `{flag} {request.sequence}`, or a shorter `--seq`"],
            )
    training = Training(
        shape=shape, tokens=tokens, sequence=request.sequence, dtype=request.dtype,
        batch=round_batch(step_tokens / request.sequence), trainer=trainer,
    )  # fmt: skip
    names = (each.strip() for each in (request.gpus or "").split(","))
    return TrainingRequest(
        training=training,
        gpus=tuple(context.book.resolve_accelerator(each) for each in names if each),
        deadline_hours=read_hours(request.deadline) if request.deadline else None,
        budget_usd=request.budget_usd, gpus_max=request.gpus_max, spot=request.spot,
        hour_value_usd=request.hour_value_usd,
    )  # fmt: skip


def read_amount(text: str, flag: str) -> float:
    """Read an amount: `7B`, `350M`, `1.5T`, `4e9`. Raises UsageError."""
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    value = float(found[1]) * _SCALE[found[2].lower()] if found else 0.0
    if not 0 < value < 1e18:
        raise UsageError(
            f"invalid amount `{text}` for `{flag}`",
            hints=[f"for example `{flag} 7B`; the suffixes K, M, B and T mean thousands to trillions"],
        )
    return value


def read_hours(text: str) -> float:
    """Read a duration as in a task file; a bare number is hours. Raises UsageError."""
    from broker.task.measures import Duration

    measure = Duration(bare_unit="h")
    if not re.fullmatch(measure.pattern, text):
        raise UsageError(
            f"`--deadline` must be {measure.expected}, not `{text}`", hints=["for example `--deadline 5d`"]
        )
    return measure.convert(text) / 3600


def read_shape(
    params: str | None,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    vocab: int | None,
    *,
    active: str | None = None,
) -> ModelShape:
    """Read the shape from `--layers` and `--hidden`, else derive it from `--params`.

    With all three, the MLP is as wide as the parameters require. With `active`, the shape has the active parameters,
    and experts hold the remaining ones. Raises UsageError.
    """
    if active is not None:
        if params is None:
            raise UsageError(
                "`--active-params` requires `--params`", hints=["for example `--params 671B --active-params 37B`"]
            )
        total, own = read_amount(params, "--params"), read_amount(active, "--active-params")
        if own >= total:
            raise UsageError(
                f"`--active-params` must be less than `--params`: {active} is not less than {params}",
                hints=[
                    "for example `--params 671B --active-params 37B`; a model without experts has no active parameters"
                ],
            )
        shape = read_shape(active, layers, hidden, heads, vocab)
        return replace(shape, idle_parameters=total - own)
    from broker.optimizer.model_shape import HEAD_WIDTH, VOCABULARY, ModelShape, guess_shape

    if hidden is not None:
        if layers is None:
            raise UsageError("`--hidden` requires `--layers`", hints=["for example `--layers 32 --hidden 4096`"])
        count = heads or max(1, hidden // HEAD_WIDTH)
        if hidden % count:
            raise UsageError(f"`--hidden` must be a multiple of {count} heads, not {hidden}", hints=["pass `--heads`"])
        shape = ModelShape(layers=layers, width=hidden, heads=count, vocabulary=vocab or VOCABULARY)
        return shape if params is None else fit_mlp(shape, read_amount(params, "--params"))
    if params is None:
        raise UsageError(
            "the size of the model is required", hints=["pass `--params 7B`, or `--layers 32 --hidden 4096`"]
        )
    if heads is not None:
        raise UsageError(
            "`--heads` requires `--layers` and `--hidden`",
            hints=["for example `--layers 32 --hidden 4096 --heads 32`"],
        )
    try:
        return guess_shape(read_amount(params, "--params"), vocabulary=vocab or VOCABULARY, layers=layers)
    except ValueError as error:
        raise UsageError(str(error), hints=["pass the shape instead: `--layers 4 --hidden 256`"]) from None


def fit_mlp(shape: ModelShape, parameters: float) -> ModelShape:
    """Return the shape with an MLP that gives it this many parameters. Raises UsageError if no usual width does."""
    from broker.advisor.amounts import show_amount

    plain_width = 4 * shape.width
    missing = (parameters - shape.parameters) / (2 * shape.layers * shape.width)
    mlp_width = max(0, round((plain_width + missing) / MLP_MULTIPLE)) * MLP_MULTIPLE
    if not shape.width / 2 <= mlp_width <= 16 * shape.width:
        raise UsageError(
            f"a model of {shape.layers} x {shape.width} does not have {show_amount(parameters)} parameters",
            hints=[f"omit `--params`: such a model has about {show_amount(shape.parameters)}", "or omit `--hidden`"],
        )
    return shape if mlp_width == plain_width else replace(shape, mlp_width=float(mlp_width))


def choose_batch(parameters: float) -> float:
    """Choose the batch size in tokens by the size of the model.

    It is roughly that of GPT-3 (Brown 2020, table 2.1), of Llama 2 from 20 billion parameters, and of Llama 3 405B from
    150 billion (Dubey 2024, table 4).
    """
    for limit, power in ((1e9, 19), (2.5e9, 20), (20e9, 21), (150e9, 22)):
        if parameters <= limit:
            return 2.0**power
    return 2.0**24


def round_batch(sequences: float) -> int:
    """Round to a multiple of the largest power of two within `BATCH_SLACK`.

    `--batch 4M` with sequences of 4,096 tokens is 1,024 sequences: 977 would rarely divide evenly by ranks or
    micro-batches, and would be slower.
    """
    for power in range(24, 0, -1):
        unit = 1 << power
        rounded = round(sequences / unit) * unit
        if rounded and abs(rounded - sequences) <= BATCH_SLACK * sequences:
            return rounded
    return max(1, round(sequences))


def find_offers(context: Context, request: TrainingRequest, infra: str | None) -> list[Offer]:
    """Find the catalog's offers of suitable GPUs."""
    from broker.advisor.advise import can_train
    from broker.task.override import override_resources
    from broker.types import Resources, Task

    names = [each for each in context.book.read_figures() if can_train(request, each)]
    task = Task(resources=tuple(Resources(accelerator=name, accelerator_count=1) for name in names))
    return list(context.book.find_offers(override_resources(task, infra=infra) if infra else task))
