"""Everything around a run: watching, reporting, evaluating, skipping; and other ways to run a model alike."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainers.blocks import check_shared, find_shared, prepare_blocks
from trainers.config import Config, LogConfig, ModelConfig, ProfileConfig, SampleConfig, TrainConfig
from trainers.devices import advise, check_memory, find_peak_flops, is_out_of_memory
from trainers.errors import TrainerError
from trainers.generate import write_text
from trainers.lm import count_flops, main
from trainers.loop import DeviceLog, Position, StepReport, Work, iterate_steps
from trainers.losses import next_token_loss
from trainers.metrics import Meter, MetricFiles
from trainers.models import create_language_model
from trainers.models.llama import make_waves, turn
from trainers.optimizer import Optimizer
from trainers.profile import Profile
from trainers.progress import Progress
from trainers.ranks import Ranks
from trainers.scaling import LossScale
from trainers.strategies import create_strategy
from trainers.tokenizers import ByteTokenizer

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, device=CPU)
TINY = ModelConfig(depth=2, width=16, heads=4, context=8, vocabulary=300)


def make_model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = dataclasses.replace(TINY, **changes)
    return create_language_model(config.kind, config)


NO_SCALING = LossScale("float32")


class Numbers:
    """Samples that count up; some steps are poisoned."""

    fingerprint = "numbers"

    def read(self, sample_first: int, sample_count: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(sample_first, sample_first + sample_count)[:, None] + torch.arange(9)
        return rows[:, :-1] % 300, rows[:, 1:] % 300


def take_steps(
    model: nn.Module,
    config: TrainConfig,
    loss_of: Callable[..., Tensor],
    is_read_due: Callable[[int], bool] = lambda step: True,
    scaling: LossScale = NO_SCALING,
    changing: AbstractContextManager[Any] | None = None,
) -> Iterator[StepReport]:
    return iterate_steps(
        config,
        model=model,
        strategy=create_strategy("ddp", ALONE),
        optimizer=Optimizer(model.named_parameters(), config),
        work=Work(samples=Numbers(), loss=loss_of, precision=nullcontext),
        position=Position("numbers"),
        ranks=ALONE,
        is_stop_asked=lambda: False,
        before_change=lambda: None,
        scaling=scaling,
        changing=changing,
        is_read_due=is_read_due,
    )


class Poison:
    """The usual loss; not a number in some steps of one micro-batch each."""

    def __init__(self, *steps: int) -> None:
        self._steps, self._calls = steps, 0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        self._calls += 1
        return next_token_loss(0.0)(logits, targets) * (float("nan") if self._calls in self._steps else 1.0)


def test_nan_step_changes_nothing_and_the_run_continues() -> None:
    config = TrainConfig(steps=6, batch=4, micro_batch=4, on_nan="skip", warmup_steps=0)
    model = make_model()
    before: dict[str, Tensor] = {}
    for report in take_steps(model, config, Poison(3)):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        is_unmoved = bool(before) and all(torch.equal(before[name], value) for name, value in state.items())
        assert report.reading is not None
        assert report.reading.skipped_steps == ((3,) if is_unmoved else ()) and is_unmoved == (report.step == 3)
        before = state
    assert report.step == 6 and report.reading.loss < 6.0


def test_scale_of_the_loss_changes_with_the_parameters() -> None:
    """An elastic run that loses a rank before the update takes the step again, and would change the scale twice."""
    scaling, seen = LossScale("float16"), list[float]()

    class Changing:
        def __enter__(self) -> None:
            seen.append(scaling.factor)

        def __exit__(self, *error: object) -> None:
            seen.append(scaling.factor)

    config = TrainConfig(steps=2, batch=4, micro_batch=4, on_nan="skip", warmup_steps=0)
    for _ in take_steps(make_model(), config, Poison(1), scaling=scaling, changing=Changing()):
        pass
    assert seen == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_steps_are_read_together_where_asked_and_the_last_one_always() -> None:
    config = TrainConfig(steps=8, batch=4, micro_batch=4, on_nan="skip", warmup_steps=0)
    each_step = [report.reading for report in take_steps(make_model(), config, Poison(2, 5))]
    rarely = list(take_steps(make_model(), config, Poison(2, 5), lambda step: step % 3 == 0))
    assert [report.step for report in rarely if report.reading] == [3, 6, 8]
    read = [report.reading for report in rarely if report.reading]
    assert [reading.skipped_steps for reading in read] == [(2,), (5,), ()]
    for reading, step in zip(read, (3, 6, 8), strict=True):
        alone = each_step[step - 1]
        assert alone is not None and (reading.loss, reading.norm) == (alone.loss, alone.norm)


def test_step_that_is_not_finite_ends_the_run_when_it_is_read() -> None:
    config = TrainConfig(steps=8, batch=4, micro_batch=4)
    steps = take_steps(make_model(), config, Poison(2), lambda step: step == 4)
    taken = [next(steps).step for _ in range(3)]
    with pytest.raises(TrainerError, match="gradients of step 2 are not finite"):
        next(steps)
    assert taken == [1, 2, 3]


def test_optimizer_moves_as_torchs_own() -> None:
    config = TrainConfig(steps=9, warmup_steps=0, learning_rate=0.01, learning_rate_min=0.01)
    mine, theirs = make_model(), make_model()
    ours = Optimizer(mine.named_parameters(), config)
    groups = [[each for each in theirs.parameters() if (each.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    torchs = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for _ in range(9):
        for mine_each, theirs_each in zip(mine.parameters(), theirs.parameters(), strict=True):
            mine_each.grad = torch.randn_like(mine_each)
            theirs_each.grad = mine_each.grad.clone()
        ours.step()
        torchs.step()
    for mine_each, theirs_each in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine_each, theirs_each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("on_nan", "poisoned", "message"), [("stop", (2,), "step 2 "), ("skip", (2, 3, 4), "step 4 ")])
def test_run_that_can_no_longer_learn_stops_with_a_hint(on_nan: str, poisoned: tuple[int], message: str) -> None:
    config = TrainConfig(steps=9, batch=4, micro_batch=4, on_nan=on_nan, skips_max=2)
    with pytest.raises(TrainerError, match=f"gradients of {message}(?s:.*)hint: lower `--train.learning_rate`"):
        list(take_steps(make_model(), config, Poison(*poisoned)))


def test_steps_that_are_skipped_now_and_then_do_not_end_the_run() -> None:
    config = TrainConfig(steps=9, batch=4, micro_batch=4, on_nan="skip", skips_max=2)
    for is_read_due in (lambda step: True, lambda step: step % 4 == 0):
        reports = list(take_steps(make_model(), config, Poison(2, 3, 5, 6, 8), is_read_due))
        assert sorted(step for each in reports if each.reading for step in each.reading.skipped_steps) == [
            2,
            3,
            5,
            6,
            8,
        ]


def test_request_to_stop_in_a_step_before_the_reading_is_not_lost() -> None:
    log = DeviceLog(TrainConfig())
    for step, stops in enumerate((0.0, 1.0, 0.0), start=1):
        log.add(step, torch.ones(()), torch.tensor([0.5, stops], dtype=torch.float64), is_overflow=False)
    assert log.read().is_stop_asked
    log.add(4, torch.ones(()), torch.zeros(2), is_overflow=False)
    assert not log.read().is_stop_asked, "it is reported once"


def test_checkpoint_of_other_data_is_refused_with_the_remedy() -> None:
    saved, position = Position("data"), Position("other")
    saved.advance(4)
    with pytest.raises(TrainerError, match=r"trained on other data(?s:.*)hint: set `\$BROKER_CHECKPOINT_DIR`"):
        position.load_state_dict(saved.state_dict())
    again = Position("data")
    again.load_state_dict(saved.state_dict())
    assert (again.steps_done, again.samples_done) == (1, 4)


def test_ranks_that_used_different_layers_end_the_run_at_the_next_reading() -> None:
    log = DeviceLog(TrainConfig())
    for step, is_mixed in enumerate((False, True, False), start=1):
        log.add(step, torch.ones(()), torch.zeros(2), is_overflow=False, mixture=torch.tensor(is_mixed))
    with pytest.raises(TrainerError, match=r"different parameters in step 2(?s:.*)hint: `ddp`"):
        log.read()
    log = DeviceLog(TrainConfig())
    log.add(1, torch.ones(()), torch.zeros(2), is_overflow=False)
    assert log.read().norm == 1.0


def test_z_loss_is_the_mean_of_squared_log_sums() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    extra = next_token_loss(0.1)(logits, targets) - next_token_loss(0.0)(logits, targets)
    assert float(extra) == pytest.approx(0.1 * float((logits.exp().sum(-1).log() ** 2).mean()), rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_model_made_without_memory_is_filled_with_the_same_weights(kind: str) -> None:
    whole = make_model(seed=3, kind=kind)
    with torch.device("meta"):
        empty = make_model(seed=3, kind=kind)
    assert all(each.is_meta for each in empty.parameters())
    torch.manual_seed(99)  # whatever was drawn meanwhile
    empty.fill(CPU)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), empty.parameters(), strict=True))
    tokens = torch.randint(0, 300, (2, 8))
    assert torch.equal(whole(tokens), empty(tokens))
    assert not torch.equal(whole(tokens), make_model(seed=4, kind=kind)(tokens))


@pytest.mark.parametrize(("dtype", "z_weight"), [(torch.float32, 0.0), (torch.float32, 0.3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows_a_chunk", [1, 5, 99])
def test_loss_in_chunks_is_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, z_weight: float, rows_a_chunk: int
) -> None:
    logits, targets = (4 * torch.randn(2, 9, 50)).to(dtype), torch.randint(0, 50, (2, 9))
    found = []
    for bytes_max in (2**30, 4 * 50 * rows_a_chunk):
        monkeypatch.setattr("trainers.losses.CHUNK_BYTES", bytes_max)
        mine = logits.clone().requires_grad_()
        loss = next_token_loss(z_weight)(mine, targets)
        (loss * 3).backward()
        with torch.no_grad():
            assert torch.equal(next_token_loss(z_weight)(mine, targets), loss)
        found.append((loss, mine.grad))
    (loss, gradient), (chunked, chunked_gradient) = found
    torch.testing.assert_close(chunked, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chunked_gradient, gradient)
    assert chunked_gradient is not None and chunked_gradient.dtype == dtype


def test_float16_logits_keep_the_gradients_of_unlikely_tokens_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a probability of 6e-6 over 512 rows, less than the smallest float16; the loss is scaled for that."""
    logits, targets = torch.full((1, 512, 64), -12.0), torch.zeros((1, 512), dtype=torch.int64)
    logits[:, :, 0] = 0.0
    loss_scale, gradients = 2.0**16, []
    monkeypatch.setattr("trainers.losses.CHUNK_BYTES", 4 * 64 * 100)
    for dtype in (torch.float32, torch.float16):
        mine = logits.to(dtype, copy=True).requires_grad_()
        (next_token_loss(0.0)(mine, targets) * loss_scale).backward()
        assert mine.grad is not None
        gradients.append(mine.grad.float() / loss_scale)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_learn_the_same_to_the_last_bit(kind: str, recompute: str) -> None:
    config = TrainConfig(steps=4, batch=4, micro_batch=2)
    losses = []
    kept: list[int] = []
    for how in ("none", recompute):
        model = make_model(kind=kind)
        names = list(model.state_dict())
        prepare_blocks(model, recompute=how, is_compiled=False)
        assert list(model.state_dict()) == names
        saved = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            reports = take_steps(model, config, next_token_loss(0.0))
            losses.append([report.reading.loss for report in reports if report.reading])
        kept.append(saved)
    assert losses[0] == losses[1]
    assert kept[1] < kept[0]


