"""Run a command with a Docker engine for kind, also on a machine that has none.

    python tools/kind_node.py -- .venv/bin/pytest -m kind
    python tools/kind_node.py -- bash

If `docker info` succeeds, the command runs as it is. Otherwise, root gets its own engine for as long as the command
runs (`kind_engine.py`), and the command runs in the engine's network. This engine cannot reach an image registry, so
everything is made before and kept in the cache of `binaries.py`: the image of a node (`node_image.py`) is
`$TILECAST_KIND_NODE` for `kind create cluster --image`, and `$TILECAST_KIND_ARCHIVES` are the archives for `kind load
image-archive`: the operator's image and a Prometheus.

If neither is possible, one line says why, and the command does not run; this is a failure only if `TILECAST_REQUIRE`
names kind. The first run takes about 5 minutes on two cores after `binaries.py all`, later ones some seconds. Go, a C
compiler and, of Debian, `docker.io debootstrap buildah iproute2 iptables` are needed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import binaries
import image
import kind_engine
import node_image
from cluster import exit_on_sigterm
from kind_engine import Engine, EngineError
from node_image import NodeImageError
from processes import adopt_orphans, die_with_parent
from required import is_required

NODE = "localhost/kind-node"
_CHART = (Path(__file__).resolve().parent.parent / "charts" / "tilecast" / "Chart.yaml").read_text(encoding="utf-8")
OPERATOR = f"localhost/tilecast:{_CHART.partition('appVersion: ')[2].split()[0]}"
"""Image that the chart uses by default, with localhost as its registry."""
_PACKAGES = {
    **kind_engine.PACKAGES,
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "cc": "gcc",
    "go": "Go 1.26",
}


def obstacle() -> str:
    """Return why no engine can be started here; empty if one can."""
    if platform.system() != "Linux":
        return "only on Linux can one be started here"
    if os.geteuid() != 0:
        return "only root can start one here"
    missing = sorted({package for program, package in _PACKAGES.items() if shutil.which(program) is None})
    return f"to start one, install {', '.join(missing)}" if missing else ""


def operator_archive() -> Path:
    """Return an archive of the operator's image, built from this work tree."""
    built = image.build(OPERATOR)
    folder = binaries.cache_folder()
    path = folder / f"kind-operator-{built.digest.rpartition(':')[2][:16]}.tar"
    if not path.exists():
        for other in folder.glob("kind-operator-*"):
            other.unlink()
        scratch = path.with_suffix(".new")
        image.push(OPERATOR, scratch)
        scratch.rename(path)
    return path


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit status; Ctrl-C and SIGTERM end it in order."""
    process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def run_with_own_engine(command: Sequence[str]) -> int:
    """Run a command with its own engine and return its exit status."""
    engine = Engine()
    started_s = time.monotonic()

    def step(name: str) -> None:
        binaries.say(f"kind: {name} after {time.monotonic() - started_s:.0f} s")

    with engine.locked():
        for toolset in ("chart", "kind", "kube-state-metrics"):
            binaries.ensure(toolset)
        made = node_image.ensure()
        step("image of a node")
        operator = operator_archive()
        step("image of the operator")
        with engine.running():
            name = f"{NODE}:{made.digest}"
            if not engine.docker("image", "ls", "--quiet", name):
                if others := engine.docker("image", "ls", "--quiet", NODE).split():
                    engine.docker("image", "rm", "--force", *others)
                start = 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]'
                engine.docker("import", "-c", "ENV container=docker", "-c", start, str(made.node), name)
            step("engine")
            variables = {"TILECAST_KIND_NODE": name, "TILECAST_KIND_ARCHIVES": f"{operator} {made.prometheus}"}
            status = run(engine.inside(*command), engine.environment() | variables)
            step("command ended")
    step("engine ended, nothing of it is left,")
    return status


def main(command: Sequence[str]) -> int:
    """Run the command line; see the module's docstring."""
    exit_on_sigterm()
    adopt_orphans()
    if kind_engine.answers(os.environ):
        return run(command, os.environ)
    if reason := obstacle():
        line = f"the stories on kind are skipped: no Docker engine answers, and {reason}"
        print(line, file=sys.stderr)
        return 1 if is_required("kind") else 0
    return run_with_own_engine(command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
    except (EngineError, NodeImageError, binaries.BinariesError, image.ImageError) as error:
        binaries.say(f"error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
