"""Judge a rehearsal: whether the program resumes, what it loses, and whether its checkpoint interval fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from broker.formatting import format_count, format_duration
from broker.rehearsal.report import Comparison, Measures, ReportedAttempt, Resume
from broker.spot.interval import find_best_interval_s, find_expected_hours
from broker.types import CheckpointSpec

Level = Literal["good", "note", "bad"]
REPORT_HINT = (
    'append lines such as {"step": 7, "total": 100, "loss": 2.1, "checkpoint_step": 5} to $BROKER_PROGRESS_FILE'
)
TRAINER_PACKAGES = ("torch", "numpy")  # the extra `train`
OWN_HINT = "hint: "  # `trainers.setup` and other bundled programs write it at the start of their last line
SHOWN = "the rehearsal failed, see the lines marked BAD"
GOOD_SHARE = 0.02  # of expected time that an interval may cost above the best one


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding, with a hint on how to fix it."""

    level: Level
    about: str
    text: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """The program's checkpoint interval and the best one, for `work_hours` at `hazard` preemptions per hour."""

    every_s: float  # simulated seconds of work from one checkpoint to the next
    best_s: float  # Young/Daly; infinite without hazard
    every_steps: int
    best_steps: int | None
    hours: float  # expected in total, with the program's interval
    best_hours: float

    @property
    def waste_share(self) -> float:
        """Additional time compared with the best interval, as a fraction."""
        return self.hours / self.best_hours - 1 if self.best_hours > 0 else 0.0


