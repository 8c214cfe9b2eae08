"""The house keeps its shape: layers, circles, banned calls, sizes, registries, templates."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULE_LINES_MAX = 400

# From the ground up; siblings in a layer don't import each other.
LAYERS: list[set[str]] = [
    {"nouns"},
    {"errors"},
    {"types", "clock", "config"},
    {"task", "catalog", "spot"},
    {"optimizer"},
    {"state", "storage", "clouds", "runtime"},
    {"access"},
    {"provision"},
    {"jobs"},
    {"api"},
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
    "broker/runtime/agent.py",
    "broker/runtime/agent_access.py",
    "broker/runtime/agent_bucket.py",
    "broker/runtime/agent_burial.py",
    "broker/runtime/agent_container.py",
    "broker/runtime/agent_delivery.py",
    "broker/runtime/agent_files.py",
    "broker/runtime/agent_flush.py",
    "broker/runtime/agent_follow.py",
    "broker/runtime/agent_gang.py",
    "broker/runtime/agent_lease.py",
    "broker/runtime/agent_link.py",
    "broker/runtime/agent_login.py",
    "broker/runtime/agent_notice.py",
    "broker/runtime/agent_paths.py",
    "broker/runtime/agent_run.py",
    "broker/runtime/agent_turn.py",
    "broker/runtime/agent_wire.py",
    "broker/clouds/local_machine.py",
    "broker/storage/node_mount.py",
}


def list_modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = iter(tree.body) if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "broker" and len(parts) > 1 else None


@pytest.mark.parametrize("path", list_modules("broker"), ids=module_name)
def test_imports_run_towards_the_ground(path: Path) -> None:
    own = room_of(module_name(path))
    if own is None or own not in LEVEL:
        return
    for target in {room_of(name) for name in list_imports(path)} & set(LEVEL):
        assert target is not None
        assert target == own or LEVEL[target] < LEVEL[own], f"{module_name(path)} imports the room `{target}`"


def test_every_room_has_its_layer() -> None:
    rooms = {
        path.stem for path in (ROOT / "broker").iterdir() if path.name not in ("__init__.py", "__main__.py", "py.typed")
    }
    assert rooms - {"__pycache__"} <= set(LEVEL)


def test_trainers_and_broker_never_import_each_other() -> None:
    for path in list_modules("broker"):
        assert not any(name.split(".")[0] == "trainers" for name in list_imports(path)), path
    for path in list_modules("trainers"):
        assert not any(name.split(".")[0] == "broker" for name in list_imports(path)), path


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


@pytest.mark.parametrize("path", list_modules("broker"), ids=module_name)
def test_no_banned_call(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    if relative in NODE_PROGRAMS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        name = dotted(node.func) if isinstance(node, ast.Call) else dotted(node)
        if isinstance(node, ast.Name):
            continue  # `exec` as a name is fine; a call of it is not
        homes = BANNED_CALLS.get(name)
        assert homes is None or relative in homes, f"{relative}:{getattr(node, 'lineno', 0)}: `{name}` has another home"
        if isinstance(node, ast.Call):
            shell = next((keyword.value for keyword in node.keywords if keyword.arg == "shell"), None)
            assert not (isinstance(shell, ast.Constant) and shell.value), f"{relative}:{node.lineno}: no `shell=True`"


@pytest.mark.parametrize("path", [*list_modules("broker"), *list_modules("trainers")], ids=module_name)
def test_module_is_short_and_says_what_it_answers_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


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


@pytest.mark.parametrize(("module", "table"), REGISTRIES)
def test_registry_entry_has_file_and_docs_row(module: str, table: str) -> None:
    architecture = (ROOT / "docs/ARCHITECTURE.md").read_text()
    entries: dict[str, str] = getattr(importlib.import_module(module), table)
    assert entries
    for name, target in entries.items():
        path, _, attribute = target.partition(":")
        file = ROOT / Path(*path.split(".")).with_suffix(".py")
        assert file.exists(), f"{table}[{name!r}] names a missing file"
        assert attribute in file.read_text()
        assert f"`{file.relative_to(ROOT).as_posix()}`" in architecture, f"docs/ARCHITECTURE.md has no row for {file}"


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
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for line in lines:
        is_requirement = line.strip().startswith('"') and (">=" in line or line.strip().startswith('"types-'))
        is_extra = line.split(" =")[0] in ("aws", "gcp", "sky", "storage", "train") and "[" in line
        if is_requirement or is_extra:
            assert "#" in line, f"no reason given: {line.strip()}"
