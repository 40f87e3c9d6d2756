"""Read a training configuration written in Python, without running it.

The file is parsed, and the few statements that configurations consist of are interpreted: assignments, calls of
functions in the same folder, literals, and branches with a literal condition. Any other call becomes an object with its
name and its arguments, like a call of a configuration class. A value that is known only at run time becomes a marker,
as in `tilecast.readers.shell`. Imported modules are read if they are next to the file or in its package.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tilecast.launch_options.options_table import UNKNOWN, Setting
from tilecast.readers.shell import unknown
from tilecast.spec import SpecError

ReadText = Callable[[str], str]
MAX_STEPS = 50_000
"""Most expressions and statements that are interpreted."""
MAX_CALLS = 16
"""Largest depth of calls."""
MAX_MODULES = 32
"""Most files that are read."""
MAX_ITEMS = 4096
"""Most items of a list, characters of a computed text, and settings of a configuration."""
_MAX_DEPTH = 24
_MAX_NODES = 200_000
"""Most syntax nodes of a file."""
_MAX_FLAT = 16 * MAX_ITEMS
"""Most items of all lists and settings of a configuration together."""
_MAX_NESTED = 64
"""Most items of a nested list that are described."""
_MAX_NAME = 1000
"""Most characters of a setting's name."""
_REST = "**"
"""Key for fields and items that are known only at run time."""
_LISTED = {"param_groups": "optimizer_name"}
"""Field by which the objects of a list count, by the list's name."""
_ASIDE = ("env_vars", "logger", "tokenizer")
"""Sections in which such fields do not matter, because they do not describe the job."""


@dataclass(slots=True, eq=False)
class BuiltObject:
    """An object that a call creates: the name of the called function, and its arguments or fields by name."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    is_object: bool = False
    """Whether it is certainly an object, which is true in a condition. A function's result may be anything."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An imported or unknown name, such as `torch.bfloat16`."""

    name: str
    is_own: bool = False
    """Whether it is a class of the file. Its fields are not interpreted."""

    def __str__(self) -> str:
        """Return the name."""
        return self.name


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function defined in a Python file."""

    node: ast.FunctionDef
    module: _Module
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the enclosing function, if there is one."""


@dataclass(slots=True, eq=False)
class _Module:
    """A Python file and its variables."""

    name: str
    names: dict[str, Any] = field(default_factory=dict)
    place: tuple[str, ...] = ()
    """Folders from the package's to the file's own."""


@dataclass(frozen=True, slots=True)
class _Later:
    """A name in a module of the package. The module is read when the name is used."""

    place: tuple[str, ...]
    name: str


class _ReturnError(Exception):
    """Raised at a `return` statement, with the returned value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _StopError(Exception):
    """Raised where `return`, `raise`, `break` or `continue` ends a branch that may not run."""


class _RaiseError(_StopError):
    """Raised at a `raise` statement that certainly runs."""


class _BreakError(_StopError):
    """Raised at a `break` statement that certainly runs."""


class _ContinueError(_StopError):
    """Raised at a `continue` statement that certainly runs."""


@dataclass(slots=True, eq=False)
class _RunningBlock:
    """A call or a loop that is being interpreted."""

    base: int
    """Number of open branches with an unknown condition when the block began."""
    extra: int = 0
    """Number of points at which the block may have ended. Statements after them may not run."""
    returned: list[Any] = field(default_factory=list)
    """Values that the call may have returned."""


def find_functions(text: str, name: str) -> dict[str, str]:
    """Return the declared return type of each function in a file that builds a configuration, by function name.

    Such a function needs no argument, and its name does not begin with an underscore.

    Raises:
        SpecError: the file is not Python.
    """
    found = {}
    for node in _parse(text, name).body:
        if isinstance(node, ast.FunctionDef) and node.returns is not None and node.name[0] != "_":
            positional = [*node.args.posonlyargs, *node.args.args]
            if len(positional) == len(node.args.defaults) and None not in node.args.kw_defaults:
                # A type is a name here, or a name behind names of modules.
                found[node.name] = ".".join(_split_dotted_name(node.returns))
    return found


def _split_dotted_name(node: ast.expr) -> list[str]:
    """Return the parts of a dotted name, or an empty list for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value[:80].split(".")
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def read_function(
    text: str, name: str, function: str, read_text: ReadText, bases: Mapping[str, Any],
    package: Sequence[str] = (), place: Sequence[str] = (), folders: Sequence[str] = (),
    neighbours: Sequence[str] = (), located: Sequence[str] = (), calls: _Calls | None = None,
) -> list[Setting]:  # fmt: skip
    """Return the settings of the configuration that a function returns.

    Args:
        text: the file.
        name: name of the file in errors.
        function: name of the function.
        read_text: function that reads another file of the folder by name.
        bases: fields of the objects that functions of the framework create, by the names of the functions.
        package: folders on the path to the file's package, including the package itself. Empty if the file is in no
            package.
        place: folders on the path from the package to the file. `read_text` reads names relative to the package's
            folder.
        folders: folders of the package whose modules are read.
        neighbours: folders of other packages beside the file's own, such as `torchtitan/models`, whose modules are
            read.
        located: functions that are not interpreted, and whose objects are named by the module that defines them.
        calls: fields that functions of the framework set on an object among their arguments, by the name of the
            function and the text among its arguments.

    Raises:
        SpecError: the file is not Python, has no such function, or the function is too long to interpret.
    """
    reader = _Reader(name, read_text, bases, package, folders)
    reader.neighbours, reader.located = [one.split("/") for one in neighbours], located
    reader.setters = calls or {}
    try:
        module = reader.load(text, name, place)
        made = reader._resolve(module.names.get(function))
        if not isinstance(made, Function):
            raise SpecError(name, f"has no function {function[:60]!r}", "name one of its functions")
        value = reader.call(made, [], {})
        if not isinstance(value, BuiltObject | dict):
            raise SpecError(f"{name}:{function}", "returns nothing that can be read", "describe the job by flags")
        settings: list[Setting] = []
        reader.flatten(value, "", settings, 0)
    except RecursionError:
        raise SpecError(name, "is nested too deeply", "flatten it") from None
    return settings


