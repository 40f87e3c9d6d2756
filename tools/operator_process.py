"""The operator of this checkout as a child process, against a control plane of `cluster.py`.

It runs with the command line of the image, and with the interpreter and the packages of the caller.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from cluster import Cluster, ClusterError, free_ports, wait_for
from processes import start_logged

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
ARGUMENTS = (
    "run",
    "--standalone",
    "--all-namespaces",
    "--log-format=json",
    "-m",
    "tilecast_operator.main",
)
COMMAND = ("-m", "kopf", *ARGUMENTS)
_PATIENT = str(ROOT / "tools" / "patient_operator.py")

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener that reaches 127.0.0.1 without the proxy that the environment may name."""


def is_answered(job: Mapping[str, Any]) -> bool:
    """Return whether the operator has finished with the job's current spec; it writes the status last."""
    return bool(job.get("status", {}).get("observedGeneration") == job["metadata"]["generation"])


class Operator:
    """One operator process; `start`, `kill` and `stop` it, or use it as a context manager.

    Args:
        cluster: the control plane that it serves.
        kubeconfig: its credentials there; the administrator's by default.
        settings: additional environment variables.
        clock_skew_s: how far its clock is ahead, in seconds.
        patience: factor on the times that it may take to decide about a waiting job and to wait for the plan of the
            queue, since busy machines take longer than clusters.
        prelude: Python statements that the process runs first.
    """

    def __init__(
        self,
        cluster: Cluster,
        kubeconfig: Path | None = None,
        settings: Mapping[str, str] | None = None,
        clock_skew_s: float = 0.0,
        patience: float = 1.0,
        prelude: str = "",
    ) -> None:
        (port,) = free_ports(1)
        self.kubeconfig = kubeconfig or cluster.kubeconfig
        self.url = f"http://127.0.0.1:{port}"
        self.log = cluster.folder / f"operator-{port}.log"
        paths = [str(ROOT / "operator"), str(ROOT / "predictor"), os.environ.get("PYTHONPATH", "")]
        # Variables that begin with TILECAST_ are settings of the operator; the caller's are not passed on.
        variables = {name: value for name, value in cluster.environment().items() if not name.startswith("TILECAST_")}
        changed = (_PATIENT, str(clock_skew_s), str(patience), prelude, *ARGUMENTS)
        self._command = changed if clock_skew_s or patience != 1.0 or prelude else COMMAND
        self.environment = variables | {
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TILECAST_LISTEN_HOST": "127.0.0.1",
            "TILECAST_LISTEN_PORT": str(port),
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it reports that it is ready.

        Raises:
            ClusterError: it ended, or was not ready in time; the message ends with its last log lines.
        """
        self._process = start_logged([sys.executable, *self._command], self.log, self.environment, self.log.parent)
        try:
            wait_for(self._ready_or_ended, f"the operator at {self.url}/readyz", READY_TIMEOUT_S)
        except ClusterError as error:
            self.kill()
            raise ClusterError(f"{error}; the operator's last words:\n{self.log_tail()}") from None

    @property
    def pid(self) -> int | None:
        """Process id while it runs; None otherwise."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def get(self, path: str) -> str:
        """Return what it serves under `path`, for instance `/metrics`.

        Raises:
            urllib.error.URLError: nobody listens, or the answer is an error.
        """
        with _DIRECT.open(f"{self.url}{path}", timeout=10) as response:
            return str(response.read().decode())

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Kill it without warning, as a node failure would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Stop it as the kubelet does, and return its exit status, negative if a signal ended it."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()
        return status

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _ready_or_ended(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise ClusterError(f"the operator ended with status {self._process.returncode}")
        try:
            self.get("/readyz")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True
