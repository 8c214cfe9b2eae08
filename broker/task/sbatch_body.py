"""Convert the program of a Slurm batch script to `run`: Slurm's variables and `srun`, and notes about what differs.

A batch script runs on the first node of its job, and `srun` on all; `run` starts on every node. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

# Options of `srun` without a value, or with one after `=` only: the next word is the command.
SRUN_FLAGS = re.compile(
    r"(-[luvEOKQkXZHIs]+|--(label|unbuffered|exclusive|exact|overlap|kill-on-bad-exit|verbose|quiet|pty|no-kill|overcommit"
    r"|oversubscribe|preserve-env|disable-status|no-allocate|hold|immediate|contiguous|spread-job|use-min-nodes|reboot"
    r"|whole|interactive|propagate|bcast|compress|x11|nice|resv-ports|send-libs|test-only|mpi-combine))$"
)
FIRST_HOST = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
# Slurm's variables that a program reads -> shell expressions for broker's counterparts; `{tasks}` run on each node.
VARIABLES = {
    "SLURM_JOB_ID": "${BROKER_JOB_ID:-0}",
    "SLURM_JOBID": "${BROKER_JOB_ID:-0}",
    "SLURM_NNODES": "$SKYPILOT_NUM_NODES",
    "SLURM_JOB_NUM_NODES": "$SKYPILOT_NUM_NODES",
    "SLURM_NODEID": "$SKYPILOT_NODE_RANK",
    "SLURM_PROCID": "$((SKYPILOT_NODE_RANK * {tasks}))",  # the first one of the node
    "SLURM_NTASKS": "$((SKYPILOT_NUM_NODES * {tasks}))",
    "SLURM_NPROCS": "$((SKYPILOT_NUM_NODES * {tasks}))",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "$SKYPILOT_NUM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_NODE": "$SKYPILOT_NUM_GPUS_PER_NODE",
    "SLURM_GPUS": "$((SKYPILOT_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))",
    "SLURM_CPUS_PER_TASK": "$(($(nproc) / {tasks}))",  # the tasks of a node share all its CPUs
    "SLURM_CPUS_ON_NODE": "$(nproc)",
    "SLURM_NTASKS_PER_NODE": "{tasks}",
    "SLURM_ARRAY_JOB_ID": "${BROKER_JOB_ID:-0}",
    "SLURM_TMPDIR": "${TMPDIR:-/tmp}",
    "SLURM_RESTART_COUNT": "$((${BROKER_ATTEMPT:-1} - 1))",
    "SLURM_JOB_NODELIST": "$SKYPILOT_NODE_IPS",
    "SLURM_NODELIST": "$SKYPILOT_NODE_IPS",
    "SLURM_SUBMIT_DIR": "$PWD",
    # In a batch script these are of the first node.
    "SLURM_LAUNCH_NODE_IPADDR": FIRST_HOST,
    "SLURMD_NODENAME": FIRST_HOST,
}
ONE_TASK = {
    "SLURM_PROCID": "$SKYPILOT_NODE_RANK",
    "SLURM_NTASKS": "$SKYPILOT_NUM_NODES",
    "SLURM_NPROCS": "$SKYPILOT_NUM_NODES",
    "SLURM_CPUS_PER_TASK": "$(nproc)",
}
HOST_NAMES = re.compile(r'scontrol\s+show\s+hostnames?(\s+"?\$\{?SLURM_(JOB_)?NODELIST\}?"?)?')
SLURM_NAME = re.compile(r"\bSLURMD?_[A-Z_]+\b")
# The arguments of the script: anywhere as a whole; one of them outside functions, which are indented.
ARGUMENTS = re.compile(r"""\$[@*]|\$\{[@*]|^[^\s#'][^#'\n]*\$(?:\{[1-9][:}-]|[1-9]\b)""", re.MULTILINE)
SPACE = r"(?:\s|\\\n)"  # between the words of a command, which may continue in the next line
SRUN_LINE = re.compile(r"\s*(?:exec\s+|time\s+)?srun\b")
INNER_SHELL = re.compile(r"[^#]*\b(?:ba|z)?sh\s+-\w*c\s")  # its `$1` are its own
# `module load cuda`, `ml gcc`: commands of environment modules, which clouds' machines do not have.
MODULE = re.compile(
    r"(?:^[ \t]*|[;&|{][ \t]*|\b(?:then|do|else)[ \t]+)"
    r"(?P<command>(?P<name>module[ \t]+(?:-\S+[ \t]+)?"
    r"(?:load|add|purge|swap|switch|use|unload|rm|list|restore|reset|avail)\b"
    r"|ml[ \t]+[\w./+-]+)(?:[^;&|\n\\]|\\\n)*)",
    re.MULTILINE,
)
WITHOUT_MODULES = "type {name} >/dev/null 2>&1 || {name}() {{ :; }}  # clouds' machines have no modules\n"
ANY_LINE = re.compile("")
WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
SRUN_NAMES = {
    "-N": "--nodes", "-n": "--ntasks", "-w": "--nodelist", "-x": "--exclude", "-r": "--relative", "-D": "--chdir",
}  # fmt: skip
# Options of `srun` that change what it starts, without a counterpart.
SRUN_UNSERVED = {
    "--chdir", "--container-mounts", "--container-workdir", "--container-name", "--multi-prog",
    "--environment", "--uenv",
}  # fmt: skip
# `head_ip=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address)`: our host names are addresses.
HOST_ADDRESS = re.compile(
    r"\$\(\s*srun\s(?P<options>[^()|;]*?)\s*\bhostname\s+(?:--ip-address|--all-ip-addresses|-i|-I)(?:\s*\|[^()]*)?\s*\)"
)
# `export MASTER_ADDR=$(hostname -s)`, without `srun`: a batch script runs on the first node.
OWN_HOST = re.compile(
    r"""(?P<name>(?<![\w$-])[A-Za-z_]\w*=)"?(?:\$\(\s*hostname(?:\s[^()]*)?\)|`\s*hostname(?:\s[^`]*)?`)"?(?=[\s;&]|$)"""
)
# Values that a script determines once, and `run` on each node: a free port, a time, a draw.
OWN_VALUE = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=.*(?:\bshuf\s|getsockname|uuid|\$\(date\b|`date\b)")
RANDOM = re.compile(r"^[^#\n]*\bRANDOM\b(?!=)", re.MULTILINE)
HOST = re.compile(r"""(?:-w|--nodelist)[\s=]?\s*(?P<host>"[^"]+"|[^\s"]+)""")
SEPARATOR = re.compile(r"&&|\|\||[;|]")
# Programs that a script starts once, on its first node, although nothing in the script says so.
PROGRAM = re.compile(
    r"\s*(?:exec\s+|time\s+|nohup\s+|[A-Za-z_]\w*=\S*\s+)*"
    r"(?P<program>python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|prterun|ray|julia|Rscript|bash|sh|\.{0,2}/\S+)"
    r"\s"
)
# The login's home folder, with its environments, is not on the nodes.
ACTIVATES = re.compile(r"\s*((?:source|\.)\s+\S*activate\b.*|(?:conda|mamba|micromamba)\s+activate\b.*)")
COMMANDS = re.compile(r"(?:^|[;&|(]\s*|\s)(sbatch|scancel|squeue|sacct|sinfo|sbcast|sattach|scontrol)\s")


def convert_body(lines: list[str], *, tasks: int = 1, nodes: int = 1) -> tuple[str, list[str]]:
    """Return `run`, which defines the Slurm variables that it reads, and the script's `module` commands.

    These do nothing unless the nodes have environment modules.
    `tasks` is the number of tasks per node. With several nodes, the name of the script's host is that of the first.
    """
    kept = []
    for line in _join_lines(lines, SRUN_LINE):
        line = HOST_ADDRESS.sub(_name_host, line)
        if nodes > 1 and "srun" not in line:
            line = OWN_HOST.sub(lambda found: found["name"] + FIRST_HOST, line)
        kept.append(_drop_srun(HOST_NAMES.sub('echo "$SKYPILOT_NODE_IPS"', line)))
    text = re.sub(r"[ \t]+$", "", "\n".join(kept).strip("\n"), flags=re.MULTILINE) + "\n"
    text = re.sub(r"\A(?:#?\n)+", "", text)
    values = VARIABLES | (ONE_TASK if tasks == 1 else {})
    read = [name for name in VARIABLES if re.search(rf"\b{name}\b", text)]
    # A batch script draws a port or a rendezvous id once, for all nodes; an assignment seeds bash's generator.
    seed = 'RANDOM="${BROKER_JOB_ID:-1}"  # the same numbers on every node\n'
    exports = seed if nodes > 1 and RANDOM.search(text) else ""
    exports += "".join(f'export {name}="{values[name].replace("{tasks}", str(tasks))}"\n' for name in read)
    modules = list(MODULE.finditer(text))
    for name in sorted({each["name"].split()[0] for each in modules}):
        exports += WITHOUT_MODULES.format(name=name)
    return exports + text, [" ".join(each["command"].replace("\\\n", " ").split()) for each in modules]


def _join_lines(lines: Sequence[str], begins: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines; one text for a command that matches `begins` and continues in the next lines.

    It continues in quotes or after a backslash.
    """
    place = 0
    while place < len(lines):
        joined, end = lines[place], place + 1
        if begins.match(joined):
            while end < len(lines) and (joined.endswith("\\") or _is_quote_open(joined)):
                joined, end = f"{joined}\n{lines[end]}", end + 1
            if _is_quote_open(joined):  # a stray quote, such as in a comment
                joined, end = lines[place], place + 1
        yield joined
        place = end


def _is_quote_open(text: str) -> bool:
    """Return whether a shell would read on for the end of a quoted text."""
    quote, skips = "", False
    for each in re.sub(r"(?m)^([^'\"\n]*\s)#.*$", r"\1", text):  # a comment
        if skips:
            skips = False
        elif each == "\\" and quote != "'":
            skips = True
        elif quote:
            quote = "" if each == quote else quote
        elif each in "'\"":
            quote = each
    return bool(quote)


def _name_host(found: re.Match[str]) -> str:
    """Return the host whose address the command asks for: the one that `srun` names, or the first one."""
    host = HOST.search(found["options"])
    return f"$(echo {host['host']})" if host else FIRST_HOST


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


def note_body(body: list[str], run: str, nodes: int, known: Set[str]) -> Iterator[str]:
    """Yield what differs from the script in `run`, or is missing there; `known`: variables that the task sets."""
    yield from _note_srun(body, run, nodes)
    if nodes > 1:
        yield from _note_first_node(body, nodes)
    yield from _note_run(body, run, known)


def _note_srun(body: list[str], run: str, nodes: int) -> Iterator[str]:
    """Note each `srun` that broker starts elsewhere or differently, because its options are removed."""
    for line in _join_lines(body, SRUN_LINE):
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
            yield f"`srun` starts `{shown}` on some nodes only, but `run` starts on all: test `$SKYPILOT_NODE_RANK`"
        names = options.keys() & SRUN_UNSERVED | ({"--export"} if "=" in options.get("--export", "") else set())
        for name in sorted(names):
            yield f"`srun {name}={options[name]}` has no counterpart; write it into `run`"
    if any(re.search(r"\bsrun\b", line) for line in run.splitlines() if not line.lstrip().startswith("#")):
        yield "`srun` after another command in its line is not converted; remove it"


def _note_first_node(body: list[str], nodes: int) -> Iterator[str]:
    """Note programs without `srun`: Slurm runs them once, and `run` on every node."""
    body = [line for each in _join_lines(body, SRUN_LINE) if "srun" not in each for line in each.split("\n")]
    parts = (
        part.strip().partition("\n")[0].rstrip("\\ ")
        for line in _join_lines(body, ANY_LINE)
        for part in SEPARATOR.split(line)
    )
    if own := next((line.strip() for line in body if OWN_VALUE.match(line)), None):
        yield (
            f"`{own[:60]}` has another value on each node: replace one that all nodes must share, such as a port or "
            "the id of a rendezvous"
        )
    if found := [part for part in parts if PROGRAM.match(f"{part} ")]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield (
            f"Slurm runs `{found[0][:60]}`{more} on the first node only, without `srun`, but `run` starts on all "
            f"{nodes}: test `$SKYPILOT_NODE_RANK`"
        )


def _note_run(body: list[str], run: str, known: Set[str]) -> Iterator[str]:
    """Note what the program expects from Slurm and would lack here without an error."""
    code = "\n".join(line for line in run.splitlines() if not line.lstrip().startswith("#"))
    own = set(re.findall(r"\b(SLURMD?_[A-Z_]+)=", code))
    if unset := sorted(set(SLURM_NAME.findall(code)) - set(VARIABLES) - known - own):
        yield f"`{'`, `'.join(unset)}`: only Slurm sets {'it' if len(unset) == 1 else 'them'}; replace in `run`"
    commands = _join_lines(code.split("\n"), INNER_SHELL)
    if any(ARGUMENTS.search(re.sub("'[^']*'", "", each) if INNER_SHELL.match(each) else each) for each in commands):
        yield "`run` gets no arguments: replace `$1` or `$@` by their values, or by variables in `envs`"
    if "scontrol requeue" in code:
        yield "`scontrol requeue`: remove it; a managed job is restarted after a preemption"
    names = dict.fromkeys(COMMANDS.findall(code.replace("scontrol requeue", "")))
    if names:
        yield f"`{'`, `'.join(names)}`: Slurm's commands are not on the nodes; remove or replace them in `run`"
    if activated := [found[1].strip() for line in body if (found := ACTIVATES.match(line))]:
        yield f"your home folder is not on the nodes: create the environment of `{activated[0][:60]}` in `setup`"
    images = re.findall(
        r"--container-image[= ](\S+)", "\n".join(each for each in _join_lines(body, SRUN_LINE) if "srun" in each)
    )
    if images:
        yield f"`srun --container-image={images[0]}`: set `image_id: docker:IMAGE`"