def list_bad(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that make a rehearsal fail."""
    return [each for each in findings if each.level == "bad"]


def weigh_interval(
    measures: Measures, *, work_hours: float, hazard: float, checkpoint: CheckpointSpec
) -> CheckpointInterval | None:
    """Compare intervals; None if the program does not report steps and checkpoints."""
    if not measures.total or not measures.checkpoint_steps or work_hours <= 0:
        return None
    step_s = work_hours * 3600 / measures.total
    every_s = measures.checkpoint_steps * step_s
    best_s = min(find_best_interval_s(checkpoint.stall_s, hazard), work_hours * 3600)

    def hours(interval_s: float) -> float:
        return find_expected_hours(work_hours, hazard, interval_s, checkpoint.stall_s, checkpoint.restart_s)

    best_steps = None if math.isinf(best_s) else min(max(1, round(best_s / step_s)), measures.total)
    return CheckpointInterval(
        every_s=every_s,
        best_s=best_s,
        every_steps=measures.checkpoint_steps,
        best_steps=best_steps,
        hours=hours(every_s),
        best_hours=hours(best_s),
    )


def judge_resume(
    trials: Sequence[ReportedAttempt],
    resumes: Sequence[Resume],
    *,
    preemptions: int,
    has_saved: bool,
    failure: str = "",
    last_words: str = "",
    missing_module: str = "",
) -> list[Finding]:
    """Judge whether the program resumed from where it was, and explain if it did not.

    `has_saved`: the checkpoint folder is not empty. `failure`: why the job failed. `last_words`: the last line of its
    log. `missing_module`: the module that Python could not import, from the log.
    """
    if failure and missing_module:
        return [explain_import(missing_module)]
    if failure and last_words.startswith(OWN_HINT):
        return [_bad(f"the program could not start: {failure}", last_words.removeprefix(OWN_HINT))]
    findings = _judge_resume(trials, resumes, preemptions=preemptions, has_saved=has_saved, failure=failure)
    if failure and last_words:
        findings.append(Finding(level="note", about="log", text=f"the last line of the log is `{last_words}`"))
    return findings


def explain_import(module: str) -> Finding:
    """Explain a module that Python could not import."""
    package = module.partition(".")[0]
    hint = f"install it where `broker` is installed, or in the task's `setup:`: `pip install {package}`"
    if package in TRAINER_PACKAGES:
        hint = "the bundled trainers require it: `pip install 'intercloud-broker[train]'`"
    text = f"the program requires the Python package `{package}`, which is not installed here"
    return Finding(level="bad", about="program", text=text, hint=hint)


def _judge_resume(
    trials: Sequence[ReportedAttempt], resumes: Sequence[Resume], *, preemptions: int, has_saved: bool, failure: str
) -> list[Finding]:
    if failure and not any(trial.lines for trial in trials):
        return [_bad(f"the program ended before it reported a step: {failure}", "fix the cause that its log names")]
    if not any(trial.lines for trial in trials):
        return [_bad("the program reported no progress, so it is unknown whether it resumed", REPORT_HINT)]
    if failure and len(trials) > 1 and not trials[-1].lines:
        before = max((trial.saved_step for trial in trials if trial.saved_step is not None), default=None)
        where = f"from the checkpoint at step {before}" if before else "from the start"
        text = f"attempt {trials[-1].number} should have resumed {where}, but ended before its first step: {failure}"
        return [_bad(text, "make the program load its own checkpoint, and check it with `broker rehearse`")]
    scratch = [resume for resume in resumes if resume.is_from_scratch]
    if scratch:
        return [_judge_scratch(scratch[0], has_saved=has_saved)]
    if not resumes:
        text = "there was no preemption" if not preemptions else "the preemption came before the first reported step"
        return [Finding(level="note", about="resume", text=f"not tested: {text}")]
    short = next((resume for resume in resumes if resume.is_short), None)
    if short is not None:
        return [
            _bad(
                f"attempt {short.number} resumed from step {short.begin_step}, although the program had reported "
                f"a checkpoint at step {short.saved_step}",
                "report `checkpoint_step` only when the checkpoint is complete and can be loaded",
            )
        ]
    steps = ", ".join(str(resume.begin_step) for resume in resumes)
    lost = sum(resume.steps_lost for resume in resumes)
    times = "once" if len(resumes) == 1 else f"{len(resumes)} times"
    again = "1 step" if lost == 1 else f"{lost} steps"
    return [Finding(level="good", about="resume", text=f"resumed {times}, from step {steps}; repeated {again}")]


def _judge_scratch(first: Resume, *, has_saved: bool) -> Finding:
    saved = first.saved_step
    if saved:
        why = f"although it had reported a checkpoint at step {saved}"
        hint = "load the newest checkpoint from $BROKER_CHECKPOINT_DIR at the start, on every rank"
        if not has_saved:
            why += ": $BROKER_CHECKPOINT_DIR is empty, so the checkpoint was lost with the nodes"
            hint = "save to $BROKER_CHECKPOINT_DIR, which outlives the nodes; every other folder is lost with them"
    elif has_saved:
        why = "although $BROKER_CHECKPOINT_DIR is not empty"
        hint = "load it at the start, on every rank, and report `checkpoint_step` after each save"
    else:
        why = "without a reported checkpoint"
        hint = "save to $BROKER_CHECKPOINT_DIR, which outlives the nodes, and load from it at the start"
    return _bad(
        f"attempt {first.number} restarted from step 0, {why}; "
        f"{'1 step was' if first.last_step == 1 else f'{first.last_step} steps were'} lost",
        hint,
    )


def _bad(text: str, hint: str) -> Finding:
    return Finding(level="bad", about="resume", text=text, hint=hint)


def judge_losses(repeats: Comparison, unbroken: Comparison | None) -> list[Finding]:
    """Judge whether repeated steps, and those of an uninterrupted run, had bit-identical losses."""
    findings = []
    if repeats.steps:
        findings.append(_judge_comparison(repeats, format_count(repeats.steps, "repeated step")))
    if unbroken is not None and unbroken.steps:
        findings.append(
            _judge_comparison(unbroken, f"{format_count(unbroken.steps, 'step')} compared with an uninterrupted run")
        )
    elif unbroken is not None:
        findings.append(Finding(level="note", about="losses", text="the program reports no losses to compare"))
    return findings


def _judge_comparison(comparison: Comparison, steps: str) -> Finding:
    if comparison.is_exact:
        return Finding(level="good", about="losses", text=f"{steps}: all losses are bit-identical")
    assert comparison.first is not None
    step, first, second = comparison.first
    return Finding(
        level="note",
        about="losses",
        text=f"differ in {comparison.steps - comparison.equal} of {steps}, "
        f"first at step {step}: {first!r} and {second!r}",
        hint="for an exact resume, also save the data position, the random state of every rank, and the optimizer",
    )


def judge_notices(*, given: int, ignored: int, grace_s: float) -> list[Finding]:
    """Judge whether the program exited within `grace_s` real seconds of a preemption notice."""
    if not given:
        return []
    if not ignored:
        return [Finding(level="good", about="notice", text="the program exited in time after the preemption warning")]
    return [
        Finding(
            level="bad",
            about="notice",
            text=f"the program ignored SIGTERM until its node was terminated {format_duration(grace_s)} later",
            hint="on SIGTERM, or when $BROKER_PREEMPTION_FILE appears, save and exit",
        )
    ]


def judge_interval(interval: CheckpointInterval | None, hazard: float, stall_s: float) -> list[Finding]:
    """Compare the checkpoint interval with the best one for `hazard` preemptions per hour."""
    if interval is None:
        return []
    steps, seconds = format_count(interval.every_steps, "step"), format_duration(interval.every_s)
    as_is = f"a checkpoint every {steps} is one every {seconds}"
    if interval.best_steps is None or hazard <= 0:
        return [Finding(level="note", about="interval", text=f"{as_is}; on-demand nodes are not preempted")]
    best = f"{format_duration(interval.best_s)} or {format_count(interval.best_steps, 'step')}"
    basis = f"Young/Daly for one preemption in {format_duration(3600 / hazard)} and {stall_s:g} s per checkpoint"
    if interval.waste_share <= GOOD_SHARE:
        return [Finding(level="good", about="interval", text=f"{as_is}, which fits: {basis} gives {best}")]
    return [
        Finding(
            level="note",
            about="interval",
            text=f"{as_is}: {interval.waste_share:.0%} more time than the optimum; {basis} gives {best}",
            hint=f"save every {format_count(interval.best_steps, 'step')}",
        )
    ]
