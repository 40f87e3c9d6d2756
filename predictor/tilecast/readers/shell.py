"""Read the commands of a shell script without running anything.

Variables with literal values are replaced, also arrays, defaults (`${N:-8}`) and integer arithmetic. A value that only
a run would know (a command's output, a parameter) becomes a mark, `UNKNOWN` around its name. Branches whose condition
is literal are followed. What other branches and loops assign is unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilecast.spec import SpecError

UNKNOWN = "\x00"
"""Mark before and after the name of a value that is not literal."""
MAX_BYTES = 2**20
MAX_LINE = 2**16
_MAX_DEPTH = 8
"""Most levels of `eval` and `bash -c`."""
_MAX_WORDS = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_SPECIAL = "@*#?$!0123456789-"
_KEYWORDS = ("then", "do", "else", "fi", "done", "esac", "{", "}", "!")
_BREAKS = " \t\n;&|()<>"


@dataclass(slots=True)
class Script:
    """The commands of a script in order, and the files that it writes from here-documents."""

    name: str
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    """Counts that `#SBATCH` lines request."""


def unknown(name: str) -> str:
    """Return the mark of a value that is not literal."""
    return f"{UNKNOWN}{name}{UNKNOWN}"


def read_script(text: str, name: str) -> Script:
    """Return the commands of a shell script, with literal variables replaced.

    Args:
        text: the script.
        name: name of the file in errors.

    Raises:
        SpecError: it is binary, too long, or cut off within a quotation.
    """
    if len(text) > MAX_BYTES:
        raise SpecError(name, f"is longer than {MAX_BYTES // 2**20} MiB", "give the launch line behind --")
    if "\0" in text:
        raise SpecError(name, "is binary", "give a script, a configuration, or the launch line behind --")
    long = next((number for number, line in enumerate(text.split("\n"), 1) if len(line) > MAX_LINE), None)
    if long is not None:
        raise SpecError(f"{name}: line {long}", f"is longer than {MAX_LINE // 1024} KiB", "break it into lines")
    script = Script(name)
    _read_batch_lines(text, script)
    _Reader(script, text.replace("\r\n", "\n")).run()
    return script


_BATCH = re.compile(r"^#SBATCH\s+(?:--?)([A-Za-z-]+)[= ]+(\S+)", re.MULTILINE)
_BATCH_KEYS = {
    "nodes": "nodes", "N": "nodes", "gpus-per-node": "gpus", "gres": "gpus", "ntasks-per-node": "tasks",
}  # fmt: skip


def _read_batch_lines(text: str, script: Script) -> None:
    for key, value in _BATCH.findall(text):
        count = re.search(r"(\d{1,6})$", value)
        if key in _BATCH_KEYS and count:
            script.nodes[_BATCH_KEYS[key]] = int(count[1])
    if "nodes" in script.nodes:
        for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            script.variables[name] = str(script.nodes["nodes"])
    if "gpus" in script.nodes:
        script.variables["SLURM_GPUS_ON_NODE"] = str(script.nodes["gpus"])


@dataclass(slots=True)
class _Branch:
    """A compound command that is open: whether its present branch runs, if that is known."""

    kind: str
    taken: bool | None
    """True: it runs. False: it does not. None: only a run would know."""
    done: bool | None = False
    """Whether an earlier branch ran."""


class _Reader:
    """Reader of one text. Variables and commands go to the script."""

    def __init__(self, script: Script, text: str, depth: int = 0) -> None:
        self.script, self.text, self.place, self.depth = script, text, 0, depth
        self.open: list[_Branch] = []
        self.pending: list[tuple[str, str, bool, bool]] = []

    def run(self) -> None:
        """Read all commands."""
        words: list[str] = []
        started = False
        target: str | None = None
        while self.place < len(self.text):
            char = self.text[self.place]
            if char in " \t":
                self.place += 1
            elif self.text.startswith("\\\n", self.place):
                self.place += 2
            elif char == "#":
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            elif char in "\n;&|":
                if char == "&" and self.text.startswith("&>", self.place):
                    self.place += 2
                    target = self._redirection_target()
                    continue
                self.place += 1
                chained = char if self.text.startswith(char, self.place) and char in "&|" else ""
                self._finish(words, started, target, chained)
                words, started, target = [], False, None
                if char == "\n":
                    self._read_here_documents()
            elif char in "()":
                self.place += 1
                if char == "(" and words and self.text[self.place : self.place + 1] == ")":
                    # A function: its body is read where it is defined.
                    self.place += 1
                    words, started = [], False
                elif char == ")" and self.open and self.open[-1].kind == "case":
                    words, started = [], False
                else:
                    self._finish(words, started, target)
                    words, started, target = [], False, None
            elif char in "<>":
                if self.text.startswith("<<<", self.place):
                    self.place += 3
                    self._skip_blanks()
                    self._word()
                elif self.text.startswith("<<", self.place):
                    self._open_here_document(target)
                else:
                    self.place += 2 if self.text[self.place : self.place + 2] in (">>", ">&", "<&") else 1
                    file = self._redirection_target()
                    if char == ">":
                        target = file
                        self.pending = [
                            (tag, name or file, is_literal, strips) for tag, name, is_literal, strips in self.pending
                        ]
            else:
                match = _ASSIGNMENT.match(self.text, self.place)
                if (match and not words) or (
                    match and words[0] in ("export", "local", "declare", "readonly", "typeset")
                ):
                    self._assign(match)
                else:
                    found = self._word()
                    after = self.text[self.place : self.place + 1]
                    is_descriptor = len(found) == 1 and found[0].isdecimal() and after in ("<", ">")
                    if not words and len(found) == 1 and found[0] in _KEYWORDS:
                        self._keyword(found[0])
                    elif not is_descriptor:
                        words += found
                        started = True
                    if len(words) > _MAX_WORDS:
                        raise SpecError(self.script.name, "a command has too many words", "shorten it")
        self._finish(words, started, target)
        if self.open and self.open[-1].kind in ("if", "for", "while", "until", "case", "select"):
            raise SpecError(
                self.script.name, f"ends within `{self.open[-1].kind}`", "check where the script was cut off"
            )

    def _skip_blanks(self) -> None:
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self.place += 1

    def _redirection_target(self) -> str:
        self._skip_blanks()
        return "".join(self._word())

    # --- control flow

    def _runs(self) -> bool | None:
        """Return whether the present command runs: False if a branch is skipped, None if only a run would know."""
        if any(branch.taken is False for branch in self.open):
            return False
        return None if any(branch.taken is None for branch in self.open) else True

    def _keyword(self, word: str) -> None:
        """Open or close a branch at a keyword."""
        if word == "else" and self.open:
            branch = self.open[-1]
            branch.taken = None if branch.done is None else not branch.done
        elif word in ("fi", "done", "esac") and self.open:
            self.open.pop()

    def _finish(self, words: Sequence[str], started: bool, target: str | None, chained: str = "") -> None:
        """Note a command that has ended, after its keywords. `chained` is the mark of `&&` or `||` behind it."""
        words = list(words)
        while words and started:
            head = words[0]
            if head in ("time", "exec", "nohup", "command"):
                words = words[1:]
            elif head in ("if", "elif"):
                value = _evaluate_test(words[1:])
                # The rest of a chain is not evaluated: it decides unless the first test does.
                if (chained == "|" and value is False) or (chained == "&" and value is True):
                    value = None
                if head == "if":
                    self.open.append(_Branch("if", value, value))
                elif self.open:
                    branch = self.open[-1]
                    branch.taken = False if branch.done is True else (None if branch.done is None else value)
                    branch.done = branch.done if branch.done is not False else value
                return
            elif head in ("for", "while", "until", "case", "select"):
                self.open.append(_Branch(head, None))
                if head == "for" and len(words) > 1:
                    self.script.variables[words[1]] = unknown(words[1])
                return
            elif head == "function":
                return
            else:
                break
        if not words or self._runs() is False:
            return
        if words[0] in ("read", "unset") or (
            words[0] == "set" and len(words) > 1 and not words[1].startswith(("-", "+"))
        ):
            for name in words[1:]:
                if _NAME.fullmatch(name):
                    self.script.variables[name] = unknown(name)
            return
        inner = _inner_text(words)
        if inner is not None and self.depth < _MAX_DEPTH:
            _Reader(self.script, inner, self.depth + 1).run()
            return
        self.script.commands.append(words)

    # --- assignments and words

    def _assign(self, match: re.Match[str]) -> None:
        name, adds = match[1], bool(match[2])
        self.place = match.end()
        value: str | list[str]
        if self.text.startswith("(", self.place):
            self.place += 1
            value = self._array()
        else:
            value = "".join(self._word(splits=False)) if not self._at_break() else ""
        runs = self._runs()
        if runs is False:
            return
        before = self.script.variables.get(name)
        if runs is None:
            if adds and isinstance(before, list):
                self.script.variables[name] = [*before, unknown(f"+{name}")]
            elif before != value:
                self.script.variables[name] = [unknown(name)] if isinstance(value, list) else unknown(name)
            return
        if adds and before is not None:
            if isinstance(before, list) or isinstance(value, list):
                value = [*_as_list(before), *_as_list(value)]
            else:
                value = before + value
        self.script.variables[name] = value

    def _at_break(self) -> bool:
        return self.place >= len(self.text) or self.text[self.place] in _BREAKS

    def _array(self) -> list[str]:
        items: list[str] = []
        while self.place < len(self.text):
            char = self.text[self.place]
            if char in " \t\n":
                self.place += 1
            elif self.text.startswith("\\\n", self.place):
                self.place += 2
            elif char == "#":
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            elif char == ")":
                self.place += 1
                return items
            else:
                before = self.place
                items += self._word()
                self.place += self.place == before
        raise SpecError(self.script.name, "ends within an array", "check where the script was cut off")

    def _word(self, splits: bool = True) -> list[str]:
        """Return the words that one word of the text expands to."""
        pieces, quoted = [""], False
        while self.place < len(self.text) and self.text[self.place] not in _BREAKS:
            char = self.text[self.place]
            if char == "\\":
                if self.text.startswith("\\\n", self.place):
                    self.place += 2
                    continue
                pieces[-1] += self.text[self.place + 1 : self.place + 2]
                self.place += 2
            elif char == "'":
                end = self.text.find("'", self.place + 1)
                if end < 0:
                    raise self._cut_off("'")
                pieces[-1] += self.text[self.place + 1 : end]
                self.place, quoted = end + 1, True
            elif char == '"':
                self._quotation(pieces)
                quoted = True
            elif char == "$":
                value = self._expansion()
                if isinstance(value, list):
                    found = [word for item in value for word in item.split()] if splits else [" ".join(value)]
                else:
                    found = _split_keeping_ends(value) if splits else [value]
                if found:
                    pieces[-1] += found[0]
                    pieces += found[1:]
            elif char == "`":
                end = self.text.find("`", self.place + 1)
                if end < 0:
                    raise self._cut_off("`")
                pieces[-1] += unknown("a command")
                self.place = end + 1
            else:
                pieces[-1] += char
                self.place += 1
        if splits:
            return [piece for piece in pieces if piece or quoted]
        return pieces

    def _cut_off(self, mark: str) -> SpecError:
        line = self.text.count("\n", 0, self.place) + 1
        return SpecError(f"{self.script.name}: line {line}", f"a {mark} is not closed", "check where it was cut off")

    def _quotation(self, pieces: list[str]) -> None:
        start = self.place
        self.place += 1
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == '"':
                self.place += 1
                return
            if char == "\\":
                after = self.text[self.place + 1 : self.place + 2]
                pieces[-1] += "" if after == "\n" else after if after in '"\\$`' else "\\" + after
                self.place += 2
            elif char == "$":
                value = self._expansion()
                if isinstance(value, list):
                    if value:
                        pieces[-1] += value[0]
                        pieces += value[1:]
                else:
                    pieces[-1] += value
            elif char == "`":
                end = self.text.find("`", self.place + 1)
                if end < 0:
                    break
                pieces[-1] += unknown("a command")
                self.place = end + 1
            else:
                pieces[-1] += char
                self.place += 1
        self.place = start
        raise self._cut_off('"')

    def _expansion(self) -> str | list[str]:
        """Return the value of `$…`: a text, or the words of an array."""
        text = self.text
        if text.startswith("$((", self.place):
            end = text.find("))", self.place)
            if end < 0:
                raise self._cut_off("$((")
            inner, self.place = text[self.place + 3 : end], end + 2
            return _evaluate_arithmetic(inner, self.script.variables)
        if text.startswith("$(", self.place):
            start, depth = self.place, 0
            while self.place < len(text):
                depth += {"(": 1, ")": -1}.get(text[self.place], 0)
                self.place += 1
                if depth == 0 and self.place > start + 1:
                    return unknown("a command")
            self.place = start
            raise self._cut_off("$(")
        if text.startswith("${", self.place):
            brace = _closing_brace(text, self.place + 2)
            if brace is None:
                raise self._cut_off("${")
            inner, self.place = text[self.place + 2 : brace], brace + 1
            return self._parameter(inner)
        name = _NAME.match(text, self.place + 1)
        if name:
            self.place = name.end()
            return self._value(name[0])
        char = text[self.place + 1 : self.place + 2]
        if char and char in _SPECIAL:
            self.place += 2
            return [] if char in "@*" else unknown(f"${char}")
        self.place += 1
        return "$"

    def _parameter(self, inner: str) -> str | list[str]:
        name = _NAME.match(inner)
        if name is None:
            # Without arguments the defaults of parameters count.
            default = re.fullmatch(r"\d:?-(.*)", inner, re.DOTALL)
            if default:
                return self._expand_text(default[1])
            return [] if inner[:1] in "@*" else unknown(f"${inner[:20]}")
        rest = inner[name.end() :]
        if rest in ("[@]", "[*]"):
            value = self._value(name[0])
            return value if isinstance(value, list) else [value]
        if not rest:
            return self._value(name[0])
        match = re.fullmatch(r"(:?[-=+])(.*)", rest, re.DOTALL)
        if match:
            known = self.script.variables.get(name[0])
            if match[1].endswith("+"):
                return self._expand_text(match[2]) if known else ""
            return known if known else self._expand_text(match[2])
        return unknown(name[0])

    def _expand_text(self, text: str) -> str:
        reader = _Reader(self.script, text.replace('"', ""), self.depth + 1)
        if reader.depth > _MAX_DEPTH:
            return unknown("a value")
        parts: list[str] = []
        while reader.place < len(reader.text):
            if reader.text[reader.place] == "$":
                value = reader._expansion()
                parts.append(" ".join(value) if isinstance(value, list) else value)
            else:
                parts.append(reader.text[reader.place])
                reader.place += 1
        return "".join(parts)

    def _value(self, name: str) -> str | list[str]:
        return self.script.variables.get(name, unknown(name))

    # --- here-documents

    def _open_here_document(self, target: str | None) -> None:
        self.place += 2
        strips = self.text.startswith("-", self.place)
        self.place += strips
        self._skip_blanks()
        is_literal = self.text[self.place : self.place + 1] in ("'", '"', "\\")
        tag = "".join(self._word(splits=False))
        self.pending.append((tag, target or "", is_literal, strips))

    def _read_here_documents(self) -> None:
        for tag, name, is_literal, strips in self.pending:
            lines: list[str] = []
            while True:
                if self.place >= len(self.text):
                    raise SpecError(self.script.name, f"ends before {tag!r}", "check where the script was cut off")
                end = self.text.find("\n", self.place)
                end = len(self.text) if end < 0 else end
                line = self.text[self.place : end]
                self.place = end + 1
                if (line.lstrip("\t") if strips else line) == tag:
                    break
                lines.append(line)
            content = "\n".join(lines) + "\n"
            if self._runs() is not False and name:
                self.script.files[name] = content if is_literal else self._expand_document(content)
        self.pending = []

    def _expand_document(self, content: str) -> str:
        reader = _Reader(self.script, content, self.depth + 1)
        parts: list[str] = []
        while reader.place < len(content):
            char = content[reader.place]
            if char == "$":
                value = reader._expansion()
                parts.append(" ".join(value) if isinstance(value, list) else value)
            elif char == "\\" and content[reader.place + 1 : reader.place + 2] in ("$", "\\", "`"):
                parts.append(content[reader.place + 1])
                reader.place += 2
            else:
                parts.append(char)
                reader.place += 1
        return "".join(parts)


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


def _split_keeping_ends(value: str) -> list[str]:
    """Return the words of an unquoted value. A blank at either end separates it from its neighbours."""
    words = value.split()
    if not words:
        return ["", ""] if value else []
    return [*([""] if value[0].isspace() else []), *words, *([""] if value[-1].isspace() else [])]


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, min(len(text), start + MAX_LINE)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _inner_text(words: Sequence[str]) -> str | None:
    """Return the text that `eval` or `bash -c` runs, or None if the command is neither."""
    if words[0] == "eval" and len(words) > 1:
        return " ".join(words[1:])
    for place, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in ("bash", "sh") and words[place + 1].startswith("-") and "c" in words[place + 1]:
            return words[place + 2]
    return None


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _evaluate_arithmetic(text: str, variables: Mapping[str, str | list[str]]) -> str:
    """Return the value of integer arithmetic as text, or a mark if a variable in it is not literal."""

    def put(match: re.Match[str]) -> str:
        value = variables.get(match[1])
        return value if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value) else "x"

    filled = re.sub(r"\$?\{?\b([A-Za-z_][A-Za-z0-9_]*)\}?", put, text)
    if len(filled) < 256:
        try:
            return str(_evaluate_node(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            pass
    return unknown(text.strip()[:40])


def _evaluate_node(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
        if abs(value) < 10**18:
            return value
    raise ValueError


def _evaluate_test(words: Sequence[str]) -> bool | None:
    """Return the value of `[ … ]` or `[[ … ]]`, or None if only a run would know it."""
    if len(words) < 3 or words[0] not in ("[", "[[", "test"):
        return None
    inner = list(words[1:-1] if words[0] != "test" else words[1:])
    negated = inner[:1] == ["!"]
    inner = inner[negated:]
    if any(UNKNOWN in word for word in inner):
        return None
    value: bool | None = None
    if len(inner) == 2 and inner[0] in ("-z", "-n"):
        value = (inner[1] == "") == (inner[0] == "-z")
    elif len(inner) == 3 and inner[1] in ("=", "==", "!="):
        value = (inner[0] == inner[2]) == (inner[1] != "!=")
    elif (
        len(inner) == 3
        and inner[1] in _COMPARISONS
        and all(one.lstrip("-").isdecimal() for one in (inner[0], inner[2]))
    ):
        value = _COMPARISONS[inner[1]](int(inner[0]), int(inner[2]))
    return None if value is None else value != negated


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
