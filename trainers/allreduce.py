"""Benchmark collectives: `python -m trainers.allreduce`, on broker's nodes or under torchrun.

Sizes, rates and their names follow nccl-tests, so results can be compared with published ones. Sizes that the results
file already contains are skipped, so a sweep continues after a preemption.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.environment import Environment, read_environment
from trainers.errors import TrainerError
from trainers.flags import parse_flags
from trainers.knobs import knob
from trainers.launch import launch_if_needed, run_process
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
    """The options of a sweep over collectives and message sizes."""

    collectives: str = knob(",".join(COLLECTIVES), "collectives to measure, separated by commas")
    smallest: str = knob("1K", "smallest message in bytes, or with the suffix K, M or G (powers of 1024)")
    largest: str = knob("16M", "largest message")
    factor: int = knob(4, "ratio between consecutive sizes")
    warmup: int = knob(2, "untimed warm-up runs per size")
    runs: int = knob(10, "timed runs per size; their mean is reported")
    dtype: str = knob("float32", "element type", ("float32", "bfloat16", "float16"))
    results: str = knob("", f"JSON lines file for the results; empty: `{RESULTS}` in $BROKER_CHECKPOINT_DIR")
    timeout_s: float = knob(600.0, "maximum time per size in seconds; 0 disables the limit")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurement of one collective at one size. Bandwidths are in GB/s (10^9 bytes per second)."""

    collective: str
    size: int  # requested bytes of the whole message, as nccl-tests counts it
    dtype: str
    ranks: int
    time_us: float
    algorithm_gb_s: float  # size over time
    bus_gb_s: float  # per link: comparable across collectives and numbers of ranks
    wrong: int  # elements with an incorrect value


def main(arguments: Sequence[str]) -> int:
    """Run the sweep that the flags and the environment describe; return the exit code."""
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
    """Measure what the results file lacks; return 0 when all is measured, 1 on wrong results, 143 if preempted."""
    from trainers.progress import Progress

    if ranks.world_size == 1:
        raise TrainerError(
            "collectives require at least two ranks\n\n"
            "hint: `python -m trainers.launch --workers 2 -m trainers.allreduce`, or a task with `num_nodes: 2`"
        )
    plan = list(iterate_plan(config))
    progress = Progress(environment.progress_file, total=len(plan), is_silent=not ranks.is_first)
    file = find_results_file(config, environment)
    results: dict[tuple[str, int], Result] = ranks.share(read_results(file, config, ranks.world_size))
    begun = sum(point in results for point in plan)
    progress.report(step=begun, event="resumed" if begun else "started", checkpoint_step=begun or None)
    for line in (HEADER, UNITS_LINE):
        progress.print_text(line)
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
    """Check one collective at one size, warm up, and time it on the slowest rank."""
    from trainers.collectives import create_collective, time_runs

    collective = create_collective(name, size, config.dtype, ranks)
    wrong = int(ranks.sum([float(collective.check())])[0])
    seconds = time_runs(collective, warmup=config.warmup, runs=config.runs, ranks=ranks)
    return describe(collective, size, seconds, wrong, config.dtype, ranks.world_size)


def describe(collective: "Collective", size: int, seconds: float, wrong: int, dtype: str, ranks: int) -> Result:
    """Return the result with rates as nccl-tests defines them (its doc/PERFORMANCE.md)."""
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
    """Return the minimum number of times that each link carries the message: bus bandwidth over algorithm bandwidth."""
    if name == "broadcast":
        return 1.0
    return (2.0 if name == "all_reduce" else 1.0) * (ranks - 1) / ranks


def report(progress: "Progress", result: Result, step: int | None) -> None:
    """Print a row of the table; for a new result, also append a progress line for broker."""
    progress.print_text(
        f"{result.collective:<15}{result.size:>13,}{result.time_us:>13,.1f}"
        f"{result.algorithm_gb_s:>12.3f}{result.bus_gb_s:>12.3f}  {result.wrong}"
    )
    if step is not None:
        progress.note(step=step, checkpoint_step=step, **asdict(result))


def iterate_plan(config: SweepConfig) -> Iterator[tuple[str, int]]:
    """Yield every pair of collective and size in bytes, in order."""
    for name in config.collectives.split(","):
        size = read_size(config.smallest)
        while size <= read_size(config.largest):
            yield name, size
            size *= config.factor


def read_results(file: Path, config: SweepConfig, ranks: int) -> dict[tuple[str, int], Result]:
    """Return earlier results with the same dtype and number of ranks; skip a line that a kill truncated."""
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
    """Append one line in a single write, after a newline if the previous line was truncated."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as opened:
        is_torn = opened.tell() > 0 and not file.read_bytes().endswith(b"\n")
        opened.write((b"\n" if is_torn else b"") + json.dumps(asdict(result)).encode() + b"\n")


def find_results_file(config: SweepConfig, environment: Environment) -> Path:
    """Return the path of the results file, which outlives the machine."""
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
    """Parse a size such as `64`, `8K`, `16M` or `1G` into bytes. Raises ValueError."""
    number, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")) :]
    if not number.isdecimal() or unit not in UNITS:
        raise ValueError(f"`{text}` is not a size such as 64, 8K, 16M or 1G")
    return int(number) * UNITS[unit]


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
