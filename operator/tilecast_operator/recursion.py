"""Recursion limit and stack size of the operator's processes.

The API server accepts documents that are nested 10,000 levels deep, and Python parses 1,000 by default. One such
object, and a watch would never report anything again. Only the JSON parser may meet such depths.
`untrusted.empty_containers_below` removes deep levels right after it.
"""

from __future__ import annotations

import resource
import sys
import threading

from tilecast_operator.settings import RECURSION_LIMIT

STACK_BYTES = 8 * 2**20
"""Usual stack of a process, in bytes. Threads have less if the stack of the process has no limit."""
CALL_BYTES = 700
"""Bytes of stack for one call that counts towards the recursion limit.

Python's own functions in C take less: its JSON parser 140 bytes, `repr` of a mapping 220, of an object by `__repr__`
520, `map` 640 (CPython 3.11 on x86-64).
"""


def set_recursion_limit() -> None:
    """Set the recursion limit of this process, and a matching stack size for its future threads.

    If the process's own stack is too small and cannot be enlarged, the limit is set lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < STACK_BYTES:
        soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    threading.stack_size(STACK_BYTES)
    carried = RECURSION_LIMIT if soft == resource.RLIM_INFINITY else soft // CALL_BYTES
    sys.setrecursionlimit(min(RECURSION_LIMIT, carried))
