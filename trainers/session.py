"""One attempt at a run of any recipe: join the other ranks, build, resume, train, save, report.

This module imports torch only after the flags are checked and SIGTERM is handled.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainers.config import RunConfig, TrainConfig
from trainers.elastic import Elastic, ElasticMember, join_world
from trainers.environment import Environment, read_environment
from trainers.errors import TrainerError
from trainers.live_state import ChangeLock, LiveState
from trainers.preemption import PreemptionNotice
from trainers.recipe import Build
from trainers.watchdog import EXIT_CODE_HUNG, Watchdog

if TYPE_CHECKING:
    from trainers.checkpoint import CheckpointManager
    from trainers.compile_cache import CompileCache
    from trainers.loop import StepReport
    from trainers.own_time import WorkClock
    from trainers.peer_checkpoint import PeerCheckpoint
    from trainers.progress import Progress
    from trainers.ranks import Ranks
    from trainers.restore_progress import RestoreProgress, RestoreStatus
    from trainers.state import RunState
    from trainers.storage import Storage
    from trainers.strategies.base import Strategy

STARTED_S = time.perf_counter()
IS_WARM = "torch" in sys.modules  # in a standby


def run_session(config: RunConfig, build: Build) -> int:
    """Train as the config and the environment specify; return the exit code.

    0: all steps are done; 143: preempted; 1: the run cannot continue. A hang ends the process with 75.
    """
    # Read when torch is imported. At warning level, DDP warns about a choice that strategies/ddp.py explains.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    environment = read_environment()
    notice = PreemptionNotice(environment.preemption_file)
    notice.listen()
    watchdog = Watchdog(config.watchdog.timeout_s, start_s=config.watchdog.start_s)
    watchdog.start()
    from trainers.devices import advise, configure_arithmetic, is_out_of_memory
    from trainers.ranks import is_first_to_say, join_ranks, leave_ranks

    configure_arithmetic(config)
    code = EXIT_CODE_HUNG
    try:
        member = join_world(config, notice)
        if member is not None:  # read when NCCL's groups are created; they would end the process when a peer is lost
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        try:
            session = Session(
                config=config, environment=environment, notice=notice, watchdog=watchdog,
                ranks=join_ranks(start_s=config.watchdog.start_s, checkpoint_s=config.watchdog.checkpoint_s),
                member=member,
            )  # fmt: skip
            code = session.train(build)
            return code
        except Exception as error:
            if member is not None:  # a lost peer causes errors of many kinds
                watchdog.beat("waiting for a new world")
                member.await_change(error)
            raise
    except TrainerError as error:
        if is_first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
        return code
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).splitlines()[0] if str(error) else "no details"
        print(f"error: out of memory: {first}{advise(config)}", file=sys.stderr, flush=True)
        code = 1
        return code
    finally:
        # It may wait for a peer, or for a thread that waits for one. The result of the run is known by now.
        watchdog.beat("leaving the process group", exit_code=code)
        leave_ranks()
        watchdog.stop()


@dataclass(frozen=True, kw_only=True)
class Session:
    """The work of one rank in an attempt."""

    config: RunConfig
    environment: Environment
    notice: PreemptionNotice
    watchdog: Watchdog
    ranks: "Ranks"
    member: ElasticMember | None
    changing: ChangeLock = field(default_factory=ChangeLock)

    def train(self, build: Build) -> int:
        """Build everything, resume, drive the steps; return the exit code."""
        from trainers.checkpoint import CheckpointManager
        from trainers.progress import Progress
        from trainers.state import build_state
        from trainers.storage import open_storage

        config, ranks, member = self.config, self.ranks, self.member
        storage = open_storage(self.environment.checkpoint_url)
        state = build_state(config, build, ranks, generation=member.world.generation if member else 1)
        checkpoints = CheckpointManager(
            storage,
            ranks,
            attempt=self.environment.attempt,
            keep=config.checkpoint.keep,
            shared=state.shared,
            own=state.own,
            about=state.recipe.about,
            buffers=state.model.buffers,
            find_conflict=state.recipe.find_conflict,
        )
        progress = Progress(
            self.environment.progress_file,
            total=config.train.steps,
            is_silent=not ranks.is_first,
            unit=state.recipe.unit,
        )
        peers = self._join_peers(state)
        event = self._resume(state, checkpoints, progress, peers)
        compiled = self._open_compile_cache(storage)
        loaded = compiled.load() if compiled else 0
        self.watchdog.beat("in the first step", limit_s=self.watchdog.start_s)
        progress.report(
            step=state.position.steps_done,
            event=event,
            checkpoint_step=checkpoints.step_committed,
            busy_s=config.watchdog.start_s,
            **({"ranks": ranks.world_size} if member else {}),
            **({"is_warm": True} if IS_WARM else {}),
            **({"compiled_artifacts": loaded} if compiled else {}),
            startup_s=round(time.perf_counter() - STARTED_S, 3),
        )
        if state.position.steps_done >= config.train.steps and ranks.is_first:
            place = self.environment.checkpoint_url
            print(
                f"note: the checkpoint in `{place}` is of step {state.position.steps_done}, so no step is left: raise "
                "`--train.steps`, or set `$BROKER_CHECKPOINT_DIR` to a new folder to start a new run",
                file=sys.stderr,
            )
        code = self._drive(state, checkpoints, progress, peers, compiled)
        if member is not None and code == 0:
            member.finish()
        if code == 0 and state.recipe.demonstrate is not None:
            self.watchdog.beat("demonstrating the trained model")
            progress.print_text(state.recipe.demonstrate(state.wrapped))
        return code

    def _open_compile_cache(self, storage: "Storage") -> "CompileCache | None":
        """Return the compiled graphs of earlier attempts, if this run compiles."""
        if not self.config.compile:
            return None
        from trainers.compile_cache import CompileCache, describe_code

        return CompileCache(storage, describe_code(self.config, self.ranks.device), self.ranks.make_counter())

    def _join_peers(self, state: "RunState") -> "PeerCheckpoint | None":
        """Return the copies of the state in the memory of other nodes, if the config asks for them."""
        if not self.config.checkpoint.peer_every_steps:
            return None
        if self.member is None:
            raise TrainerError(
                "`--checkpoint.peer_every_steps` requires an elastic run: only there do ranks outlive a lost node\n\n"
                "hint: `--elastic 2:4`, or `job_recovery: {min_nodes: 2}` in the task"
            )
        if not state.strategy.HAS_PEER_COPIES:
            raise TrainerError(
                f"`--checkpoint.peer_every_steps` is not available with `--strategy {self.config.strategy}`, only with "
                "fsdp, zero1 and zero2"
            )
        return self.member.join_peers(self.ranks, state.shared, self.config)

    def _resume(
        self,
        state: "RunState",
        checkpoints: "CheckpointManager",
        progress: "Progress",
        peers: "PeerCheckpoint | None",
    ) -> str:
        """Load the newest state of the run, from the memory of peers or from storage; return the event to report."""
        member, part = self.member, state.strategy.find_part() if self.member is not None else None
        step, event = None, "resumed from memory"
        if peers is not None:
            step = peers.restore(checkpoints.find_newest_step())
        elif member is not None and part is not None:
            step = member.take_over(self.ranks, part, state.shared)
        if step is None:
            event = "started" if checkpoints.restore(self._make_restore_progress(progress)) is None else "resumed"
        if peers is not None:
            peers.begin(state.position.steps_done)
        elif member is not None and part is not None:
            # The update of sharded parameters by the user's own optimizer may wait for other ranks.
            is_joint = part.count > 1 and state.recipe.make_optimizer is not None
            wait = (self.ranks.wait_for_device,) if is_joint else ()
            member.offer(LiveState(self.changing, state.position, part, state.shared, *wait))
        return event

    def _make_restore_progress(self, progress: "Progress") -> "RestoreProgress":
        """Return a counter of bytes read by all ranks: a restore has no time limit while bytes arrive."""
        from trainers.restore_progress import RestoreProgress

        def report(status: "RestoreStatus") -> None:
            progress.report(
                step=status.step,
                event="restoring",
                checkpoint_step=status.step,
                busy_s=self.config.watchdog.timeout_s or self.config.watchdog.start_s,
                read_gb=round(status.read_bytes / 1e9, 3),
                of_gb=round(status.wanted_bytes / 1e9, 3),
            )

        return RestoreProgress(self.ranks.make_counter(), beat=self.watchdog.beat, report=report)

    def _drive(
        self,
        state: "RunState",
        checkpoints: "CheckpointManager",
        progress: "Progress",
        peers: "PeerCheckpoint | None",
        compiled: "CompileCache | None",
    ) -> int:
        from trainers.evaluate import Evaluation
        from trainers.interval import Pacer
        from trainers.metrics import MetricFiles, make_meter
        from trainers.own_time import NodeTimes, WorkClock, choose_clock
        from trainers.profile import Profile
        from trainers.ranks import choose_precision
        from trainers.supervisor import Supervisor

        config, ranks, recipe, strategy = self.config, self.ranks, state.recipe, state.strategy
        precision = choose_precision(ranks.device, config.dtype)
        node_times = NodeTimes(ranks, self.environment.progress_file)
        # On a GPU, the wait for the counts of other ranks would be measured as this rank's own work.
        is_timed = node_times.is_on and (recipe.count is None or ranks.device.type == "cpu")
        clock = choose_clock(strategy, ranks.device, config.train.batch) if is_timed else WorkClock()
        supervisor = Supervisor(
            config=config,
            checkpoints=checkpoints,
            pacer=Pacer(config.checkpoint.every_steps, self.environment, ranks.share, step=state.position.steps_done),
            progress=progress,
            files=MetricFiles(config.log, self.environment.attempt, is_silent=not ranks.is_first),
            meter=make_meter(
                config.log,
                config.dtype,
                ranks.device,
                units_per_sample=recipe.units_per_sample,
                flops_per_sample=recipe.flops_per_sample,
                ranks=ranks.world_size,
            ),
            evaluation=Evaluation(config, state.wrapped, strategy, ranks, recipe, precision, state.random_numbers),
            profile=Profile(config.profile, ranks),
            watchdog=self.watchdog,
            ranks=ranks,
            node_times=node_times,
            step_begin=state.position.steps_done,
            elastic=Elastic(member=self.member, notice=self.notice, is_kept=strategy.grid.is_whole, peers=peers)
            if self.member
            else None,
            peers=peers,
            compiled=compiled,
        )

        wait_for_copies = partial(self._wait_for_copies, checkpoints, peers)
        return supervisor.drive(self._iterate(state, wait_for_copies, precision, supervisor.is_read_due, clock))

    def _wait_for_copies(self, checkpoints: "CheckpointManager", peers: "PeerCheckpoint | None") -> None:
        """Return when the state may change."""
        if self.member is not None and self.member.keeps_state:
            self.ranks.wait_for_device()
        checkpoints.wait_for_copy()
        if peers is not None:
            peers.wait_for_copy()

    def _iterate(
        self,
        state: "RunState",
        before_change: Callable[[], None],
        precision: Callable[[], AbstractContextManager[Any]],
        is_read_due: Callable[[int], bool],
        clock: "WorkClock",
    ) -> "Iterator[StepReport]":
        from trainers.data import Prefetch
        from trainers.loop import Work, iterate_steps

        config, recipe = self.config, state.recipe
        samples = recipe.training
        if config.prefetch:
            samples = Prefetch(samples, config.train.batch, is_pinned=self.ranks.device.type == "cuda")
        return iterate_steps(
            self._choose_train(state.strategy),
            model=state.wrapped,
            strategy=state.strategy,
            optimizer=state.optimizer,
            work=Work(
                samples=samples,
                loss=recipe.loss,
                precision=precision,
                forward=recipe.forward,
                count=recipe.count,
            ),
            position=state.position,
            ranks=self.ranks,
            is_stop_asked=self._is_stop_asked,
            before_change=before_change,
            scaling=state.scaling,
            changing=self.changing,
            is_read_due=is_read_due,
            clock=clock,
        )

    def _choose_train(self, strategy: "Strategy") -> TrainConfig:
        """Return the training settings: in an elastic run, with a micro-batch that suits this number of ranks."""
        train = self.config.train
        size = strategy.choose_micro_batch(train.batch, train.micro_batch) if self.member else train.micro_batch
        if size != train.micro_batch and self.ranks.is_first:
            words = f"{self.ranks.world_size} ranks: passes of {size} samples instead of {train.micro_batch}"
            print(f"note: {words}, because a pipeline needs passes of equal size", file=sys.stderr, flush=True)
        return replace(train, micro_batch=size)

    def _is_stop_asked(self) -> bool:
        return self.notice.is_given() or (self.member is not None and self.member.is_change_asked)
