"""Drive the training loop: report, evaluate, checkpoint, and end the run."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainers.checkpoint import CheckpointManager
from trainers.config import RunConfig
from trainers.elastic import Elastic
from trainers.evaluate import Evaluation
from trainers.gc_control import GcControl
from trainers.interval import Pacer
from trainers.loop import DeviceReading, StepReport
from trainers.metrics import Meter, MetricFiles, read_memory
from trainers.own_time import NodeTimes
from trainers.peer_checkpoint import PeerCheckpoint
from trainers.preemption import EXIT_CODE_PREEMPTED
from trainers.profile import Profile
from trainers.progress import Progress
from trainers.ranks import Ranks
from trainers.watchdog import Watchdog

if TYPE_CHECKING:
    from trainers.compile_cache import CompileCache

# A request to stop is detected when the host reads the device: at least this often, even if steps are logged rarely.
READ_STEPS_MAX = 10


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """Takes the steps of the loop; checkpoints at intervals, at the end, and when a stop is requested."""

    config: RunConfig
    checkpoints: CheckpointManager
    pacer: Pacer
    progress: Progress
    files: MetricFiles
    meter: Meter
    evaluation: Evaluation
    profile: Profile
    watchdog: Watchdog
    ranks: Ranks
    node_times: NodeTimes
    step_begin: int = 0  # steps done before; more than the config asks for if `--train.steps` was lowered
    elastic: Elastic | None = None
    peers: PeerCheckpoint | None = None
    compiled: "CompileCache | None" = None

    def is_read_due(self, step: int) -> bool:
        """Return whether the host waits for the device after this step. The result is equal on all ranks."""
        config = self.config
        every_steps = min(config.log.every_steps, READ_STEPS_MAX)
        # Read before a checkpoint: it must not contain a step whose gradients end the run.
        is_saved = self.pacer.is_due(step)
        return is_saved or is_due(step, every_steps) or is_due(step, config.evaluate.every_steps)

    def drive(self, steps: Iterator[StepReport]) -> int:
        """Take all steps; return the exit code."""
        with GcControl() as gc_control:
            return self._drive(steps, gc_control)

    def _drive(self, steps: Iterator[StepReport], gc_control: GcControl) -> int:
        config, checkpoints = self.config, self.checkpoints
        reported = checkpoints.step_committed
        is_first = True
        for report in steps:
            self.watchdog.beat(f"in step {report.step + 1}")
            if is_first:  # all ranks have compiled and read their first samples
                self.ranks.limit_steps(config.watchdog.collective_s)
                self._keep_compiled()
                is_first = False
            gc_control.step()
            self.meter.count(config.train.batch)
            self.profile.step()
            if self.peers is not None and self.peers.is_due(report.step) and report.step < config.train.steps:
                self.peers.begin(report.step)
            reading = report.reading
            if reading is None:
                continue
            committed = checkpoints.step_committed
            values = self._measure(report, reading)
            if values or committed != reported or reading.skipped_steps:
                event = "checkpoint" if committed != reported else "skipped" if reading.skipped_steps else None
                self._report(report, reading, values, event)
                reported = committed
            if reading.is_stop_asked and report.step < config.train.steps:
                verdict = self._decide(report.step)
                if verdict == "stop":
                    return self._flush(report.step)
                if verdict == "go":
                    self.progress.report(step=report.step, event="preempted; the others continue")
                    return EXIT_CODE_PREEMPTED
            if self.pacer.is_due(report.step):
                self.pacer.note(report.step, stall_s=checkpoints.stall_s, write_s=checkpoints.write_s)
                self.watchdog.beat("writing the checkpoint before", limit_s=config.watchdog.checkpoint_s)
                checkpoints.save(report.step)
                self._keep_compiled()  # an evaluation compiles graphs of its own
                self.watchdog.beat(f"in step {report.step + 1}")
        self.watchdog.beat("saving the last step", limit_s=config.watchdog.checkpoint_s)
        step_last = max(config.train.steps, self.step_begin)
        checkpoints.save(step_last, is_last=True)
        checkpoints.wait()
        if self.compiled is not None:
            self.compiled.wait()
        if self.peers is not None:  # other ranks may still wait for this one
            self.peers.wait()
        self.profile.stop()
        self.files.close()
        self.progress.report(step=step_last, event="finished", checkpoint_step=checkpoints.step_committed)
        return 0

    def _keep_compiled(self) -> None:
        if self.compiled is not None:
            self.compiled.save()

    def _decide(self, step: int) -> str:
        """Return `stay`, `go` or `stop`. Does not return if this rank continues in another world."""
        if self.elastic is None:
            return "stop"
        self.watchdog.beat("agreeing on the next world", limit_s=self.config.watchdog.checkpoint_s)
        verdict = self.elastic.decide(self.checkpoints, step)
        self.watchdog.beat(f"in step {step + 1}")
        return verdict

    def _measure(self, report: StepReport, reading: DeviceReading) -> dict[str, Any]:
        """Return the values to log for this step; empty if it is not logged."""
        last = report.step == self.config.train.steps
        values: dict[str, Any] = {}
        if last or is_due(report.step, self.config.log.every_steps):
            values = {
                "norm": reading.norm,
                "learning_rate": report.learning_rate,
                **read_memory(self.ranks.device),
                **self.meter.read(),
            }
        every_steps = self.config.evaluate.every_steps
        # A machine that is about to be reclaimed may not have the time to evaluate first, and to save then.
        is_leaving = reading.is_stop_asked and not last
        if not is_leaving and ((last and every_steps) or is_due(report.step, every_steps)):
            begin = time.perf_counter()
            values["validation_loss"] = self.evaluation.run()
            self.meter.pause(time.perf_counter() - begin)
        return values

    def _report(self, report: StepReport, reading: DeviceReading, values: dict[str, Any], event: str | None) -> None:
        step, committed = report.step, self.checkpoints.step_committed
        own_s = None if report.own_s is None else self.node_times.publish(report.own_s)
        own = {} if own_s is None else {"own_s": round(own_s, 6)}
        if own and not self.ranks.is_first:
            self.progress.note_node(step=step, **own)
        self.progress.report(step=step, loss=reading.loss, event=event, checkpoint_step=committed, **values, **own)
        if values:
            self.files.write(step, {"loss": reading.loss, **values})

    def _flush(self, step: int) -> int:
        """Save this step before the machine is reclaimed, and report whether that worked."""
        self.watchdog.beat("saving before the preemption", limit_s=self.config.watchdog.checkpoint_s)
        begin = time.perf_counter()
        event = "preempted, checkpoint committed"
        try:
            self.checkpoints.save(step, is_last=True)
            self.checkpoints.wait()
            if self.peers is not None:
                self.peers.wait()
            if self.compiled is not None:
                self.compiled.wait()
        except Exception as error:
            # The process exits as preempted either way; the next attempt continues from an older checkpoint.
            print(f"error: the checkpoint of step {step} was not written: {error}", file=sys.stderr, flush=True)
            event = "preempted, checkpoint not made"
        flush_s = round(time.perf_counter() - begin, 3)
        committed = self.checkpoints.step_committed
        self.progress.report(step=step, event=event, checkpoint_step=committed, flush_s=flush_s)
        self.files.close()
        return EXIT_CODE_PREEMPTED


def is_due(step: int, every_steps: int) -> bool:
    """Return whether an action that is repeated every `every_steps` steps is due after `step`; 0: never."""
    return every_steps > 0 and step % every_steps == 0
