"""The house keeps its shape: layers, no cycles, sizes, registries, templates, dependencies. Ruff checks the rest."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE_LINES_MAX = 400

# From the ground up; siblings in a layer don't import each other.
LAYERS: list[set[str]] = [
    {"frozen", "agent"},
    {"errors"},
    {"types", "clock", "locks"},
    {"user_files"},
    {"config"},
    {"axes", "environment", "formatting", "redirects"},
    {"wording"},
    {"task", "catalog", "spot"},
    {"optimizer"},
    {"pipelines", "advisor", "sites"},
    {"state", "storage", "clouds", "runtime"},
    {"access"},
    {"provision"},
    {"jobs", "batch", "sweeps", "lab", "serve", "notify"},
    {"app"},
    {"rehearsal", "dashboard", "client"},
    {"aio", "server", "hosting"},
    {"api"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


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
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def report(offences: Sequence[str]) -> str:
    return "".join(f"\n  {offence}" for offence in offences)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "broker" and len(parts) > 1 else None


# `broker.jobs` is a room and, for users, the Python API of managed jobs, which it imports from the top on first use.
PUBLIC_NAMES = {"broker/jobs/__init__.py"}


def find_climbing_imports(path: Path) -> Iterator[str]:
    own = room_of(module_name(path))
    if path.relative_to(ROOT).as_posix() in PUBLIC_NAMES:
        return
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


def test_no_import_cycle() -> None:
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


def test_modules_are_short() -> None:
    lengths = {
        path: len(path.read_text().splitlines()) for name in ("broker", "trainers") for path in list_modules(name)
    }
    offences = [f"{module_name(path)} has {n} lines" for path, n in lengths.items() if n > MODULE_LINES_MAX]
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


NEED_GPUS = {"megatron_core", "torchtitan"}  # templates that this machine cannot run


def test_every_template_parses_and_plans(tmp_path: Path) -> None:
    from broker.catalog.bundle import open_book
    from broker.catalog.local import list_local_offers
    from broker.optimizer.planner import make_plan
    from broker.task.loader import load_tasks

    here, book = list_local_offers(4, 16), open_book(tmp_path)
    templates = sorted((ROOT / "task_templates").glob("*.yaml"))
    assert templates
    for path in templates:
        for task in load_tasks(path):
            offers = book.find_offers(task) if path.stem in NEED_GPUS else here
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
        "deploy",
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


# distribution -> the module that it installs, where that has another name
MODULES = {
    "PyYAML": "yaml",
    "axe-playwright-python": "axe_playwright_python",
    "kubernetes-validate": "kubernetes_validate",
    "grpcio": "grpc",
    "google-cloud-compute": "google.cloud.compute_v1",
    "skypilot": "sky",
}
# Distributions that no module of ours imports: where each is used instead, and the text that shows it.
USES = {
    "numpy": ("trainers/safetensors.py", ".numpy()"),
    "mkdocs-material": ("Makefile", "mkdocs build"),
    "bandit": ("tests/security/audit.py", '"bandit"'),
    "pip-audit": ("tests/security/audit.py", '"pip_audit"'),
    "pytest-xdist": ("Makefile", "--dist worksteal"),
    "coverage": ("Makefile", "-m coverage"),
    "mypy": ("Makefile", "$(BIN)/mypy"),
    "ruff": ("Makefile", "$(BIN)/ruff"),
    "vermin": ("tests/trainers/test_oldest_python.py", "import vermin"),
    "types-PyYAML": ("broker/task/yaml_reader.py", "import yaml"),
}
NOT_IN_DEV = {"sky", "docs", "audit"}  # extras that a checkout installs only for one command


# What a statement or a test's `importorskip` imports. Parsing every file would take seconds.
IMPORTED = re.compile(
    r"""^\s*(?:from ([\w.]+) )?import ([\w.]+)|(?:importorskip|import_module)\("([\w.]+)""", re.MULTILINE
)


def read_requirements() -> dict[str, bool]:
    """Every distribution that pyproject names, and whether `make test` installs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = [(line, group not in NOT_IN_DEV) for group, lines in groups.items() for line in lines]
    names = [(re.split(r"[\[<>=!~;]", line)[0].strip(), is_installed) for line, is_installed in lines]
    return {name: is_installed for name, is_installed in names if name != project["name"]}


def test_every_dependency_is_used_and_installed() -> None:
    packages = ("broker", "trainers", "tests", "task_templates")
    imported = {
        ".".join(filter(None, names))
        for package in packages
        for path in list_modules(package)
        for names in IMPORTED.findall(path.read_text())
    }
    offences = []
    for name, is_installed in read_requirements().items():
        module = MODULES.get(name, name)
        if name in USES:
            file, words = USES[name]
            if words not in (ROOT / file).read_text():
                offences.append(f"{name}: `{words}` is no longer in {file}")
            continue
        if not any(each == module or each.startswith(f"{module}.") for each in imported):
            offences.append(f"{name}: no module imports `{module}`")
        if is_installed and importlib.util.find_spec(module) is None:
            offences.append(f"{name}: `{module}` cannot be imported")
    assert not offences, report(offences)
