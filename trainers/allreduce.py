"""Measure collectives: `python -m trainers.allreduce`, on the broker's nodes or under torchrun.

Sizes, rates and their names are those of nccl-tests, so results can be compared with published ones. Sizes that are
already in the results file are not measured again: after a preemption the sweep continues.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.environment import Environment, read_environment
from trainers.errors import TrainerError
from trainers.flags import parse_flags
from trainers.knobs import knob
from trainers.launch import end_process, launch_if_needed
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice
from trainers.watchdog import Watchdog

if TYPE_CHECKING:
    from trainers.collectives import Collective
    from trainers.progress import Progress
    from trainers.ranks import Ranks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RESULTS = "allreduce.jsonl"
HEADER = f"{'collective':<15}{'bytes':>13}{'time':>13}{'algbw':>12}{'busbw':>12}  wrong"
UNITS_LINE = f"{'':<15}{'':>13}{'us':>13}{'GB/s':>12}{'GB/s':>12}"


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A whole sweep."""

    collectives: str = knob(",".join(COLLECTIVES), "collectives to measure, separated by commas")
    smallest: str = knob("1K", "size to begin with: bytes, or with K, M or G (powers of 1024)")
    largest: str = knob("16M", "size to end with")
    factor: int = knob(4, "ratio of one size to the one before")
    warmup: int = knob(2, "runs before those that are timed")
    runs: int = knob(10, "timed runs, of which the mean is reported")
    dtype: str = knob("float32", "type of the data", ("float32", "bfloat16", "float16"))
    results: str = knob("", f"file for the results, a JSON line each; empty: `{RESULTS}` in $BROKER_CHECKPOINT_DIR")
    timeout_s: float = knob(600.0, "longest time for one size; 0 waits forever")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the sweep. Bandwidths are in GB/s, 10^9 bytes."""

    collective: str
    size: int  # bytes that were asked for, of the whole message as nccl-tests counts it
    dtype: str
    ranks: int
    time_us: float
    algorithm_gb_s: float  # size over time
    bus_gb_s: float  # what each link carries: comparable between collectives and numbers of ranks
    wrong: int  # elements that are not what they should be


def main(arguments: Sequence[str]) -> int:
    """Run the measurements that flags and environment request; return the exit code."""
    config = parse_config(arguments)
    code = launch_if_needed("trainers.allreduce", arguments)
    if code is not None:
        return code
    environment = read_environment()
    notice = PreemptionNotice(environment.preemption_file)
    notice.listen()
    watchdog = Watchdog(config.timeout_s)
    watchdog.start()
    from trainers.ranks import join_ranks, leave_ranks

    try:
        return sweep(config, environment, notice, watchdog, join_ranks())
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        watchdog.stop()
        leave_ranks()


def sweep(
    config: SweepConfig, environment: Environment, notice: PreemptionNotice, watchdog: Watchdog, ranks: "Ranks"
) -> int:
    """Measure every size of every collective that is not measured yet; 0 when all are, 143 when preempted."""
    from trainers.progress import Progress

    if ranks.world_size == 1:
        raise TrainerError(
            "one rank has no peer\n\n"
            "hint: `python -m trainers.launch --workers 2 -m trainers.allreduce`, or a task with `num_nodes: 2`"
        )
    plan = list(iterate_plan(config))
    progress = Progress(environment.progress_file, total=len(plan), is_silent=not ranks.is_first)
    file = find_results_file(config, environment)
    results: dict[tuple[str, int], Result] = ranks.share(read_results(file, config, ranks.world_size))
    begun = sum(point in results for point in plan)
    progress.report(step=begun, event="resumed" if begun else "started", checkpoint_step=begun or None)
    for line in (HEADER, UNITS_LINE):
        progress.say(line)
    for done, (name, size) in enumerate(plan, start=1):
        is_new = (name, size) not in results
        if is_new:
            watchdog.beat(f"measuring {name} of {size} bytes")
            result = measure(name, size, config, ranks)
            if ranks.is_first:
                append_result(file, result)
            results[name, size] = result
        report(progress, results[name, size], done if is_new else None)
        if is_new and ranks.sum([float(notice.is_given())])[0] and done < len(plan):
            progress.report(step=done, event="preempted, results kept", checkpoint_step=done)
            return EXIT_CODE_PREEMPTED
    wrong = sum(result.wrong for result in results.values())
    progress.report(step=len(plan), event="finished", checkpoint_step=len(plan), wrong=wrong)
    return 1 if wrong else 0


def measure(name: str, size: int, config: SweepConfig, ranks: "Ranks") -> Result:
    """Check one collective at one size, warm up, and time it; the slowest rank counts."""
    from trainers.collectives import create_collective, time_runs

    collective = create_collective(name, size, config.dtype, ranks)
    wrong = int(ranks.sum([float(collective.check())])[0])
    seconds = time_runs(collective, warmup=config.warmup, runs=config.runs, ranks=ranks)
    return describe(collective, size, seconds, wrong, config.dtype, ranks.world_size)


def describe(collective: "Collective", size: int, seconds: float, wrong: int, dtype: str, ranks: int) -> Result:
    """Return rates as nccl-tests define them (its doc/PERFORMANCE.md)."""
    algorithm_gb_s = collective.size / seconds / 1e9
    return Result(
        collective=collective.name,
        size=size,
        dtype=dtype,
        ranks=ranks,
        time_us=round(seconds * 1e6, 2),
        algorithm_gb_s=round(algorithm_gb_s, 4),
        bus_gb_s=round(algorithm_gb_s * find_bus_factor(collective.name, ranks), 4),
        wrong=wrong,
    )


def find_bus_factor(name: str, ranks: int) -> float:
    """Return how often a link must carry the message at least, for n ranks: reduce and spread, either, or pass on."""
    if name == "broadcast":
        return 1.0
    return (2.0 if name == "all_reduce" else 1.0) * (ranks - 1) / ranks


def report(progress: "Progress", result: Result, step: int | None) -> None:
    """Print a row of the table, and for a new result a line for the broker."""
    progress.say(
        f"{result.collective:<15}{result.size:>13,}{result.time_us:>13,.1f}"
        f"{result.algorithm_gb_s:>12.3f}{result.bus_gb_s:>12.3f}  {result.wrong}"
    )
    if step is not None:
        progress.note(step=step, checkpoint_step=step, **asdict(result))


def iterate_plan(config: SweepConfig) -> Iterator[tuple[str, int]]:
    """Return every collective and size, in order."""
    for name in config.collectives.split(","):
        size = read_size(config.smallest)
        while size <= read_size(config.largest):
            yield name, size
            size *= config.factor


def read_results(file: Path, config: SweepConfig, ranks: int) -> dict[tuple[str, int], Result]:
    """Return the earlier results under the same conditions, ignoring a line that a kill cut short."""
    results = {}
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (result.dtype, result.ranks) == (config.dtype, ranks):
            results[result.collective, result.size] = result
    return results


def append_result(file: Path, result: Result) -> None:
    """Append in one small write, after a newline if the previous line was cut short."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as opened:
        is_torn = opened.tell() > 0 and not file.read_bytes().endswith(b"\n")
        opened.write((b"\n" if is_torn else b"") + json.dumps(asdict(result)).encode() + b"\n")


