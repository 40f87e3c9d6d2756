"""Read and write the options of a launcher, by a table that says what each option means.

A table is a TOML file in `tables/`. Each option has a target, such as `plan.tensor` or `training.precision`, and a
type. `ignored` lists options that change neither speed nor memory. `unpriced` has options that do, but that no forecast
includes, with the reason. Spellings with dashes, underscores and leading dashes are equal.

`bare` is the value of an option without one, and of None in a configuration. `empty` is that of an empty list.

An option with `write` is also written, in the order of the table. `write` names the value that the launcher's module in
`render/launch/` gives it; `true` is the name of its target. The value is written as it is read: as a flag if the option
has `is`, otherwise as the first of its `values` with that meaning, or as `as` says. An option with an empty target is
written, but has no meaning for a forecast. `section` is the mapping of a configuration in which it is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from tilecast import shipped
from tilecast.spec import SpecError

_T = TypeVar("_T")
UNKNOWN = "\x00"
"""Marker before and after the name of a value that is not literal."""
_RENDEZVOUS = frozenset((
    "master-addr", "master-address", "master-port", "node-rank", "machine-rank", "local-rank", "rdzv-backend",
    "rdzv-conf", "rdzv-endpoint", "rdzv-id", "main-process-ip", "main-process-port", "dist-url", "dist-backend",
    "dist-port", "init-method", "hostfile",
))  # fmt: skip
"""Options, of any launcher or script, that say where processes meet. They change neither speed nor memory."""
_OWN = ("model.", "training.")
"""Beginnings of targets that are the job's and not the plan's."""
_TYPES = ("adapter", "dtype")
"""Further targets that are the job's: whether it trains adapters, and the type of its checkpoint."""
_OUTPUTS = ("output-dir",)
"""Options without a target that are written for a job whose user states none."""
_NUMBER = re.compile(r"-\d")
_DOTTED = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "null", "")


