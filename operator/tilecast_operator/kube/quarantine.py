"""Objects that are quarantined because the operator died while it read them.

An object is quarantined if it was the only one being read when the operator died. If others were being read too, all
are suspects: the next process reads each of them alone (`isolation`), so that another death shows which one caused it.
A quarantined object is read again once its content has changed, or after a wait that grows with every death.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.times import format_time

log = logging.getLogger("tilecast")

FILE = "quarantine.json"
FIRST_S, FACTOR, MOST_S = 600.0, 6.0, 86_400.0
"""Seconds in quarantine after the first death, the factor for each further death, and the most seconds."""
FORGET_S = 86_400.0
"""Seconds for which deaths are remembered after the last one, or after the object was read again."""
EVERYTHING = "*"
"""Kind in the key that stands for all objects of a namespace."""
NAMESPACE_DEATHS = 3
"""Number of deaths by objects of one namespace after which all its objects are quarantined.

Otherwise a namespace could cause any number of deaths with ever new objects.
"""


@dataclass(frozen=True, slots=True)
class DeathRecord:
    """Deaths of the operator while reading one object, and the end of the object's quarantine."""

    deaths: int
    last_s: float
    """Unix time at which the last death was noticed."""
    until_s: float = 0.0
    """Unix time at which the quarantine ends. 0 if the object is only a suspect."""
    digest: str = ""
    """Digest of the object's content when it was first seen after the death."""


DeathRecords: TypeAlias = Mapping[Key, DeathRecord]


def add_deaths(records: DeathRecords, suspects: Iterable[Key], now_s: float) -> dict[Key, DeathRecord]:
    """Return the records after another death of the operator.

    Args:
        records: records of earlier deaths.
        suspects: the objects that were being read.
        now_s: Unix time, in seconds.
    """
    after = _select_recent_records(records, now_s)
    suspects = set(suspects)
    to_blame = suspects if len(suspects) == 1 else set[Key]()
    for key in suspects:
        deaths = _get_death_count(after, key) + 1
        after[key] = DeathRecord(deaths, now_s, now_s + compute_quarantine_s(deaths) if key in to_blame else 0.0)
    for namespace in {key.namespace for key in to_blame if key.namespace}:
        key = Key(EVERYTHING, namespace)
        deaths = _get_death_count(after, key) + 1
        beyond = deaths - NAMESPACE_DEATHS
        after[key] = DeathRecord(deaths, now_s, now_s + compute_quarantine_s(1 + beyond) if beyond >= 0 else 0.0)
    return after


def compute_quarantine_s(deaths: int) -> float:
    """Return the seconds in quarantine after `deaths` deaths."""
    return min(FIRST_S * FACTOR ** min(deaths - 1, 16), MOST_S)


