"""The PromQL query that Prometheus is asked for the step of a job.

Administrators write GPUPools and settings, and tenants write TrainingJobs. A tenant's query is not asked unless a
setting allows it, and then every selector in it is restricted to the job's namespace. No maintained parser of PromQL
exists for Python, so a tenant's query has to be in a part of the language that is read here with certainty; anything
else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Template

from tilecast.spec import SpecError

FIELD = "spec.observationQuery"
NOT_ALLOWED = SpecError(
    FIELD,
    "queries of TrainingJobs are not asked here",
    "ask an administrator for one in the GPUPool, or for TILECAST_OBSERVATION_QUERIES=jobs",
)
FUNCTIONS = frozenset(
    (
        "sum", "avg", "min", "max", "quantile", "rate", "irate", "increase", "avg_over_time", "min_over_time",
        "max_over_time", "quantile_over_time", "last_over_time", "histogram_quantile",
    )
)  # fmt: skip
MOST_DEEP = 8
_TOKENS = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<range>\[\d+(?:ms|[smhd])\])|(?P<number>\d+(?:\.\d+)?)"""
    r"""|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<mark>=~|!~|!=|[={}(),/*]))"""
)
_Token = tuple[str, str]


def asked(template: str, namespace: str, name: str) -> str:
    """Return a query of an administrator with the job's namespace and name filled in."""
    return Template(template).safe_substitute(namespace=namespace, name=name)


def held(template: str, namespace: str, name: str) -> str:
    """Return the query of a TrainingJob with every selector restricted to the job's namespace.

    Raises:
        SpecError: the query uses more than can be restricted to a namespace.
    """
    return _Reader(_tokens(asked(template, namespace, name)), namespace).query()


def _refused(problem: str) -> SpecError:
    remedy = f"write a selector in double quotes, {', '.join(sorted(FUNCTIONS)[:3])} and the like of it, / and *"
    return SpecError(FIELD, problem, remedy)


def _tokens(text: str) -> list[_Token]:
    tokens, at = list[_Token](), 0
    text = text.strip()
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None or match.lastgroup is None:
            raise _refused(f"{text[at : at + 20]!r} cannot be read")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens


class _Reader:
    """Reads tokens once, from left to right, and writes what it has understood."""

    def __init__(self, tokens: Sequence[_Token], namespace: str) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._namespace = namespace

    def query(self) -> str:
        """Return the whole query."""
        text = self._product(0)
        self._take("end")
        return text

    def _product(self, depth: int) -> str:
        if depth > MOST_DEEP:
            raise _refused("it is nested too deep")
        text = self._term(depth)
        while self._next[1] in ("/", "*"):
            text += f" {self._take('mark')} {self._term(depth)}"
        return text

    def _term(self, depth: int) -> str:
        if self._next[0] == "number":
            return self._take("number")
        if self._next[1] == "(":
            return self._arguments(depth)
        name = self._take("name")
        if self._next[1] == "(":
            if name not in FUNCTIONS:
                raise _refused(f"{name} cannot be held to a namespace")
            return name + self._arguments(depth)
        return self._selector(name)

    def _arguments(self, depth: int) -> str:
        self._mark("(")
        parts = [self._product(depth + 1)]
        while self._next[1] == ",":
            self._take("mark")
            parts.append(self._product(depth + 1))
        self._mark(")")
        return f"({', '.join(parts)})"

    def _selector(self, name: str) -> str:
        matchers = list[str]()
        if self._next[1] == "{":
            self._mark("{")
            while self._next[1] != "}":
                label, operator = self._take("name"), self._take("mark")
                if operator not in ("=", "!=", "=~", "!~") or ":" in label:
                    raise _refused(f"{label}{operator} is no matcher")
                matchers.append(f"{label}{operator}{self._take('string')}")
                if self._next[1] != "}":
                    self._mark(",")
            self._mark("}")
        matchers.append(f'namespace="{self._namespace}"')
        text = f"{name}{{{','.join(matchers)}}}"
        return text + self._take("range") if self._next[0] == "range" else text

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _mark(self, mark: str) -> None:
        if self._next != ("mark", mark):
            raise _refused(f"{self._next[1] or 'its end'} stands where {mark} is expected")
        self._at += 1

    def _take(self, kind: str) -> str:
        token = self._next
        if token[0] != kind:
            raise _refused(f"{token[1] or 'its end'} cannot be read there")
        self._at += 1
        return token[1]