def spell_option(option: str) -> str:
    """Return the spelling of an option in tables: without leading dashes, and with dashes for underscores."""
    return option.lstrip("-").replace("_", "-")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option as the user wrote it, with its values. A flag without a value has none."""

    option: str
    values: tuple[object, ...]

    @property
    def text(self) -> str:
        """The values as text, separated by blanks."""
        return " ".join(map(str, self.values))


@dataclass(frozen=True, slots=True)
class OutputOption:
    """An option that Tilecast writes."""

    option: str
    value: str
    """Name of the value that the launcher's module gives it."""
    entry: Mapping[str, Any]

    def format(self, value: object) -> object:
        """Return the launcher's value for a value of Tilecast, or None if the option is left out."""
        if value is None:
            return None
        if "as" in self.entry:
            return self.entry["as"].get(value)
        if "is" in self.entry:
            return bool(value == self.entry["is"])
        if "values" in self.entry:
            text = next((text for text, meant in self.entry["values"].items() if meant == value), None)
            return text if text not in ("true", "false") else text == "true"
        return value


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Meaning of the options of one launcher."""

    name: str
    title: str
    version: str
    options: Mapping[str, Mapping[str, Any]]
    """Target, type and values of each option, by spelling (`spell_option`)."""
    names: Mapping[str, str]
    """Name of each option in the launcher, by spelling (`spell_option`)."""
    ignored: frozenset[str]
    unpriced: Mapping[str, str]
    """Reasons why options are not priced, by spelling."""
    defaults: Mapping[str, Any]
    """Values that the launcher assumes for targets without an option."""
    sections: tuple[str, ...] = ()
    """Prefixes, such as `model.`, with which some options of the table can be written, by spelling."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further tables of the launcher, such as names of models."""
    source: str = ""
    writes: str = ""
    """Version for which options are written. Empty if options are only read."""

    @classmethod
    @cache
    def read(cls, name: str) -> OptionTable:
        """Return the shipped table of a launcher."""
        table = shipped.read_table("tilecast.launch_options", f"tables/{name}.toml")
        parent = cls.read(table["like"]) if "like" in table else None
        own = {spell_option(option): entry for option, entry in table.get("options", {}).items()}
        names = {spell_option(option): option for option in table.get("options", {})}
        ignored = frozenset(map(spell_option, table.get("ignored", ())))
        unpriced = {spell_option(option): reason for option, reason in table.get("unpriced", {}).items()}
        defaults = table.get("defaults", {})
        if parent is not None:
            given = {
                key: entry
                for key, entry in parent.options.items()
                if entry["to"] or not (key in ignored or key in unpriced)
            }
            own, names, defaults = {**given, **own}, {**parent.names, **names}, {**parent.defaults, **defaults}
            inherited = {key: reason for key, reason in parent.unpriced.items() if key not in ignored}
            ignored, unpriced = ignored | parent.ignored, {**inherited, **unpriced}
        sections = tuple(map(spell_option, table.get("sections", parent.sections if parent else ())))
        return cls(
            name, table["title"], table["version"], own, names, ignored, unpriced, defaults, sections,
            {**(parent.facts if parent else {}), **table.get("facts", {})}, table["source"], table.get("writes", ""),
        )  # fmt: skip

    def list_written(self) -> list[OutputOption]:
        """Return the options that are written, in order."""
        return [
            OutputOption(self.names[key], entry["to"] if entry["write"] is True else entry["write"], entry)
            for key, entry in self.options.items()
            if "write" in entry
        ]

    def format_words(self, values: Mapping[str, Callable[[_T], object]], setting: _T) -> list[str]:
        """Return the options to write as command-line words.

        Args:
            values: a function for each value by name. If it returns None, the option is left out. True is written
                without a value.
            setting: argument of the functions.
        """
        words: list[str] = []
        for one in self.list_written():
            written = one.format(values[one.value](setting))
            if written is True:
                words.append(one.option)
            elif isinstance(written, list | tuple):
                words += [one.option, *map(str, written)]
            elif written is not None and written is not False:
                words += [one.option, f"{written}"]
        return words

    def format_sections(self, values: Mapping[str, Callable[[_T], object]], setting: _T) -> dict[str, Any]:
        """Return the options to write as nested mappings, by the dots in their names.

        Args:
            values: a function for each value by name. If it returns None, the option is left out.
            setting: argument of the functions.
        """
        found: dict[str, Any] = {}
        for one in self.list_written():
            written = one.format(values[one.value](setting))
            if written is None:
                continue
            *sections, key = one.option.split(".")
            inner = found
            for name in (*([one.entry["section"]] if "section" in one.entry else []), *sections):
                inner = inner.setdefault(name, {})
            inner[key] = written
        return found

    def find_key(self, option: str) -> str:
        """Return an option's spelling in the table, without its section prefix."""
        key = spell_option(option)
        if key in self.options or key in self.unpriced:
            return key
        return next((key[len(one) :] for one in self.sections if key.startswith(one)), key)

    def split_words(self, words: Sequence[str]) -> list[Setting]:
        """Return the options among command-line words, each with the words that follow it.

        Words in front of the first option are dropped.
        """
        settings: list[Setting] = []
        for word in words:
            if word.startswith(f"{UNKNOWN}+"):
                # Options that a branch adds whose condition only a run would know.
                settings.append(Setting(f"${word.strip(UNKNOWN)[1:]}", ()))
            elif word.startswith("-") and word != "-" and not _NUMBER.match(word):
                option, equals, value = word.partition("=")
                settings.append(Setting(option, (value,) if equals else ()))
            elif settings:
                last = settings[-1]
                settings[-1] = Setting(last.option, (*last.values, word))
        return settings

    def list_own(self, words: Sequence[str]) -> list[Setting]:
        """Return the user's own options among words: those that stay when the plan changes, such as the learning rate.

        Left out are options of the plan, options that are written anew, and options that say where processes meet.
        """
        written = {
            self.options[key]["to"] for key in map(spell_option, (one.option for one in self.list_written()))
        } - {""}
        kept = []
        for setting in self.split_words(words):
            key = self.find_key(setting.option)
            entry = self.options.get(key)
            target = "" if entry is None else str(entry["to"])
            is_new = entry is not None and (
                target in written or not (target.startswith(_OWN) or key in _OUTPUTS or target in _TYPES)
            )
            if not is_new and key not in _RENDEZVOUS and not setting.option.startswith("$"):
                kept.append(setting)
        return kept

    def read_facts(self, settings: Iterable[Setting], where: str) -> Facts:
        """Return the facts that options state. If an option is given twice, the last one is used.

        Args:
            settings: the options with their values.
            where: name of the file or command in errors.

        Raises:
            SpecError: two options contradict each other, or a value cannot be read.
        """
        facts = Facts(self, where)
        last = {spell_option(setting.option): setting for setting in settings}
        for full, setting in last.items():
            key = self.find_key(full)
            if key in self.options and not self.options[key]["to"]:
                facts.ignored.append(setting.option)
            elif key in self.options:
                facts.add(self.options[key], setting)
            elif (reason := self.unpriced.get(key) or self.unpriced.get(key.partition(".")[0])) is not None:
                if setting.text.strip().lower() not in _FALSE or not setting.values:
                    facts.unpriced[setting.option] = reason
            elif not any(
                one in self.ignored
                or one in _RENDEZVOUS
                or any(one.startswith(start[:-1]) for start in self.ignored if start[-1:] == "*")
                for one in (key, full)
            ):
                facts.unknown.append(setting.option)
            else:
                facts.ignored.append(setting.option)
        return facts