def read_registered(
    text: str, name: str, key: str, read_text: ReadText, package: Sequence[str], place: Sequence[str],
    builders: Sequence[str],
) -> BuiltObject | None:  # fmt: skip
    """Return the object that a function builds which a mapping of a file registers under a key, or None.

    Such a mapping's name ends in `_configs`. `read_function` describes the other arguments.

    Args:
        text: the file.
        name: name of the file in errors.
        key: the key.
        read_text: function that reads another file of the package by name.
        package: folders that lead to the file's package, with its own.
        place: folders from the package's to the file's own.
        builders: functions that are not interpreted. Their arguments are the object's fields.

    Raises:
        SpecError: the file is not Python, or is too long to interpret.
    """
    reader = _Reader(name, read_text, {}, package, ())
    reader.builders = builders
    try:
        module = reader.load(text, name, place)
        registries = [value for one, value in module.names.items() if one.endswith("_configs")]
        made = next((one[key] for one in registries if isinstance(one, dict) and key in one), None)
        value = reader.call(made, [], {}) if isinstance(made, Function) else None
    except RecursionError:
        raise SpecError(name, "is nested too deeply", "flatten it") from None
    return value if isinstance(value, BuiltObject) else None


def _parse(text: str, name: str) -> ast.Module:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        where = f"{name}: line {error.lineno}" if error.lineno else name
        raise SpecError(where, f"is not Python: {str(error.msg)[:80]}", "check where the file was cut off") from None
    except (ValueError, RecursionError, MemoryError):
        raise SpecError(name, "is not Python, or is nested too deeply", "give a configuration") from None
    for count, _ in enumerate(ast.walk(tree)):
        if count > _MAX_NODES:
            raise SpecError(name, "is too long to follow", "give a file with fewer configurations")
    return tree


def _only_checks(node: ast.ClassDef) -> bool:
    """Return whether a class has only the fields of its base, and changes none of them when it is built."""
    for one in node.body:
        if isinstance(one, ast.Pass) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):
            continue
        if not isinstance(one, ast.FunctionDef) or one.name in ("__init__", "__new__"):
            return False
        if one.name != "__post_init__":
            continue
        raised = {id(part) for inner in ast.walk(one) if isinstance(inner, ast.Raise) for part in ast.walk(inner)}
        for part in ast.walk(one):
            if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
                return False
            if isinstance(part, ast.Call) and id(part) not in raised and not _is_own_check(part.func):
                return False
    return True


def _is_own_check(node: ast.expr) -> bool:
    """Return whether a called function is the check of a base class, or `super`."""
    return (isinstance(node, ast.Attribute) and node.attr == "__post_init__") or (
        isinstance(node, ast.Name) and node.id == "super"
    )


_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le,
}  # fmt: skip
_WRAPPERS = ("Config", "Partial", "partial")
"""Names of calls that build their first argument: `run.Config(Trainer, devices=8)`."""
_Scope = dict[str, Any]
_Calls = Mapping[str, Mapping[str, Mapping[str, Any]]]


def _is_unknown(value: object) -> bool:
    return isinstance(value, str) and UNKNOWN in value


