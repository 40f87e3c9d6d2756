"""A Docker engine for kind on a machine that has none, in its own network; it leaves nothing behind.

dockerd runs in a network namespace with loopback and its bridges but no route out: the machine's interfaces, routes and
packet filters stay as they are. Its files are in the cache of `binaries.py`, so that images are imported only once. Its
sockets, processes and control groups carry one name, by which everything is found again and ended: at the end of a run
or, if a run was killed, by the next one. Kernel settings that a kubelet makes for the whole machine are restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import binaries
from processes import has_ended, start_logged

PACKAGES = {"docker": "docker.io", "dockerd": "docker.io", "ip": "iproute2", "iptables": "iptables",
            "nsenter": "util-linux", "runc": "runc", "unshare": "util-linux"}  # fmt: skip
"""Debian package of each program."""
_RUNC = Path(__file__).resolve().parent / "kind" / "files" / "runc"
_CGROUPS = Path("/sys/fs/cgroup")
_SETTINGS = Path("/proc/sys")
_KERNEL = ("kernel/keys/root_maxbytes", "kernel/keys/root_maxkeys", "kernel/panic", "kernel/panic_on_oops",
           "vm/overcommit_memory", "vm/panic_on_oom")  # fmt: skip
"""Settings of the whole machine that a kubelet makes, also from inside a container."""
_START_S, _STOP_S = 60.0, 60.0


class EngineError(Exception):
    """The engine cannot be started or ended; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Paths and processes of the engine with a name.

    Two engines with different names can run at once.
    """

    name: str = "tilecast-kind"

    @property
    def folder(self) -> Path:
        """Folder of its sockets and logs."""
        return Path("/run") / self.name

    @property
    def network(self) -> Path:
        """File that holds its network namespace."""
        return self.folder / "network"

    @property
    def data(self) -> Path:
        """Folder of its images."""
        return binaries.cache_folder() / f"{self.name}-engine"

    def environment(self) -> dict[str, str]:
        """Return the variables by which `docker` finds the engine, without proxies."""
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        return variables | {"DOCKER_HOST": f"unix://{self.folder}/docker.sock"}

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs in the engine's network."""
        return ["nsenter", f"--net={self.network}", *command]

    def docker(self, *arguments: str) -> str:
        """Return what `docker ARGUMENTS` prints.

        Raises:
            EngineError: it fails.
        """
        command = ["docker", *arguments]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-1000:]}")
        return done.stdout

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other run uses the name, and hold it for the block."""
        with self.folder.with_suffix(".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                binaries.say("waiting for another run of kind on this machine")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the engine for the block, inside `locked`.

        Raises:
            EngineError: it does not start, or parts of it are left afterwards.
        """
        self.clear()
        self.folder.mkdir()
        (self.folder / "kernel.json").write_text(json.dumps(_kernel()))
        try:
            _start(self)
            self._remove_containers()
            yield
        finally:
            with contextlib.suppress(EngineError):
                self._remove_containers()
            self.clear()
        if left := self.leftovers():
            raise EngineError(f"left behind by {self.name}: {'; '.join(left)}")

    def clear(self) -> None:
        """End and delete everything of an engine with that name, except its images."""
        daemons = [process for process in self._processes() if "dockerd" in _command(process)]
        _end(lambda: [process for process in daemons if not has_ended(process)], signal.SIGTERM)
        _end(self._processes, signal.SIGKILL)
        for point in sorted(self._mounts(), reverse=True):
            _succeeds("umount", "--lazy", point)
        for group in self._groups():
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            before: dict[str, str] = json.loads((self.folder / "kernel.json").read_text())
            for name, value in before.items() - _kernel().items():
                (_SETTINGS / name).write_text(value)
        if not self._mounts():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_containers(self) -> None:
        """Remove every container, also those that a killed run left in the engine's files."""
        if containers := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *containers)

    def leftovers(self) -> list[str]:
        """Return what an engine with that name has left on the machine; empty once it has ended."""
        left = [f"process {each} ({_command(each)[:80]})" for each in self._processes()]
        left += [f"mount {each}" for each in self._mounts()]
        left += [f"control group {each}" for each in self._groups()]
        return [*left, f"folder {self.folder}"] if self.folder.exists() else left

    def _processes(self) -> list[int]:
        """Return the processes in its network and in its control groups."""
        inside = set[int]()
        for group in self._groups():
            with contextlib.suppress(OSError):
                inside |= {int(word) for word in (group / "cgroup.procs").read_text().split()}
        with contextlib.suppress(FileNotFoundError):
            network = self.network.stat().st_ino
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if (folder / "ns" / "net").stat().st_ino == network:
                        inside.add(int(folder.name))
        return sorted(inside - {os.getpid()})

    def _groups(self) -> list[Path]:
        """Return its control groups, the innermost first."""
        tops = (*_CGROUPS.glob(self.name), *_CGROUPS.glob(f"*/{self.name}"))
        groups = [Path(folder) for top in tops for folder, _, _ in os.walk(top)]
        return sorted(groups, key=lambda path: -len(path.parts))

    def _mounts(self) -> list[str]:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        # dockerd mounts its data folder onto itself.
        places = (f"{self.folder}/", f"{self.data}/")
        return [point for point in points if f"{point}/".startswith(places)]


def _start(engine: Engine) -> None:
    """Start dockerd and wait until it answers."""
    engine.network.touch()
    for command in (
        ["unshare", f"--net={engine.network}", "true"],
        engine.inside("ip", "link", "set", "lo", "up"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    configuration = {
        "hosts": [f"unix://{engine.folder}/docker.sock"],
        "data-root": str(engine.data),
        "exec-root": f"{engine.folder}/exec",
        "pidfile": f"{engine.folder}/dockerd.pid",
        "cgroup-parent": f"/{engine.name}",
        "runtimes": {"bounded": {"path": str(_RUNC)}},
        "default-runtime": "bounded",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
    }
    (engine.folder / "daemon.json").write_text(json.dumps(configuration))
    log = engine.folder / "dockerd.log"
    command = engine.inside("dockerd", f"--config-file={engine.folder}/daemon.json")
    daemon = start_logged(command, log, engine.environment())
    deadline_s = time.monotonic() + _START_S
    while not answers(engine.environment()):
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            raise EngineError(f"dockerd did not start: {' | '.join(log.read_text().splitlines()[-5:])}")
        time.sleep(0.2)


def answers(environment: Mapping[str, str]) -> bool:
    """Return whether a Docker engine answers."""
    return shutil.which("docker") is not None and _succeeds("docker", "info", environment=environment)


def _succeeds(*command: str, environment: Mapping[str, str] | None = None) -> bool:
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def _kernel() -> dict[str, str]:
    paths = {name: _SETTINGS / name for name in _KERNEL}
    return {name: path.read_text().strip() for name, path in paths.items() if path.exists()}


def _command(process: int) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _end(processes: Callable[[], list[int]], number: signal.Signals) -> None:
    """Send a signal to processes until there are none, and give up on those that remain after a while."""
    deadline_s = time.monotonic() + _STOP_S
    sent = set[int]()
    while (left := processes()) and time.monotonic() < deadline_s:
        for process in left:
            if process not in sent:
                sent.add(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            has_ended(process)
        time.sleep(0.1)