def test_tied_embeddings_are_one_parameter_and_untying_them_is_noticed() -> None:
    model = make_model(tie_embeddings=True)
    shared = find_shared(model)
    assert shared == [["token_embedding.weight", "head.weight"]] and find_shared(make_model()) == []
    check_shared(model, shared, "ddp")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(TrainerError, match=r"`tensor` would split (?s:.*)--model.tie_embeddings false"):
        check_shared(model, shared, "tensor")


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_no_position_sees_what_comes_after_it(kind: str) -> None:
    model = make_model(kind=kind, key_value_heads=2 if kind == "llama" else 0)
    tokens = torch.randint(0, 300, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 300
    first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :5], second[:, :5]) and not torch.equal(first[:, 5:], second[:, 5:])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    waves = make_waves(16, 8, 10000.0)
    query, key = torch.randn(8), torch.randn(8)
    rows = [turn(each.expand(1, 1, 16, 8), waves, torch.arange(16)[None])[0, 0] for each in (query, key)]
    torch.testing.assert_close(rows[0].norm(dim=-1), query.norm().expand(16))
    torch.testing.assert_close(rows[0][3] @ rows[1][1], rows[0][12] @ rows[1][10])
    assert not torch.isclose(rows[0][3] @ rows[1][1], rows[0][3] @ rows[1][2])


