"""The jobs of a torture run: a seed draws their kinds; each defines how it must end, whatever happens to it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STEPS = 60  # of a shell program
STEP_S = 0.3
TRAIN_STEPS = 100
PACE_S = 0.2
MODEL = (
    *("--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.context", "16"),
    *("--train.batch", "6", "--train.micro_batch", "2", "--sample.tokens", "0"),
    *("--evaluate.every_steps", "20", "--evaluate.samples", "8", "--checkpoint.every_steps", "8"),
)
# A program killed by a signal on a healthy node, or one that meets a full disk, is restarted without a limit: the acts
# of a torture run are no fault of the program's.
RECOVERY = "max_restarts_on_errors: 1000, recover_on_exit_codes: [75, 137, 143]"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parameters that decide the numbers of a trainer's run: equal values, equal losses."""

    strategy: str
    nodes: int
    seed: int
    nodes_min: int | None = None  # elastic: the order in which gradients are added depends on membership
    steps: int = TRAIN_STEPS

    @property
    def flags(self) -> tuple[str, ...]:
        # Random numbers restart where the number of ranks changes, so an elastic run draws none.
        drawn = ("--model.dropout", "0" if self.nodes_min else "0.1", "--train.seed", str(self.seed))
        return ("--strategy", self.strategy, *MODEL, "--train.steps", str(self.steps), *drawn)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One submission. `ends`: how each of its jobs must end, by the job's name; a cluster has none."""

    kind: str
    name: str
    text: str
    ends: dict[str, str]
    nodes: int = 1  # at work at once
    training: Training | None = None
    counts: bool = False  # its program keeps a ledger of steps
    follow_up: str = ""  # the user's later command: "cancel", "retry" or "down"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Properties of the bed that task files need: the place of evidence and the nodes' resources."""

    evidence: Path
    resources: str = "infra: local, use_spot: true"
    python: str = sys.executable
    header: str = ""  # more lines of a task, such as where checkpoints go
    pace: str = str(HERE / "pace")
    witness: str = str(HERE / "witness.py")
    root: str = str(ROOT)
    state: str = "$BROKER_CHECKPOINT_DIR"  # place of a shell program's count
    step_s: float = STEP_S
    pace_s: float = PACE_S
    train_steps: int = TRAIN_STEPS
    kinds: tuple[tuple[str, float], ...] = field(default_factory=lambda: KINDS)


# Kind and weight.
KINDS: tuple[tuple[str, float], ...] = (
    *(("plain", 3.0), ("gang", 2.0), ("solo", 2.0), ("ddp", 2.0), ("fsdp", 1.5), ("allreduce", 1.5)),
    *(("elastic", 1.0), ("pipeline", 1.0), ("fails-twice", 1.0), ("retried", 1.0), ("cancelled", 1.0)),
    *(("cluster", 1.0), ("deadline", 1.0)),
)
COUNT = """\
  cat > count.sh <<'PROGRAM'
  set -e
  mkdir -p STATE
  n=$(cat STATE/n 2>/dev/null || echo 0)
  while [ $n -lt STEPS ]; do
    n=$((n + 1))
    if [ $SKYPILOT_NODE_RANK = 0 ]; then
      echo "$BROKER_ATTEMPT $n" >> EVIDENCE/ledger
      echo $n > STATE/n.new
      mv STATE/n.new STATE/n
      echo "{\\"step\\": $n, \\"total\\": STEPS}" >> $BROKER_PROGRESS_FILE
    fi
    sleep STEP_S
  done
  PROGRAM
"""


def draw_workload(draw: random.Random, number: int, setting: Setting, kind: str = "") -> Workload:
    """Draw the `number`th submission of the run."""
    kinds, weights = zip(*setting.kinds, strict=True)
    kind = kind or draw.choices(kinds, weights)[0]
    return MAKERS[kind](draw, f"{kind}-{number:03d}", setting)


def make_task(
    name: str,
    setting: Setting,
    program: str,
    *,
    nodes: int = 1,
    recovery: str = RECOVERY,
    more: str = "",
    head: str = "",
) -> str:
    """Make a task file. `program`: the words after `witness.py EVIDENCE`."""
    evidence = setting.evidence / name
    return f"""\
name: {name}
resources: {{{setting.resources}, job_recovery: {{{recovery}}}}}
num_nodes: {nodes}
{setting.header}{more}run: |
{head.replace("EVIDENCE", str(evidence))}\
  exec {setting.python} {setting.witness} {evidence} {program.replace("EVIDENCE", str(evidence))}
"""


def count(setting: Setting, steps: int = STEPS) -> str:
    return COUNT.replace("STEPS", str(steps)).replace("STEP_S", f"{setting.step_s:g}").replace("STATE", setting.state)


