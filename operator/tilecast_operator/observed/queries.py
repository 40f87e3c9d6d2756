"""Make the PromQL query for the step of a job.

Administrators write GPUPools and settings, and tenants write TrainingJobs. A tenant's query is sent only if a setting
allows it, with every selector in it restricted to the job's namespace. No maintained parser of PromQL exists for
Python. So a tenant's query must be in a part of the language that is parsed here with certainty, and anything else is
refused.
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


def fill_query(template: str, namespace: str, name: str) -> str:
    """Return an administrator's query with the job's namespace and name filled in."""
    return Template(template).safe_substitute(namespace=namespace, name=name)


def restrict_query(template: str, namespace: str, name: str) -> str:
    """Return a TrainingJob's query with every selector restricted to the job's namespace.

    Raises:
        SpecError: the query uses syntax that cannot be restricted to a namespace.
    """
    return _QueryParser(_tokenize(fill_query(template, namespace, name)), namespace).read_query()


def _make_query_error(problem: str) -> SpecError:
    remedy = f"write a selector in double quotes, {', '.join(sorted(FUNCTIONS)[:3])} and the like of it, / and *"
    return SpecError(FIELD, problem, remedy)


def _tokenize(text: str) -> list[_Token]:
    tokens, at = list[_Token](), 0
    text = text.strip()
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None or match.lastgroup is None:
            raise _make_query_error(f"{text[at : at + 20]!r} cannot be read")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens


class _QueryParser:
    """Parser that reads tokens from left to right and returns the query, restricted to a namespace."""

    def __init__(self, tokens: Sequence[_Token], namespace: str) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._namespace = namespace

    def read_query(self) -> str:
        """Return the whole query."""
        text = self._read_product(0)
        self._take_token("end")
        return text

    def _read_product(self, depth: int) -> str:
        if depth > MOST_DEEP:
            raise _make_query_error("it is nested too deep")
        text = self._read_term(depth)
        while self._next_token[1] in ("/", "*"):
            text += f" {self._take_token('mark')} {self._read_term(depth)}"
        return text

    def _read_term(self, depth: int) -> str:
        if self._next_token[0] == "number":
            return self._take_token("number")
        if self._next_token[1] == "(":
            return self._read_arguments(depth)
        name = self._take_token("name")
        if self._next_token[1] == "(":
            if name not in FUNCTIONS:
                raise _make_query_error(f"{name} cannot be held to a namespace")
            return name + self._read_arguments(depth)
        return self._read_selector(name)

    def _read_arguments(self, depth: int) -> str:
        self._expect_mark("(")
        parts = [self._read_product(depth + 1)]
        while self._next_token[1] == ",":
            self._take_token("mark")
            parts.append(self._read_product(depth + 1))
        self._expect_mark(")")
        return f"({', '.join(parts)})"

    def _read_selector(self, name: str) -> str:
        matchers = list[str]()
        if self._next_token[1] == "{":
            self._expect_mark("{")
            while self._next_token[1] != "}":
                label, operator = self._take_token("name"), self._take_token("mark")
                if operator not in ("=", "!=", "=~", "!~") or ":" in label:
                    raise _make_query_error(f"{label}{operator} is no matcher")
                matchers.append(f"{label}{operator}{self._take_token('string')}")
                if self._next_token[1] != "}":
                    self._expect_mark(",")
            self._expect_mark("}")
        matchers.append(f'namespace="{self._namespace}"')
        text = f"{name}{{{','.join(matchers)}}}"
        return text + self._take_token("range") if self._next_token[0] == "range" else text

    @property
    def _next_token(self) -> _Token:
        return self._tokens[self._at]

    def _expect_mark(self, mark: str) -> None:
        if self._next_token != ("mark", mark):
            raise _make_query_error(f"{self._next_token[1] or 'its end'} stands where {mark} is expected")
        self._at += 1

    def _take_token(self, kind: str) -> str:
        token = self._next_token
        if token[0] != kind:
            raise _make_query_error(f"{token[1] or 'its end'} cannot be read there")
        self._at += 1
        return token[1]
