"""One attempt at a run, whatever is trained: join the others, resume, train, save, and say how it went.

Imports torch only when flags are known to be right and SIGTERM is heard.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainers.config import RunConfig
from trainers.elastic import Elastic, Member, join_world
from trainers.environment import Environment, read_environment
from trainers.errors import TrainerError
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice
from trainers.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

    from trainers.checkpoint import CheckpointManager
    from trainers.data import Samples
    from trainers.evaluate import Evaluation
    from trainers.interval import Pacer
    from trainers.loop import StepReport
    from trainers.metrics import Meter, MetricFiles
    from trainers.profile import Profile
    from trainers.progress import Progress
    from trainers.ranks import Ranks

# Further apart than any two ranks' draws.
SEEDS_A_GENERATION = 1_000_003
STARTED_S = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Study:
    """What an entry point brings: a model, what it learns from, and how its errors are measured."""

    model: "torch.nn.Module"  # on the device
    training: "Samples"
    validation: "Samples | None"
    loss_of: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"  # outputs and targets -> mean over the samples
    unit: str  # what is counted: tokens, images
    units_per_sample: int
    flops_per_sample: float  # of forward and backward, for the share of the device's peak
    demonstrate: "Callable[[torch.nn.Module], str] | None" = None  # what the trained model can do, as text
    fill: "Callable[[torch.device], None] | None" = None  # of a model made without memory: takes it, and draws weights


# The device, and whether the model gets its memory only when a strategy has spread it over ranks.
Bring = Callable[["torch.device", bool], Study]


def run_session(config: RunConfig, bring: Bring) -> int:
    """Train as the config and the environment say.

    Returns 0 when all steps are done, 143 when preempted, 1 where the run cannot go on; a hang ends with 75.
    """
    # Read at torch's import. At warning level every DDP run scolds us for a choice explained in strategies/ddp.py.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment = read_environment()
    notice = PreemptionNotice(environment.preemption_file)
    notice.listen()
    watchdog = Watchdog(config.watchdog.timeout_s)
    watchdog.start()
    from trainers.devices import advise, is_out_of_memory
    from trainers.ranks import is_first_to_say, join_ranks, leave_ranks

    try:
        member = join_world(config)
        try:
            return train(config, environment, notice, watchdog, bring, join_ranks(), member)
        except Exception:
            if member is not None:  # a peer that is gone makes all kinds of errors
                watchdog.beat("waiting for a new world")
                member.await_change()
            raise
    except TrainerError as error:
        if is_first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).splitlines()[0] if str(error) else "no memory was left"
        print(f"error: memory does not suffice: {first}{advise(config)}", file=sys.stderr, flush=True)
        return 1
    finally:
        watchdog.stop()
        leave_ranks()


def train(
    config: RunConfig,
    environment: Environment,
    notice: PreemptionNotice,
    watchdog: Watchdog,
    bring: Bring,
    ranks: "Ranks",
    member: Member | None = None,
) -> int:
    """Build everything, resume, drive the steps."""
    from trainers.blocks import check_shared, find_shared, prepare_blocks
    from trainers.checkpoint import CheckpointManager
    from trainers.data import Prefetch
    from trainers.devices import check_memory
    from trainers.evaluate import Evaluation
    from trainers.interval import Pacer
    from trainers.loop import Position, Work, iterate_steps
    from trainers.metrics import MetricFiles, make_meter
    from trainers.optimizer import AdamW
    from trainers.profile import Profile
    from trainers.progress import Progress
    from trainers.randomness import RandomNumbers
    from trainers.ranks import choose_precision
    from trainers.scaling import LossScale
    from trainers.storage import open_storage
    from trainers.strategies import create_strategy

    random_numbers = RandomNumbers(ranks.device)
    random_numbers.seed(config.train.seed)  # equal on all ranks: they draw equal weights
    strategy = create_strategy(config.strategy, ranks, config)
    is_spread = strategy.TAKES_EMPTY and ranks.world_size > 1
    study = bring(ranks.device, is_spread)
    model, fill = study.model, study.fill
    if not is_spread:
        check_memory(model.parameters(), ranks.device, config)
        if fill is not None:
            fill(ranks.device)
            fill = None
    prepare_blocks(model, recompute=config.recompute, is_compiled=config.compile)
    # Unequal: they drop different activations, and others again in another world.
    generation = member.world.generation if member else 1
    random_numbers.seed(config.train.seed + 1 + strategy.share.draw + SEEDS_A_GENERATION * (generation - 1))
    tied = find_shared(model)
    wrapped = strategy.wrap(model)
    check_shared(model, tied, config.strategy)
    check_memory(model.parameters(), ranks.device, config)
    if fill is not None:
        fill(ranks.device)
    optimizer = AdamW(model.named_parameters(), config.train)
    position = Position(study.training.fingerprint)
    scaling = LossScale(config.dtype)
    shared = {**strategy.shared_state(model, optimizer), "position": position}
    if scaling.is_on:
        shared["loss_scale"] = scaling
    checkpoints = CheckpointManager(
        open_storage(environment.checkpoint_url),
        ranks,
        attempt=environment.attempt,
        keep=config.checkpoint.keep,
        shared=shared,
        own={**strategy.own_state(model, optimizer), "random_numbers": random_numbers},
    )
    changing = threading.Lock()
    part = strategy.find_part() if member is not None else None
    step = member.take_over(ranks, part, shared) if member is not None and part is not None else None
    event = "started" if step is None else "went on from memory"
    if step is None:
        step = checkpoints.restore()
        event = "started" if step is None else "resumed"
    if member is not None and part is not None:
        member.offer(changing, position, part, shared)
    progress = Progress(
        environment.progress_file, total=config.train.steps, is_silent=not ranks.is_first, unit=study.unit
    )
    progress.report(
        step=position.steps_done,
        event=event,
        checkpoint_step=checkpoints.step_committed,
        **({"ranks": ranks.world_size} if member else {}),
        startup_s=round(time.perf_counter() - STARTED_S, 3),
    )
    precision = choose_precision(ranks.device, config.dtype)
    samples = study.training
    if config.prefetch:
        samples = Prefetch(samples, config.train.batch, is_pinned=ranks.device.type == "cuda")
    steps = iterate_steps(
        config.train,
        model=wrapped,
        strategy=strategy,
        optimizer=optimizer,
        work=Work(samples=samples, loss_of=study.loss_of, precision=precision),
        position=position,
        ranks=ranks,
        is_stop_asked=lambda: notice.is_given() or (member is not None and member.is_change_asked),
        before_change=checkpoints.settle,
        scaling=scaling,
        changing=changing,
    )
    supervisor = Supervisor(
        config=config,
        checkpoints=checkpoints,
        pacer=Pacer(config.checkpoint.every_steps, environment, ranks.share, step=position.steps_done),
        progress=progress,
        files=MetricFiles(config.log, environment.attempt, is_silent=not ranks.is_first),
        meter=make_meter(
            config.log,
            config.dtype,
            ranks.device,
            units_per_sample=study.units_per_sample,
            flops_per_sample=study.flops_per_sample,
            ranks=ranks.world_size,
        ),
        evaluation=Evaluation(config, wrapped, strategy, ranks, study, precision),
        profile=Profile(config.profile, ranks),
        watchdog=watchdog,
        device=ranks.device,
        elastic=Elastic(member=member, notice=notice, is_kept=strategy.grid.is_whole) if member else None,
    )
    code = supervisor.drive(steps)
    if member is not None and code == 0:
        member.finish()
    if code == 0 and study.demonstrate is not None:
        watchdog.beat("showing what was learnt")
        progress.say(study.demonstrate(wrapped))
    return code


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """Goes round the loop: reports, evaluates, saves every so often, at the end, and at once when asked to stop."""

    config: RunConfig
    checkpoints: "CheckpointManager"
    pacer: "Pacer"
    progress: "Progress"
    files: "MetricFiles"
    meter: "Meter"
    evaluation: "Evaluation"
    profile: "Profile"
    watchdog: Watchdog
    device: "torch.device"
    elastic: Elastic | None = None

    def drive(self, steps: "Iterator[StepReport]") -> int:
        """Take all steps; return the exit code."""
        config, checkpoints = self.config, self.checkpoints
        told = checkpoints.step_committed
        for report in steps:
            self.watchdog.beat(f"in step {report.step + 1}")
            self.meter.count(config.train.batch)
            self.profile.step()
            committed = checkpoints.step_committed
            values = self._measure(report)
            if values or committed != told or report.is_skipped:
                event = "checkpoint" if committed != told else "skipped" if report.is_skipped else None
                self._tell(report, values, event)
                told = committed
            if report.is_stop_asked and report.step < config.train.steps:
                verdict = self.elastic.decide(checkpoints, report.step) if self.elastic else "stop"
                if verdict == "stop":
                    return self._flush(report.step)
                if verdict == "go":
                    self.progress.report(step=report.step, event="preempted, the others go on")
                    return EXIT_CODE_PREEMPTED
            if self.pacer.is_due(report.step):
                self.pacer.note(report.step, stall_s=checkpoints.stall_s, write_s=checkpoints.write_s)
                checkpoints.save(report.step)
        self.watchdog.beat("saving the last step")
        checkpoints.save(config.train.steps)
        checkpoints.wait()
        self.profile.stop()
        self.files.close()
        self.progress.report(step=config.train.steps, event="finished", checkpoint_step=checkpoints.step_committed)
        return 0

    def _measure(self, report: "StepReport") -> dict[str, Any]:
        """What is to be told of this step; nothing at most of them, if so configured."""
        from trainers.metrics import read_memory

        last = report.step == self.config.train.steps
        values: dict[str, Any] = {}
        if last or is_due(report.step, self.config.log.every_steps):
            values = {
                "norm": report.norm,
                "learning_rate": report.learning_rate,
                **read_memory(self.device),
                **self.meter.read(),
            }
        every_steps = self.config.evaluate.every_steps
        if (last and every_steps) or is_due(report.step, every_steps):
            begin = time.perf_counter()
            values["validation_loss"] = self.evaluation.run()
            self.meter.pause(time.perf_counter() - begin)
        return values

    def _tell(self, report: "StepReport", values: dict[str, Any], event: str | None) -> None:
        self.progress.report(
            step=report.step,
            loss=report.loss,
            event=event,
            checkpoint_step=self.checkpoints.step_committed,
            **values,
        )
        if values:
            self.files.write(report.step, {"loss": report.loss, **values})

    def _flush(self, step: int) -> int:
        """Save this very step before the machine goes, and say whether that worked."""
        self.watchdog.beat("saving before the machine goes")
        begin = time.perf_counter()
        event = "preempted, checkpoint committed"
        try:
            self.checkpoints.save(step)
            self.checkpoints.wait()
        except Exception as error:
            # The process ends as preempted either way; the next attempt goes on from an older checkpoint.
            print(f"error: checkpoint of step {step} was not made: {error}", file=sys.stderr, flush=True)
            event = "preempted, checkpoint not made"
        flush_s = round(time.perf_counter() - begin, 3)
        committed = self.checkpoints.step_committed
        self.progress.report(step=step, event=event, checkpoint_step=committed, flush_s=flush_s)
        self.files.close()
        return EXIT_CODE_PREEMPTED


def is_due(step: int, every_steps: int) -> bool:
    """Whether something done every so many steps is done after this one; 0 is never."""
    return every_steps > 0 and step % every_steps == 0
