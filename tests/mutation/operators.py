"""Changes to the source text of one module, each as small as a typing error.

A mutant replaces a span of bytes and keeps every other byte, so line numbers stay. These change no behaviour that
matters, and are left alone:

* docstrings, annotations, `__all__`, bodies under `if TYPE_CHECKING` and of Protocols, `__repr__`
* log calls, and calls that make or add an event (`make_event`, `add_event`, `on_event`, `_record_event`): both are only
  read
* functions that make texts for people: named `describe`, `show` or `explain` and returning `str`, and `_record_event`
* tuning values by one: numbers that are not small counts become 0 or ten times as much
* arguments of raised errors, assertions, f-strings, and `hints`, `message` and `kind` given by keyword
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

BOUNDARY = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
NEGATION = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}
EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = ("log", "logger", "logging")
EVENTS = ("on_event", "_record_event", "_record_choice", "_add_event", "_record_decision", "make_event")
TEXTS = ("describe", "show", "explain")
UNREAD_KEYWORDS = ("hints", "message", "kind", "details")
SQL_CALLS = ("execute", "write", "row", "rows")
SQL_CHANGES = (
    (r" AND ", " OR "),
    (r"(?<!INSERT) OR ", " AND "),
    (r"\bNOT (?=is_)", ""),
    (r" < ", " >= "),
    (r" > ", " <= "),
)
SQL_CHANGES += ((r" IS NOT NULL", " IS NULL"), (r" IS NULL", " IS NOT NULL"), (r" DESC\b", ""), (r"max\(", "min("))


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mutant.

    `function`: qualified name, empty at module level. `start`, `end`: bytes of the source that `after` replaces.
    """

    file: str
    line: int
    function: str
    operator: str
    start: int
    end: int
    before: str
    after: str
    text: str  # the line, stripped

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator}: {_shorten(self.before)} -> {_shorten(self.after)}"

    @property
    def identity(self) -> tuple[str, str, str, str, str]:
        """Return an identity that stays the same when other lines of the file change."""
        return self.file, self.function, self.operator, self.text, f"{self.before} -> {self.after}"