def test_fewer_key_heads_are_shared_by_groups_of_queries() -> None:
    few, many = make_model(kind="llama", key_value_heads=2), make_model(kind="llama")
    state = few.state_dict()
    for name, value in list(state.items()):
        if name.endswith((".key.weight", ".value.weight")):
            state[name] = value.view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    many.load_state_dict(state)
    tokens = torch.randint(0, 300, (2, 8))
    torch.testing.assert_close(few(tokens), many(tokens))


def test_text_is_the_same_for_the_same_seed_and_continues_the_prompt() -> None:
    model, tokenizer = make_model(), ByteTokenizer()
    config = SampleConfig(tokens=20, prompt="ab", seed=1)
    written = write_text(model, tokenizer, config, TINY.context, CPU)
    assert written.startswith("ab") and model.training
    torch.manual_seed(9)
    assert write_text(model, tokenizer, config, TINY.context, CPU) == written
    greedy = dataclasses.replace(config, temperature=0.0)
    ids = list(b"ab")
    model.eval()
    for _ in range(5):  # by the model alone, without padding
        ids.append(int(model(torch.tensor([ids]))[0, -1, :256].argmax()))
    assert write_text(model, tokenizer, dataclasses.replace(greedy, tokens=5), 8, CPU) == tokenizer.decode(ids)


