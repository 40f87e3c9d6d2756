"""Read the commands of a shell script without executing anything.

Variables with literal values, arrays, defaults (`${N:-8}`) and integer arithmetic are replaced by their values. A value
that is known only at run time (a command's output, a parameter) becomes a marker, `UNKNOWN` around its name. Branches,
including those of `&&` and `||`, are followed if their condition is literal. Variables assigned in other branches and
in loops become unknown. The body of a function is read where it is called. Assignments in a subshell have no effect
after it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tilecast.launch_options.options_table import UNKNOWN
from tilecast.readers.slurm import Allocation, read_header
from tilecast.spec import SpecError

MAX_BYTES = 2**20
MAX_LINE = 2**16
MAX_CHARACTERS = 2**22
"""Most characters to which all uses of a script's variables expand together."""
MAX_WORDS = 100_000
MAX_STEPS = 20_000
"""Most commands of a script, including those that functions and `eval` repeat."""
MAX_BRANCHES = 256
"""Largest depth of nested compound commands."""
_MAX_DEPTH = 8
"""Largest depth of nested functions, `eval` and `bash -c`."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_ELEMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[[^\]]*\]\+?=")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w.:-]{1,100})[ \t]*(?:\([ \t]*\))?|([\w.:-]{1,100})[ \t]*\([ \t]*\))\s*(?=[{(])"
)
_PLAIN = re.compile(r"[^ \t\n;&|()<>\\'\"$`]+")
_JOINED = re.compile(r"\$\*|\$\{(?:\*|[A-Za-z_][A-Za-z0-9_]*\[\*\])")
"""Expansion that gives one word within quotation marks."""
_QUOTED = re.compile(r'[^"\\$`]+')
_Value = TypeVar("_Value", str, list[str], str | list[str])
_SPECIAL = "@*#?$!0123456789-"
_KEYWORDS = ("if", "elif", "then", "else", "fi", "while", "until", "do", "done", "esac", "{", "}", "!")
_OPENED_BY = {"fi": ("if",), "done": ("for", "while", "until", "select"), "esac": ("case",), "}": ("{", "function")}
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_SUCCEEDING = (
    *_DECLARATIONS, "cd", "pushd", "popd", "mkdir", "echo", "printf", "set", "shift", "source", ".", "module", "ulimit",
    "umask", "sleep", "rm", "touch", "cp", "mv", "ln", "chmod", "conda", "pip",
)  # fmt: skip
"""Commands that are assumed to succeed. Whether any other command does is unknown."""
_ACTIVATIONS = ("activate", "conda.sh")
"""Files that activate a Python environment. They set no variable that scripts use."""
SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_BREAKS = " \t\n;&|()<>"
_MARK = re.compile(rf"{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}")
_MARKED_WORD = re.compile(rf"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|[^\s{UNKNOWN}])+")


@dataclass(slots=True)
class ReadingBudget:
    """Remaining cost of reading a script and all texts that it runs."""

    name: str
    characters: int = MAX_CHARACTERS
    words: int = MAX_WORDS
    steps: int = MAX_STEPS

    def spend(self, characters: int = 0, words: int = 0, steps: int = 0) -> None:
        """Subtract a cost from the budget.

        Raises:
            SpecError: the budget is exceeded.
        """
        self.characters -= characters
        self.words -= words
        self.steps -= steps
        remedy = "give the launch line behind --"
        if self.characters < 0:
            raise SpecError(self.name, f"its variables expand to more than {MAX_CHARACTERS // 2**20} MiB", remedy)
        if self.words < 0:
            raise SpecError(self.name, f"has more than {MAX_WORDS:,} words", remedy)
        if self.steps < 0:
            raise SpecError(self.name, f"runs more than {MAX_STEPS:,} commands", remedy)


@dataclass(slots=True)
class _Function:
    """A function of a script."""

    body: str
    """Text of the body, including its braces."""
    defined: bool | None
    """Whether its definition runs. None if that is unknown."""
    called: bool = False


@dataclass(slots=True)
class Script:
    """The commands of a script in order, and the files that it writes by here-documents."""

    name: str
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    batch: Allocation = field(default_factory=Allocation)
    """Counts that `#SBATCH` lines request."""
    given: frozenset[str] = frozenset()
    """Variables that have a value before the script begins."""
    notes: list[str] = field(default_factory=list)
    functions: dict[str, _Function] = field(default_factory=dict)
    subshells: list[dict[str, str | list[str] | None]] = field(default_factory=list)
    """Values of variables before each open subshell."""
    has_ended: bool = False
    """Whether the script has already ended."""
    parameters: list[str] | None = None
    """Arguments of the script. None if they are unknown, in which case defaults apply."""
    has_unread: bool = False
    """Whether the environment may have variables that were not read, so that no default is certain."""
    prefixes: dict[int, dict[str, str]] = field(default_factory=dict)
    """Assignments before a command, by its index in `commands`."""
    wrappers: list[list[str]] = field(default_factory=list)
    """Words before each `bash -c`, such as those of mpirun."""
    budget: ReadingBudget = field(init=False)

    def __post_init__(self) -> None:
        """Set the budget for reading this script to its maximum."""
        self.budget = ReadingBudget(self.name)


def unknown(name: str) -> str:
    """Return the marker that stands for a value that is not literal."""
    return f"{UNKNOWN}{name}{UNKNOWN}"


REST = unknown("$@")
"""Argument that stands for any number of unknown arguments."""


def read_script(
    text: str,
    name: str,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    *,
    has_unread: bool = False,
) -> Script:
    """Return the commands of a shell script, with literal variables replaced.

    Args:
        text: the script.
        name: name of the file in errors.
        variables: environment variables. All others are unknown.
        arguments: arguments of the script, or None if they are unknown.
        has_unread: whether the environment may have other variables, so that defaults such as `${N:-8}` are unknown.

    Raises:
        SpecError: the script is binary, too long, cut off within a quotation, or costs more than a `ReadingBudget`.
    """
    if len(text) > MAX_BYTES:
        raise SpecError(name, f"is longer than {MAX_BYTES // 2**20} MiB", "give the launch line behind --")
    if "\0" in text:
        raise SpecError(name, "is binary", "give a script, a configuration, or the launch line behind --")
    long = next((number for number, line in enumerate(text.split("\n"), 1) if len(line) > MAX_LINE), None)
    if long is not None:
        raise SpecError(f"{name}: line {long}", f"is longer than {MAX_LINE // 1024} KiB", "break it into lines")
    script = Script(name, {**(variables or {})}, has_unread=has_unread)
    script.parameters = None if arguments is None else [*arguments]
    script.batch = read_header(text, name)
    script.variables |= script.batch.list_variables()
    script.given = frozenset(script.variables)
    _Reader(script, text.replace("\r\n", "\n")).run()
    script.has_ended = False
    for function in [one for one in script.functions.values() if not one.called]:
        # A call may be computed: what such a function launches counts, but its variables are unknown.
        _Reader(script, function.body, 1, None, None if arguments is None else [REST]).run()
    return script


class _ExpandedWords:
    """The words to which one word of the text expands. Later text may still be appended to the last word."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.parts: list[str] = []

    def add(self, text: str) -> None:
        """Append a text to the last word."""
        self.parts.append(text)

    def extend(self, words: Sequence[str]) -> None:
        """Append the first word to the last word so far, and add the others after it."""
        for place, word in enumerate(words):
            if place:
                self.done.append("".join(self.parts))
                self.parts = []
            self.parts.append(word)

    def words(self) -> list[str]:
        """Return all words."""
        return [*self.done, "".join(self.parts)]