def make_plain(draw: random.Random, name: str, setting: Setting) -> Workload:
    text = make_task(name, setting, "-- bash count.sh", head=count(setting))
    return Workload(kind="plain", name=name, text=text, ends={name: "SUCCEEDED"}, counts=True)


def make_gang(draw: random.Random, name: str, setting: Setting) -> Workload:
    text = make_task(name, setting, "-- bash count.sh", head=count(setting), nodes=2)
    return Workload(kind="gang", name=name, text=text, ends={name: "SUCCEEDED"}, counts=True, nodes=2)


def make_deadline(draw: random.Random, name: str, setting: Setting) -> Workload:
    """Make a job whose spot policy decides where it runs, and may move it."""
    more = "goal: {work: 1m, deadline: 2h}\ncheckpoint: {every: 5s, stall: 1s, restart: 5s}\n"
    text = make_task(name, setting, "-- bash count.sh", head=count(setting), more=more)
    return Workload(kind="deadline", name=name, text=text, ends={name: "SUCCEEDED"}, counts=True)


def make_fails_twice(draw: random.Random, name: str, setting: Setting) -> Workload:
    text = make_task(name, setting, "--fail-first 2 -- bash count.sh", head=count(setting, STEPS // 3))
    return Workload(kind="fails-twice", name=name, text=text, ends={name: "SUCCEEDED"})


def make_retried(draw: random.Random, name: str, setting: Setting) -> Workload:
    """Make a job that fails whatever happens, until its user repairs it and retries."""
    recovery = "max_restarts_on_errors: 0"
    text = make_task(name, setting, "--fail-first 1000 -- true", recovery=recovery)
    return Workload(kind="retried", name=name, text=text, ends={name: "FAILED"}, follow_up="retry")


def make_cancelled(draw: random.Random, name: str, setting: Setting) -> Workload:
    text = make_task(name, setting, "-- sleep 100000", nodes=draw.choice((1, 2)))
    return Workload(kind="cancelled", name=name, text=text, ends={name: "CANCELLED"}, nodes=2, follow_up="cancel")


def make_cluster(draw: random.Random, name: str, setting: Setting) -> Workload:
    text = f"name: {name}\nresources: {{{setting.resources}}}\nrun: sleep 100000\n"
    return Workload(kind="cluster", name=name, text=text, ends={}, follow_up="down")


def make_pipeline(draw: random.Random, name: str, setting: Setting) -> Workload:
    """Make three tasks, each of which needs the data of the one before."""
    parts = {
        f"{name}-a": "-- bash -c 'mkdir -p $BROKER_PIPELINE_DIR && sleep 3 && echo one > $BROKER_PIPELINE_DIR/a'",
        f"{name}-b": "-- bash -c 'sleep 3 && sed s/one/two/ $BROKER_PIPELINE_DIR/a > $BROKER_PIPELINE_DIR/b'",
        f"{name}-c": "-- bash -c 'sleep 3 && test $(cat $BROKER_PIPELINE_DIR/b) = two'",
    }
    tasks = [f"name: {name}\n", *(make_task(part, setting, program) for part, program in parts.items())]
    ends = dict.fromkeys(parts, "SUCCEEDED")
    return Workload(kind="pipeline", name=name, text="---\n".join(tasks), ends=ends)


def make_trainer(draw: random.Random, name: str, setting: Setting) -> Workload:
    kind = name.rpartition("-")[0]
    nodes = {"solo": 1, "elastic": 3}.get(kind, 2)
    strategy = "ddp" if kind in ("solo", "elastic") else kind
    nodes_min = 2 if kind == "elastic" else None
    training = Training(
        strategy=strategy, nodes=nodes, seed=draw.choice((1, 2)), nodes_min=nodes_min, steps=setting.train_steps
    )
    recovery = RECOVERY + (f", min_nodes: {nodes_min}" if nodes_min else "")
    program = f"-- {setting.python} -m trainers.lm {' '.join(training.flags)} --log.metrics EVIDENCE/metrics.jsonl"
    head = f"  export PYTHONPATH={setting.pace}:{setting.root} TORTURE_PACE_S={setting.pace_s:g}\n"
    text = make_task(name, setting, program, nodes=nodes, recovery=recovery, head=head)
    return Workload(kind=kind, name=name, text=text, ends={name: "SUCCEEDED"}, nodes=nodes, training=training)


MAKERS = {
    "plain": make_plain,
    "gang": make_gang,
    "deadline": make_deadline,
    "fails-twice": make_fails_twice,
    "retried": make_retried,
    "cancelled": make_cancelled,
    "cluster": make_cluster,
    "pipeline": make_pipeline,
    **dict.fromkeys(("solo", "ddp", "fsdp", "allreduce", "elastic"), make_trainer),
}
