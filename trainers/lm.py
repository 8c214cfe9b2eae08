"""Trains a small language model: `python -m trainers.lm --strategy ddp`, alone, under trainers.launch or torchrun.

Run again after any end but success, it goes on from the newest complete checkpoint.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainers.config import Config, parse_config
from trainers.environment import Environment, read_environment
from trainers.errors import TrainerError
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice

# Nothing above imports torch. It is imported below, when flags are known to be right and SIGTERM is heard.
if TYPE_CHECKING:
    from trainers.checkpoint import CheckpointManager
    from trainers.loop import StepReport
    from trainers.progress import Progress

STARTED_S = time.perf_counter()


def main(arguments: Sequence[str]) -> int:
    """Train as the flags and the environment say; return the exit code."""
    config = parse_config(arguments)
    # Read at torch's import. At warning level every DDP run scolds us for a choice explained in strategies/ddp.py.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment = read_environment()
    notice = PreemptionNotice(environment.preemption_file)
    notice.listen()
    return run(config, environment, notice)


def run(config: Config, environment: Environment, notice: PreemptionNotice) -> int:
    """Build everything, resume, train, save; 0 when all steps are done, 143 when preempted."""
    from trainers.checkpoint import CheckpointManager
    from trainers.data import Corpus, read_text
    from trainers.loop import Position, iterate_steps
    from trainers.models.gpt import GPT
    from trainers.optimizer import AdamW
    from trainers.progress import Progress
    from trainers.randomness import RandomNumbers
    from trainers.ranks import join_ranks, leave_ranks
    from trainers.storage import open_storage
    from trainers.strategies import create_strategy

    train = config.train
    ranks = join_ranks()
    random_numbers = RandomNumbers(ranks.device)
    random_numbers.seed(train.seed)  # equal on all ranks: they draw equal weights
    model = GPT(config.model).to(ranks.device)
    progress = Progress(environment.progress_file, total=train.steps, is_silent=not ranks.is_first)
    try:
        strategy = create_strategy(config.strategy, ranks, config)
        random_numbers.seed(train.seed + 1 + strategy.share.draw)  # unequal: they drop different activations
        wrapped = strategy.wrap(model)
        corpus = Corpus(read_text(config.data), config.model.context, config.data.seed)
        optimizer = AdamW(model.named_parameters(), train)
        position = Position(corpus.fingerprint)
        checkpoints = CheckpointManager(
            open_storage(environment.checkpoint_url),
            ranks,
            attempt=environment.attempt,
            keep=config.checkpoint.keep,
            shared={**strategy.shared_state(model, optimizer), "position": position},
            own={**strategy.own_state(model, optimizer), "random_numbers": random_numbers},
        )
        step = checkpoints.restore()
        progress.report(
            step=position.steps_done,
            event="started" if step is None else "resumed",
            checkpoint_step=step,
            startup_s=round(time.perf_counter() - STARTED_S, 3),
        )
        steps = iterate_steps(
            train,
            model=wrapped,
            strategy=strategy,
            optimizer=optimizer,
            corpus=corpus,
            position=position,
            ranks=ranks,
            is_stop_asked=notice.is_given,
        )
        return supervise(steps, config, checkpoints, progress)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        leave_ranks()


def supervise(
    steps: "Iterator[StepReport]", config: Config, checkpoints: "CheckpointManager", progress: "Progress"
) -> int:
    """Drive the steps; save every so often, at the end, and at once when a stop is asked for."""
    told = checkpoints.step_committed
    begin = time.perf_counter()
    for report in steps:
        now = time.perf_counter()
        tokens_per_s = config.train.batch * config.model.context / (now - begin)
        begin = now
        committed = checkpoints.step_committed
        progress.report(
            step=report.step,
            loss=report.loss,
            tokens_per_s=round(tokens_per_s, 1),
            event="checkpoint" if committed != told else None,
            checkpoint_step=committed,
        )
        told = committed
        if report.is_stop_asked and report.step < config.train.steps:
            return flush(report.step, checkpoints, progress)
        if config.checkpoint.every_steps and report.step % config.checkpoint.every_steps == 0:
            checkpoints.save(report.step)
    checkpoints.save(config.train.steps)
    checkpoints.wait()
    progress.report(step=config.train.steps, event="finished", checkpoint_step=checkpoints.step_committed)
    return 0


def flush(step: int, checkpoints: "CheckpointManager", progress: "Progress") -> int:
    """Save this very step before the machine goes, and say whether that worked."""
    begin = time.perf_counter()
    event = "preempted, checkpoint committed"
    try:
        checkpoints.save(step)
        checkpoints.wait()
    except Exception as error:
        # The process ends as preempted either way; the next attempt goes on from an older checkpoint.
        print(f"error: checkpoint of step {step} was not made: {error}", file=sys.stderr, flush=True)
        event = "preempted, checkpoint not made"
    flush_s = round(time.perf_counter() - begin, 3)
    progress.report(step=step, event=event, checkpoint_step=checkpoints.step_committed, flush_s=flush_s)
    return EXIT_CODE_PREEMPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
