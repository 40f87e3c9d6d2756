"""Build the programs that tests and demos run, once, in a cache outside the work tree.

    python tools/binaries.py controlplane    # etcd, kube-apiserver, ..., kwokctl, kubectl
    python tools/binaries.py chart           # helm, kubeconform
    python tools/binaries.py kueue           # similarly jobset, trainer, training-operator: controllers of jobs
    python tools/binaries.py prometheus      # prometheus, promtool
    python tools/binaries.py kube-state-metrics
    python tools/binaries.py kube-score
    python tools/binaries.py prometheus-operator    # only its CRDs; similarly karpenter
    python tools/binaries.py kind
    python tools/binaries.py kubelet         # similarly containerd, coredns, crictl, kube-router: for a node of kind
    python tools/binaries.py all             # except those for a node, which `kind_node.py` builds

prints the folder that holds the programs; everything else goes to standard error. The Go module of the same name in
this folder pins what is built, and in which version. The cache is `$TILECAST_CACHE`, else `$XDG_CACHE_HOME/tilecast`,
else `~/.cache/tilecast`. A folder there is named by the digest of its module and build flags, so a second clone starts
at once and a changed pin causes a new build.

`KUBEBUILDER_ASSETS` (the convention of controller-runtime's envtest) takes precedence: if it holds kube-apiserver, etcd
and kubectl, these and every other program found there are used, and only missing ones are built. Go is needed only to
build. This file uses only the standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
HEARTBEAT_S = 30.0
"""Seconds between messages that a long build is still running."""


class BinariesError(Exception):
    """A program can be neither found nor built; the message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Toolset:
    """Programs that one Go module pins."""

    module: str
    """Folder beside this file that holds go.mod and go.sum."""
    programs: Mapping[str, str]
    """Go package of each program."""
    stamps: tuple[str, ...]
    """Go variables that the linker sets, as `variable=value`.

    In a value, `{a/module}` is replaced by the version of that module in go.mod, and `{a/module:minor}` by a part of
    it.
    """
    usual_time: str
    tags: tuple[str, ...] = ()
    """Go build tags."""
    assets: tuple[str, ...] = ()
    """Programs that `KUBEBUILDER_ASSETS` must hold to be used; empty if the variable does not apply."""
    of_node: bool = False
    """Whether the programs run in a node of kind; see `kind_node.py`."""
    manifests: str = ""
    """Folder, as `a/module:folder`, of the CRDs and webhooks that belong to the programs.

    It is kept as `manifests` beside the programs.
    """


_KUBERNETES = (
    "k8s.io/component-base/version.gitVersion={k8s.io/kubernetes}",
    "k8s.io/component-base/version.gitMajor={k8s.io/kubernetes:major}",
    "k8s.io/component-base/version.gitMinor={k8s.io/kubernetes:minor}",
    "k8s.io/component-base/version.gitTreeState=clean",
)

