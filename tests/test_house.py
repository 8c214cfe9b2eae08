"""The house keeps its shape: layers, circles, banned calls, sizes, registries, templates."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE_LINES_MAX = 400

# From the ground up; siblings in a layer don't import each other.
LAYERS: list[set[str]] = [
    {"nouns", "agent"},
    {"errors"},
    {"types", "clock", "config", "locks"},
    {"wording", "formatting"},
    {"task", "catalog", "spot"},
    {"optimizer"},
    {"pipelines", "advisor"},
    {"state", "storage", "clouds", "runtime"},
    {"access"},
    {"provision"},
    {"jobs", "lab"},
    {"api"},
    {"app"},
    {"rehearsal"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# call -> the only files that may make it
BANNED_CALLS: dict[str, set[str]] = {
    "time.time": {"broker/clock.py"},
    "time.sleep": {"broker/clock.py", "broker/clouds/local.py"},  # the latter in a thread: waits for a kill
    "datetime.now": {"broker/clock.py"},
    "os.environ": {"broker/config.py", "broker/clouds/local.py"},  # the latter passes a few on to its nodes
    "pickle.loads": set(),
    "yaml.load": set(),
    "eval": set(),
    "exec": set(),
}
# Programs of their own on a node: they have no broker to ask for the time, and read the environment they were given.
NODE_PROGRAMS = {
    "broker/agent/agent.py",
    "broker/agent/agent_access.py",
    "broker/agent/agent_bucket.py",
    "broker/agent/agent_dead_runs.py",
    "broker/agent/agent_container.py",
    "broker/agent/agent_delivery.py",
    "broker/agent/agent_files.py",
    "broker/agent/agent_flush.py",
    "broker/agent/agent_follow.py",
    "broker/agent/agent_gang.py",
    "broker/agent/agent_lease.py",
    "broker/agent/agent_link.py",
    "broker/agent/agent_login.py",
    "broker/agent/agent_notice.py",
    "broker/agent/agent_paths.py",
    "broker/agent/agent_run.py",
    "broker/agent/agent_turn.py",
    "broker/agent/agent_wire.py",
    "broker/clouds/local_machine.py",
    "broker/storage/node_mount.py",
}


@cache
def list_modules(package: str) -> Sequence[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def list_imports(path: Path, *, top_level_only: bool = False) -> Sequence[str]:
    nodes: Iterator[ast.AST] = iter(parse(path).body) if top_level_only else ast.walk(parse(path))
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are written in full"
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def report(offences: Sequence[str]) -> str:
    return "".join(f"\n  {offence}" for offence in offences)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "broker" and len(parts) > 1 else None


def find_climbing_imports(path: Path) -> Iterator[str]:
    own = room_of(module_name(path))
    if own is None or own not in LEVEL:
        return
    for target in sorted({room_of(name) or "" for name in list_imports(path)} & set(LEVEL)):
        if target != own and LEVEL[target] >= LEVEL[own]:
            yield f"{module_name(path)} imports the room `{target}`"


def test_imports_run_towards_the_ground() -> None:
    offences = [offence for path in list_modules("broker") for offence in find_climbing_imports(path)]
    assert not offences, report(offences)


def test_every_room_has_its_layer() -> None:
    rooms = {
        path.stem for path in (ROOT / "broker").iterdir() if path.name not in ("__init__.py", "__main__.py", "py.typed")
    }
    assert rooms - {"__pycache__"} <= set(LEVEL)


def test_trainers_and_broker_never_import_each_other() -> None:
    offences = [
        f"{module_name(path)} imports `{name}`"
        for package, other in (("broker", "trainers"), ("trainers", "broker"))
        for path in list_modules(package)
        for name in list_imports(path)
        if name.split(".")[0] == other
    ]
    assert not offences, report(offences)


def test_no_import_circle() -> None:
    names = {module_name(path): path for package in ("broker", "trainers") for path in list_modules(package)}
    edges = {
        name: {target for target in list_imports(path, top_level_only=True) if target in names and target != name}
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in edges[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in names:
        visit(name, ())


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def find_banned_calls(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT).as_posix()
    if relative in NODE_PROGRAMS:
        return
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call | ast.Attribute):
            continue  # `exec` as a name is fine; a call of it is not
        name = dotted(node.func) if isinstance(node, ast.Call) else dotted(node)
        if relative not in BANNED_CALLS.get(name, {relative}):
            yield f"{relative}:{node.lineno}: `{name}` has another home"
        if isinstance(node, ast.Call):
            shell = next((keyword.value for keyword in node.keywords if keyword.arg == "shell"), None)
            if isinstance(shell, ast.Constant) and shell.value:
                yield f"{relative}:{node.lineno}: no `shell=True`"


def test_no_banned_call() -> None:
    offences = list(dict.fromkeys(offence for path in list_modules("broker") for offence in find_banned_calls(path)))
    assert not offences, report(offences)


def find_length_and_docstring(path: Path) -> Iterator[str]:
    text = path.read_text()
    if (line_count := len(text.splitlines())) > MODULE_LINES_MAX:
        yield f"{module_name(path)} has {line_count} lines, more than {MODULE_LINES_MAX}"
    if text.strip() and not ast.get_docstring(parse(path)):
        yield f"{module_name(path)} has no docstring"


def test_modules_are_short_and_say_what_they_answer_for() -> None:
    paths = [*list_modules("broker"), *list_modules("trainers")]
    offences = [offence for path in paths for offence in find_length_and_docstring(path)]
    assert not offences, report(offences)


# registry: module, table, docs heading
REGISTRIES = [
    ("broker.clouds", "CLOUDS"),
    ("broker.runtime.transports", "TRANSPORTS"),
    ("broker.catalog.sources", "SOURCES"),
    ("broker.spot.policies", "POLICIES"),
    ("broker.storage", "BUCKETS"),
    ("broker.access", "GRANTERS"),
    ("trainers.strategies", "STRATEGIES"),
]


def find_unlisted_entries(module: str, table: str, architecture: str) -> Iterator[str]:
    entries: dict[str, str] = getattr(importlib.import_module(module), table)
    if not entries:
        yield f"{table} is empty"
    for name, target in entries.items():
        path, _, attribute = target.partition(":")
        file = ROOT / Path(*path.split(".")).with_suffix(".py")
        if not file.exists() or attribute not in file.read_text():
            yield f"{table}[{name!r}] names `{target}`, which does not exist"
        elif f"`{file.relative_to(ROOT).as_posix()}`" not in architecture:
            yield f"docs/ARCHITECTURE.md has no row for {file.relative_to(ROOT)}"


def test_registry_entries_have_a_file_and_a_docs_row() -> None:
    architecture = (ROOT / "docs/ARCHITECTURE.md").read_text()
    offences = [
        offence for module, table in REGISTRIES for offence in find_unlisted_entries(module, table, architecture)
    ]
    assert not offences, report(offences)


def test_every_template_parses_and_plans() -> None:
    from broker.catalog.local import list_local_offers
    from broker.optimizer.planner import make_plan
    from broker.task.loader import load_tasks

    offers = list_local_offers(4, 16)
    templates = sorted((ROOT / "task_templates").glob("*.yaml"))
    assert templates
    for path in templates:
        for task in load_tasks(path):
            assert task.run
            assert make_plan(task, offers, prices_as_of="2026-01-01").choice.placement.node_count == task.num_nodes


def test_files_that_begin_a_test_run_exist() -> None:
    from tests.conftest import LONGEST

    missing = [name for name in LONGEST if not (ROOT / name).exists()]
    assert not missing, missing


def test_top_level_holds_what_the_readme_names() -> None:
    allowed = {
        "pyproject.toml",
        "broker",
        "task_templates",
        "trainers",
        "tests",
        "README.md",
        "docs",
        "Makefile",
        "LICENSE",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CODE_OF_CONDUCT.md",
        "mkdocs.yml",
    }
    made_here = {"build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - made_here
    assert {name for name in found if not name.endswith(".egg-info") and name != "__pycache__"} <= allowed


def test_every_dependency_says_why_it_is_there() -> None:
    offences = []
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        is_requirement = line.strip().startswith('"') and (">=" in line or line.strip().startswith('"types-'))
        is_extra = line.split(" =")[0] in ("aws", "gcp", "sky", "storage", "train") and "[" in line
        if (is_requirement or is_extra) and "#" not in line:
            offences.append(f"no reason given: {line.strip()}")
    assert not offences, report(offences)
