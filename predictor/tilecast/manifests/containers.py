"""Turn a container into the launch line of its command, with the files that ConfigMaps mount."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import join, normpath

from tilecast.api.fields import Document, as_mapping, list_mappings_in
from tilecast.readers import (
    REST,
    SHELLS,
    UNKNOWN,
    LaunchLine,
    Script,
    find_launch,
    read_script,
    split_shell_call,
    unknown,
)
from tilecast.spec import SpecError

_SCRIPTS = (".sh", ".bash")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
"""Pattern of a reference to a variable in a command, as Kubernetes expands it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_BYTES = 2**20
MAX_FILES = 256
"""Most files of a container."""
_MAX_SCRIPTS = 4
"""Largest depth of scripts that call scripts."""


@dataclass(slots=True)
class Container:
    """The command of a container, its variables, and the texts of files that ConfigMaps mount."""

    name: str
    where: str
    """Path of the container in the manifest, for messages."""
    words: Sequence[str]
    variables: Mapping[str, str]
    """Values of environment variables. If a value is not in the manifest, it is marked as unknown."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Text of each file, by its absolute path."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """ConfigMap and key of each file, by its absolute path."""
    mounted: Mapping[str, str] = field(default_factory=dict)
    """Missing ConfigMaps, by the path at which they are mounted."""
    folder: str = "/"
    """Working directory."""
    has_unread: bool = False
    """Whether a Secret or a missing ConfigMap sets further variables with unknown names."""
    read: list[str] = field(default_factory=list)
    """Paths of the files that were read."""

    def find_text(self, path: str) -> str | None:
        """Return the text of a file that a ConfigMap mounts, or None."""
        whole = normpath(join(self.folder, path))
        if whole in self.texts:
            self.read.append(whole)
            return self.texts[whole]
        return None

    def explain_missing(self, name: str) -> SpecError:
        """Return the error for a file that is not in the manifest."""
        whole = normpath(join(self.folder, name))
        shown = name[:80] if name.isprintable() else "a file"
        for path, config_map in self.mounted.items():
            if whole == path or whole.startswith(path.rstrip("/") + "/"):
                remedy = f"give ConfigMap {config_map} beside the job"
                return SpecError(
                    f"{self.where}: {shown}", f"lies in ConfigMap {config_map}, which was not given", remedy
                )
        remedy = "mount it from a ConfigMap, or annotate the job with its model and training"
        return SpecError(f"{self.where}: {shown}", "is not in the manifest: the image or a volume holds it", remedy)


@dataclass(slots=True)
class ContainerFiles:
    """Files that a launch may name: files of ConfigMaps, and files that its script writes."""

    container: Container
    written: Mapping[str, str]

    def read(self, name: str) -> str:
        """Return the text of a file.

        Raises:
            SpecError: the file is not in the manifest, is too long, or is not text.
        """
        text = self.container.find_text(name)
        if text is None:
            text = self.written.get(name, self.written.get(name.removeprefix("./")))
        if text is None:
            raise self.container.explain_missing(name)
        if len(text) > MAX_BYTES or "\0" in text:
            raise SpecError(name[:60], "is no text of at most 1 MiB", "give a script or a configuration")
        return text


def list_names(spec: Document) -> set[str]:
    """Return the names of the ConfigMaps in a pod's volumes and environment."""
    names = set[str]()
    for volume in list_mappings_in(spec.get("volumes")):
        parts = [volume, *list_mappings_in(as_mapping(volume.get("projected")).get("sources"))]
        names |= {str(as_mapping(item.get("configMap")).get("name", "")) for item in parts}
    for container in list_mappings_in(spec.get("containers")):
        for item in list_mappings_in(container.get("envFrom")):
            names.add(str(as_mapping(item.get("configMapRef")).get("name", "")))
        for item in list_mappings_in(container.get("env")):
            reference = as_mapping(as_mapping(item.get("valueFrom")).get("configMapKeyRef"))
            names.add(str(reference.get("name", "")))
    return names - {""}


def read_container(
    spec: Document, container: Document, where: str, config_maps: Mapping[str, Document], given: Mapping[str, str]
) -> Container:
    """Return a container with its command, variables and files.

    Args:
        spec: the pod's spec.
        container: the container.
        where: its path in the manifest.
        config_maps: ConfigMaps by name.
        given: variables that the job's controller sets. The container's own variables take precedence.
    """
    variables, has_unread = _read_variables(container, config_maps, given)
    texts, sources, mounted = _read_files(spec, container, config_maps)
    words = [*_list_strings(container.get("command")), *_list_strings(container.get("args"))]
    expanded = [_expand_command(word, variables, has_unread) for word in words]
    folder = normpath(str(container.get("workingDir") or "/"))
    return Container(
        str(container.get("name", "")), where, expanded, variables, texts, sources, mounted, folder, has_unread
    )


