"""The functions that read a module's constant or a class's field: tests that enter them may notice its change."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from tests.mutation.draw import ROOMS, list_files
from tests.mutation.operators import Mutant
from tests.mutation.shadow import ROOT


def find_readers(mutant: Mutant) -> frozenset[str]:
    """Return `FILE FUNCTION` of each reader of the name that this mutant's line defines outside of functions."""
    room = mutant.file.rpartition("/")[0]
    names = set(_list_defined(ast.parse((ROOT / mutant.file).read_text()), mutant.line))
    return frozenset().union(*(_index(room).get(name, frozenset()) for name in names))


def _list_defined(node: ast.Module | ast.ClassDef, line: int) -> Iterator[str]:
    for statement in node.body:
        if not statement.lineno <= line <= (statement.end_lineno or 0):
            continue
        if isinstance(statement, ast.ClassDef):
            yield from _list_defined(statement, line)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


@functools.cache
def _index(room: str) -> Mapping[str, Set[str]]:
    """Index the functions of the default rooms and of this one by the names that they read; a function reads what is
    within it, too."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in list_files((*ROOMS, room)):
        _add(ast.parse((ROOT / file).read_text()), file, "", found)
    return found


def _add(node: ast.AST, file: str, scope: str, found: dict[str, set[str]]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in ast.walk(child):
                if isinstance(each, ast.Name | ast.Attribute):
                    found[each.id if isinstance(each, ast.Name) else each.attr].add(f"{file} {inner}")
        _add(child, file, inner, found)
