"""Progress files of a rehearsal, and the verdict on it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from broker.jobs.deadline import estimate_hazard
from broker.rehearsal.report import (
    Comparison,
    Line,
    Measures,
    ReportedAttempt,
    compare_repeats,
    compare_runs,
    find_resumes,
    measure,
    measure_start_s,
    read_lines,
    read_newest_line,
)
from broker.rehearsal.result import find_gang_hazard, find_missing_module, read_last_words
from broker.rehearsal.verdict import (
    Finding,
    Level,
    judge_interval,
    judge_losses,
    judge_notices,
    judge_resume,
    list_bad,
    weigh_interval,
)
from broker.spot.hazard import find_hazard_per_node_hour
from broker.spot.interval import find_best_interval_s
from broker.spot.market_model import find_hazard
from broker.types import CheckpointSpec, Offer, Placement


def make_line(step: int, *, loss: float | None = 1.0, saved: int | None = None, time_s: float | None = None) -> Line:
    return Line(step=step, total=100, loss=loss, checkpoint_step=saved, time_s=time_s)


def make_trial(number: int, steps: range, *, every: int = 5, loss_shift: float = 0.0) -> ReportedAttempt:
    """Make a trial that saves every few steps and first reports where it resumed, like the bundled trainer."""
    begin = steps.start - 1
    first = make_line(begin, loss=None, saved=begin or None)
    rest = [make_line(step, loss=1 / step + loss_shift, saved=step // every * every or None) for step in steps]
    return ReportedAttempt(number=number, lines=(first, *rest))


def test_a_file_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    lines = [{"step": 1, "loss": 0.5}, {"step": True}, ["no"], {"step": 2, "checkpoint_step": 1, "time": 7.5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + 'nonsense\n{"step": 3')
    assert [(line.step, line.loss, line.checkpoint_step, line.time_s) for line in read_lines(path)] == [
        (1, 0.5, None, None),
        (2, None, 1, 7.5),
    ]
    newest = read_newest_line(path)
    assert newest is not None and newest.step == 2
    assert read_lines(tmp_path / "none") == () and read_newest_line(tmp_path / "none") is None


def test_last_line_counts_only_once_its_end_is_written(tmp_path: Path) -> None:
    """`{"step": 1}` may be the beginning of `{"step": 1}...`, or be written again by the next write."""
    path = tmp_path / "progress.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert [line.step for line in read_lines(path)] == [1]
    newest = read_newest_line(path)
    assert newest is not None and newest.step == 1


def test_numbers_that_are_no_count_of_steps_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    endless = {"step": 1, "total": float("inf"), "loss": float("nan"), "checkpoint_step": float("nan")}
    path.write_text(json.dumps(endless) + '\n{"step": NaN}\n{"step": 1' + "0" * 400 + "}\n")
    (line,) = read_lines(path)
    assert (line.step, line.total, line.checkpoint_step) == (1, None, None) and line.loss != line.loss
    newest = read_newest_line(path)
    assert newest is not None and newest.step == 1


def test_a_resume_loses_the_steps_since_its_checkpoint() -> None:
    (resume,) = find_resumes([make_trial(1, range(1, 14)), make_trial(2, range(11, 20))])
    assert (resume.last_step, resume.saved_step, resume.begin_step, resume.steps_lost) == (13, 10, 10, 3)
    assert not resume.is_from_scratch and not resume.is_short


def test_program_that_reports_its_first_new_step_with_its_checkpoint_resumed_from_the_checkpoint() -> None:
    lines = (make_line(11, loss=None, saved=10), make_line(12, saved=10))
    (resume,) = find_resumes([make_trial(1, range(1, 14)), ReportedAttempt(number=2, lines=lines)])
    assert (resume.begin_step, resume.steps_lost) == (10, 3)


def test_older_checkpoint_costs_the_steps_up_to_the_one_that_was_loaded() -> None:
    (resume,) = find_resumes([make_trial(1, range(1, 14)), make_trial(2, range(6, 9))])
    assert resume.is_short and resume.steps_lost == 8


def test_third_attempt_is_compared_with_the_newest_step_and_the_newest_checkpoint_before_it() -> None:
    trials = [make_trial(1, range(1, 8)), make_trial(2, range(6, 18)), make_trial(3, range(16, 19))]
    first, second = find_resumes(trials)
    assert (first.last_step, first.saved_step, first.steps_lost) == (7, 5, 2)
    assert (second.last_step, second.saved_step, second.begin_step, second.steps_lost) == (17, 15, 15, 2)
    (found,) = judge_resume(trials, (first, second), preemptions=2, has_saved=True)
    assert found.text == "resumed 2 times, from step 5, 15; repeated 4 steps"
    failed = [*trials[:2], ReportedAttempt(number=3, lines=())]
    (found,) = judge_resume(failed, (first,), preemptions=2, has_saved=True, failure="exit code 1")
    assert "should have resumed from the checkpoint at step 15" in found.text


def test_attempts_without_a_report_are_skipped() -> None:
    trials = [make_trial(1, range(1, 14)), ReportedAttempt(number=2, lines=()), make_trial(3, range(11, 12))]
    assert [each.number for each in find_resumes(trials)] == [3]


@pytest.mark.parametrize(
    ("trials", "has_saved", "words"),
    [
        ([ReportedAttempt(number=1, lines=())], True, "reported no progress"),
        ([make_trial(1, range(1, 9))], True, "not tested: the preemption came before"),
        ([make_trial(1, range(1, 14)), make_trial(2, range(1, 9))], True, "reported a checkpoint at step 10; 13 steps"),
        ([make_trial(1, range(1, 14)), make_trial(2, range(1, 9))], False, "is empty, so the checkpoint was lost"),
        ([make_trial(1, range(1, 4)), make_trial(2, range(1, 9))], False, "without a reported checkpoint; 3 steps"),
        ([make_trial(1, range(1, 4)), make_trial(2, range(1, 9))], True, "is not empty"),
        (
            [make_trial(1, range(1, 14)), make_trial(2, range(6, 9))],
            True,
            "resumed from step 5, although the program had reported",
        ),
        (
            [make_trial(1, range(1, 14)), make_trial(2, range(11, 19))],
            True,
            "resumed once, from step 10; repeated 3",
        ),
        ([make_trial(1, range(1, 12)), make_trial(2, range(11, 19))], True, "from step 10; repeated 1 step"),
    ],
)
def test_each_outcome_of_a_resume_has_its_message(trials: list[ReportedAttempt], has_saved: bool, words: str) -> None:
    (finding,) = judge_resume(trials, find_resumes(trials), preemptions=1, has_saved=has_saved)
    assert words in finding.text
    assert (finding.level == "bad") == bool(finding.hint)


def test_a_program_that_fails_before_its_first_new_step_could_not_load_its_checkpoint(tmp_path: Path) -> None:
    trials = [make_trial(1, range(1, 14)), ReportedAttempt(number=2, lines=())]
    (tmp_path / "log").write_text("loading\nKeyError: 'epoch'\n\n")
    said = read_last_words(tmp_path / "log")
    finding, log = judge_resume(
        trials, (), preemptions=1, has_saved=True, failure="`run` exited with code 1", last_words=said
    )
    assert finding.level == "bad" and "attempt 2 should have resumed from the checkpoint at step 10" in finding.text
    assert "`run` exited with code 1" in finding.text and "KeyError: 'epoch'" in log.text
    assert read_last_words(tmp_path / "none") == ""


def test_hint_of_a_setup_comes_before_findings_about_the_progress_file() -> None:
    (found,) = judge_resume(
        [], [], preemptions=0, has_saved=False, failure="`setup` exited with code 1",
        last_words="hint: run `pip install 'intercloud-broker[train]'`",
    )  # fmt: skip
    assert (found.level, found.hint) == ("bad", "run `pip install 'intercloud-broker[train]'`")
    assert "`setup` exited with code 1" in found.text


def test_program_that_fails_at_once_is_not_blamed_for_its_reports() -> None:
    finding, log = judge_resume(
        [], [], preemptions=0, has_saved=False, failure="`run` exited with code 2", last_words="no such option"
    )
    assert "`run` exited with code 2" in finding.text and "PROGRESS" not in finding.text + finding.hint
    assert "no such option" in log.text


@pytest.mark.parametrize(
    ("module", "hint"),
    [("torch", "`pip install 'intercloud-broker[train]'`"), ("wandb.sdk", "`pip install wandb`")],
)
def test_package_that_is_missing_is_named_before_the_progress_file(tmp_path: Path, module: str, hint: str) -> None:
    log = tmp_path / "1.log"
    log.write_text(f"Traceback (most recent call last):\n  import x\nModuleNotFoundError: No module named '{module}'\n")
    missing = find_missing_module(log)
    (found,) = judge_resume([], [], preemptions=0, has_saved=False, failure="exit code 1", missing_module=missing)
    assert found.level == "bad" and module.partition(".")[0] in found.text
    assert hint in found.hint and "PROGRESS" not in found.text + found.hint
    assert find_missing_module(tmp_path / "none.log") == ""


def test_steps_done_twice_are_compared_bit_for_bit() -> None:
    exact = [make_trial(1, range(1, 14)), make_trial(2, range(11, 20))]
    assert compare_repeats(exact) == Comparison(steps=3, equal=3)
    (good,) = judge_losses(compare_repeats(exact), None)
    assert good.level == "good" and "3 repeated steps" in good.text
    off = [make_trial(1, range(1, 14)), make_trial(2, range(11, 20), loss_shift=1e-12)]
    found = compare_repeats(off)
    assert (found.steps, found.equal) == (3, 0) and found.first is not None and found.first[0] == 11
    assert "first at step 11" in judge_losses(found, None)[0].text
    (note,) = judge_losses(Comparison(steps=8, equal=5, first=(11, 0.5, 0.25)), None)
    assert note.text == "differ in 3 of 8 repeated steps, first at step 11: 0.5 and 0.25"


def test_interrupted_run_is_compared_by_its_final_steps() -> None:
    broken = [make_trial(1, range(1, 14), loss_shift=0.0), make_trial(2, range(11, 20))]
    assert compare_runs(broken, [make_trial(1, range(1, 20))]).is_exact
    assert compare_runs(broken, [make_trial(1, range(1, 20), loss_shift=1.0)]).equal == 0


def test_nan_losses_of_both_runs_count_as_equal() -> None:
    trial = ReportedAttempt(number=1, lines=(make_line(1, loss=math.nan),))
    assert compare_runs([trial], [trial]).is_exact


def test_steps_checkpoints_and_starts_are_measured() -> None:
    """Steps of 2 s; the one after each fifth takes 3 s longer."""
    time_s, lines = 100.0, [make_line(0, loss=None, time_s=99.0)]
    for step in range(1, 41):
        time_s += 2.0 + (3.0 if step % 5 == 1 and step > 1 else 0.0)
        lines.append(make_line(step, saved=(step - 1) // 5 * 5 or None, time_s=time_s))
    trial = ReportedAttempt(number=1, lines=tuple(lines), start_s=measure_start_s(lines, 90.0))
    found = measure([trial])
    assert (found.total, found.last_step, found.checkpoint_steps) == (100, 40, 5)
    assert found.step_s == pytest.approx(2.0) and found.stall_s == pytest.approx(3.0)
    assert found.start_s == pytest.approx(12.0)


def test_first_steps_of_a_start_do_not_count_as_its_speed() -> None:
    """Two slow steps (compilation, caches), then steps of 1, 2 and 3 s; each line reports two steps."""
    times = [0.0, 40.0, 60.0, 62.0, 66.0, 72.0]
    lines = tuple(make_line(2 * number + 1, time_s=time_s) for number, time_s in enumerate(times))
    found = measure([ReportedAttempt(number=1, lines=lines)])
    assert found.step_s == pytest.approx(2.0)


def test_line_that_was_written_before_the_start_is_not_a_negative_time() -> None:
    lines = [make_line(0, loss=None, time_s=80.0), make_line(1, time_s=89.5)]
    assert measure_start_s(lines, 90.0) == 0.0


def test_only_bad_findings_make_a_rehearsal_fail() -> None:
    levels: tuple[Level, ...] = ("good", "note", "bad")
    findings = [Finding(level=level, about="losses", text=level) for level in levels]
    assert [each.text for each in list_bad(findings)] == ["bad"]


def test_an_interval_is_weighed_at_the_hazard_of_the_place() -> None:
    checkpoint = CheckpointSpec(stall_s=60.0, restart_s=300.0)
    measures = Measures(total=1000, last_step=1000, checkpoint_steps=10)
    found = weigh_interval(measures, work_hours=100.0, hazard=0.05, checkpoint=checkpoint)
    assert found is not None
    assert found.every_s == pytest.approx(3600.0)
    assert found.best_s == pytest.approx(find_best_interval_s(60.0, 0.05))
    assert found.best_steps == round(found.best_s / 360) and found.hours >= found.best_hours
    often = weigh_interval(
        Measures(total=1000, last_step=1000, checkpoint_steps=1), work_hours=100.0, hazard=0.05, checkpoint=checkpoint
    )
    assert often is not None and often.waste_share > 0.1
    (finding,) = judge_interval(often, 0.05, 60.0)
    assert finding.level == "note" and finding.hint == f"save every {often.best_steps} steps"
    assert weigh_interval(Measures(total=None, last_step=3), work_hours=1.0, hazard=0.1, checkpoint=checkpoint) is None


def test_interval_near_the_best_one_fits() -> None:
    """Steps of 100 s: 26 of them, instead of the best 29, cost less than 1 % of the time."""
    checkpoint = CheckpointSpec(stall_s=60.0, restart_s=300.0)
    measures = Measures(total=1000, last_step=1000, checkpoint_steps=26)
    near = weigh_interval(measures, work_hours=1000 / 36, hazard=0.05, checkpoint=checkpoint)
    assert near is not None and near.best_steps == 29 and 0 < near.waste_share < 0.02
    (finding,) = judge_interval(near, 0.05, 60.0)
    assert finding.level == "good" and "every 26 steps" in finding.text and not finding.hint
    (finding,) = judge_interval(near, 0.0, 60.0)
    assert "on-demand nodes are not preempted" in finding.text


def test_best_interval_of_a_short_job_is_at_most_the_whole_job() -> None:
    checkpoint = CheckpointSpec(stall_s=60.0, restart_s=300.0)
    measures = Measures(total=3, last_step=3, checkpoint_steps=1)
    found = weigh_interval(measures, work_hours=0.5, hazard=0.001, checkpoint=checkpoint)
    assert found is not None and found.best_steps == 3 and found.best_s == 1800.0


def test_interval_is_weighed_by_the_market_model_that_jobs_use_not_by_the_published_band() -> None:
    offer = Offer(
        cloud="aws", region="us-east-1", zone="us-east-1a", instance_type="g5.xlarge", vcpus=4, memory_gib=16,
        spot_usd_hour=0.4, ondemand_usd_hour=1.0, interruption_band=0,
    )  # fmt: skip
    played = Placement(offer=offer, is_spot=True, node_count=2)
    hazard = find_gang_hazard(played, 8)
    assert hazard == estimate_hazard(replace(played, node_count=8), {})
    assert hazard == pytest.approx(find_hazard() + 8 * find_hazard_per_node_hour(0))
    assert hazard > 10 * 8 * find_hazard_per_node_hour(0), "a band is far below what recordings show"
    assert find_gang_hazard(replace(played, is_spot=False), 8) == 0


def test_programs_are_judged_by_notices_only_if_one_was_given() -> None:
    assert judge_notices(given=0, ignored=0, grace_s=20.0) == []
    assert judge_notices(given=1, ignored=0, grace_s=20.0)[0].level == "good"
    assert judge_notices(given=2, ignored=1, grace_s=20.0)[0].level == "bad"
