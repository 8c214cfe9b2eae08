"""Convert a Slurm batch script to a task file: `#SBATCH` options to fields, the rest to `run`.

    #SBATCH --nodes=4 --gres=gpu:h100:8      ->  num_nodes: 4, resources: {accelerators: H100:8}
    #SBATCH --time=2-00:00:00                ->  goal: {work: 48h}
    #SBATCH --array=0-9                      ->  a note with the command of `broker sweep`
    srun python train.py                     ->  python train.py

Pure: text in, an `Imported` out. Options without a counterpart are listed in its notes, never dropped silently.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from broker.frozen import frozen
from broker.task.allowed import TASK_NAME

SHORT = {
    "-A": "account", "-C": "constraint", "-D": "chdir", "-G": "gpus", "-J": "job-name", "-N": "nodes", "-a": "array",
    "-c": "cpus-per-task", "-d": "dependency", "-e": "error", "-n": "ntasks", "-o": "output", "-p": "partition",
    "-q": "qos", "-t": "time", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
FLAGS = {"requeue", "no-requeue", "exclusive", "overcommit", "parsable", "contiguous", "spread-job"}  # without a value
USED = {
    "nodes", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "mem", "mem-per-cpu", "time", "array",
    "job-name", "ntasks", "ntasks-per-node", "chdir", "requeue", "no-requeue", "partition", "dependency", "signal",
    "constraint", "container-image", "cpus-per-gpu", "mem-per-gpu", "mail-type", "mail-user",
}  # fmt: skip
# Options without an effect on the work: broker keeps logs and runs each job on its own machines.
SILENT = {"output", "error", "exclusive", "parsable", "open-mode"}
SHELLS = re.compile(r"#!.*\b(ba|da|z|k)?sh\b")
OTHER_SYSTEMS = re.compile(r"#(PBS|BSUB|PJM|COBALT|OAR)\b|#\$\s+-")  # PBS, LSF, Fujitsu, Cobalt, OAR, Grid Engine
NODE_GPUS_MAX = 8  # of nearly all machines
SRUN_FLAGS = re.compile(r"(-l|-u|-v+|-E|-O|-K|--(label|unbuffered|exclusive|exact|overlap|kill-on-bad-exit|verbose))$")
# Slurm's variables that a program reads -> shell expressions for broker's counterparts.
VARIABLES = {
    "SLURM_JOB_ID": "${BROKER_JOB_ID:-0}",
    "SLURM_JOBID": "${BROKER_JOB_ID:-0}",
    "SLURM_NNODES": "$SKYPILOT_NUM_NODES",
    "SLURM_JOB_NUM_NODES": "$SKYPILOT_NUM_NODES",
    "SLURM_NODEID": "$SKYPILOT_NODE_RANK",
    "SLURM_PROCID": "$SKYPILOT_NODE_RANK",
    "SLURM_NTASKS": "$SKYPILOT_NUM_NODES",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "$SKYPILOT_NUM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_NODE": "$SKYPILOT_NUM_GPUS_PER_NODE",
    "SLURM_GPUS": "$((SKYPILOT_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))",
    "SLURM_CPUS_PER_TASK": "$(nproc)",  # one task per node has all CPUs of its node
    "SLURM_CPUS_ON_NODE": "$(nproc)",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_ARRAY_JOB_ID": "${BROKER_JOB_ID:-0}",
    "SLURM_TMPDIR": "${TMPDIR:-/tmp}",
    "SLURM_RESTART_COUNT": "$((${BROKER_ATTEMPT:-1} - 1))",
    "SLURM_JOB_NODELIST": "$SKYPILOT_NODE_IPS",
    "SLURM_NODELIST": "$SKYPILOT_NODE_IPS",
    "SLURM_SUBMIT_DIR": "$PWD",
}
HOST_NAMES = re.compile(r'scontrol\s+show\s+hostnames?(\s+"?\$\{?SLURM_(JOB_)?NODELIST\}?"?)?')
SLURM_NAME = re.compile(r"\bSLURM_[A-Z_]+\b")
# The arguments of the script: anywhere as a whole; one of them outside functions, which are indented.
ARGUMENTS = re.compile(r"""\$[@*]|\$\{[@*]|^[^\s#'][^#'\n]*\$(?:\{[1-9][:}-]|[1-9]\b)""", re.MULTILINE)
SPACE = r"(?:\s|\\\n)"  # between the words of a command, which may continue in the next line
WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
SRUN_NAMES = {
    "-N": "--nodes", "-n": "--ntasks", "-w": "--nodelist", "-x": "--exclude", "-r": "--relative", "-D": "--chdir",
}  # fmt: skip
# Options of `srun` that change what it starts, without a counterpart.
SRUN_UNSERVED = {"--chdir", "--container-mounts", "--container-workdir", "--multi-prog"}
# Parts of a GPU's name in gres.conf that are not in broker's: nvidia_l40s, tesla_v100, h100-80gb-hbm3, a100-sxm4-80gb.
GPU_PREFIX = re.compile(r"^(?:(?:NVIDIA|TESLA|GEFORCE|QUADRO)-)+")
GPU_FORM = re.compile(r"-(?:SXM\d?|PCIE|NVL|HBM\d\w?)(?=-|$)")
GPU_SIZES = {"A100-80GB", "V100-32GB"}  # names with a size; every other GPU has one size
MEMORY_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
ARRAY_RUNS_MAX = 10_000


@frozen
class Imported:
    """A task as plain data, in the order of a task file, and notes for the user to read or act on."""

    task: Mapping[str, Any]
    notes: tuple[str, ...]


def import_sbatch(text: str) -> Imported:
    """Convert a script. Raises ValueError, which names the option, for a value that Slurm would refuse."""
    options, body = split_script(text)
    notes: list[str] = []
    nodes = _read_nodes(options, notes)
    tasks = _read_count(options, "ntasks-per-node") or max(1, math.ceil((_read_count(options, "ntasks") or 1) / nodes))
    task: dict[str, Any] = {}
    if name := re.sub(r"[^A-Za-z0-9_.-]+", "-", options.get("job-name", "")).strip("-_."):
        task["name"] = name[:63].rstrip("-_.")
        assert TASK_NAME.admits(task["name"]), "a repaired name is valid"
    resources = _read_resources(options, nodes, tasks)
    image = _read_image(options, notes)
    task["resources"] = {**resources, "use_spot": True, **({"image_id": image} if image else {})}
    if nodes > 1:
        task["num_nodes"] = nodes
    if "time" in options:
        minutes = max(1, math.ceil(read_minutes(options["time"])))
        task["goal"] = {"work": f"{minutes}m" if minutes % 60 else f"{minutes // 60}h"}
        notes.append("`--time` became the work; set `work` to the expected time, and add a `deadline` and a `budget`")
    task["workdir"] = options.get("chdir", ".")
    if "array" in options:
        first = _note_array(options["array"], task.get("name", "task"), notes)
        task["envs"] = {"SLURM_ARRAY_TASK_ID": first}
    run, modules = convert_body(body)
    if run.strip():
        task["run"] = run
    else:
        notes.append("the script has no commands; add `run`")
    _note_run(body, run, is_array="array" in options, notes=notes)
    _note_srun(body, run, nodes, notes)
    _note_rest(options, tasks, modules, notes)
    if found := next(filter(OTHER_SYSTEMS.match, body), None):
        notes.append(f"only `#SBATCH` lines are converted, not `{found.strip()[:60]}`")
    return Imported(task=task, notes=tuple(notes))


def split_script(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the options, which end at the first command (as in Slurm), and the lines of the program."""
    options: dict[str, str] = {}
    body: list[str] = []
    if text.startswith("#!") and not SHELLS.match(text):
        program = text.partition("\n")[0][2:].strip()[:60]
        raise ValueError(f"the script is for `{program}`, not for `bash`; write a task that runs it: `run: ...`")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#SBATCH") and not any(each.strip() and not each.startswith("#") for each in body):
            try:
                words = shlex.split(line[len("#SBATCH") :])
                options.update(_parse_options(list(takewhile(lambda word: not word.startswith("#"), words))))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        elif not (line.startswith("#!") and not body):
            body.append(line)
    return options, body


def _parse_options(words: list[str]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            if word in ("hetjob", "packjob"):
                raise ValueError("heterogeneous jobs are not supported; write a job group with a task per component")
            if word[:2] not in SHORT:
                what = "unknown option" if word.startswith("-") else "a value with a space must be in quotes:"
                raise ValueError(f"{what} `{word}`")
            name, value = SHORT[word[:2]], word[2:].removeprefix("=")
            equals = value
        if not equals and name not in FLAGS and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield name, value


def _read_count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"`--{name}`: not a number: `{text}`")
    return int(text)


def _read_nodes(options: Mapping[str, str], notes: list[str]) -> int:
    text = options.get("nodes", "1")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found or int(found[1]) < 1:
        raise ValueError(f"`--nodes`: not a number of nodes: `{text}`")
    if found[2]:
        notes.append(f"`--nodes={text}`: a gang has a fixed size; `job_recovery: {{min_nodes: {found[1]}}}` is elastic")
    return int(found[2] or found[1])


def _read_resources(options: Mapping[str, str], nodes: int, tasks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind, count = _read_gpus(options, nodes, tasks)
    if count:
        found["accelerators"] = f"{name_gpu(kind)}:{count}" if kind else f"1GB+:{count}"
    cores = (_read_count(options, "cpus-per-task") or 1) * tasks
    cores = max(cores, _read_count(options, "cpus-per-gpu") * count)
    if cores > 1:
        found["cpus"] = f"{cores}+"
    memory = options.get("mem") or ""
    mib = _read_mib("mem", memory) if memory else 0.0
    if "mem-per-cpu" in options:
        mib = _read_mib("mem-per-cpu", options["mem-per-cpu"]) * cores
    if "mem-per-gpu" in options:
        mib = _read_mib("mem-per-gpu", options["mem-per-gpu"]) * count
    if mib:  # 0 is all memory of a node
        found["memory"] = f"{math.ceil(mib / 1024)}+"
    return found


def _read_gpus(options: Mapping[str, str], nodes: int, tasks: int) -> tuple[str, int]:
    """Return the type ("" for any) and the number per node."""
    for name, factor in (("gres", 1.0), ("gpus-per-node", 1.0), ("gpus-per-task", tasks), ("gpus", 1 / nodes)):
        text = options.get(name, "")
        if name == "gres":
            text = next((each[4:] for each in text.split(",") if each.startswith("gpu:")), "1" if text == "gpu" else "")
        if text:
            kind, _, count = text.partition("(")[0].rpartition(":")
            if count and not count.isdigit():
                kind, count = count, "1"
            return kind, math.ceil(int(count or 1) * factor)
    return "", 0


def name_gpu(kind: str) -> str:
    """Return broker's name of a GPU type: `tesla_v100` is V100, `H200_141GB` is H200, `a100-sxm4-80gb` is A100-80GB."""
    name = GPU_FORM.sub("", GPU_PREFIX.sub("", kind.upper().replace("_", "-")))
    base, _, size = name.rpartition("-")
    return base if base and re.fullmatch(r"\d+GB?", size) and f"{base}-{size.rstrip('GB')}GB" not in GPU_SIZES else name


def _read_image(options: Mapping[str, str], notes: list[str]) -> str | None:
    """Return the container of pyxis, `[REGISTRY#]IMAGE`, as an `image_id`; note a file and a user's name, which have no
    counterpart."""
    image = options.get("container-image", "").removeprefix("docker://")
    if not image:
        return None
    if image.startswith(("/", ".")) or image.endswith(".sqsh") or re.match("[^#]*@.*#", image):
        notes.append(f"`--container-image={image}`: name an image of a registry, `image_id: docker:IMAGE`")
        return None
    return f"docker:{image.replace('#', '/', 1)}"


def _read_mib(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if not found:
        raise ValueError(f"`--{name}`: not an amount of memory: `{text}`")
    return int(found[1]) * MEMORY_MIB[found[2] or "M"]


def read_minutes(text: str) -> float:
    """Read `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours[:minutes[:seconds]]`."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise ValueError(f"`--time`: not a time limit: `{text}`")
    days, first, second, third = (int(each or 0) for each in found.groups())
    if found[1] is not None or found[4] is not None:
        return days * 1440 + first * 60 + second + third / 60
    return first + second / 60


def _note_array(text: str, name: str, notes: list[str]) -> str:
    """Note the sweep that replaces the array; return its first index."""
    places, _, parallel = text.partition("%")
    indices: list[int] = []
    for part in places.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if not found or int(found[2] or found[1]) - int(found[1]) > ARRAY_RUNS_MAX:
            raise ValueError(f"`--array`: not a list of indices: `{text}`")
        indices += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))
    values = ",".join(map(str, indices))
    limit = f" --parallel {parallel}" if parallel else ""
    notes.append(
        f"`--array`: run it with `broker sweep {name}.yaml --param SLURM_ARRAY_TASK_ID={values}{limit}`; "
        "a launch only runs the first index"
    )
    return str(indices[0])


def convert_body(lines: list[str]) -> tuple[str, list[str]]:
    """Return `run`, which defines the Slurm variables that it reads, and the `module` lines, which become comments."""
    modules, kept = [], []
    for line in _join_srun(lines):
        if re.match(r"\s*(module|ml)\s", line):
            modules.append(line.strip())
            line = f"# {line.strip()}"
        kept.append(_drop_srun(HOST_NAMES.sub('echo "$SKYPILOT_NODE_IPS"', line)))
    text = re.sub(r"[ \t]+$", "", "\n".join(kept).strip("\n"), flags=re.MULTILINE) + "\n"
    text = re.sub(r"\A(?:#?\n)+", "", text)
    read = [name for name in VARIABLES if re.search(rf"\b{name}\b", text)]
    exports = "".join(f'export {name}="{VARIABLES[name]}"\n' for name in read)
    return exports + text, modules


def _join_srun(lines: list[str]) -> Iterator[str]:
    """Yield the lines; one text for an `srun` that continues in the next lines."""
    rest = iter(lines)
    for line in rest:
        joined = line
        while re.match(r"\s*(?:exec\s+|time\s+)?srun\b", joined) and joined.endswith("\\"):
            if (following := next(rest, None)) is None:
                break
            joined += f"\n{following}"
        yield joined


def _drop_srun(line: str) -> str:
    """Remove `srun`: broker starts `run` on every node, as srun would start one task on each."""
    found = _split_srun(line)
    return line if found is None else found[0] + found[2]


def _split_srun(line: str) -> tuple[str, dict[str, str], str] | None:
    """Split `srun` into what precedes it, its options by their long names, and its command; None for another line."""
    found = re.match(rf"(\s*(?:exec\s+|time\s+)?)srun{SPACE}+(.*)$", line, re.DOTALL)
    if not found:
        return None
    options, rest = dict[str, str](), found[2]
    while option := re.match(rf"(-{WORD})({SPACE}+|$)", rest):
        word, rest = option[1], rest[option.end() :]
        name, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        takes_next = "=" not in word and not SRUN_FLAGS.match(word) and (word.startswith("--") or len(word) == 2)
        if takes_next and (following := re.match(rf"({WORD})({SPACE}+|$)", rest)):
            value, rest = following[1], rest[following.end() :]
        options[SRUN_NAMES.get(name, name)] = value
    return found[1], options, rest


def _note_srun(body: list[str], run: str, nodes: int, notes: list[str]) -> None:
    """Note each `srun` that broker starts elsewhere or differently, because its options are removed."""
    for line in _join_srun(body):
        found = _split_srun(line)
        if found is None:
            continue
        _, options, command = found
        counts = [options[name] for name in ("--nodes", "--ntasks") if options.get(name, "").isdigit()]
        is_partial = bool(options.keys() & {"--nodelist", "--exclude", "--relative"}) or any(
            int(count) < nodes for count in counts
        )
        if nodes > 1 and is_partial:
            shown = command.partition("\n")[0].strip()[:40]
            notes.append(
                f"`srun` starts `{shown}` on some nodes only, but `run` starts on all: test `$SKYPILOT_NODE_RANK`"
            )
        names = options.keys() & SRUN_UNSERVED | ({"--export"} if "=" in options.get("--export", "") else set())
        notes.extend(f"`srun {name}={options[name]}` has no counterpart; write it into `run`" for name in sorted(names))
    if any(re.search(r"\bsrun\b", line) for line in run.splitlines() if not line.lstrip().startswith("#")):
        notes.append("`srun` after another command in its line is not converted; remove it")


def _note_run(body: list[str], run: str, *, is_array: bool, notes: list[str]) -> None:
    """Note what the program needs of Slurm and would miss without an error."""
    known = {*VARIABLES, *(["SLURM_ARRAY_TASK_ID"] if is_array else [])}
    code = "\n".join(line for line in run.splitlines() if not line.lstrip().startswith("#"))
    if unset := sorted(set(SLURM_NAME.findall(code)) - known - set(re.findall(r"\b(SLURM_[A-Z_]+)=", code))):
        notes.append(f"`{'`, `'.join(unset)}`: only Slurm sets {'it' if len(unset) == 1 else 'them'}; replace in `run`")
    if ARGUMENTS.search(code):
        notes.append("`run` gets no arguments: replace `$1` or `$@` by their values, or by variables in `envs`")
    if "scontrol requeue" in code:
        notes.append("`scontrol requeue`: remove it; a managed job is restarted after a preemption")
    images = re.findall(r"--container-image[= ](\S+)", "\n".join(each for each in _join_srun(body) if "srun" in each))
    if images:
        notes.append(f"`srun --container-image={images[0]}`: set `image_id: docker:IMAGE`")


def _note_rest(options: Mapping[str, str], tasks: int, modules: list[str], notes: list[str]) -> None:
    if tasks > 1:
        notes.append(f"`run` starts once per node: start the {tasks} processes of a node with torchrun or mpiexec")
    gpus = options.get("gpus", "").rpartition(":")[2]
    if "nodes" not in options and gpus.isdigit() and int(gpus) > NODE_GPUS_MAX:
        notes.append(f"`--gpus={options['gpus']}` without `--nodes`: divide them among nodes with `num_nodes`")
    if others := [each for each in options.get("gres", "").split(",") if each and not re.match(r"gpu(:|$)", each)]:
        notes.append(f"`--gres={','.join(others)}` has no counterpart")
    if "constraint" in options:
        notes.append(f"`--constraint={options['constraint']}`: if it names a GPU, write it as `accelerators`")
    if "partition" in options:
        notes.append(f"`--partition={options['partition']}`: broker chooses the machines; `infra` limits it to a cloud")
    if "signal" in options:
        notes.append("`--signal`: a preemption sends SIGTERM and creates `$BROKER_PREEMPTION_FILE`")
    if "no-requeue" in options:
        notes.append("`--no-requeue`: a managed job recovers from preemptions; `broker launch` runs it once")
    if "dependency" in options:
        notes.append(f"`--dependency={options['dependency']}`: write both tasks into one file, with `needs`")
    if modules:
        notes.append(f"install in `setup`, or set `image_id`: {'; '.join(f'`{each}`' for each in modules)}")
    if mail := sorted(options.keys() & {"mail-type", "mail-user"}):
        address = options.get("mail-user") or "ADDRESS"
        notes.append(f"`--{'`, `--'.join(mail)}`: write `notify: {{mail: {address}}}` (docs/NOTIFICATIONS.md)")
    for name in sorted(options.keys() - USED - SILENT):
        notes.append(f"`--{name}` has no counterpart")