@dataclass(slots=True)
class Facts:
    """Values that options set, by target of the table, with the option that set each value."""

    table: OptionTable
    where: str
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unpriced: dict[str, str] = field(default_factory=dict)
    """Options that change speed or memory and are not priced, with the reason."""
    unknown: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, entry: Mapping[str, Any], setting: Setting) -> None:
        """Add the meaning of one option.

        Raises:
            SpecError: it contradicts an earlier option, or its value cannot be read.
        """
        target = str(entry["to"])
        value = self._read_value(entry, setting)
        if value is None:
            return
        if target in self.values and self.values[target] != value:
            if entry.get("weak"):
                return
            if not entry.get("strong"):
                problem = f"says {value}, and {self.origins[target]} says {self.values[target]}"
                raise SpecError(self.field(setting.option), problem, "leave one of them out")
        self.values[target], self.origins[target] = value, setting.option

    def _read_value(self, entry: Mapping[str, Any], setting: Setting) -> object:
        """Return the value of an option, or None if it has no meaning."""
        kind, text = entry.get("type", "count"), setting.text.strip()
        if kind == "flag" or "is" in entry:
            if setting.values and len(setting.values) == 1 and UNKNOWN in text:
                raise self.make_not_literal_error(setting)
            on = not setting.values or text.lower() in _TRUE
            if setting.values and not on and text.lower() not in _FALSE and "is" in entry:
                on = len(setting.values) != 1 or not isinstance(setting.values[0], bool)
            value = entry.get("is", True) if on else entry.get("else")
            return value if "is" in entry else on
        if not setting.values or setting.values == (None,):
            if "empty" in entry and not setting.values:
                return tuple(entry["empty"])
            if "bare" in entry:
                return entry["bare"]
            if setting.values:
                return None
            raise SpecError(self.field(setting.option), "has no value", "check where the command was cut off")
        if UNKNOWN in text:
            if entry.get("optional"):
                return None
            raise self.make_not_literal_error(setting)
        if "values" in entry:
            known: Mapping[str, Any] = entry["values"]
            if text not in known and _DOTTED.fullmatch(text):
                # A class counts by its name, whatever module it is imported from.
                text = text.rpartition(".")[2] if text.rpartition(".")[2] in known else text
            if text in known or text.lower() in known:
                found = known[text] if text in known else known[text.lower()]
                return None if found == "" else found
            if "*" in known:
                return None if known["*"] == "" else known["*"]
            reason = f"{text[:60]!r} is not priced"
            self.unpriced[setting.option] = reason
            return None
        if kind == "words":
            for word, reason in entry.get("refuse", {}).items():
                if word in setting.values:
                    self.unpriced[setting.option] = reason
            return tuple(str(part) for value in setting.values for part in str(value).split())
        if kind == "text":
            return text
        if kind == "layout":
            return _format_layout(setting.values) or text
        return self._read_number(kind, setting, text)

    def _read_number(self, kind: str, setting: Setting, text: str) -> object:
        if kind == "number":
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise SpecError(self.field(setting.option), f"{text[:60]!r} is no number", "give a number")
            return number
        plain = text.replace("_", "")
        if re.fullmatch(r"-?\d{1,15}(\.0)?", plain):
            return int(float(plain))
        if text.lower() in ("auto", "none", "null"):
            return None
        raise SpecError(self.field(setting.option), f"{text[:60]!r} is no count", "give an integer")

    def make_not_literal_error(self, setting: Setting) -> SpecError:
        """Return the error about an option whose value is computed when the script runs."""
        name = setting.text.split(UNKNOWN)[1] or "a command"
        return SpecError(
            self.field(setting.option), f"its value is that of {name[:60]}, which is not literal", "write its value"
        )

    def field(self, option: str) -> str:
        """Return the name of an option for errors."""
        return f"{self.where}: {option}" if self.where else option

    def get(self, target: str, default: object = None) -> Any:
        """Return the value of a target, or else the launcher's default, or else `default`."""
        return self.values.get(target, self.table.defaults.get(target, default))

    def count(self, target: str, default: int = 1) -> int:
        """Return the value of a target as a whole number.

        Raises:
            SpecError: the value is below 1, and also below `default`.
        """
        value = int(self.get(target, default))
        if value < min(1, default):
            raise SpecError(self.field(self.origins.get(target, target)), f"{value} is no count", "give one from 1")
        return value

    def require(self, target: str, remedy: str) -> Any:
        """Return the value of a target.

        Raises:
            SpecError: no option sets it.
        """
        value = self.get(target)
        if value is None:
            names = [self.table.names[key] for key, entry in self.table.options.items() if entry["to"] == target]
            raise SpecError(self.field(names[0] if names else target), "is missing", remedy)
        return value

    def get_by_prefix(self, start: str) -> dict[str, Any]:
        """Return the values whose targets begin with `start`, by the rest of the target."""
        return {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Letter of a pipeline layout for each kind of layer in Megatron-Core's lists."""


def _format_layout(stages: Sequence[object]) -> str:
    """Return a pipeline layout as text. `stages` has a list of layer kinds for each stage.

    Return "" if `stages` has another form.
    """
    if not all(isinstance(stage, list | tuple) and all(kind in _LETTERS for kind in stage) for stage in stages):
        return ""
    return "|".join("".join(_LETTERS[str(kind)] for kind in stage) for stage in stages)  # type: ignore[attr-defined]