def find_results_file(config: SweepConfig, environment: Environment) -> Path:
    """Return the path at which results outlive the machine."""
    if config.results:
        return Path(config.results)
    url = environment.checkpoint_url.removeprefix("file://")
    if "://" in url:
        raise TrainerError(f"results cannot be appended to `{url}`; name a file on a mounted bucket with `--results`")
    return Path(url) / RESULTS


def parse_config(arguments: Sequence[str]) -> SweepConfig:
    """Read flags and a config file; invalid values exit with code 2."""
    return parse_flags(
        SweepConfig,
        arguments,
        program="python -m trainers.allreduce",
        description="Measure collectives between all ranks: latency, algorithm bandwidth and bus bandwidth.",
        find_problem=find_problem,
    )


def find_problem(config: SweepConfig) -> str | None:
    """Return the problem in a config, or None."""
    for name in config.collectives.split(","):
        if name not in COLLECTIVES:
            return f"`--collectives`: `{name}` is not one of {', '.join(COLLECTIVES)}"
    try:
        smallest, largest = read_size(config.smallest), read_size(config.largest)
    except ValueError as error:
        return str(error)
    if smallest < 1 or largest < smallest:
        return f"`--smallest {config.smallest}` must be at least 1 byte and at most `--largest {config.largest}`"
    if config.factor < 2 or config.runs < 1 or config.warmup < 0 or config.timeout_s < 0:
        return "`--factor` must be at least 2, `--runs` 1, `--warmup` and `--timeout_s` 0"
    return None


def read_size(text: str) -> int:
    """Return bytes of `64`, `8K`, `16M` or `1G`."""
    number, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")) :]
    if not number.isdecimal() or unit not in UNITS:
        raise ValueError(f"`{text}` is not a size such as 64, 8K, 16M or 1G")
    return int(number) * UNITS[unit]


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