class Quarantine:
    """Store of the quarantined objects. Belongs to one event loop.

    Args:
        folder: folder in which records are kept between processes. If empty, they are not kept.
        suspects: objects that were being read when the last process died.
        clock: Unix time, in seconds.
        harmless_part: function that returns the part of a quarantined object that may be read, or None.
        digest: function that returns a digest of what users wrote in an object. It must not recurse, because the object
            may be nested as deep as the API server allows.
    """

    def __init__(
        self,
        folder: str,
        suspects: Iterable[Key],
        clock: Callable[[], float],
        harmless_part: Callable[[Document], Document | None],
        digest: Callable[[Document], str],
    ) -> None:
        self._harmless_part = harmless_part
        self._digest = digest
        self._path = Path(folder) / FILE if folder else None
        self._clock = clock
        self._held: dict[Key, tuple[str, str]] = {}
        """UID of every quarantined object that was seen, and the reason."""
        self._records = _select_recent_records(_load_records(self._path), clock())
        self.changed: Callable[[Counter[str]], None] = lambda counts: None
        """Function to call with the number of quarantined objects of each kind, whenever that changes."""
        if suspects := tuple(suspects):
            self._records = add_deaths(self._records, suspects, clock())
            self._save_records()
            for key in suspects:
                record = self._records[key]
                text = f"is set aside until {format_time(record.until_s)}" if record.until_s else "is suspected"
                log.error("%s was being read when the last process died (death %d); it %s", key, record.deaths, text)

    @property
    def suspects(self) -> list[Key]:
        """Objects that were being read at a death, and that must be read alone."""
        return [key for key in self._records if key.kind != EVERYTHING]

    def find_readable_part(self, body: Document) -> Document | None:
        """Return the whole object, or only its harmless part while it is quarantined."""
        if not self._records:
            return body
        key = Key.from_object(body)
        place, record = self._find_active_record(key)
        if record is None or (place == key and self._has_changed(key, record, body)):
            self._release_object(key)
            return body
        deaths = f"{record.deaths} time{'s' if record.deaths > 1 else ''}, last at {format_time(record.last_s)}"
        what = "this object" if place == key else "objects of this namespace"
        text = f"the operator died while it read {what} ({deaths}); it is set aside until {format_time(record.until_s)}"
        if key not in self._held:
            log.warning("%s is set aside until %s", key, format_time(record.until_s))
        self._held[key] = str(body["metadata"].get("uid", "")), f"{text}; correct or delete it"
        self.changed(self._count_by_kind())
        return self._harmless_part(body)

    def remove_object(self, key: Key) -> None:
        """Forget the records of a deleted object."""
        self._release_object(key)
        if self._records.pop(key, None) is not None:
            self._save_records()

    def find_quarantine_reason(self, key: Key) -> str | None:
        """Return why an object is quarantined, or None."""
        return self._held[key][1] if key in self._held else None

    def iterate_quarantined(self) -> Iterator[tuple[Key, str, str]]:
        """Yield the key, the UID and the reason of every quarantined object."""
        for key, (uid, text) in list(self._held.items()):
            yield key, uid, text

    def list_due_keys(self) -> list[Key]:
        """Return the keys of objects whose time in quarantine is over."""
        return [key for key in self._held if self._find_active_record(key)[1] is None]

    def _find_active_record(self, key: Key) -> tuple[Key, DeathRecord | None]:
        """Return the record that quarantines an object now, together with the key of the record.

        If there is no such record, return the key of the object and None.
        """
        whole, now_s = Key(EVERYTHING, key.namespace), self._clock()
        for place in (key, whole) if key.namespace else (key,):
            record = self._records.get(place)
            if record is not None and record.until_s > now_s:
                return place, record
        return key, None

    def _has_changed(self, key: Key, record: DeathRecord, body: Document) -> bool:
        """Return whether an object may be read again because it has changed since it was quarantined."""
        says = self._digest(body)
        if not record.digest:
            self._records[key] = replace(record, digest=says)
            self._save_records()
        elif record.digest != says:
            # The wait stops a user who changes the object as fast as it is read again from ending every process.
            again_s = record.last_s + (0.0 if record.deaths == 1 else compute_quarantine_s(record.deaths - 1))
            is_due = again_s <= self._clock()
            self._records[key] = replace(record, until_s=0.0 if is_due else min(record.until_s, again_s), digest="")
            self._save_records()
            return is_due
        return False

    def _release_object(self, key: Key) -> None:
        if self._held.pop(key, None) is not None:
            log.warning("%s is read again", key)
            self.changed(self._count_by_kind())

    def _count_by_kind(self) -> Counter[str]:
        return Counter(key.kind for key in self._held)

    def _save_records(self) -> None:
        if self._path is None:
            return
        rows = [{"key": [key.kind, key.namespace, key.name], **asdict(item)} for key, item in self._records.items()]
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(rows), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            log.warning("journal: %s; what is set aside is not remembered", error)


def _select_recent_records(records: DeathRecords, now_s: float) -> dict[Key, DeathRecord]:
    """Return the records that remain after old deaths are dropped."""
    return {key: item for key, item in records.items() if now_s < max(item.last_s, item.until_s) + FORGET_S}


def _get_death_count(records: DeathRecords, key: Key) -> int:
    return records[key].deaths if key in records else 0


def _load_records(path: Path | None) -> dict[Key, DeathRecord]:
    """Return the records that an earlier process saved. If they cannot be read, return an empty mapping."""
    if path is None or not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {Key(*row.pop("key")): DeathRecord(**row) for row in rows}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s cannot be read, and nothing is set aside: %s", path, error)
        return {}