def test_work_of_a_token_is_six_times_the_weights_and_attention() -> None:
    # GPT-2: 124.4 million weights less 0.79 million positions, and 12 x 12 x 768 x 1024 for attention.
    config = Config(model=ModelConfig(depth=12, width=768, heads=12, context=1024, tie_embeddings=True))
    per_token = count_flops(config, 124_439_808, 50257) / 1024
    assert per_token == 6 * (124_439_808 - 786_432) + 12 * 12 * 768 * 1024


def test_share_of_the_peak_is_what_the_model_needs_over_what_the_devices_can(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 102.0, 103.0])
    monkeypatch.setattr("trainers.metrics.time.perf_counter", lambda: next(now))
    meter = Meter(units_per_sample=10, flops_per_sample=5e9, peak_flops=1e11, ranks=2)
    meter.count(8)
    meter.count(8)
    assert meter.read() == {"tokens_per_s": 80.0, "mfu": pytest.approx(16 * 5e9 / 2 / 2 / 1e11)}
    meter.count(8)
    meter.pause(0.5)
    assert meter.read()["tokens_per_s"] == 160.0


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
        ("NVIDIA A10G", "bfloat16", 70.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("Tesla V100-SXM2-16GB", "bfloat16", 125.0),
        ("Unheard Of", "bfloat16", None),
    ],
)
def test_peak_is_found_by_the_devices_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = find_peak_flops(torch.device("cuda"), dtype, 0.0)
    assert peak == (None if tflops is None else tflops * 1e12)
    assert find_peak_flops(CPU, dtype, 3.0) == 3e12 and find_peak_flops(CPU, dtype, 0.0) is None


def test_model_too_large_for_the_device_is_an_error_with_hints() -> None:
    config = Config()
    with torch.device("meta"):
        huge = nn.Linear(10**7, 10**6)
    with pytest.raises(
        TrainerError, match=r"take 149011.\d GiB per rank(?s:.*)hint: `--dtype bfloat16`(?s:.*)`--strategy fsdp`"
    ):
        check_memory(huge.parameters(), CPU, config)
    check_memory(nn.Linear(2, 2).parameters(), CPU, config)
    small = dataclasses.replace(
        config, dtype="bfloat16", recompute="full", strategy="fsdp", train=TrainConfig(micro_batch=1)
    )
    assert advise(small).count("hint:") == 1
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    assert is_out_of_memory(caught.value) and not is_out_of_memory(RuntimeError("shape"))


def test_metrics_are_lines_of_json_without_infinities(tmp_path: Path) -> None:
    files = MetricFiles(LogConfig(metrics=str(tmp_path / "deep" / "m.jsonl")), attempt=3, is_silent=False)
    files.write(1, {"loss": 2.5, "norm": float("inf")})
    files.write(2, {"loss": float("nan"), "mfu": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "deep" / "m.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"], line["loss"]) for line in lines] == [(1, 3, 2.5), (2, 3, None)]
    assert lines[0]["norm"] is None and lines[1]["mfu"] == 0.5
    silent = MetricFiles(LogConfig(metrics=str(tmp_path / "other")), attempt=3, is_silent=True)
    silent.write(1, {"loss": 1.0})
    assert not (tmp_path / "other").exists()


