"""Process that runs one call at a time under limits of time and memory, and is replaced when it exceeds one.

Each process has its own pipe, and one thread waits for it. `ProcessPoolExecutor` (which cannot end a call before Python
3.14) and `pebble.ProcessPool` share one pipe and one lock among their processes. If the kernel kills one of these while
it holds the lock, the calls of all others are lost.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tilecast_operator import control_group, pickles, recursion

Cause: TypeAlias = Literal["timeout", "memory", "died"]
CAUSES: tuple[Cause, ...] = ("timeout", "memory", "died")
"""Causes for replacing a process: its call took too long or too much memory, or it ended for another reason."""

BOOT_S = 300.0
"""Longest time for a new process to load its modules, in seconds, even if all cores are busy."""
MIB = 2**20
OUT_OF_MEMORY = 77
"""Exit status of a process that reached its memory limit. It may have no memory left to report that."""

log = logging.getLogger("tilecast")


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of time and memory of one search."""

    seconds: float = 30.0
    memory_mib: int = 640
    """Limit of the process's private, writable memory (`RLIMIT_DATA`) in MiB.

    The address space would say less, because libraries and thread stacks map twice what they use.
    """


class SearchInterruptedError(Exception):
    """Error that a search ended before it had a result."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(cause, text)
        self.cause = cause
        self.text = text
        """Limit that the call exceeded, or how the process ended."""

    def __str__(self) -> str:
        return self.text


class SearchProcess:
    """Process that calls a function under limits of time and memory. Only one thread may use it at a time.

    Args:
        function: The function. Its module is loaded before the first call.
        limits: Limits of each call.
        restarted: Function to call with the cause whenever the process was replaced.
        niceness: Niceness of the process, which is added to that of the operator.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        limits: SearchLimits,
        restarted: Callable[[Cause], None] = lambda cause: None,
        niceness: int = 0,
    ) -> None:
        self._function = function
        self._limits = limits
        self._restarted = restarted
        self._niceness = niceness
        self._start()

    @property
    def pid(self) -> int:
        """Id of the current process."""
        return self._process.pid or 0

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes, or 0 if it cannot be read."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * resource.getpagesize()

    def call_function(self, *arguments: object) -> Any:
        """Call the function in the process and return its result, or raise its error.

        If the process dies, the call is repeated in a new process within the time limit. The same holds if the call
        runs out of memory in a process that was used before, because memory of earlier calls is not always freed.

        Raises:
            SearchInterruptedError: The call exceeded a limit, or the process ended.
        """
        data = pickles.dump(arguments, ())
        self._wait_until_ready()
        began_s, was_used = time.monotonic(), self._is_used
        try:
            return self._call(data, self._limits.seconds)
        except SearchInterruptedError as error:
            if error.cause == "timeout" or (error.cause == "memory" and not was_used):
                raise
        spent_s = time.monotonic() - began_s
        self._wait_until_ready()
        return self._call(data, self._limits.seconds - spent_s)

    def stop(self) -> None:
        """Kill the process. A call in progress raises SearchInterruptedError."""
        self._is_stopped = True
        self._process.kill()

    def _start(self) -> None:
        # A fork would copy locks that other threads hold.
        context = multiprocessing.get_context("spawn")
        self._is_stopped = self._is_ready = self._is_used = False
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve_calls, args=(other, self._function, self._limits.memory_mib, self._niceness), daemon=True
        )
        self._process.start()
        other.close()

    def _wait_until_ready(self) -> None:
        try:
            if not self._is_ready and not self._pipe.poll(BOOT_S):
                raise self._replace_process("died", "the process did not start")
            if not self._is_ready:
                self._pipe.recv_bytes()
            self._is_ready = True
        except (EOFError, OSError):
            raise self._replace_process("died", f"the process ended as it started, {self._describe_exit()}") from None

    def _call(self, data: bytes, limit_s: float) -> Any:
        self._is_used, killed = True, control_group.count_oom_kills(control_group.ROOT)
        try:
            self._pipe.send_bytes(data)
            if not self._pipe.poll(max(0.0, limit_s)):
                raise self._replace_process("timeout", f"took longer than {self._limits.seconds:g} s")
            result = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._replace_ended_process(killed) from None
        is_raised, value = pickles.load(result, ())
        if is_raised:
            raise value
        return value

    def _replace_ended_process(self, killed: int) -> SearchInterruptedError:
        ended = self._describe_exit()
        if self._process.exitcode == OUT_OF_MEMORY:
            return self._replace_process("memory", f"needed more than {self._limits.memory_mib} MiB of memory")
        if control_group.count_oom_kills(control_group.ROOT) > killed:
            return self._replace_process("memory", "needed more memory than the container has left")
        return self._replace_process("died", f"ended its process, {ended}")

    def _describe_exit(self) -> str:
        self._process.join(5.0)
        status = self._process.exitcode
        return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    def _replace_process(self, cause: Cause, text: str) -> SearchInterruptedError:
        """Replace the process by a new one. Return the error that gives the cause."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        if not self._is_stopped:
            log.warning("a call %s; its process is replaced", text)
            self._start()
            self._restarted(cause)
        return SearchInterruptedError(cause, text)


def _serve_calls(pipe: Connection, function: Callable[..., Any], memory_mib: int, niceness: int) -> None:
    """Run calls from a pipe until its other end is closed."""
    _prepare_process(memory_mib, niceness)
    pipe.send_bytes(b"")
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_call_and_pickle(function, data))


def _call_and_pickle(function: Callable[..., Any], data: bytes) -> bytes:
    """Call the function. Return a pickle of whether it raised, and of its error or result."""
    try:
        return pickles.dump((False, function(*pickles.load(data, ()))), ())
    except Exception as error:
        if _is_memory_error(error):
            os._exit(OUT_OF_MEMORY)
        return _pickle_error(error)


def _pickle_error(error: Exception) -> bytes:
    try:
        data = pickles.dump((True, error), ())
        pickles.load(data, ())
    except Exception:  # some exceptions with arguments of their own cannot be unpickled
        return pickles.dump((True, RuntimeError(f"{type(error).__name__}: {error}")), ())
    return data


def _is_memory_error(error: BaseException | None) -> bool:
    """Return whether an error comes from a lack of memory, in Python or in a library."""
    while error is not None:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _prepare_process(memory_mib: int, niceness: int) -> None:
    """Prepare this process for searches: set limits and signals, and end it when the operator ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    recursion.set_recursion_limit()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    # A process that dies of a signal leaves no core dump with what users have written.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # a profile of system calls may forbid it
        os.nice(niceness)
    with contextlib.suppress(OSError):  # the kernel ends this process before the operator
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _exit_with_parent(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(0)