# Five modules require one version of every module that they share: controlplane, chart, kueue, jobset and trainer.
# What one of them has compiled, the next one finds in the cache of Go.
TOOLSETS: Mapping[str, Toolset] = {
    "controlplane": Toolset(
        module="controlplane",
        programs={
            "etcd": "go.etcd.io/etcd/server/v3",
            "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
            "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
            "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
            "kubectl": "k8s.io/kubernetes/cmd/kubectl",
            "kwok": "sigs.k8s.io/kwok/cmd/kwok",
            "kwokctl": "sigs.k8s.io/kwok/cmd/kwokctl",
        },
        stamps=_KUBERNETES,
        usual_time="6 to 7 minutes on two cores and 6 GB of Go caches the first time, then seconds",
        assets=("kube-apiserver", "etcd", "kubectl"),
    ),
    "chart": Toolset(
        module="chart",
        programs={
            "helm": "helm.sh/helm/v3/cmd/helm",
            "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
        },
        stamps=(
            "helm.sh/helm/v3/internal/version.version={helm.sh/helm/v3}",
            "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={k8s.io/client-go:minor}",
            "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor={k8s.io/client-go:minor}",
        ),
        usual_time="about half a minute on two cores after the control plane",
    ),
    "kueue": Toolset(
        module="kueue",
        programs={"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
        stamps=(),
        usual_time="about 2 minutes on two cores after the control plane",
        manifests="sigs.k8s.io/kueue:config/components",
    ),
    "jobset": Toolset(
        module="jobset",
        programs={"jobset": "sigs.k8s.io/jobset"},
        stamps=(),
        usual_time="seconds after Kueue",
        manifests="sigs.k8s.io/jobset:config/components",
    ),
    "trainer": Toolset(
        module="trainer",
        programs={"trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
        stamps=(),
        usual_time="seconds after Kueue",
        manifests="github.com/kubeflow/trainer/v2:manifests/base",
    ),
    "training-operator": Toolset(
        module="training-operator",
        programs={"training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1"},
        stamps=(),
        usual_time="about 1 minute on two cores the first time, then seconds",
        manifests="github.com/kubeflow/training-operator:manifests/base",
    ),
    "prometheus": Toolset(
        module="prometheus",
        programs={
            "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
            "promtool": "github.com/prometheus/prometheus/cmd/promtool",
        },
        stamps=("github.com/prometheus/common/version.Version={github.com/prometheus/prometheus}",),
        # Targets come from files and fixed lists; the clients of two dozen clouds would double the build.
        tags=("remove_all_sd",),
        usual_time="about 5 minutes on two cores the first time, then seconds",
    ),
    "kube-state-metrics": Toolset(
        module="kube-state-metrics",
        programs={"kube-state-metrics": "k8s.io/kube-state-metrics/v2"},
        stamps=(),
        usual_time="about 2 minutes on two cores the first time, then seconds",
    ),
    "kube-score": Toolset(
        module="kube-score",
        programs={"kube-score": "github.com/zegl/kube-score/cmd/kube-score"},
        stamps=("main.version={github.com/zegl/kube-score}",),
        usual_time="about 1 minute on two cores the first time, then seconds",
    ),
    "prometheus-operator": Toolset(
        module="prometheus-operator",
        programs={},
        stamps=(),
        usual_time="seconds",
        manifests="github.com/prometheus-operator/prometheus-operator:example/prometheus-operator-crd",
    ),
    "karpenter": Toolset(
        module="karpenter",
        programs={},
        stamps=(),
        usual_time="seconds",
        manifests="sigs.k8s.io/karpenter:pkg/apis/crds",
    ),
    "kind": Toolset(
        module="kind",
        programs={"kind": "sigs.k8s.io/kind"},
        stamps=(),
        usual_time="about half a minute on two cores the first time, then seconds",
    ),
    "kubelet": Toolset(
        module="controlplane",
        programs={name: f"k8s.io/kubernetes/cmd/{name}" for name in ("kubeadm", "kubelet", "kube-proxy")},
        stamps=_KUBERNETES,
        usual_time="about half a minute on two cores after the control plane",
        of_node=True,
    ),
    "containerd": Toolset(
        module="containerd",
        programs={
            name: f"github.com/containerd/containerd/v2/cmd/{name}"
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
        stamps=("github.com/containerd/containerd/v2/version.Version={github.com/containerd/containerd/v2}",),
        tags=("no_btrfs", "no_devmapper", "no_zfs"),
        usual_time="about a minute on two cores the first time, then seconds",
        of_node=True,
    ),
    "crictl": Toolset(
        module="crictl",
        programs={"crictl": "sigs.k8s.io/cri-tools/cmd/crictl"},
        stamps=("sigs.k8s.io/cri-tools/pkg/version.Version={sigs.k8s.io/cri-tools}",),
        usual_time="about half a minute on two cores the first time, then seconds",
        of_node=True,
    ),
    "kube-router": Toolset(
        module="kube-router",
        programs={"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"},
        stamps=(
            "github.com/cloudnativelabs/kube-router/v2/pkg/version.Version={github.com/cloudnativelabs/kube-router/v2}",
        ),
        usual_time="about 3 minutes on two cores the first time, then seconds",
        of_node=True,
    ),
    "coredns": Toolset(
        module="coredns",
        programs={"coredns": "tilecast.dev/tools/coredns"},
        stamps=(),
        usual_time="about a minute on two cores the first time, then seconds",
        of_node=True,
    ),
}


def cache_folder() -> Path:
    """Return the folder outside the work tree that keeps programs and running clusters; it need not exist yet."""
    if named := os.environ.get("TILECAST_CACHE"):
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "tilecast"


def ensure(name: str) -> Path:
    """Return the folder with every program of the toolset `name`, building them first if they are missing.

    Safe to call from several processes at once: one builds, the others wait.

    Raises:
        BinariesError: Go is absent, or the build fails.
    """
    toolset = TOOLSETS[name]
    given = _from_assets(toolset)
    flags = ["-trimpath", "-ldflags", _ldflags(toolset)]
    flags += [f"-tags={','.join(toolset.tags)}"] if toolset.tags else []
    folder = cache_folder() / f"{name}-{_digest(toolset, flags, given)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
                made = Path(scratch) / "bin"
                made.mkdir()
                _build(toolset, sorted(set(toolset.programs) - set(given)), flags, made)
                for program, path in given.items():
                    (made / program).symlink_to(path)
                made.rename(folder)
    return folder


def say(message: str) -> None:
    """Write one line of progress to standard error."""
    print(message, file=sys.stderr, flush=True)


def _from_assets(toolset: Toolset) -> dict[str, Path]:
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if not named or not toolset.assets:
        return {}
    held = {program: Path(named).resolve() / program for program in toolset.programs}
    held = {program: path for program, path in held.items() if os.access(path, os.X_OK)}
    if missing := [program for program in toolset.assets if program not in held]:
        say(f"KUBEBUILDER_ASSETS={named} is not used: it lacks {', '.join(missing)}")
        return {}
    return held


def pinned(toolset: Toolset) -> dict[str, str]:
    """Return the version of every module that go.mod requires, by the module's path."""
    text = (TOOLS / toolset.module / "go.mod").read_text(encoding="utf-8")
    return dict(re.findall(r"^\s*(?:require\s+)?(\S+) (v\S+)(?: // indirect)?$", text, flags=re.MULTILINE))


def _ldflags(toolset: Toolset) -> str:
    versions = pinned(toolset)

    def version(match: re.Match[str]) -> str:
        parts = dict(zip(("major", "minor"), versions[match[1]].removeprefix("v").split("."), strict=False))
        return parts[match[2]] if match[2] else versions[match[1]]

    stamps = [re.sub(r"\{([^:}]+):?(\w*)\}", version, stamp) for stamp in toolset.stamps]
    return " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in stamps)])


def _digest(toolset: Toolset, flags: list[str], given: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    folder = TOOLS / toolset.module
    for path in (*sorted(folder.glob("*.go")), folder / "go.mod", folder / "go.sum"):
        digest.update(path.read_bytes())
    described = [*flags, *(f"{name}={package}" for name, package in toolset.programs.items()), os.uname().machine]
    described += [toolset.manifests] if toolset.manifests else []
    for path in given.values():
        fact = path.stat()
        described.append(f"{path} {fact.st_size} {fact.st_mtime_ns}")
    digest.update("\n".join(described).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that builds {path.stem}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(toolset: Toolset, programs: list[str], flags: list[str], into: Path) -> None:
    if not programs and not toolset.manifests:
        return
    contents = ", ".join(programs) or f"the manifests of {toolset.module}"
    go = shutil.which("go")
    if go is None:
        raise BinariesError(
            f"go: not found, and {contents} must be built: install Go 1.26 (https://go.dev/dl), "
            "or point KUBEBUILDER_ASSETS to a folder that holds them"
        )
    say(f"building {contents} from Go modules: {toolset.usual_time}")
    packages = [toolset.programs[program] for program in programs]
    command = [go, "build", *flags, "-o", f"{into}{os.sep}", *packages] if packages else [go, "mod", "download"]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=TOOLS / toolset.module, stdout=output, stderr=output) as build:
            while build.poll() is None:
                try:
                    build.wait(HEARTBEAT_S)
                except subprocess.TimeoutExpired:
                    say(f"  still building, {time.monotonic() - started:.0f} s")
        if build.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if not line.startswith("go: downloading")]
            raise BinariesError(f"go {command[1]} failed in tools/{toolset.module}: {' | '.join(lines[-5:])}")
    for program, package in zip(programs, packages, strict=True):
        (into / _go_name(package)).rename(into / program)
    if toolset.manifests:
        module, folder = toolset.manifests.split(":")
        asked = [go, "list", "-m", "-f", "{{.Dir}}", module]
        run = subprocess.run(asked, cwd=TOOLS / toolset.module, capture_output=True, text=True, check=False)
        if run.returncode:
            raise BinariesError(f"go list failed in tools/{toolset.module}: {run.stderr.strip()[-500:]}")
        # Go keeps its modules read-only; the copy can be removed like any other file.
        shutil.copytree(Path(run.stdout.strip()) / folder, into / "manifests", copy_function=shutil.copyfile)
        for each in (into / "manifests").rglob("*"):
            each.chmod(0o755 if each.is_dir() else 0o644)
        (into / "manifests").chmod(0o755)
    say(f"built in {time.monotonic() - started:.0f} s")


def _go_name(package: str) -> str:
    """Return the name that `go build` gives a package's program: its last path element that is not a major version."""
    return next(part for part in reversed(package.split("/")) if not re.fullmatch(r"v\d+", part))


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Print the folder of the test programs, building them when missing.")
    parser.add_argument("toolset", choices=[*sorted(TOOLSETS), "all"])
    toolset = parser.parse_args().toolset
    try:
        common = [name for name, each in TOOLSETS.items() if not each.of_node]
        for name in common if toolset == "all" else [toolset]:
            print(ensure(name))
    except BinariesError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing was kept of the unfinished build")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
