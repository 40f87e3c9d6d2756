"""How deep calls may nest in a process of the operator, and the stacks that carry them.

The API server takes documents that are nested 10,000 deep, and Python reads 1,000: one such object, and a watch would
tell of nothing else again. Only the JSON parser may meet those levels; `untrusted.cut` takes them away right after it.
"""

from __future__ import annotations

import resource
import sys
import threading

from tilecast_operator.settings import RECURSION_LIMIT

STACK_BYTES = 8 * 2**20
"""The usual stack of a process. Threads have less where the process may have a stack without a limit."""
CALL_BYTES = 700
"""More than Python's own functions in C take of it for each call that the limit counts: its JSON parser 140 bytes,
`repr` of a mapping 220, of an object by `__repr__` 520, `map` 640 (CPython 3.11 on x86-64)."""


def prepare() -> None:
    """Set the recursion limit of this process, and give its threads from now on the stack for it.

    A smaller stack than usual is made larger where the process may do so, or else gets a lower limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < STACK_BYTES:
        soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    threading.stack_size(STACK_BYTES)
    carried = RECURSION_LIMIT if soft == resource.RLIM_INFINITY else soft // CALL_BYTES
    sys.setrecursionlimit(min(RECURSION_LIMIT, carried))