@dataclass(slots=True)
class _AndOrList:
    """Commands joined by `&&` and `||`. A condition is True, False, or None if it is known only at run time."""

    gate: bool | None = True
    """Whether the next command runs."""
    status: bool | None = True
    """Whether the last command succeeded."""
    mark: str = ""
    """Operator before the next command."""
    is_piped: bool = False
    """Whether the next command is part of a pipeline."""
    ended: tuple[bool, bool] | None = None
    """Whether the text and the script had already ended before the next compound command."""

    def end_command(self, status: bool | None, mark: str) -> None:
        """Record whether a command succeeds, and the operator after it."""
        if self.gate is True:
            self.status = status
        elif self.gate is None:
            # Whether it runs is unknown. Its failure decides after `&&`, its success after `||`.
            self.status = status if status == (self.mark == "||") else None
        if mark in ("&&", "||"):
            self.gate, self.mark = self.status if mark == "&&" else _negate(self.status), mark
        elif mark != "|":
            self.gate, self.mark = True, ""


@dataclass(slots=True)
class _OpenBranch:
    """An open compound command, and whether its present branch runs."""

    kind: str
    outer: bool | None
    """Whether the compound command runs. None if that is known only at run time."""
    taken: bool | None
    """Whether the present branch runs, if the compound command does."""
    chain: _AndOrList
    """Chain that contains the compound command."""
    start: int = 0
    """Position of its opening brace."""
    name: str = ""
    """Name of the function, if it is a function's body."""
    negates: bool = False
    done: bool | None = False
    """Whether an earlier branch ran."""
    saved: dict[str, str | list[str] | None] | None = None
    """Values of variables to restore after a subshell."""