class _Reader:
    """Interpreter of the statements of a configuration."""

    def __init__(
        self, name: str, read_text: ReadText, bases: Mapping[str, Any], package: Sequence[str], folders: Sequence[str]
    ) -> None:
        self.name, self.read_text, self.bases = name, read_text, bases
        self.package, self.folders = list(package), folders
        self.neighbours: Sequence[Sequence[str]] = ()
        self.located: Sequence[str] = ()
        self.builders: Sequence[str] = ()
        self.setters: _Calls = {}
        self.steps = self.calls = 0
        self.modules: dict[str, _Module] = {}
        self.effects: list[Setting] = []
        """Calls of unknown functions that may change an object, with their other arguments."""
        self.unsure = 0
        """Number of open branches with a condition that is known only at run time."""
        self.frame = self.loop = _RunningBlock(0)
        self.flat = 0
        """Number of items of settings so far."""

    def _count_steps(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise SpecError(self.name, f"takes more than {MAX_STEPS:,} steps to follow", "describe the job by flags")

    def load(self, text: str, name: str, place: Sequence[str] = ()) -> _Module:
        """Return a module with the functions and constants that a text defines."""
        module = self.modules[name] = _Module(name, place=tuple(place))
        outer, self.unsure = (self.unsure, self.frame, self.loop), 0
        self.frame = self.loop = _RunningBlock(0)
        try:
            with contextlib.suppress(_ReturnError, _StopError):
                self._run(_parse(text, name).body, module.names, module)
        finally:
            self.unsure, self.frame, self.loop = outer
        return module

    def call(self, function: Function, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the result of calling a function."""
        if self.calls >= MAX_CALLS:
            return unknown(function.node.name)
        own = function.node.args
        names = [one.arg for one in (*own.posonlyargs, *own.args)]
        self._count_steps(len(function.outer) // _PER_STEP)
        scope: _Scope = dict(function.outer)
        defaults = dict(zip(reversed(names), reversed(own.defaults), strict=False))
        defaults |= {one.arg: value for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value}
        scope |= {key: self._evaluate(node, function.module.names, function.module) for key, node in defaults.items()}
        known = {*names, *(one.arg for one in own.kwonlyargs)}
        if _REST in keywords:
            scope |= {key: unknown(key) for key in known}
        if _has_unknown_items(args):
            args = args[: next(place for place, one in enumerate(args) if one == _OPEN)]
            scope |= {key: unknown(key) for key in names[len(args) :]}
            rest = [_OPEN]
        else:
            rest = list(args[len(names) :])
        scope |= dict(zip(names, args, strict=False))
        if own.vararg:
            scope[own.vararg.arg] = rest
        scope |= {key: value for key, value in keywords.items() if key in known}
        if own.kwarg:
            scope[own.kwarg.arg] = {key: value for key, value in keywords.items() if key not in known}
        outer = self.unsure, self.frame, self.loop
        frame = self.frame = self.loop = _RunningBlock(self.unsure)
        self.calls += 1
        value = None
        try:
            self._run(function.node.body, scope, function.module)
        except _ReturnError as end:
            value = end.value
        except _StopError:
            return unknown(function.node.name)
        finally:
            self.calls -= 1
            self.unsure, self.frame, self.loop = outer
        return value if all(_is_same(one, value) for one in frame.returned) else unknown(function.node.name)

    def flatten(self, value: object, prefix: str, settings: list[Setting], depth: int) -> None:
        """Add a setting for each field of an object, and one for the object itself.

        The value of the object's own setting is the name of the function or class that created it.
        """
        self._count_steps()
        if depth > _MAX_DEPTH or len(settings) > MAX_ITEMS or len(prefix) > _MAX_NAME:
            raise SpecError(self.name, "builds more than can be read", "flatten it")
        if isinstance(value, BuiltObject | dict):
            fields = value.fields if isinstance(value, BuiltObject) else value
            if _REST in fields and prefix.partition(".")[0] not in _ASIDE:
                where = f"{self.name}: {prefix}" if prefix else self.name
                raise SpecError(where, "has fields that only a run would know", "write them as literals")
            if prefix and isinstance(value, BuiltObject) and value.name:
                settings.append(Setting(prefix, (value.name,)))
            for key, item in fields.items():
                name = "items" if isinstance(key, tuple) else str(key)
                self.flatten(item, f"{prefix}.{name}" if prefix else name, settings, depth + 1)
        elif isinstance(value, list | tuple):
            self.flat += len(value)
            if self.flat > _MAX_FLAT:
                raise SpecError(self.name, "builds more than can be read", "flatten it")
            # Objects in a list count by their names, and by one field of theirs where they are all alike.
            settings.append(Setting(prefix, tuple(map(_describe, value))))
            if field_name := _LISTED.get(prefix.rpartition(".")[2]):
                found = [one.fields.get(field_name) for one in value if isinstance(one, BuiltObject)]
                settings.append(Setting(f"{prefix}.{field_name}", tuple(dict.fromkeys(map(_describe, found)))))
        else:
            settings.append(Setting(prefix, (_describe(value),)))
        if depth == 0:
            settings += self.effects

    # --- statements

    def _run(self, body: Sequence[ast.stmt], scope: _Scope, module: _Module) -> None:
        for node in body:
            self._count_steps()
            self._run_statement(node, scope, module)

    def _change_arguments(self, call: BuiltObject, rest: Sequence[Any]) -> None:
        """Set the fields that a call of a function of the framework sets on the objects among its arguments."""
        known = self.setters.get(call.name.rpartition(".")[2], {})
        changes: Mapping[str, Any] = next((known[one] for one in rest if isinstance(one, str) and one in known), {})
        if any(map(_is_unknown, rest)):
            changes = {key: unknown(key) for fields in known.values() for key in fields}
        for owner in call.fields.values():
            if isinstance(owner, BuiltObject):
                owner.fields |= {key: unknown(key) for key in changes} if self.unsure else changes

    def _run_statement(self, node: ast.stmt, scope: _Scope, module: _Module) -> None:
        if isinstance(node, ast.FunctionDef):
            scope[node.name] = Function(node, module, {} if scope is module.names else scope)
        elif isinstance(node, ast.Assign):
            value = self._evaluate(node.value, scope, module)
            for target in node.targets:
                self._assign(target, value, scope, module)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self._evaluate(node.value, scope, module), scope, module)
        elif isinstance(node, ast.AugAssign):
            left = self._evaluate(node.target, scope, module)
            right = self._evaluate(node.value, scope, module)
            if isinstance(left, list) and isinstance(node.op, ast.Add):
                # A list grows in place, for all its names.
                self._call_method(left, "extend", [right], {})
            elif isinstance(left, dict) and isinstance(node.op, ast.BitOr):
                self._call_method(left, "update", [right], {})
            else:
                self._assign(node.target, self._operate(node.op, left, right), scope, module)
        elif isinstance(node, ast.Expr):
            value = self._evaluate(node.value, scope, module)
            if (
                isinstance(value, BuiltObject)
                and value.name
                and any(isinstance(one, BuiltObject) for one in value.fields.values())
            ):
                rest = tuple(one for one in value.fields.values() if not isinstance(one, BuiltObject | dict | list))
                self._change_arguments(value, rest)
                self.effects.append(Setting(f"{value.name.rpartition('.')[2]}()", tuple(map(_describe, rest))))
        elif isinstance(node, ast.Return):
            value = None if node.value is None else self._evaluate(node.value, scope, module)
            if self.unsure == self.frame.base + self.frame.extra:
                raise _ReturnError(value)
            # Whether it returns here is unknown, so the rest may not run.
            self.frame.returned.append(value)
            self._end_uncertain_branch(self.frame)
        elif isinstance(node, ast.If):
            self._run_if(node, scope, module)
        elif isinstance(node, ast.For | ast.While | ast.Try | ast.TryStar | ast.With | ast.Match):
            self._run_compound(node, scope, module)
        elif isinstance(node, ast.Raise):
            # A run that is of interest does not fail.
            raise _StopError if self.unsure > self.frame.base + self.frame.extra else _RaiseError
        elif isinstance(node, ast.Break | ast.Continue):
            if self.unsure == self.loop.base:
                raise _BreakError if isinstance(node, ast.Break) else _ContinueError
            self._end_uncertain_branch(self.loop)
        elif isinstance(node, ast.ImportFrom):
            self._run_import(node, scope, module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                scope[name] = Symbol(name if alias.asname is None else alias.name)
        elif isinstance(node, ast.ClassDef):
            base = self._find_base(node, scope, module) if _only_checks(node) else ""
            scope[node.name] = Symbol(base) if base else Symbol(node.name, is_own=True)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._run_delete(target, scope, module)
        elif isinstance(node, ast.Global):
            module.names |= {name: unknown(name) for name in node.names if scope is not module.names}
        elif isinstance(node, ast.Nonlocal):
            raise SpecError(self.name, "uses nonlocal variables", "describe the job by flags")
        elif not isinstance(node, ast.Pass | ast.Assert):
            self._mark_unknown([node], scope, module)

    def _find_base(self, node: ast.ClassDef, scope: _Scope, module: _Module) -> str:
        """Return the name of a class's only base, or an empty text if the base has fields that are not interpreted."""
        parts = _split_dotted_name(node.bases[0]) if len(node.bases) == 1 else []
        owner = scope.get(parts[0], module.names.get(parts[0])) if parts else None
        if not isinstance(owner, Symbol):
            return ".".join(parts)
        return "" if owner.is_own else ".".join([owner.name, *parts[1:]])

    def _end_uncertain_branch(self, block: _RunningBlock) -> NoReturn:
        """End a branch that may not run, and mark the rest of the call or loop as possibly not run."""
        block.extra += 1
        self.unsure += 1
        raise _StopError

    def _mark_unknown(self, body: Sequence[ast.stmt], scope: _Scope, module: _Module) -> None:
        """Make every variable unknown to which the statements assign."""
        for outer in body:
            for node in ast.walk(outer):
                self._count_steps()
                if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                    name = getattr(node, "id", "") or getattr(node, "attr", "a value")
                    self._assign(node, unknown(name), scope, module)

    def _run_delete(self, target: ast.expr, scope: _Scope, module: _Module) -> None:
        owner = self._evaluate(target.value, scope, module) if isinstance(target, ast.Subscript) else None
        key = self._evaluate(target.slice, scope, module) if isinstance(target, ast.Subscript) else None
        if isinstance(owner, dict | list):
            self._call_method(owner, "pop", [key], {})
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._run_delete(one, scope, module)
        else:
            self._assign(target, unknown("a value"), scope, module)

    def _run_if(self, node: ast.If, scope: _Scope, module: _Module) -> None:
        test = self._evaluate_condition(self._evaluate(node.test, scope, module))
        if test is None:
            for body in (node.body, node.orelse):
                self._run_uncertain(body, scope, module)
        else:
            self._run(node.body if test else node.orelse, scope, module)

    def _run_compound(
        self, node: ast.For | ast.While | ast.Try | ast.TryStar | ast.With | ast.Match, scope: _Scope, module: _Module
    ) -> None:  # fmt: skip
        if isinstance(node, ast.With):
            for one in node.items:
                if one.optional_vars is not None:
                    self._assign(one.optional_vars, self._evaluate(one.context_expr, scope, module), scope, module)
            self._run(node.body, scope, module)
        elif isinstance(node, ast.Try | ast.TryStar):
            with contextlib.suppress(_RaiseError):
                self._run([*node.body, *node.orelse], scope, module)
            for handler in node.handlers:
                self._run_uncertain(handler.body, scope, module)
            self._run(node.finalbody, scope, module)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                for part in ast.walk(case.pattern):
                    name = getattr(part, "name", None) or getattr(part, "rest", None)
                    scope |= {name: unknown(name)} if isinstance(name, str) else {}
                self._run_uncertain(case.body, scope, module)
        else:
            self._run_loop(node, scope, module)

    def _run_loop(self, node: ast.For | ast.While, scope: _Scope, module: _Module) -> None:
        """Interpret a loop. If its iterations are unknown, the variables that it assigns become unknown."""
        items = self._evaluate(node.iter, scope, module) if isinstance(node, ast.For) else None
        outer = self.loop
        loop = self.loop = _RunningBlock(self.unsure)
        is_broken = False
        try:
            if not isinstance(node, ast.For) or not isinstance(items, list | tuple) or _has_unknown_items(items):
                # A later turn starts from what an earlier one stored.
                self._mark_unknown(node.body, scope, module)
                if isinstance(node, ast.For):
                    self._assign(node.target, unknown("a loop"), scope, module)
                self._run_uncertain(node.body, scope, module)
                loop.extra += 1
                self.unsure += 1
            else:
                # The loop may change its list.
                for item in list(items):
                    self._assign(node.target, item, scope, module)
                    try:
                        self._run(node.body, scope, module)
                    except _BreakError:
                        is_broken = True
                        break
                    except (_RaiseError, _ReturnError):
                        raise
                    except _StopError:
                        continue
            if not is_broken:
                self.loop = outer
                with contextlib.nullcontext() if self.unsure == loop.base else contextlib.suppress(_StopError):
                    self._run(node.orelse, scope, module)
        finally:
            self.loop = outer
            self.unsure -= loop.extra

    def _run_uncertain(self, body: Sequence[ast.stmt], scope: _Scope, module: _Module) -> None:
        """Interpret statements that may not run. Everything that they change becomes unknown."""
        self.unsure += 1
        try:
            self._run(body, scope, module)
        except _StopError:
            pass
        finally:
            self.unsure -= 1

    def _run_import(self, node: ast.ImportFrom, scope: _Scope, importer: _Module) -> None:
        """Import from a module that is in the package or next to the file.

        An import from any other module only defines names. A module of the package is read when one of its names is
        used.
        """
        place = self._find_place(node, importer.place)
        last = (node.module or "").rpartition(".")[2]
        module = None if place is not None or not last else self._load_module([*importer.place, last])
        for alias in node.names:
            name = alias.asname or alias.name
            if alias.name in self.located:
                scope[name] = Symbol(self._locate(node, importer, alias.name))
            elif alias.name in self.bases:
                scope[name] = Symbol(alias.name)
            elif place is not None and alias.name != "*":
                scope[name] = _Later(tuple(place), alias.name)
            elif alias.name == "*":
                module = module if place is None else self._load_module(place)
                scope |= {} if module is None else dict(module.names)
            else:
                value = module.names.get(name) if module else self._load_module([*importer.place, alias.name])
                scope[name] = Symbol(alias.name) if value is None else value

    def _resolve(self, value: Any) -> Any:
        """Return an imported value. A value that still refers to a module of the package is read from there."""
        for _ in range(MAX_CALLS):
            if not isinstance(value, _Later):
                break
            later, module = value, self._load_module(value.place)
            value = module.names.get(later.name) if module else None
            if value is None:
                value = self._load_module([*later.place, later.name]) or Symbol(later.name)
            if isinstance(value, Symbol) and value.is_own:
                # A class of another file builds an object.
                value = Symbol(later.name)
        return value

    def _find_place(self, node: ast.ImportFrom, importer: Sequence[str]) -> list[str] | None:
        """Return the path from the package's folder to an imported module, or None if it is outside the package."""
        parts = node.module.split(".") if node.module else []
        if node.level:
            up = node.level - 1
            found = [*importer[: len(importer) - up], *parts] if self.package and up <= len(importer) else []
        else:
            counts = range(1, len(parts) + 1)
            found = next((parts[count:] for count in counts if parts[:count] == self.package[-count:]), [])
            if not found and self.package and any(parts[: len(one)] == one for one in self.neighbours):
                return ["..", *parts]
        return found if found[:1] and found[0] in self.folders else None

    def _locate(self, node: ast.ImportFrom, importer: _Module, name: str) -> str:
        """Return an imported name behind that of its module, from the module's package on."""
        parts = node.module.split(".") if node.module else []
        if node.level:
            place = [*self.package[-1:], *importer.place]
            place = place[place.index("..") + 1 :] if ".." in place else place
            parts = [*place[: len(place) - node.level + 1], *parts]
        return ".".join([*parts, name])

    def _load_module(self, place: Sequence[str]) -> _Module | None:
        """Return the module at a path, or None if it cannot be read."""
        path = "/".join(place)
        for name, folder in ((f"{path}.py", place[:-1]), (f"{path}/__init__.py", place)):
            if name in self.modules:
                return self.modules[name]
            if len(self.modules) >= MAX_MODULES:
                return None
            try:
                text = self.read_text(name)
            except SpecError:
                continue
            return self.load(text, name, folder)
        return None

    def _assign(self, target: ast.expr, value: Any, scope: _Scope, module: _Module) -> None:
        if isinstance(target, ast.Name):
            if self.unsure and not _is_same(scope.get(target.id, value), value):
                value = unknown(target.id)
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._find_or_make_owner(target.value, scope, module)
            if owner is not None:
                if self.unsure and not _is_same(owner.fields.get(target.attr), value):
                    value = unknown(target.attr)
                owner.fields[target.attr] = value
        elif isinstance(target, ast.Tuple | ast.List):
            items: Sequence[Any] = value if isinstance(value, list | tuple) else ()
            if isinstance(value, BuiltObject):
                # The first of several results goes by the name of the call, as an optimizer with its schedule.
                items = [value, *(BuiltObject(f"{value.name}[{place}]") for place in range(1, len(target.elts)))]
            if len(items) != len(target.elts):
                items = [unknown("a value")] * len(target.elts)
            for one, item in zip(target.elts, items, strict=True):
                self._assign(one, item, scope, module)
        elif isinstance(target, ast.Subscript):
            owner_of = self._evaluate(target.value, scope, module)
            key = self._evaluate(target.slice, scope, module)
            if _is_unknown(owner_of) and isinstance(target.value, ast.Attribute):
                owner_of = self._find_or_make_owner(target.value, scope, module)
            self._set_item(owner_of, key, value)

    def _set_item(self, owner: object, key: object, value: Any) -> None:
        """Set an item of a mapping or a list."""
        is_known = isinstance(key, _KEYS) and not _is_unknown(key)
        if isinstance(owner, BuiltObject):
            # Whether items of an object are its fields is up to its class.
            owner.fields[key if is_known and isinstance(key, str) else _REST] = unknown(str(key)[:80])
        elif isinstance(owner, dict):
            if not is_known or len(owner) >= MAX_ITEMS:
                _make_items_unknown(owner)
            elif not self.unsure or not _is_same(owner.get(key), value):
                owner[key] = unknown(str(key)[:80]) if self.unsure else value
        elif isinstance(owner, list):
            if (
                isinstance(key, int)
                and -len(owner) <= key < len(owner)
                and not self.unsure
                and not _has_unknown_items(owner)
            ):
                owner[key] = value
            else:
                _make_items_unknown(owner)

    def _find_or_make_owner(self, node: ast.expr, scope: _Scope, module: _Module) -> BuiltObject | None:
        """Return the object on which an attribute is set. If only its name is known so far, create the object."""
        if isinstance(node, ast.Attribute):
            outer = self._find_or_make_owner(node.value, scope, module)
            if outer is None:
                return None
            found = outer.fields.get(node.attr)
            if not isinstance(found, BuiltObject):
                # A text, such as "bf16_mixed", names what is built from it.
                name = found if isinstance(found, str) and not _is_unknown(found) else ""
                found = outer.fields[node.attr] = BuiltObject(name, is_object=True)
            return found
        value = self._evaluate(node, scope, module)
        return value if isinstance(value, BuiltObject) else None

    # --- expressions

    def _evaluate_condition(self, value: object) -> bool | None:
        if _is_unknown(value) or isinstance(value, Symbol):
            return None
        if isinstance(value, BuiltObject):
            return True if value.is_object else None
        if isinstance(value, list | tuple | dict) and _has_unknown_items(value):
            return None
        return True if isinstance(value, Function | _Module) else bool(value)

    def _evaluate(self, node: ast.expr, scope: _Scope, module: _Module) -> Any:
        """Return the value of an expression."""
        self._count_steps()
        reader = self._READERS.get(type(node))
        return unknown("an expression") if reader is None else reader(self, node, scope, module)

    def _evaluate_constant(self, node: ast.Constant, _scope: _Scope, _module: _Module) -> Any:
        is_long = isinstance(node.value, int) and abs(node.value) >= 2**63
        return unknown("a number") if is_long else node.value

    def _name(self, node: ast.Name, scope: _Scope, module: _Module) -> Any:
        if node.id in scope:
            return self._resolve(scope[node.id])
        return self._resolve(module.names.get(node.id, Symbol(node.id)))

    def _evaluate_attribute(self, node: ast.Attribute, scope: _Scope, module: _Module) -> Any:
        owner = self._evaluate(node.value, scope, module)
        if isinstance(owner, Symbol):
            return Symbol(f"{owner.name}.{node.attr}"[:200])
        if isinstance(owner, BuiltObject):
            return owner.fields.get(node.attr, unknown(node.attr))
        if isinstance(owner, _Module):
            return self._resolve(owner.names.get(node.attr, Symbol(node.attr)))
        return unknown(node.attr)

    def _evaluate_tuple(self, node: ast.Tuple, scope: _Scope, module: _Module) -> list[Any] | tuple[Any, ...]:
        """Return a tuple if all items are literals, so that it can be a key of a mapping. Otherwise return a list."""
        items = self._evaluate_list(node, scope, module)
        return tuple(items) if all(isinstance(one, _PLAIN) for one in items) else items

    def _evaluate_list(self, node: ast.List | ast.Tuple | ast.Set, scope: _Scope, module: _Module) -> list[Any]:
        items: list[Any] = []
        for one in node.elts[:MAX_ITEMS]:
            if isinstance(one, ast.Starred):
                inner = self._evaluate(one.value, scope, module)
                items += inner if isinstance(inner, list | tuple) else [_OPEN]
            else:
                items.append(self._evaluate(one, scope, module))
        return items[:MAX_ITEMS]

    def _evaluate_list_comprehension(self, node: ast.ListComp, scope: _Scope, module: _Module) -> Any:
        """Return the list that a comprehension over one known list builds, or a marker."""
        loop = node.generators[0]
        items = self._evaluate(loop.iter, scope, module)
        if len(node.generators) > 1 or loop.ifs or loop.is_async or not isinstance(loop.target, ast.Name):
            return unknown("a comprehension")
        if not isinstance(items, list | tuple) or _has_unknown_items(items):
            return unknown("a comprehension")
        # Its variable is its own. Other variables that an item assigns are those around it.
        self._count_steps(len(scope) // _PER_STEP)
        before, inner, name, found = dict(scope), dict(scope), loop.target.id, []
        for item in items:
            self._count_steps()
            inner[name] = item
            found.append(self._evaluate(node.elt, inner, module))
        scope |= {key: value for key, value in inner.items() if key != name and before.get(key, before) is not value}
        return found

    def _evaluate_dict(self, node: ast.Dict, scope: _Scope, module: _Module) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found = self._evaluate(value, scope, module)
            if key is None:
                self._update_mapping(items, found)
            else:
                name = self._evaluate(key, scope, module)
                if isinstance(name, _KEYS) and not _is_unknown(name):
                    items[name] = found
                elif isinstance(name, Symbol):
                    items[name.name] = found
                else:
                    _make_items_unknown(items)
        return items

    def _evaluate_binary(self, node: ast.BinOp, scope: _Scope, module: _Module) -> Any:
        return self._operate(
            node.op, self._evaluate(node.left, scope, module), self._evaluate(node.right, scope, module)
        )

    def _operate(self, how: ast.operator, left: Any, right: Any) -> Any:
        value = _operate(how, left, right)
        self._count_steps(len(value) // _PER_STEP if isinstance(value, list | str) else 0)
        return value

    def _evaluate_named_expression(self, node: ast.NamedExpr, scope: _Scope, module: _Module) -> Any:
        self._assign(node.target, self._evaluate(node.value, scope, module), scope, module)
        return scope[node.target.id]

    def _evaluate_unary(self, node: ast.UnaryOp, scope: _Scope, module: _Module) -> Any:
        value = self._evaluate(node.operand, scope, module)
        if isinstance(node.op, ast.Not):
            truth = self._evaluate_condition(value)
            return unknown("a condition") if truth is None else not truth
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return unknown("an expression")

    def _evaluate_bool(self, node: ast.BoolOp, scope: _Scope, module: _Module) -> Any:
        is_and, value = isinstance(node.op, ast.And), None
        for place, one in enumerate(node.values):
            value = self._evaluate(one, scope, module)
            truth = self._evaluate_condition(value)
            if truth is None:
                self._evaluate_uncertain(node.values[place + 1 :], scope, module)
                return unknown("a condition")
            if truth != is_and:
                return value
        return value

    def _compare(self, node: ast.Compare, scope: _Scope, module: _Module) -> Any:
        left = self._evaluate(node.left, scope, module)
        for how, other in zip(node.ops, node.comparators, strict=True):
            right = self._evaluate(other, scope, module)
            if isinstance(how, ast.In | ast.NotIn) and isinstance(right, list | tuple | dict | str):
                self._count_steps(len(right) * (len(left) if isinstance(left, tuple) else 1) // _PER_STEP)
            value = _compare(how, left, right)
            if value is not True:
                return unknown("a condition") if value is None else False
            left = right
        return True

    def _evaluate_conditional(self, node: ast.IfExp, scope: _Scope, module: _Module) -> Any:
        test = self._evaluate_condition(self._evaluate(node.test, scope, module))
        if test is None:
            self._evaluate_uncertain([node.body, node.orelse], scope, module)
            return unknown("a condition")
        return self._evaluate(node.body if test else node.orelse, scope, module)

    def _evaluate_uncertain(self, nodes: Sequence[ast.expr], scope: _Scope, module: _Module) -> None:
        """Interpret expressions that may not be evaluated, only for their side effects."""
        self.unsure += 1
        for node in nodes:
            self._evaluate(node, scope, module)
        self.unsure -= 1

    def _evaluate_joined_text(self, node: ast.JoinedStr, scope: _Scope, module: _Module) -> str:
        parts = []
        for one in node.values:
            value = self._evaluate(one.value if isinstance(one, ast.FormattedValue) else one, scope, module)
            is_plain = not isinstance(one, ast.FormattedValue) or (one.format_spec is None and one.conversion == -1)
            is_plain = is_plain and isinstance(value, str | int | float)
            parts.append(str(value)[:MAX_ITEMS] if is_plain else unknown("a value"))
            if sum(map(len, parts)) > MAX_ITEMS:
                return unknown("a text")
            parts = ["".join(parts)]
        return "".join(parts)

    def _evaluate_subscript(self, node: ast.Subscript, scope: _Scope, module: _Module) -> Any:
        owner, key = self._evaluate(node.value, scope, module), self._evaluate(node.slice, scope, module)
        if isinstance(owner, Symbol) and isinstance(key, str) and not _is_unknown(key):
            return Symbol(f"{owner.name}.{key}"[:200])
        if isinstance(key, str | int | tuple) and isinstance(owner, dict | list | tuple):
            if not isinstance(owner, dict) and _has_unknown_items(owner):
                return unknown("an item")
            try:
                return owner[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                pass
        return unknown("an item")

    def _evaluate_call(self, node: ast.Call, scope: _Scope, module: _Module) -> Any:
        args: list[Any] = []
        for one in node.args:
            if isinstance(one, ast.Starred):
                args += self._evaluate_list(ast.List([one], ast.Load()), scope, module)
            else:
                args.append(self._evaluate(one, scope, module))
        keywords: dict[str, Any] = {}
        for word in node.keywords:
            value = self._evaluate(word.value, scope, module)
            if word.arg is not None:
                keywords[word.arg] = value
            elif isinstance(value, dict):
                self._count_steps(len(value) // _PER_STEP)
                keywords |= {key: item for key, item in value.items() if isinstance(key, str)}
            else:
                keywords[_REST] = unknown("arguments")
        if isinstance(node.func, ast.Attribute):
            owner = self._evaluate(node.func.value, scope, module)
            if not isinstance(owner, Symbol | _Module):
                return self._call_method(owner, node.func.attr, args, keywords)
        function = self._evaluate(node.func, scope, module)
        if isinstance(function, Function) and function.node.name in self.builders:
            return self._build_object(function.node.name, args, keywords)
        if isinstance(function, Function):
            return self.call(function, args, keywords)
        if not isinstance(function, Symbol):
            return self._call_unknown_function("a call", [*args, *keywords.values()])
        if function.is_own:
            # Fields of a class are not followed.
            return BuiltObject(function.name, {**keywords, _REST: unknown("fields")}, is_object=True)
        return self._build_object(function.name, args, keywords)

    def _call_unknown_function(self, name: str, args: Sequence[Any]) -> str:
        """Return a marker as the result of calling an unknown function.

        The arguments are marked as partly unknown, because the call may change them.
        """
        for one in args:
            if isinstance(one, BuiltObject):
                one.fields[_REST] = unknown(name)
            elif isinstance(one, dict | list):
                _make_items_unknown(one)
        return unknown(name)

    def _update_mapping(self, owner: dict[Any, Any], other: object) -> None:
        """Update a mapping with the items of another one."""
        if not isinstance(other, dict) or len(owner) + len(other) > 2 * MAX_ITEMS:
            _make_items_unknown(owner)
            return
        self._count_steps(len(other) // _PER_STEP)
        if _REST in other:
            _make_items_unknown(owner)
        for key, value in list(other.items()):
            if not self.unsure or not _is_same(owner.get(key), value):
                owner[key] = unknown(str(key)[:80]) if self.unsure else value

    def _copy(self, value: Any, copied: dict[int, Any], depth: int = 0) -> Any:
        """Return a deep copy of a value. An object that occurs several times is copied once."""
        self._count_steps()
        if not isinstance(value, BuiltObject | dict | list):
            return value
        if id(value) in copied:
            return copied[id(value)]
        if depth > _MAX_DEPTH:
            return unknown("a copy")
        if isinstance(value, list):
            items: list[Any] = []
            copied[id(value)] = items
            items += [self._copy(one, copied, depth + 1) for one in value]
            return items
        fields: dict[Any, Any] = {}
        made = BuiltObject(value.name, fields, value.is_object) if isinstance(value, BuiltObject) else fields
        copied[id(value)] = made
        for key, item in (value.fields if isinstance(value, BuiltObject) else value).items():
            fields[key] = self._copy(item, copied, depth + 1)
        return made

    def _build_object(self, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the result of calling a function or class that is not defined in the folder."""
        last = name.rpartition(".")[2]
        if last == "deepcopy" and len(args) == 1:
            return self._copy(args[0], {})
        if last == "copy" and len(args) == 1:
            return self._copy_shallow(args[0])
        if last == "setattr" and len(args) == 3 and isinstance(args[0], BuiltObject):
            owner, key, value = args
            key = key if isinstance(key, str) and not _is_unknown(key) else _REST
            is_sure = key != _REST and (not self.unsure or _is_same(owner.fields.get(key), value))
            owner.fields[key] = value if is_sure else unknown(key)
            return None
        if last == "cast" and len(args) == 2:
            return args[1]
        if last in ("list", "tuple") and len(args) == 1 and isinstance(args[0], list | tuple):
            return self._copy_shallow(list(args[0]))
        if last == "dict" and not args:
            return dict(keywords)
        if last == "replace" and len(args) == 1 and isinstance(args[0], BuiltObject):
            copied = self._copy_shallow(args[0])
            copied.fields |= keywords
            return copied
        if last == "getattr" and len(args) > 1 and isinstance(args[0], BuiltObject) and isinstance(args[1], str):
            return args[0].fields.get(args[1], unknown(last))
        if last in ("int", "len", "max", "min", "str", "bool", "isinstance", "hasattr", "getattr"):
            return _call_builtin(last, args)
        if last in _WRAPPERS and args and isinstance(args[0], Symbol | Function):
            inner = args[0].name if isinstance(args[0], Symbol) else args[0].node.name
            return BuiltObject(inner, dict(keywords), is_object=True)
        base = self.bases.get(last)
        built = BuiltObject(name, {str(place): value for place, value in enumerate(args)} | keywords)
        # A call of a function that is not known may return nothing.
        built.is_object = base is not None or last.endswith("Config")
        if base is not None:
            built.fields = _build_fields(base) | built.fields
        return built

    def _copy_shallow(self, value: Any) -> Any:
        if isinstance(value, BuiltObject):
            self._count_steps(len(value.fields) // _PER_STEP)
            return BuiltObject(value.name, dict(value.fields), value.is_object)
        if isinstance(value, list | dict):
            self._count_steps(len(value) // _PER_STEP)
            return value.copy()
        return value

    def _call_method(self, owner: object, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the result of a method call."""
        if isinstance(owner, str) and not args and name in ("lower", "upper", "strip"):
            self._count_steps(len(owner) // _PER_STEP)
            return owner if _is_unknown(owner) else getattr(owner, name)()
        if isinstance(owner, str) and name == "join" and len(args) == 1 and isinstance(args[0], list | tuple):
            words = [one for one in args[0] if isinstance(one, str)]
            is_short = len(words) == len(args[0]) and sum(map(len, words)) <= MAX_ITEMS
            is_short = is_short and len(owner) * len(words) <= MAX_ITEMS
            return owner.join(words)[:MAX_ITEMS] if is_short else unknown("a text")
        if isinstance(owner, list):
            return self._call_list_method(owner, name, args)
        if isinstance(owner, dict):
            return self._call_dict_method(owner, name, args, keywords)
        if isinstance(owner, BuiltObject):
            # A method of a builder, such as AutoBridge.from_hf_pretrained(NAME).to_megatron_provider().
            self._count_steps(len(owner.fields) // _PER_STEP)
            return BuiltObject(f"{owner.name}.{name}"[:200], {**owner.fields, **keywords})
        return self._call_unknown_function(name, [*args, *keywords.values()])

    def _call_list_method(self, owner: list[Any], name: str, args: list[Any]) -> Any:
        if name == "copy":
            return self._copy_shallow(owner)
        added = args if name == "append" else args[0] if name == "extend" and args else None
        if isinstance(added, list | tuple) and not self.unsure and len(owner) + len(added) <= MAX_ITEMS:
            self._count_steps(len(added) // _PER_STEP)
            owner += added
        elif name not in ("count", "index"):
            _make_items_unknown(owner)
        return None if name in ("append", "extend") else unknown(name)

    def _call_dict_method(self, owner: dict[Any, Any], name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        key = args[0] if args and isinstance(args[0], _KEYS) and not _is_unknown(args[0]) else None
        default = args[1] if len(args) > 1 else None
        if name == "copy":
            return self._copy_shallow(owner)
        if name == "update":
            self._update_mapping(owner, args[0] if args else {})
            self._update_mapping(owner, keywords)
            return None
        if name in ("get", "setdefault", "pop") and args:
            if key is None or (key not in owner and _REST in owner):
                found: Any = unknown("an item")
            else:
                found = owner.get(key, default)
            if name == "setdefault":
                self._set_item(owner, args[0], found)
            elif name == "pop" and (self.unsure or key is None):
                self._set_item(owner, args[0], unknown("an item"))
            elif name == "pop":
                owner.pop(key, None)
            return found
        if name not in ("items", "keys", "values"):
            _make_items_unknown(owner)
        return unknown(name)

    _READERS: Mapping[type, Callable[..., Any]] = {
        ast.Constant: _evaluate_constant, ast.Name: _name, ast.Attribute: _evaluate_attribute,
        ast.List: _evaluate_list, ast.Tuple: _evaluate_tuple, ast.Set: _evaluate_list, ast.Dict: _evaluate_dict,
        ast.BinOp: _evaluate_binary, ast.UnaryOp: _evaluate_unary, ast.BoolOp: _evaluate_bool,
        ast.Compare: _compare, ast.IfExp: _evaluate_conditional, ast.NamedExpr: _evaluate_named_expression,
        ast.ListComp: _evaluate_list_comprehension, ast.JoinedStr: _evaluate_joined_text,
        ast.Subscript: _evaluate_subscript, ast.Call: _evaluate_call,
    }  # fmt: skip


def _describe(value: object) -> object:
    """Return a literal unchanged, and the name of an object or symbol. For any other value, return a marker."""
    if isinstance(value, BuiltObject | Symbol):
        return value.name
    if isinstance(value, list | tuple) and len(value) <= _MAX_NESTED and all(isinstance(one, str) for one in value):
        return tuple(value)
    return value if isinstance(value, str | int | float | bool | type(None)) else unknown("a value")


def _build_fields(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that the framework creates. Nested mappings become objects with fields."""
    return {
        key: BuiltObject("", _build_fields(value), is_object=True) if isinstance(value, Mapping) else value
        for key, value in base.items()
    }


_OPEN = unknown("a list")
"""Marker of a list item that stands for any number of items."""


def _has_unknown_items(value: object) -> bool:
    """Return whether a list or mapping has items that are known only at run time."""
    if isinstance(value, dict):
        return _REST in value
    return isinstance(value, list | tuple) and any(isinstance(one, str) and one == _OPEN for one in value)


def _make_items_unknown(value: dict[Any, Any] | list[Any]) -> None:
    """Make all items of a list or mapping unknown."""
    if isinstance(value, list):
        value[:] = [_OPEN]
    else:
        value |= {key: unknown("an item") for key in (*value, _REST)}


def _is_same(before: object, after: object) -> bool:
    """Return whether two values are known to be equal. For speed, only literals and symbols are compared by value."""
    is_plain = isinstance(before, (*_PLAIN, Symbol))
    return before is after or (is_plain and type(before) is type(after) and before == after)


def _operate(how: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of an operation on literals, or a marker if it is unknown or would be too large."""
    apply = _BINARY.get(type(how))
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    texts = isinstance(left, str) and isinstance(right, str) and isinstance(how, ast.Add)
    lists = isinstance(left, list) and isinstance(right, list) and isinstance(how, ast.Add)
    if apply is not None and (texts or lists) and len(left) + len(right) <= MAX_ITEMS:
        return apply(left, right)
    if isinstance(how, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        if 0 <= right * len(left) <= MAX_ITEMS:
            return left * right
    elif apply is not None and numbers and abs(left) < 2**63 and abs(right) < 2**63:
        try:
            return apply(left, right)
        except (ZeroDivisionError, OverflowError):
            pass
    if isinstance(how, ast.Pow) and isinstance(left, int) and isinstance(right, int) and 0 <= right < 63:
        return left**right if abs(left) < 16 else unknown("a power")
    return unknown("an expression")


def _compare(how: ast.cmpop, left: Any, right: Any) -> bool | None:
    """Return the result of a comparison, or None if it is known only at run time."""
    if _is_unknown(left) or _is_unknown(right):
        return None
    if isinstance(how, ast.Is | ast.IsNot) and (left is None or right is None or isinstance(right, bool)):
        if isinstance(left, Symbol):
            return None
        return (left is right) == isinstance(how, ast.Is)
    if isinstance(how, ast.In | ast.NotIn) and isinstance(right, list | tuple | dict | str):
        if isinstance(left, (*_PLAIN, tuple)) and not (isinstance(right, str) and not isinstance(left, str)):
            if isinstance(right, dict):
                is_known = not _is_unknown(right[left]) if left in right else _REST not in right
            else:
                # An item that is not known may be the one.
                is_known = left in right or all(isinstance(one, _KEYS) and not _is_unknown(one) for one in right)
            return (left in right) == isinstance(how, ast.In) if is_known else None
        return None
    if type(how) in _COMPARED and isinstance(left, _PLAIN) and isinstance(right, _PLAIN):
        try:
            return bool(_COMPARED[type(how)](left, right))
        except TypeError:
            return None
    return None


_PLAIN = (str, int, float, type(None))
_KEYS = (*_PLAIN, tuple)
_PER_STEP = 64
"""Items or characters that may be copied or compared for the cost of one step."""


def _call_builtin(name: str, args: Sequence[Any]) -> Any:
    if name == "isinstance" and len(args) == 2 and isinstance(args[0], _PLAIN) and not _is_unknown(args[0]):
        kinds = args[1] if isinstance(args[1], list) else [args[1]]
        if all(isinstance(kind, Symbol) for kind in kinds):
            # Classes of a framework have no literals.
            return type(args[0]).__name__ in [kind.name for kind in kinds]
    if name == "len" and len(args) == 1 and isinstance(args[0], list | dict) and not _has_unknown_items(args[0]):
        return len(args[0])
    if name in ("max", "min") and len(args) > 1 and all(isinstance(one, int | float) for one in args):
        return max(args) if name == "max" else min(args)
    if name == "int" and len(args) == 1 and isinstance(args[0], int | float) and abs(args[0]) < 2**63:
        return int(args[0])
    return unknown(name)


def split_name(name: str) -> tuple[str, str]:
    """Return the file and the function in a text `FILE.py:FUNCTION`. Without a function, its name is ""."""
    match = re.fullmatch(r"(.*\.py):([A-Za-z_]\w*)", name, re.DOTALL)
    return (match[1], match[2]) if match else (name, "")