def find_mutants(file: str, source: str) -> list[Mutant]:
    """Find all mutants of one module in the order of their place; see `is_sound`."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    found = {(each.start, each.end, each.after): each for each in finder.found}
    return sorted(found.values(), key=lambda each: (each.start, each.end, each.operator, each.after))


def plant(source: str, mutant: Mutant) -> str:
    data = source.encode()
    assert data[mutant.start : mutant.end].decode() == mutant.before, "the file has changed since the mutant was drawn"
    return (data[: mutant.start] + mutant.after.encode() + data[mutant.end :]).decode()


def is_sound(source: str, mutant: Mutant) -> bool:
    """Return whether it compiles to another program.

    This costs a parse, so it is called only for mutants that are drawn.
    """
    try:
        changed = ast.parse(plant(source, mutant))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}..."


class _Finder(ast.NodeVisitor):
    """A collector of mutants of the nodes that it visits; nodes it does not descend into have none."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._data = source.encode()
        self._lines = source.splitlines()
        self._offsets = [0]
        for line in self._data.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
        self._scope: list[str] = []
        self._returns: list[str] = []  # annotations of the functions around

    # -- where to look ----------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(_name_of(base) == "Protocol" for base in node.bases):
            return
        self._scope.append(node.name)
        self._visit_body(node.body)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        is_text = (
            node.name.lstrip("_").startswith(TEXTS) and node.returns is not None and _name_of(node.returns) == "str"
        )
        if is_text or node.name == "__repr__" or node.name in ("_record_event", "_record_choice"):
            return
        self._scope.append(node.name)
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._visit_body(node.body)
        self._returns.pop()
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for index, each in enumerate(body):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if not (index == 0 and is_text):
                self.visit(each)

    def visit_Module(self, node: ast.Module) -> None:
        self._visit_body(node.body)

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Import(self, node: ast.Import) -> None:
        return

    visit_ImportFrom = visit_Import

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._delete(node, node.target)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_unread(node):
            return
        name = _name_of(node.func)
        if isinstance(node.func, ast.Name) and name in EXTREMES:
            self._add("extreme", node.func, EXTREMES[name])
        if _is_call_of(node, "intents", "close") and len(node.args) > 1 and isinstance(node.args[1], ast.Attribute):
            self._add("outcome", node.args[1], "IntentEnd.NEVER_ASKED")
        if name in SQL_CALLS and node.args and isinstance(node.args[0], ast.Constant):
            self._change_sql(node.args[0])
        if name in ("cast", "TypeVar", "getLogger"):
            return
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in UNREAD_KEYWORDS and name[:1].islower():
                self._drop_argument(node, keyword)
        self.visit(node.func)
        for each in (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg not in UNREAD_KEYWORDS)):
            self.visit(each)

    def _is_unread(self, node: ast.Call) -> bool:
        name = _name_of(node.func)
        if isinstance(node.func, ast.Attribute) and _name_of(node.func.value) in LOGS:
            return True
        if _is_call_of(node, "events", "add"):
            return True
        return name in EVENTS

    # -- operators --------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            span = self._between(left, right)
            if type(operator) in BOUNDARY:
                self._add_span("boundary", node, span, BOUNDARY[type(operator)])
            self._add_span("negation", node, span, NEGATION[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add_span("boolean", right, self._between(left, right), other)
        for each in node.values:
            rest = [self._text(value) for value in node.values if value is not each]
            word = " and " if other == "or" else " or "
            self._add("operand", node, f"({word.join(f'({one})' for one in rest)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("negation", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(_is_text(each) for each in (node.left, node.right))
        if not is_text and type(node.op) in ARITHMETIC:
            self._add_span("arithmetic", node, self._between(node.left, node.right), ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            is_count = isinstance(node.value, int) and abs(node.value) < 10 and bool(self._scope)
            for value in (node.value + 1 if is_count else node.value * 10, 0 * node.value):
                if value != node.value:
                    self._add("constant", node, repr(value))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        kind = self._returns[-1] if self._returns else ""
        if kind == "bool":
            self._add("return", node.value, f"not ({self._text(node.value)})")
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("return", node.value, {"int": "0", "float": "0.0", "str": '""'}.get(kind, "None"))
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if _name_of(node.test) == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
            self._add("filter", test, "True")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not self._is_unread(value):
            self._add("await" if value is not node.value else "statement", node, "pass")
        self.visit(value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(_name_of(target) == "__all__" for target in node.targets):
            return
        self._delete(node, node.targets[0])
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("statement", node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("raise", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("jump", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("jump", node, "break")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        caught = node.type
        if caught is not None:
            self._add("caught", caught, "ZeroDivisionError")
            if _name_of(caught) not in ("Exception", "BaseException"):
                self._add("caught", caught, "Exception")
            for each in caught.elts if isinstance(caught, ast.Tuple) else ():
                rest = [self._text(one) for one in caught.elts if one is not each]
                self._add("caught", caught, f"({', '.join(rest)},)")
        for each in node.body:
            self.visit(each)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _name_of(call.func) == "transaction":
                self._add("atomic", call, '__import__("contextlib").nullcontext()')
                if not call.keywords:
                    self._add("durable", call, f"{self._text(call.func)}(is_durable=False)")
        self.generic_visit(node)

    visit_AsyncWith = visit_With

    # -- parts ------------------------------------------------------------------------------------------------------

    def _negate(self, test: ast.expr) -> None:
        """Negate; comparisons and `not` have a negation of their own."""
        is_own = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not is_own and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._add("condition", test, f"not ({self._text(test)})")

    def _delete(self, node: ast.stmt, target: ast.expr) -> None:
        """Delete an assignment whose target exists without it; otherwise any run detects the mutant."""
        if isinstance(target, ast.Attribute | ast.Subscript) and self._scope[-1:] != ["__init__"]:
            self._add("statement", node, "pass")

    def _drop_argument(self, call: ast.Call, keyword: ast.keyword) -> None:
        start, end = self._span(keyword)
        rest = self._data[end:]
        comma = re.match(rb"\s*,\s*", rest)
        if comma:
            self._add_span("argument", keyword, (start, end + comma.end()), "")
        else:
            before = re.search(rb",\s*$", self._data[:start])
            self._add_span("argument", keyword, (start - len(before[0]) if before else start, end), "")

    def _change_sql(self, text: ast.Constant) -> None:
        start, end = self._span(text)
        words = self._data[start:end].decode()
        for pattern, after in SQL_CHANGES:
            for match in re.finditer(pattern, words):
                first = start + len(words[: match.start()].encode())
                self._add_span("sql", text, (first, first + len(match[0].encode())), after)

    def _add(self, operator: str, node: ast.AST, after: str) -> None:
        self._add_span(operator, node, self._span(node), after)

    def _add_span(self, operator: str, node: ast.AST, span: tuple[int, int], after: str) -> None:
        start, end = span
        line = self._data[:start].count(b"\n") + 1
        before = self._data[start:end].decode()
        self.found.append(
            Mutant(
                file=self._file,
                line=line,
                function=".".join(self._scope),
                operator=operator,
                start=start,
                end=end,
                before=before,
                after=after,
                text=self._lines[line - 1].strip(),
            )
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        place: ast.expr = node  # type: ignore[assignment]
        assert place.end_lineno is not None and place.end_col_offset is not None
        first = self._offsets[place.lineno - 1] + place.col_offset
        return first, self._offsets[place.end_lineno - 1] + place.end_col_offset

    def _between(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """Find the operator between two operands, without the brackets round them."""
        first, last = self._span(left)[1], self._span(right)[0]
        match = _OPERATOR.search(self._data[first:last].decode())
        return (first + match.start(), first + match.end()) if match else (first, last)


_OPERATOR = re.compile(r"is not\b|not in\b|is\b|in\b|and\b|or\b|<=|>=|==|!=|<|>|\*\*|//|[-+*/%]")


def _is_call_of(node: ast.Call, part: str, verb: str) -> bool:
    """Return whether it calls a verb of one repository of the store, such as `store.intents.close`."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == verb and _name_of(node.func.value) == part


def _name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    is_list = isinstance(node, ast.List | ast.Tuple | ast.JoinedStr | ast.ListComp)
    return is_list or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