class _Reader:
    """Reader of one text, which adds the variables and commands of the text to the script."""

    def __init__(
        self,
        script: Script,
        text: str,
        depth: int = 0,
        runs: bool | None = True,
        arguments: list[str] | None = None,
        *,
        is_function: bool = False,
    ) -> None:
        """Prepare to read a text from its beginning.

        Args:
            script: the script to which variables and commands are added.
            text: the text, such as a script, a function's body or the argument of `bash -c`.
            depth: number of texts in which this text is nested.
            runs: whether the shell executes the text. None if that is known only at run time.
            arguments: arguments of the function whose body the text is. None if the text uses the arguments of the
                script.
            is_function: whether the text is the body of a function, or is executed within a function.
        """
        self.script, self.text, self.place, self.depth = script, text, 0, depth
        self.runs, self.arguments, self.is_function = runs, arguments, is_function
        self.open: list[_OpenBranch] = []
        self.pending: list[tuple[str, str, bool, bool]] = []
        self.chain = _AndOrList()
        self.status: bool | None = None
        """Whether the present command, which has no words so far, succeeds."""
        self.is_begun = self.negates = self.has_ended = False
        self.function = ""
        self.environment: dict[str, tuple[str | None, str | None]] = {}
        """Values before and after the assignments that precede a command and hold only for it."""
        self.inherited: dict[str, str] = {}
        """Assignments before the command that runs this whole text."""
        self.locals: dict[str, str | list[str] | None] = {}
        """Values of variables before the function declared them as local."""

    def run(self) -> None:
        """Interpret all commands in order, without executing them."""
        words: list[str] = []
        target: str | None = None
        while self.place < len(self.text):
            char = self.text[self.place]
            if self._skip_blank(" \t"):
                continue
            if words[:1] == ["[["] and words[-1] != "]]" and self._read_condition_mark(words):
                continue
            if char in "\n;&|":
                if char == "&" and self.text.startswith("&>", self.place):
                    self.place += 2
                    target = self._read_redirection_target()
                    continue
                pair = self.text[self.place : self.place + 2]
                mark = pair if pair in ("&&", "||") else char
                self.place += 2 if pair in ("&&", "||", "|&") else 1
                self._finish_command(words, mark)
                words, target = [], None
                if char == "\n":
                    self._read_here_documents()
            elif char in "()":
                words = self._read_bracket(char, words)
                target = None
            elif char in "<>":
                if self.text.startswith("<<<", self.place):
                    self.place += 3
                    self._skip_blanks()
                    self._expand_word()
                elif self.text.startswith("<<", self.place):
                    self._open_here_document(target)
                else:
                    self.place += 2 if self.text[self.place : self.place + 2] in (">>", ">&", "<&") else 1
                    file = self._read_redirection_target()
                    if char == ">":
                        target = file
                        self.script.budget.spend(steps=len(self.pending))
                        self.pending = [
                            (tag, name or file, is_literal, strips) for tag, name, is_literal, strips in self.pending
                        ]
            else:
                self._read_word(words)
        self._finish_command(words, "\n")
        if self.open and self.open[-1].kind not in ("{", "(", "function"):
            raise SpecError(
                self.script.name, f"ends within `{self.open[-1].kind}`", "check where the script was cut off"
            )
        while self.open:
            self._close_branch(None)
        self._restore_values(self.locals)

    def _read_condition_mark(self, words: list[str]) -> bool:
        """Read an operator inside `[[ … ]]`, where `&&`, brackets and line ends do not separate commands."""
        pair, char = self.text[self.place : self.place + 2], self.text[self.place]
        if words[-1] == "=~" and char != "\n":
            words.append(self._read_expression())
        elif pair in ("&&", "||"):
            words.append(pair)
            self.place += 2
        elif char in "()<>" or (char == "\n" and words[-1] in ("[[", "&&", "||", "(")):
            words += [char] if char != "\n" else []
            self.place += 1
        elif char == "|":
            words.append(char)
            self.place += 1
        else:
            return False
        return True

    def _read_expression(self) -> str:
        """Return the regular expression after `=~`. It ends at a blank outside of brackets and quotation marks."""
        start, depth, quote = self.place, 0, ""
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == "\n" or (char in " \t" and depth <= 0 and not quote):
                break
            if char == "\\":
                self.place += 1
            elif quote or char in "'\"":
                quote = "" if char == quote else quote or char
            else:
                depth += {"(": 1, ")": -1}.get(char, 0)
            self.place += 1
        self.place = min(self.place, len(self.text))
        return self.text[start : self.place]

    def _read_bracket(self, char: str, words: list[str]) -> list[str]:
        """Read a bracket, and return the words of the command that is being read: none after most brackets."""
        self.place += 1
        kind = self.open[-1].kind if self.open else ""
        if char == "(" and self.text.startswith("(", self.place) and (not words or words == ["for"]):
            self._read_arithmetic_command()
            return words
        if char == "(" and words and self.text.startswith(")", self.place):
            self.place += 1
            return []
        if char == "(" and not words:
            self._open_branch("function" if self.function else "(", not self.function)
            return []
        if char == ")" and kind == "case":
            self.is_begun = False
            return []
        self._finish_command(words, ";")
        if char == ")" and (kind == "(" or (kind == "function" and self.text[self.open[-1].start] == "(")):
            self._close_branch(self.chain.status)
        return []

    def _read_arithmetic_command(self) -> None:
        """Read `((…))`, which succeeds if its result is not 0. Variables that it changes become unknown."""
        end = self.text.find("))", self.place)
        if end < 0:
            raise self._make_unclosed_error("((")
        inner, self.place = self.text[self.place + 1 : end], end + 2
        if re.search(r"\+\+|--|(?<![=<>!])=(?!=)", inner):
            for name in dict.fromkeys(_NAME.findall(inner)):
                self._forget_value(name)
        value = _evaluate_arithmetic(inner, self.script.variables)
        self.is_begun, self.status = True, None if UNKNOWN in value else value != "0"

    def _read_word(self, words: list[str]) -> None:
        """Read an assignment, a keyword, the head of a function, or words of a command, and add the last to `words`."""
        if not words and (head := _FUNCTION.match(self.text, self.place)):
            self.place, self.function = head.end(), head[1] or head[2]
            return
        match = _ASSIGNMENT.match(self.text, self.place)
        if match and (not words or words[0] in _DECLARATIONS):
            variables = self.script.variables
            before = variables.get(match[1])
            self._read_assignment(match, words)
            after = variables.get(match[1])
            # Arrays stand in front of no command.
            if not words and not isinstance(before, list) and not isinstance(after, list):
                first, _ = self.environment.get(match[1], (before, None))
                self.environment[match[1]] = (first, after)
            return
        start = self.place
        if not words and self.environment:
            # Its own words do not see them.
            self._restore_values({name: old for name, (old, _) in self.environment.items()})
        found = self._expand_word()
        plain = found[0] if len(found) == 1 and self.text.startswith(found[0], start) else ""
        if plain.isdecimal() and self.text[self.place : self.place + 1] in ("<", ">"):
            return
        if not words and plain in _KEYWORDS:
            self._read_keyword(plain, start)
            return
        words += found
        self.is_begun, self.status = True, None

    def _skip_blanks(self) -> None:
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self.place += 1

    def _read_redirection_target(self) -> str:
        self._skip_blanks()
        return "".join(self._expand_word())

    # --- control flow

    def _is_running(self) -> bool | None:
        """Return whether the shell would execute the current command, or None if that is known only at run time.

        A command is not executed in a skipped branch or after the end of the script.
        """
        if self.has_ended or self.script.has_ended:
            return False
        runs = _logical_and(self.open[-1].outer, self.open[-1].taken) if self.open else self.runs
        return _logical_and(runs, self.chain.gate)

    def _open_branch(self, kind: str, taken: bool | None) -> None:
        if len(self.open) >= MAX_BRANCHES:
            raise SpecError(self.script.name, f"nests more than {MAX_BRANCHES} branches", "flatten it")
        branch = _OpenBranch(kind, self._is_running(), taken, self.chain, self.place - 1, self.function, self.negates)
        self.chain.ended = self.has_ended, self.script.has_ended
        if kind == "(":
            branch.saved = {}
            self.script.subshells.append(branch.saved)
        self.open.append(branch)
        self.chain, self.function, self.is_begun, self.negates = _AndOrList(), "", False, False

    def _close_branch(self, status: bool | None) -> None:
        branch = self.open.pop()
        if branch.kind == "function":
            if branch.outer is not False:
                body = self.text[branch.start : self.place]
                self.script.functions[branch.name] = _Function(body, branch.outer)
            status = True
        if branch.saved is not None:
            self.script.subshells.pop()
            self._restore_values(branch.saved)
            self.has_ended, self.script.has_ended = branch.chain.ended or (self.has_ended, self.script.has_ended)
        self.chain, self.is_begun, self.status, self.negates = branch.chain, True, status, branch.negates

    def _read_keyword(self, word: str, start: int) -> None:
        """Open or close a branch, as a keyword such as `if` or `fi` requires."""
        branch = self.open[-1] if self.open else None
        if word == "!":
            self.negates = not self.negates
        elif word == "if":
            self._open_branch("if", taken=True)
        elif word in ("while", "until"):
            self._open_branch(word, None)
        elif word == "{":
            self._open_branch("function" if self.function else "{", not self.function)
            self.open[-1].start = start
        elif branch is None:
            return
        elif word in ("elif", "else") and branch.kind == "if":
            branch.taken, self.chain = _negate(branch.done), _AndOrList()
        elif word == "then" and branch.kind == "if":
            value = self.chain.status
            branch.taken, branch.done = _logical_and(branch.taken, value), _logical_or(branch.done, value)
            self.chain = _AndOrList()
        elif word == "do":
            self.chain = _AndOrList()
        elif branch.kind in _OPENED_BY.get(word, ()):
            self._close_branch(self.chain.status if word == "}" else None)

    def _finish_command(self, words: list[str], mark: str) -> None:
        """Handle the end of a command. `mark` is the operator after it, such as `&&` or `|`, or ";" for another end."""
        if not self.is_begun:
            return
        if words and words[0] in ("for", "case", "select"):
            runs = self._is_running()
            self._open_branch(words[0], None)
            if words[0] == "for" and len(words) > 1 and runs is not False and _NAME.fullmatch(words[1]):
                self._forget_value(words[1])
            return
        self._restore_values({name: new for name, (_, new) in self.environment.items()} if words else {})
        ended = self.chain.ended or (self.has_ended, self.script.has_ended)
        self.chain.is_piped |= mark in ("|", "&")
        status = self._run_command(words) if words else self.status
        self._restore_values({name: old for name, (old, _) in self.environment.items()} if words else {})
        self.environment = {}
        if self.chain.is_piped:
            # Commands of a pipeline and in the background run in subshells, which end by themselves.
            self.has_ended, self.script.has_ended = ended
        self.chain.is_piped, self.chain.ended = mark == "|", None
        self.chain.end_command(_negate(status) if self.negates else status, mark)
        self.is_begun = self.negates = False

    def _run_command(self, words: list[str]) -> bool | None:
        """Record a command, and return whether it succeeds, or None if that is known only at run time."""
        self.script.budget.spend(steps=1)
        start = 0
        while start < len(words) - 1 and words[start] in ("time", "exec", "nohup", "command"):
            start += 1
        words = words[start:]
        runs = self._is_running()
        if runs is False:
            return None
        if words[0] in ("exit", "return"):
            self._end_reading(words[0], runs)
            return None
        if words[0] in ("[", "[[", "test"):
            return _evaluate_test(words)
        if words[0] in ("true", ":", "false"):
            return words[0] != "false"
        if element := _ELEMENT.match(words[0]):
            self._forget_value(element[1])
            return True
        if words[0] in ("read", "unset", "let", "mapfile", "readarray") or (
            words[0] == "set" and len(words) > 1 and not words[1].startswith(("-", "+"))
        ):
            for word in words[1:]:
                if name := _NAME.match(word):
                    self._forget_value(name[0])
            return None
        if words[0] in ("source", ".") and len(words) > 1 and words[1].rpartition("/")[2] not in _ACTIVATIONS:
            # The file is not read, and may set any variable.
            self.script.has_unread = True
            if not self.script.notes and self.script.variables.keys() - self.script.given:
                text = f"{words[1].replace(UNKNOWN, '$')[:60]} is sourced and not read"
                self.script.notes.append(f"{text}: it may change values that the script sets before it.")
        if words[0] == "shift":
            self._shift_arguments(words[1] if len(words) > 1 else "1", runs)
            return True
        if words[0] == "set" and "--" in words:
            self._set_arguments(words[words.index("--") + 1 :], runs)
            return True
        prefix = {**self.inherited, **{name: new for name, (_, new) in self.environment.items() if new is not None}}
        if self.depth < _MAX_DEPTH and (reader := self._make_inner_reader(words, runs)) is not None:
            reader.inherited = prefix
            reader.run()
            return None
        if prefix:
            self.script.prefixes[len(self.script.commands)] = prefix
        self.script.commands.append(words)
        return True if words[0] in _SUCCEEDING else None

    def _make_inner_reader(self, words: list[str], runs: bool | None) -> _Reader | None:
        """Return a reader of the text that a command executes: the body of a function, or the argument of `bash -c`.

        The text may also be the arguments of `eval`. For other commands, return None.
        """
        depth, function = self.depth + 1, self.script.functions.get(words[0])
        if function:
            self.script.budget.spend(len(function.body))
            function.called = True
            runs = _logical_and(runs, function.defined)
            return _Reader(self.script, function.body, depth, runs, words[1:], is_function=True)
        if words[0] == "eval" and len(words) > 1:
            text = " ".join(words[1:])
            self.script.budget.spend(len(text))
            return _Reader(self.script, text, depth, runs, self.arguments, is_function=self.is_function)
        for place, word in enumerate(words[:-2]):
            if word.rpartition("/")[2] not in SHELLS:
                continue
            call = split_shell_call(words[place + 1 :])
            if call is not None and call.is_text:
                self.script.budget.spend(len(call.operand))
                if place:
                    self.script.wrappers.append(words[:place])
                # The first word behind the text is its $0.
                arguments = None if self._list_arguments() is None and not call.rest else call.rest[1:]
                return _Reader(self.script, call.operand, depth, runs, arguments)
        return None

    def _list_arguments(self) -> list[str] | None:
        """Return the arguments that `$@` stands for, or None if they are unknown, in which case defaults apply."""
        return self.script.parameters if self.arguments is None else self.arguments

    def _shift_arguments(self, text: str, runs: bool | None) -> None:
        """Remove the first arguments, as `shift` does. If their number is uncertain, all arguments become unknown."""
        arguments = self._list_arguments()
        if arguments is None:
            return
        number = int(text) if text.isdecimal() and len(text) < 8 else None
        if number is None or REST in arguments[:number]:
            arguments[:] = [REST]
        elif number <= len(arguments):
            self._set_arguments(arguments[number:], runs)

    def _set_arguments(self, words: Sequence[str], runs: bool | None) -> None:
        """Replace all arguments, as `set --` does. If `set` may not be executed, the arguments become unknown."""
        is_certain = runs is True and not self.script.subshells
        new = [*words] if is_certain else [REST]
        arguments = self._list_arguments()
        if arguments is None:
            self.script.parameters = new
        else:
            arguments[:] = new

    def _end_reading(self, word: str, runs: bool | None) -> None:
        """End the script, subshell or function at a command that ends it, if that command certainly runs."""
        # Whether this text runs may be unknown, but not that it ends here if it does.
        is_sure = self.chain.gate is True and all(one.taken and one.chain.gate for one in self.open)
        if self.chain.is_piped or not is_sure:
            return
        inner = next((branch for branch in reversed(self.open) if branch.kind == "("), None)
        if inner is not None:
            for branch in self.open[self.open.index(inner) :]:
                branch.taken = False
        elif word == "return" or runs is not True or (self.depth and not self.is_function):
            self.has_ended = True
        else:
            self.script.has_ended = True

    # --- assignments and words

    def _read_assignment(self, match: re.Match[str], words: Sequence[str]) -> None:
        """Read an assignment, which may follow the words of a declaration."""
        name, adds = match[1], bool(match[2])
        self.place = match.end()
        value: str | list[str]
        if self.text.startswith("(", self.place):
            self.place += 1
            value = self._read_array()
        else:
            value = "".join(self._expand_word(splits=False)) if not self._is_at_break() else ""
        self.script.budget.spend(steps=1)
        is_literal = UNKNOWN not in value if isinstance(value, str) else True
        self.is_begun, self.status = True, True if is_literal else None
        runs = self._is_running()
        if runs is False:
            return
        self._save_value(name)
        if self.is_function and words and words[0] in ("local", "declare", "typeset"):
            self.locals.setdefault(name, self._copy_value(name))
        variables = self.script.variables
        before = variables.get(name)
        if runs is None:
            if adds and isinstance(before, list):
                before.append(unknown(f"+{name}"))
            elif before != value:
                variables[name] = [unknown(name)] if isinstance(value, list) else unknown(name)
        elif adds and isinstance(before, list):
            before.extend(_as_list(value))
        elif adds and isinstance(before, str) and isinstance(value, str):
            # The text before is copied.
            self.script.budget.spend(len(before) // 64)
            variables[name] = before + value
        else:
            variables[name] = [*_as_list(before or ""), *value] if adds and isinstance(value, list) else value

    def _forget_value(self, name: str) -> None:
        """Make a variable unknown."""
        self._save_value(name)
        self.script.variables[name] = unknown(name)

    def _save_value(self, name: str) -> None:
        """Save the value of a variable before it changes, to restore it after the innermost subshell."""
        if self.script.subshells and name not in (saved := self.script.subshells[-1]):
            saved[name] = self._copy_value(name)

    def _copy_value(self, name: str) -> str | list[str] | None:
        value = self.script.variables.get(name)
        if isinstance(value, list):
            self.script.budget.spend(words=len(value))
            return [*value]
        return value

    def _restore_values(self, saved: Mapping[str, str | list[str] | None]) -> None:
        for name, value in saved.items():
            if value is None:
                self.script.variables.pop(name, None)
            else:
                self.script.variables[name] = value

    def _skip_blank(self, blanks: str) -> bool:
        """Skip a blank, a continued line end or a comment. Return whether there was any of them."""
        char = self.text[self.place]
        if char in blanks:
            self.place += 1
        elif self.text.startswith("\\\n", self.place):
            self.place += 2
        elif char == "#":
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def _is_at_break(self) -> bool:
        return self.place >= len(self.text) or self.text[self.place] in _BREAKS

    def _read_array(self) -> list[str]:
        items: list[str] = []
        while self.place < len(self.text):
            char = self.text[self.place]
            if self._skip_blank(" \t\n"):
                continue
            if char == ")":
                self.place += 1
                return items
            before = self.place
            items += self._expand_word()
            self.place += self.place == before
        raise SpecError(self.script.name, "ends within an array", "check where the script was cut off")

    def _expand_word(self, splits: bool = True) -> list[str]:
        """Return the words that one word of the text expands to."""
        pieces, quoted = _ExpandedWords(), False
        while self.place < len(self.text) and self.text[self.place] not in _BREAKS:
            char = self.text[self.place]
            if plain := _PLAIN.match(self.text, self.place):
                pieces.add(plain[0])
                self.place = plain.end()
            elif char == "\\":
                if not self.text.startswith("\\\n", self.place):
                    pieces.add(self.text[self.place + 1 : self.place + 2])
                self.place += 2
            elif char == "'":
                end = self.text.find("'", self.place + 1)
                if end < 0:
                    raise self._make_unclosed_error("'")
                pieces.add(self.text[self.place + 1 : end])
                self.place, quoted = end + 1, True
            elif char == '"':
                quoted = self._read_quotation(pieces) or quoted
            elif char == "$":
                value = self._read_expansion()
                if isinstance(value, list):
                    pieces.extend([word for item in value for word in item.split()] if splits else [" ".join(value)])
                else:
                    pieces.extend(_split_keeping_ends(value) if splits else [value])
            else:
                self._skip_command("`")
                pieces.add(unknown("a command"))
        found = [piece for piece in pieces.words() if piece or quoted or not splits]
        self.script.budget.spend(words=len(found))
        return found

    def _skip_command(self, mark: str) -> None:
        """Skip a command substitution between two delimiters."""
        end = self.text.find(mark, self.place + 1)
        if end < 0:
            raise self._make_unclosed_error(mark)
        self.place = end + 1

    def _make_unclosed_error(self, mark: str) -> SpecError:
        line = self.text.count("\n", 0, self.place) + 1
        return SpecError(f"{self.script.name}: line {line}", f"a {mark} is not closed", "check where it was cut off")

    def _read_quotation(self, pieces: _ExpandedWords) -> bool:
        """Read a text in double quotes, and return whether it counts as a word. `"$@"` without arguments does not."""
        start, makes_word = self.place, self.text.startswith('""', self.place)
        self.place += 1
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == '"':
                self.place += 1
                return makes_word
            if char == "\\":
                makes_word = True
                after = self.text[self.place + 1 : self.place + 2]
                pieces.add("" if after == "\n" else after if after in '"\\$`' else "\\" + after)
                self.place += 2
            elif char == "$":
                is_joined = _JOINED.match(self.text, self.place)
                value = self._read_expansion()
                words = value if isinstance(value, list) else [value]
                makes_word = makes_word or bool(words) or is_joined is not None
                pieces.extend([" ".join(words)] if is_joined else words)
            elif char == "`":
                makes_word = True
                self._skip_command("`")
                pieces.add(unknown("a command"))
            elif plain := _QUOTED.match(self.text, self.place):
                makes_word = True
                pieces.add(plain[0])
                self.place = plain.end()
        self.place = start
        raise self._make_unclosed_error('"')

    def _read_expansion(self) -> str | list[str]:
        """Return the value of an expansion `$…`: a text, or the words of an array."""
        text = self.text
        if text.startswith("$((", self.place):
            end = text.find("))", self.place)
            if end < 0:
                raise self._make_unclosed_error("$((")
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
            raise self._make_unclosed_error("$(")
        if text.startswith("${", self.place):
            brace = _find_closing_brace(text, self.place + 2)
            if brace is None:
                raise self._make_unclosed_error("${")
            inner, self.place = text[self.place + 2 : brace], brace + 1
            return self._expand_parameter(inner)
        name = _NAME.match(text, self.place + 1)
        if name:
            self.place = name.end()
            return self._get_value(name[0])
        char = text[self.place + 1 : self.place + 2]
        if char and char in _SPECIAL:
            self.place += 2
            return self._expand_parameter(char)
        self.place += 1
        return "$"

    def _expand_parameter(self, inner: str) -> str | list[str]:
        name = _NAME.match(inner)
        if name is None:
            return self._expand_argument(inner)
        rest = inner[name.end() :]
        if rest in ("[@]", "[*]"):
            value = self._get_value(name[0])
            return value if isinstance(value, list) else [value]
        if not rest:
            return self._get_value(name[0])
        match = re.fullmatch(r"(:?[-=+])(.*)", rest, re.DOTALL)
        if match:
            known = self.script.variables.get(name[0])
            if known is None and self.script.has_unread:
                return unknown(name[0])
            # Without a colon, an empty value counts as set.
            is_set = bool(known) or (known is not None and not match[1].startswith(":"))
            if match[1].endswith("+"):
                if match[1] == ":+" and isinstance(known, str) and _MARK.fullmatch(known):
                    return unknown(name[0])
                return self._expand_text(match[2]) if is_set else ""
            return self._get_value(name[0]) if is_set else self._expand_text(match[2])
        return unknown(name[0])

    def _expand_argument(self, inner: str) -> str | list[str]:
        """Return the value of a positional or special parameter, such as `1`, `@`, `#` or `1:-8`."""
        arguments = self._list_arguments()
        if arguments is None:
            # Without arguments the defaults of parameters count.
            default = re.fullmatch(r"\d:?-(.*)", inner, re.DOTALL)
            if default:
                return self._expand_text(default[1])
            return [] if inner[:1] in "@*" else unknown(f"${inner[:20]}")
        if inner == "#":
            return unknown("$#") if REST in arguments else str(len(arguments))
        if part := re.fullmatch(r"[@*]: ?([1-9]\d?)(?::(\d{1,2}))?", inner):
            if REST in arguments:
                return [REST]
            start = int(part[1]) - 1
            return self._charge_budget(arguments[start : start + int(part[2]) if part[2] else None])
        match = re.fullmatch(r"([1-9]|[1-9]\d|[@*])(?:(:?[-?])(.*))?", inner, re.DOTALL)
        if match is None:
            return unknown(f"${inner[:20]}")
        place, mark = match[1], match[2] or ""
        if place in "@*":
            return self._charge_budget([*arguments]) if arguments or "-" not in mark else self._expand_text(match[3])
        number = int(place)
        if REST in arguments[:number]:
            return unknown(f"${place}")
        value = arguments[number - 1] if number <= len(arguments) else None
        if value or (value is not None and not mark.startswith(":")):
            return self._charge_budget(value)
        # Arguments passed on, as by main "$@", are those of the script, which may be unknown.
        return self._expand_text(match[3]) if "-" in mark else unknown(f"${place}")

    def _expand_text(self, text: str) -> str:
        reader = _Reader(self.script, text.replace('"', ""), self.depth + 1, arguments=self.arguments)
        if reader.depth > _MAX_DEPTH:
            return unknown("a value")
        parts: list[str] = []
        while reader.place < len(reader.text):
            if reader.text[reader.place] == "$":
                value = reader._read_expansion()
                parts.append(" ".join(value) if isinstance(value, list) else value)
            else:
                end = reader.text.find("$", reader.place)
                end = len(reader.text) if end < 0 else end
                parts.append(reader.text[reader.place : end])
                reader.place = end
        return "".join(parts)

    def _get_value(self, name: str) -> str | list[str]:
        return self._charge_budget(self.script.variables.get(name, unknown(name)))

    def _charge_budget(self, value: _Value) -> _Value:
        """Subtract the size of a value from the budget, and return the value."""
        if isinstance(value, list):
            self.script.budget.spend(sum(map(len, value)), len(value))
        else:
            self.script.budget.spend(len(value))
        return value

    # --- here-documents

    def _open_here_document(self, target: str | None) -> None:
        self.place += 2
        strips = self.text.startswith("-", self.place)
        self.place += strips
        self._skip_blanks()
        is_literal = self.text[self.place : self.place + 1] in ("'", '"', "\\")
        tag = "".join(self._expand_word(splits=False))
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
            if self._is_running() is not False and name:
                self.script.files[name] = content if is_literal else self._expand_document(content)
        self.pending = []

    def _expand_document(self, content: str) -> str:
        reader = _Reader(self.script, content, self.depth + 1, arguments=self.arguments)
        parts: list[str] = []
        while reader.place < len(content):
            char = content[reader.place]
            if char == "$":
                value = reader._read_expansion()
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
    """Return the words of an unquoted value, with an empty word at an end that has a blank.

    The empty word separates the value from its neighbours.
    """
    # A mark of a value that is not literal stays whole, also with blanks in its name.
    words = _MARKED_WORD.findall(value) if UNKNOWN in value else value.split(None, MAX_WORDS)
    if not words:
        return ["", ""] if value else []
    return [*([""] if value[0].isspace() else []), *words, *([""] if value[-1].isspace() else [])]


def _find_closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, min(len(text), start + MAX_LINE)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


@dataclass(frozen=True, slots=True)
class ShellCall:
    """The text or script that a call of a shell executes."""

    operand: str
    """Path of the script, or the text."""
    rest: list[str]
    """Words after the operand."""
    is_text: bool
    """Whether the operand is a text, because of `-c`."""


def split_shell_call(words: Sequence[str]) -> ShellCall | None:
    """Return the text or script that a call of a shell executes, or None if the shell reads its standard input.

    Args:
        words: words after the name of the shell.
    """
    place, is_text = 0, False
    while place < len(words) and words[place][:1] in ("-", "+"):
        word = words[place]
        place += 1
        if word in ("-", "--"):
            break
        if word.startswith("--"):
            place += word in ("--rcfile", "--init-file")
            continue
        is_text = is_text or (word.startswith("-") and "c" in word)
        # -o and -O have a value.
        place += "o" in word.lower()
    return ShellCall(words[place], [*words[place + 1 :]], is_text) if place < len(words) else None


def _logical_and(first: bool | None, second: bool | None) -> bool | None:
    return False if first is False or second is False else None if first is None or second is None else True


def _logical_or(first: bool | None, second: bool | None) -> bool | None:
    return _negate(_logical_and(_negate(first), _negate(second)))


def _negate(value: bool | None) -> bool | None:
    return None if value is None else not value


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_ORDERS: Mapping[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le,
}  # fmt: skip


def _evaluate_arithmetic(text: str, variables: Mapping[str, str | list[str]]) -> str:
    """Return the value of integer arithmetic as text, or a marker if a variable in it is not literal."""

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
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        return int(_ORDERS[type(node.ops[0])](_evaluate_node(node.left), _evaluate_node(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
        if abs(value) < 10**18:
            return value
    raise ValueError


def _evaluate_test(words: Sequence[str]) -> bool | None:
    """Return the value of `[ … ]` or `[[ … ]]`, or None if it is known only at run time."""
    if len(words) < 3 or words[-1] != {"[": "]", "[[": "]]"}.get(words[0], words[-1]):
        return None
    inner = list(words[1:-1] if words[0] != "test" else words[1:])
    if len(inner) > MAX_CONDITION:
        return None
    value, place = _evaluate_alternatives(inner, 0, 0)
    return value if place == len(inner) else None


MAX_CONDITION = 256
"""Most words of a condition to evaluate."""


def _evaluate_alternatives(words: Sequence[str], place: int, depth: int) -> tuple[bool | None, int]:
    """Return the value of conditions joined by `||`, and the index after them."""
    value, place = _evaluate_joined(words, place, depth)
    while place < len(words) and words[place] in ("||", "-o"):
        other, place = _evaluate_joined(words, place + 1, depth)
        value = _logical_or(value, other)
    return value, place


def _evaluate_joined(words: Sequence[str], place: int, depth: int) -> tuple[bool | None, int]:
    """Return the value of conditions joined by `&&`, and the index after them."""
    value, place = _evaluate_single(words, place, depth)
    while place < len(words) and words[place] in ("&&", "-a"):
        other, place = _evaluate_single(words, place + 1, depth)
        value = _logical_and(value, other)
    return value, place


_JOINTS = ("&&", "||", "-a", "-o", ")")
"""Words that end a single condition."""


def _evaluate_single(words: Sequence[str], place: int, depth: int) -> tuple[bool | None, int]:
    """Return the value of one condition, and the index after it."""
    if place < len(words) and words[place] == "!":
        value, place = _evaluate_single(words, place + 1, depth)
        return _negate(value), place
    if place < len(words) and words[place] == "(" and depth < _MAX_DEPTH:
        value, place = _evaluate_alternatives(words, place + 1, depth + 1)
        return value, place + 1
    end = next((at for at in range(place, len(words)) if words[at] in _JOINTS), len(words))
    return _evaluate_words(words[place:end]), end


def _evaluate_words(inner: Sequence[str]) -> bool | None:
    """Return the value of a condition without operators, or None if it is known only at run time."""
    if any(UNKNOWN in word for word in inner):
        return None
    if len(inner) == 1:
        return inner[0] != ""
    if len(inner) == 2 and inner[0] in ("-z", "-n"):
        return (inner[1] == "") == (inner[0] == "-z")
    if len(inner) == 3 and inner[1] in ("=", "==", "!="):
        # A pattern matches more than itself.
        return None if re.search(r"[*?\[]", inner[2]) else (inner[0] == inner[2]) == (inner[1] != "!=")
    if (
        len(inner) == 3
        and inner[1] in _COMPARISONS
        and all(re.fullmatch(r"-?\d{1,15}", one, re.ASCII) for one in (inner[0], inner[2]))
    ):
        return _COMPARISONS[inner[1]](int(inner[0]), int(inner[2]))
    return None


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