def _list_strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _read_variables(
    container: Document, config_maps: Mapping[str, Document], given: Mapping[str, str]
) -> tuple[dict[str, str], bool]:
    """Return the values of variables, and whether there may be further variables that were not read.

    A value that is not in the manifest, such as that of a Secret, is marked as unknown.
    """
    variables, has_unread = dict[str, str](), False
    for item in list_mappings_in(container.get("envFrom")):
        name = str(as_mapping(item.get("configMapRef")).get("name", ""))
        prefix = str(item.get("prefix") or "")
        has_unread = has_unread or bool(as_mapping(item.get("secretRef"))) or (name != "" and name not in config_maps)
        for key, value in as_mapping(as_mapping(config_maps.get(name)).get("data")).items():
            variables[f"{prefix}{key}"] = str(value)
    # Kubernetes prefers variables of `env`, which the controller's are too.
    variables |= given
    for item in list_mappings_in(container.get("env")):
        name = str(item.get("name", ""))
        reference = as_mapping(as_mapping(item.get("valueFrom")).get("configMapKeyRef"))
        data = as_mapping(as_mapping(config_maps.get(str(reference.get("name", "")))).get("data"))
        if "valueFrom" not in item:
            variables[name] = _expand_value(str(item.get("value") or ""), variables, has_unread)
        elif reference and reference.get("key") in data:
            variables[name] = str(data[reference["key"]])
        else:
            variables[name] = unknown(name)
    return variables, has_unread


_MARK = "\ue000"
"""Marker around the name of an unknown variable. It becomes a shell expansion when the words are joined."""


def _expand_value(text: str, variables: Mapping[str, str], has_unread: bool) -> str:
    """Return the value of a variable with references such as `$(NAME)` replaced, by the rules of Kubernetes.

    A reference to an undefined name stays unchanged. If `has_unread` is True, a source that was not read may define the
    name, and the reference becomes an unknown value.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return variables.get(match[1], unknown(match[1]) if has_unread else match[0])

    return _REFERENCE.sub(replaced, text)


def _expand_command(text: str, variables: Mapping[str, str], has_unread: bool) -> str:
    """Return a word of a command with references such as `$(NAME)` replaced by their values.

    A reference to an unknown value becomes its name between two `_MARK`s.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        value = variables.get(match[1])
        is_hidden = has_unread if value is None else UNKNOWN in value
        if is_hidden and _NAME.fullmatch(match[1]):
            return f"{_MARK}{match[1]}{_MARK}"
        return match[0] if value is None or is_hidden else value

    return _REFERENCE.sub(replaced, text.replace(_MARK, ""))


