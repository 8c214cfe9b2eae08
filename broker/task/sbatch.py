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
from typing import Any

from broker.frozen import frozen
from broker.task.allowed import TASK_NAME
from broker.task.sbatch_body import convert_body, note_body

SHORT = {
    "-A": "account", "-B": "extra-node-info", "-C": "constraint", "-D": "chdir", "-F": "nodefile", "-G": "gpus",
    "-H": "hold", "-I": "immediate", "-J": "job-name", "-L": "licenses", "-M": "clusters", "-N": "nodes",
    "-O": "overcommit", "-Q": "quiet", "-S": "core-spec", "-W": "wait", "-a": "array", "-b": "begin",
    "-c": "cpus-per-task", "-d": "dependency", "-e": "error", "-i": "input", "-k": "no-kill", "-m": "distribution",
    "-n": "ntasks", "-o": "output", "-p": "partition", "-q": "qos", "-s": "oversubscribe", "-t": "time",
    "-v": "verbose", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
OTHER_NAMES = {"tasks-per-node": "ntasks-per-node", "share": "oversubscribe", "workdir": "chdir"}
# Options without a value, or with one after `=` only.
FLAGS = {
    "requeue", "no-requeue", "exclusive", "overcommit", "parsable", "contiguous", "spread-job", "hold", "no-kill",
    "quiet", "oversubscribe", "verbose", "wait", "test-only", "use-min-nodes", "reboot", "get-user-env",
    "nice", "ignore-pbs",
}  # fmt: skip
USED = {
    "nodes", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "mem", "mem-per-cpu", "time", "array",
    "job-name", "ntasks", "ntasks-per-node", "chdir", "requeue", "no-requeue", "partition", "dependency", "signal",
    "constraint", "container-image", "export", "cpus-per-gpu", "mem-per-gpu", "mail-type", "mail-user",
}  # fmt: skip
# Options without an effect on the work: broker keeps logs and runs each job on its own machines.
SILENT = {
    "output", "error", "exclusive", "parsable", "open-mode", "verbose", "quiet", "wait", "oversubscribe",
    "wait-all-nodes", "use-min-nodes", "contiguous", "spread-job", "no-kill", "nice", "ignore-pbs",
}  # fmt: skip
UNLIMITED = {"0", "-1", "INFINITE", "UNLIMITED"}
SHELLS = re.compile(r"#!.*\b(ba|da|z|k)?sh\b")
OTHER_SYSTEMS = re.compile(r"#(PBS|BSUB|PJM|COBALT|OAR)\b|#\$\s+-")  # PBS, LSF, Fujitsu, Cobalt, OAR, Grid Engine
NODE_GPUS_MAX = 8  # of nearly all machines
# Parts of a GPU's name in gres.conf that are not in broker's: nvidia_l40s, tesla_v100, h100-80gb-hbm3, a100-sxm4-80gb.
GPU_PREFIX = re.compile(r"^(?:(?:NVIDIA|TESLA|GEFORCE|QUADRO)-)+")
GPU_FORM = re.compile(r"-(?:SXM\d?|PCIE|NVL|HBM\d\w?)(?=-|$)")
GEFORCE = re.compile(r"([RG]TX)?-?((?:(?<=TX)|(?<=TX-))A?\d{4}|\d{4})-?(TI)?")
GPU_SIZES = {"A100-80GB", "V100-32GB"}  # names with a size; every other GPU has one size
MEMORY_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
ARRAY_RUNS_MAX = 10_000


@frozen
class Imported:
    """A task as plain data, in the order of a task file, and notes for the user to read or act on."""

    task: Mapping[str, Any]
    notes: tuple[str, ...]


def import_sbatch(text: str, file: str = "task.yaml") -> Imported:
    """Convert a script to the content of a task file of this name.

    Raises ValueError, which names the option, for a value that Slurm would refuse.
    """
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
    limit = options.get("time", "0")
    if limit.upper() not in UNLIMITED and (minutes := math.ceil(read_minutes(limit))):
        task["goal"] = {"work": f"{minutes}m" if minutes % 60 else f"{minutes // 60}h"}
        notes.append("`--time` became the work; set `work` to the expected time, and add a `deadline` and a `budget`")
    task["workdir"] = options.get("chdir", ".")
    if "array" in options:
        first = _note_array(options["array"], file, notes)
        task["envs"] = {name: value for name, value in first.items() if name.endswith("_ID") or name in text}
    if exported := _read_export(options.get("export", "")):
        task["envs"] = {**exported, **task.get("envs", {})}
    run, modules = convert_body(body, tasks=tasks, nodes=nodes)
    if "name" in task and re.search(r"\bSLURM_JOB_NAME\b", run):
        task["envs"] = {**task.get("envs", {}), "SLURM_JOB_NAME": task["name"]}
    if run.strip():
        task["run"] = run
    else:
        notes.append("the script has no commands; add `run`")
    notes += note_body(body, run, nodes, known=task.get("envs", {}).keys())
    _note_rest(options, tasks, modules, notes)
    if late := next((line for line in body if line.startswith("#SBATCH")), None):
        notes.append(f"`{late.strip()[:60]}` follows a command, so Slurm ignores it, and so does the task")
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
                options.update(_parse_options(shlex.split(_drop_comment(line[len("#SBATCH") :]))))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        elif not (line.startswith("#!") and not body):
            body.append(line)
    return options, body


def _drop_comment(text: str) -> str:
    """Return the options before `# a comment`, which may contain apostrophes."""
    found = re.match(r"""(?:"[^"]*"|'[^']*'|[^'"\s]+|\s+(?!#))*""", text)
    assert found, "the expression matches any text"
    return found[0] if text[found.end() :].lstrip().startswith("#") else text


def _parse_options(words: list[str]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = OTHER_NAMES.get(name, name)
        else:
            if word in ("hetjob", "packjob"):
                raise ValueError("heterogeneous jobs are not supported; write a job group with a task per component")
            if word[:2] not in SHORT:
                what = "unknown option" if word.startswith("-") else "a value with a space must be in quotes:"
                raise ValueError(f"{what} `{word}`")
            name, value = SHORT[word[:2]], word[2:].removeprefix("=")
            equals = value
        if not equals and name not in FLAGS and rest and not re.match("--?[A-Za-z]", rest[0]):
            value = rest.pop(0)
        yield name, value


def _read_count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"`--{name}`: not a number: `{text}`")
    return int(text)


def _read_nodes(options: Mapping[str, str], notes: list[str]) -> int:
    """Return the number of nodes: without `--nodes`, as many as the tasks or GPUs need at the number per node."""
    if "nodes" not in options:
        counts = [(_read_total(options, name), _read_total(options, f"{name}-per-node")) for name in ("ntasks", "gpus")]
        return max(1, *(math.ceil(total / (per_node or max(1, total))) for total, per_node in counts))
    text = options["nodes"]
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found or int(found[1]) < 1:
        raise ValueError(f"`--nodes`: not a number of nodes: `{text}`")
    if found[2] and found[2] != found[1]:
        notes.append(f"`--nodes={text}`: a gang has a fixed size; `job_recovery: {{min_nodes: {found[1]}}}` is elastic")
    return int(found[2] or found[1])


def _read_total(options: Mapping[str, str], name: str) -> int:
    """Return the number at the end of `16` or `h100:16`; 0 without one."""
    count = options.get(name, "").rpartition(":")[2]
    return int(count) if count.isascii() and count.isdigit() else 0


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
    """Return broker's name of a GPU type.

    `tesla_v100` is V100, `H200_141GB` is H200, `a100-sxm4-80gb` is A100-80GB, `rtx_2080_ti` and `2080ti` are RTX2080TI.
    """
    name = GPU_FORM.sub("", GPU_PREFIX.sub("", kind.upper().replace("_", "-")))
    if found := GEFORCE.fullmatch(name):
        line = found[1] or ("GTX" if found[2] < "2000" else "RTX")
        return f"{line}{found[2]}{found[3] or ''}"
    base, _, size = name.rpartition("-")
    return base if base and re.fullmatch(r"\d+GB?", size) and f"{base}-{size.rstrip('GB')}GB" not in GPU_SIZES else name


def _read_image(options: Mapping[str, str], notes: list[str]) -> str | None:
    """Return the container of pyxis, `[REGISTRY#]IMAGE`, as an `image_id`.

    Note a file and a user's name, which have no counterpart.
    """
    image = options.get("container-image", "").removeprefix("docker://")
    if not image:
        return None
    if image.startswith(("/", ".")) or image.endswith(".sqsh") or re.match("[^#]*@.*#", image):
        notes.append(f"`--container-image={image}`: name an image of a registry, `image_id: docker:IMAGE`")
        return None
    return f"docker:{image.replace('#', '/', 1)}"


def _read_export(text: str) -> dict[str, str]:
    """Return the variables that `--export=ALL,NAME=value` sets; names alone are of the submitting shell."""
    found = (re.fullmatch(r"([A-Za-z_]\w*)=(.*)", each, re.DOTALL) for each in text.split(","))
    return {each[1]: each[2] for each in found if each}


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


def _note_array(text: str, file: str, notes: list[str]) -> dict[str, str]:
    """Note the sweep that replaces the array; return Slurm's variables of its first run."""
    places, _, parallel = text.partition("%")
    indices: list[int] = []
    for part in places.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if not found or not 0 <= int(found[2] or found[1]) - int(found[1]) <= ARRAY_RUNS_MAX:
            raise ValueError(f"`--array`: not a list of indices: `{text}`")
        indices += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))
    values = ",".join(map(str, indices))
    limit = f" --parallel {parallel}" if parallel else ""
    notes.append(
        f"`--array`: run it with `broker sweep {shlex.quote(file)} --param SLURM_ARRAY_TASK_ID={values}{limit}`; "
        "a launch only runs the first index"
    )
    bounds = {"COUNT": len(indices), "MIN": min(indices), "MAX": max(indices)}
    counts = {f"SLURM_ARRAY_TASK_{key}": str(value) for key, value in bounds.items()}
    return {"SLURM_ARRAY_TASK_ID": str(indices[0]), **counts}


def _note_rest(options: Mapping[str, str], tasks: int, modules: list[str], notes: list[str]) -> None:
    if tasks > 1:
        notes.append(f"`run` starts once per node: start the {tasks} processes of a node with torchrun or mpiexec")
    gpus = options.get("gpus", "").rpartition(":")[2]
    if not options.keys() & {"nodes", "gpus-per-node"} and gpus.isdigit() and int(gpus) > NODE_GPUS_MAX:
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