def test_tensorboard_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainerError, match="requires the package tensorboard"):
        MetricFiles(LogConfig(tensorboard=str(tmp_path)), attempt=1, is_silent=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_bar_that_stays_and_other_outputs_lines(tmp_path: Path) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for screen in (terminal, pipe):
        progress = Progress(tmp_path / "p.jsonl", total=4, is_silent=False, unit="images", screen=screen)
        progress.report(step=0, event="started", checkpoint_step=None)
        for step in (1, 2):
            progress.report(step=step, loss=1.5, tokens_per_s=1234.5, norm=0.1, mfu=0.25)
    assert pipe.getvalue().splitlines() == [
        "step 0/4  started",
        "step 1/4  loss 1.5000  1,234 images/s  mfu 0.25",
        "step 2/4  loss 1.5000  1,234 images/s  mfu 0.25",
    ]
    first, *bars = terminal.getvalue().split("\r\x1b[K")[1:]
    assert first == "step 0/4  started\n"
    assert bars[1].startswith("step 2/4  ==========----------  loss 1.5000") and "\n" not in bars[1]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and lines[1] == lines[4] | {"time": lines[1]["time"]}
    assert (lines[1]["loss"], lines[1]["norm"], lines[1]["total"]) == (1.5, 0.1, 4)


def test_trace_contains_the_requested_steps(tmp_path: Path) -> None:
    profile = Profile(ProfileConfig(steps=2, first=2, folder=str(tmp_path)), ALONE)
    for step in range(1, 7):
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(3).sum()
        profile.step()
    names = {event.get("name") for event in json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]}
    assert {"step 3", "step 4"} <= names and not {"step 2", "step 5"} & names


# The watched time is ours, so that a slow machine is no hang. The backstop's is real, so that its short limit begins in
# the call that hangs.
HANG = """
import threading
from types import SimpleNamespace
from trainers import watchdog
now_s, has_looked = [0.0], threading.Event()
def read_time():
    if threading.current_thread().name == "watchdog":
        has_looked.set()
    return now_s[0]
watchdog.time = SimpleNamespace(monotonic=read_time)
watchdog.PERIOD_S_MAX = 0.02
watched = watchdog.Watchdog(600.0)
watched.start()
def hang_here():
    {how}
for _ in range(4):  # longer than the limit in all
    now_s[0] += 400.0
    has_looked.clear()
    has_looked.wait()
    watched.beat("in step 7")
print("alive", flush=True)
hang_here()
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (
            "now_s[0] += 700.0; threading.Event().wait()",
            75,
            ("rank 3 hangs: no progress for 700 s while in step 7", "in hang_here"),
        ),
        # One call into C that never lets go of the interpreter.
        ("watched.beat('in step 7', limit_s=0.5); sum(range(10**12))", 1, ("Timeout", "in hang_here")),
    ],
    ids=["waiting", "holding the interpreter"],
)
def test_hang_ends_the_process_and_shows_where_it_was(how: str, code: int, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG.format(how=how)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"RANK": "3", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout == "alive\n"
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_model_that_does_not_fit_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Otherwise the kernel kills the process without a message: eight billion weights of four bytes."""
    monkeypatch.setenv("BROKER_CHECKPOINT_DIR", str(tmp_path))
    for name in ("RANK", "SKYPILOT_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("trainers.preemption.PreemptionNotice.listen", lambda self: None)
    monkeypatch.setattr("trainers.devices.find_memory", lambda device: 2**34)
    assert main(["--preset", "llama3-8b", "--watchdog.timeout_s", "0"]) == 1
    message = capsys.readouterr().err
    assert "8,030 million parameters take 119.7 GiB per rank, but only 16.0 GiB are available" in message
    assert "hint: use more ranks" in message


START = """
import sys
from trainers.lm import main
code = main(sys.argv[1:])
print("imported" if "torch._dynamo" in sys.modules else "not imported")
sys.exit(code)
"""


@pytest.mark.exhaustive
def test_start_without_compile_does_not_import_the_compiler(tmp_path: Path) -> None:
    """It takes as long as torch itself, and much of torch imports it on the way: every start and resume would wait."""
    shape = "--model.depth 1 --model.width 16 --model.heads 2 --model.context 16 --train.batch 4 --sample.tokens 0"
    for attempt in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", START, *shape.split(), "--train.steps", str(2 * attempt)],
            capture_output=True,
            text=True,
            timeout=600,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "BROKER_CHECKPOINT_DIR": str(tmp_path),
                "BROKER_ATTEMPT": str(attempt),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "not imported"
    assert "resumed" in done.stdout