def _read_files(
    spec: Document, container: Document, config_maps: Mapping[str, Document]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return three mappings by path: the text of each file, its ConfigMap and key, and ConfigMaps that are missing."""
    volumes = {str(item.get("name")): item for item in list_mappings_in(spec.get("volumes"))}
    texts, origins, mounted = dict[str, str](), dict[str, str](), dict[str, str]()
    for mount in list_mappings_in(container.get("volumeMounts")):
        volume = as_mapping(volumes.get(str(mount.get("name"))))
        path, part = str(mount.get("mountPath", "")), str(mount.get("subPath") or "")
        parts = [volume, *list_mappings_in(as_mapping(volume.get("projected")).get("sources"))]
        for one in (as_mapping(item.get("configMap")) for item in parts):
            # A ConfigMap of a pod's volume is named `name`.
            name = str(one.get("name", ""))
            if not name:
                continue
            if name not in config_maps:
                mounted[path] = name
                continue
            data = as_mapping(as_mapping(config_maps[name]).get("data"))
            chosen = {str(item.get("key")): str(item.get("path")) for item in list_mappings_in(one.get("items"))}
            for key, text in data.items():
                below = chosen.get(str(key)) if chosen else str(key)
                if below is None or not isinstance(text, str) or len(texts) >= MAX_FILES:
                    continue
                if part and part != below:
                    continue
                whole = normpath(path if part else join(path, below))
                texts[whole], origins[whole] = text, f"ConfigMap {name}, key {key}"
    return texts, origins, mounted


def find_line(container: Container) -> tuple[LaunchLine, Script]:
    """Return the only launch line of a container's command, and the script that contains it.

    Raises:
        SpecError: the command has no launch line, or several different ones.
    """
    if not container.words:
        remedy = "write the command into the manifest, or annotate the job with its model and training"
        raise SpecError(container.where, "has no command: the image decides what runs", remedy)
    return find_script_line(container, " ".join(map(_quote_word, container.words)))


def find_script_line(container: Container, text: str) -> tuple[LaunchLine, Script]:
    """Return the only launch line of a shell command, and the script that contains it.

    The command may call scripts from ConfigMaps.

    Raises:
        SpecError: the command has no launch line, or several different ones.
    """
    script = read_script(text, container.where, container.variables, (), has_unread=container.has_unread)
    written = dict(script.files)
    for _ in range(_MAX_SCRIPTS):
        try:
            line = find_launch(script)
        except SpecError:
            called = _find_called(container, script, written)
            if called is None:
                raise
            known = {key: value for key, value in script.variables.items() if isinstance(value, str)}
            script = read_script(
                called.text,
                f"{container.where}: {called.path}",
                {**known, **called.prefix},
                called.arguments,
                has_unread=container.has_unread,
            )
            written |= script.files
            continue
        _require_arguments(container, line, script)
        script.files |= {key: value for key, value in written.items() if key not in script.files}
        return line, script
    raise SpecError(container.where, f"more than {_MAX_SCRIPTS} scripts call each other", "give the launch line")


def _require_arguments(container: Container, line: LaunchLine, script: Script) -> None:
    """Raise SpecError if a launch line has options whose text is not in the manifest.

    Raises:
        SpecError: the line has such options.
    """
    before = ""
    for word in line.arguments:
        name = word.strip(UNKNOWN)
        is_hidden = word == unknown(name) and (
            UNKNOWN in container.variables.get(name, "") or (container.has_unread and name not in script.variables)
        )
        # A word behind an option is its value, which the reader refuses where it counts.
        if word == REST or (is_hidden and not before.startswith("-")):
            problem = f"takes options from ${name.removeprefix('$')[:60]}, whose value is not literal"
            raise SpecError(container.where, problem, "write them into the command, or annotate the job")
        before = "" if "=" in word else word


def _quote_word(word: str) -> str:
    """Return a word quoted for a shell. Unknown variables in it remain expansions."""
    parts = word.split(_MARK)
    return "".join(
        shlex.quote(part) if place % 2 == 0 else f'"${{{part}}}"' for place, part in enumerate(parts) if part
    )


@dataclass(frozen=True, slots=True)
class _CalledScript:
    """A script that a command calls."""

    path: str
    text: str
    arguments: Sequence[str]
    prefix: Mapping[str, str]
    """Variable assignments before the call."""


def _find_called(container: Container, script: Script, written: Mapping[str, str]) -> _CalledScript | None:
    """Return the only script that a command calls, if a ConfigMap mounts it or the command writes it.

    Raises:
        SpecError: the script is in the image or a volume, or it is called in different ways.
    """
    found = list[tuple[str, Sequence[str], Mapping[str, str]]]()
    for index, words in enumerate(script.commands):
        name = words[0].rpartition("/")[2] if words else ""
        prefix: Mapping[str, str] = script.prefixes.get(index, {})
        if name in SHELLS:
            call = split_shell_call(words[1:])
            if call is not None and not call.is_text:
                found.append((call.operand, call.rest, prefix))
        elif name in ("source", "."):
            if len(words) > 1 and container.find_text(words[1]) is not None:
                found.append((words[1], words[2:] or script.parameters or (), prefix))
        elif words and words[0].endswith(_SCRIPTS):
            found.append((words[0], words[1:], prefix))
    names = [*dict.fromkeys(path for path, _, _ in found)]
    if len(names) != 1:
        return None
    path, arguments, prefix = found[0]
    if any([*other] != [*arguments] or before != prefix for _, other, before in found[1:]):
        shown = path[:80] if path.isprintable() else "a script"
        raise SpecError(f"{container.where}: {shown}", "is called with different arguments", "call it once")
    text = container.find_text(path)
    if text is None:
        text = written.get(path, written.get(path.removeprefix("./")))
    if text is None:
        raise container.explain_missing(path)
    return _CalledScript(path, text, arguments, prefix)
