"""The image of a node of kind, made from kind's and Kubernetes' Go modules and from Debian's packages.

It is kind's own image, `kindest/node`, but needs no registry: the files of `images/base` of kind's module on Debian,
with kubelet, kubeadm, containerd and the images that kubeadm starts, in the versions that the modules of `tools/` pin.
runc and the CNI plugins are Debian's. Three things differ from kind's image:

- Nodes also start with cgroups v1, and where nobody may lower a process's OOM score.
- Pods get their network from a loop of kubectl (`kind/files/network.sh`) instead of kindnetd, which no module holds,
  and kube-router enforces NetworkPolicies.
- There is no volume provisioner.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import archives
import binaries
from archives import Contents

TOOLS = Path(__file__).resolve().parent
FILES = TOOLS / "kind" / "files"
_PROMETHEUS = re.compile(r"image: (\S+/prometheus:\S+)")
_DEBIAN = "bookworm"
"""The last release whose systemd starts with cgroups v1."""
_PACKAGES = (
    "bash", "busybox-static", "ca-certificates", "conntrack", "containernetworking-plugins", "curl", "e2fsprogs",
    "ethtool", "iproute2", "ipset", "iptables", "jq", "kmod", "libseccomp2", "mount", "nftables", "procps", "runc",
    "systemd", "util-linux",
)  # fmt: skip
_PROGRAMS = (
    ("containerd", "containerd", "usr/local/bin"),
    ("containerd", "containerd-shim-runc-v2", "usr/local/bin"),
    ("containerd", "ctr", "usr/local/bin"),
    ("crictl", "crictl", "usr/local/bin"),
    ("controlplane", "kubectl", "usr/bin"),
    ("kubelet", "kubeadm", "usr/bin"),
    ("kubelet", "kubelet", "usr/bin"),
)
"""Toolset, program and target folder of the programs that are copied into a node."""
_UNITS = (
    "lib/systemd/system/multi-user.target.wants/*",
    "lib/systemd/system/local-fs.target.wants/*",
    "lib/systemd/system/basic.target.wants/*",
    "lib/systemd/system/sockets.target.wants/*udev*",
    "lib/systemd/system/sockets.target.wants/*initctl*",
    "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
    "lib/systemd/system/sysinit.target.wants/systemd-sysctl.service",
    "etc/systemd/system/*.wants/*",
)
"""Units that a node must not start.

They are those that kind's Dockerfile removes, and systemd-sysctl, which would set Debian's defaults
(`kernel.pid_max`) for the whole machine.
"""
_CLUTTER = (
    "images.tar", "pause", "usr/share/doc/*", "usr/share/locale/*", "usr/share/man/*",
    "var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*",
)  # fmt: skip
_IMPORT = """
mount -t sysfs -o ro sysfs /sys
mount -t tmpfs tmpfs /run
containerd > /run/log 2>&1 & daemon=$!
tries=0
until [ -S /run/containerd/containerd.sock ]; do
  if [ $tries = 600 ] || ! kill -0 $daemon; then
    tail -5 /run/log >&2
    exit 1
  fi
  tries=$((tries + 1))
  sleep 0.1
done
ctr --namespace=k8s.io images import --all-platforms --no-unpack --digests \\
  --label=io.cri-containerd.pinned=pinned /images.tar
kill $daemon
wait $daemon || true
"""
"""Script that imports images into the store of the node's containerd, as `kind build node-image` does."""


class NodeImageError(Exception):
    """The image cannot be made; the message says which program failed, and how."""


@dataclass(frozen=True, slots=True)
class Made:
    """Paths of the archives, and their digest."""

    node: Path
    """File system of a node, for `docker import`."""
    prometheus: Path
    """Image of the Prometheus that `tests/e2e/prometheus.yaml` names."""
    digest: str
    """Digest of the programs, pins and files of a node."""


def ensure() -> Made:
    """Return the archives, made first if they are missing; those with other digests are then deleted.

    Only one process at a time may call it.

    Raises:
        NodeImageError: a program failed.
        binaries.BinariesError: a program of a node cannot be built.
    """
    toolsets = ["controlplane", "prometheus", *(name for name, each in binaries.TOOLSETS.items() if each.of_node)]
    programs = {name: binaries.ensure(name) for name in toolsets}
    digest = _digest(programs)
    folder = binaries.cache_folder() / f"kind-node-{digest}"
    if not folder.exists():
        for other in folder.parent.glob("kind-node-*"):
            shutil.rmtree(other)
        binaries.say("making the image of a node of kind (about a minute)")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
            root, made = Path(scratch) / "root", Path(scratch) / "made"
            made.mkdir()
            _make(programs, root, made)
            made.rename(folder)
    return Made(folder / "node.tar", folder / "prometheus.tar", digest)


def _digest(programs: Mapping[str, Path]) -> str:
    sources = [Path(__file__), Path(archives.__file__), *sorted(FILES.iterdir()), TOOLS / "kind" / "go.mod"]
    parts = [path.name for path in programs.values()] + [path.read_text() for path in sources]
    return hashlib.sha256("\n".join([*parts, _prometheus()]).encode()).hexdigest()[:16]


def _prometheus() -> str:
    manifest = (TOOLS.parent / "tests" / "e2e" / "prometheus.yaml").read_text()
    (name,) = map(str, _PROMETHEUS.findall(manifest))
    return name


def _make(programs: Mapping[str, Path], root: Path, made: Path) -> None:
    run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _DEBIAN, str(root))
    kubernetes = binaries.pinned(binaries.TOOLSETS["controlplane"])["k8s.io/kubernetes"]
    _copy_files(programs, root, kubernetes)
    _configure(root)
    archives.write(root / "images.tar", _images(programs, root, kubernetes))
    # Mounts and processes of the import are in their own namespaces and end with it, however it ends.
    alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc")
    run(*alone, "chroot", str(root), "sh", "-euc", _IMPORT)
    _remove(root, _CLUTTER)
    run("tar", "--numeric-owner", "--xattrs", "-C", str(root), "-cf", str(made / "node.tar"), ".")
    server = archives.layer({"/bin/prometheus": programs["prometheus"] / "prometheus"})
    archives.write(made / "prometheus.tar", {_prometheus(): Contents([_libc(root), server], ["/bin/prometheus"])})


def _copy_files(programs: Mapping[str, Path], root: Path, kubernetes: str) -> None:
    """Copy the files that kind's Dockerfile copies, and the programs."""
    base = _module("kind", "sigs.k8s.io/kind") / "images" / "base" / "files"
    for source in (path for path in base.rglob("*") if path.is_file()):
        name = source.relative_to(base)
        _copy(source, root / name, 0o755 if name.parent.name == "bin" else 0o644)
    for toolset, program, target in _PROGRAMS:
        _copy(programs[toolset] / program, root / target / program, 0o755)
    for plugin in ("host-local", "loopback", "portmap", "ptp"):
        _copy(root / "usr/lib/cni" / plugin, root / "opt/cni/bin" / plugin, 0o755)
    for manifest in ("default-cni.yaml", "default-storage.yaml"):
        _copy(FILES / manifest, root / "kind/manifests" / manifest, 0o644)
    (root / "etc/kubernetes/manifests").mkdir(parents=True)
    (root / "kind/version").write_text(kubernetes)


def _configure(root: Path) -> None:
    _remove(root, _UNITS)
    with (root / "etc/systemd/journald.conf").open("a") as journald:
        journald.write("ReadKMsg=no\n")
    (root / "sbin/init").symlink_to("/usr/lib/systemd/systemd")
    run("chroot", str(root), "systemctl", "enable", "kubelet", "containerd", "undo-mount-hacks")
    run("chroot", str(root), "systemctl", "mask", "systemd-binfmt.service")
    # Since Kubernetes 1.35 a kubelet refuses cgroups v1 by default; with cgroups v2 this option changes nothing.
    defaults = root / "etc/default/kubelet"
    defaults.write_text(f"{defaults.read_text().strip()} --fail-cgroupv1=false\n")
    # kind's entry point makes the same change if it runs without root's rights.
    config = root / "etc/containerd/config.toml"
    config.write_text(config.read_text().replace("restrict_oom_score_adj = false", "restrict_oom_score_adj = true"))
    spec = json.loads(run("chroot", str(root), "ctr", "oci", "spec"))
    spec.setdefault("hooks", {}).setdefault("createContainer", []).append({"path": "/kind/bin/mount-product-files.sh"})
    spec["process"].pop("rlimits", None)
    (root / "etc/containerd/cri-base.json").write_text(json.dumps(spec))


def _images(programs: Mapping[str, Path], root: Path, kubernetes: str) -> dict[str, Contents]:
    """Return the images that kubeadm starts, the pods' sandbox and the network, by their name."""
    listed = run("chroot", str(root), "kubeadm", "config", "images", "list", f"--kubernetes-version={kubernetes}")
    names = {name.rpartition("/")[2].partition(":")[0]: name for name in listed.split()}
    (sandbox,) = re.findall(r'sandbox_image = "(.+)"', (root / "etc/containerd/config.toml").read_text())
    pause = root / "pause"
    source = _module("controlplane", "k8s.io/kubernetes") / "build" / "pause" / "linux" / "pause.c"
    run("cc", "-Os", "-static", "-s", f"-DVERSION=v{sandbox.rpartition(':')[2]}", "-o", str(pause), str(source))
    libc = _libc(root)

    def program(toolset: str, name: str) -> bytes:
        return archives.layer({f"/usr/local/bin/{name}": programs[toolset] / name})

    shell = archives.layer(
        {"/bin/busybox": root / "bin/busybox", "/network.sh": FILES / "network.sh"},
        {f"/bin/{name}": "busybox" for name in ("cat", "grep", "ip", "mv", "sh", "sleep")},
    )
    return {
        **{
            names[name]: Contents([libc, program("controlplane", name)])
            for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
        },
        names["kube-proxy"]: Contents([libc, _netfilter(root), program("kubelet", "kube-proxy")]),
        names["coredns"]: Contents([libc, program("coredns", "coredns")], ["/usr/local/bin/coredns"]),
        sandbox: Contents([archives.layer({"/pause": pause})], ["/pause"]),
        "localhost/kind-network:1": Contents([libc, shell, program("controlplane", "kubectl")], ["/network.sh"]),
        "localhost/kube-router:1": Contents(
            [libc, _netfilter(root), program("kube-router", "kube-router")], ["/usr/local/bin/kube-router"]
        ),
    }


def _netfilter(root: Path) -> bytes:
    """Return a layer with the programs by which kube-proxy and kube-router change the node's tables."""
    programs = ["/usr/sbin/conntrack", "/usr/sbin/ipset", "/usr/sbin/nft", "/usr/sbin/xtables-nft-multi"]
    programs += [f"/{path.relative_to(root)}" for path in root.glob("usr/lib/*/xtables/*.so")]
    tables = (f"{table}{verb}" for table in ("iptables", "ip6tables") for verb in ("", "-save", "-restore"))
    return archives.layer(
        {path: _resolved(root, path) for path in _linked(root, programs)},
        {f"/usr/sbin/{name}": "xtables-nft-multi" for name in tables},
    )


def _libc(root: Path) -> bytes:
    """Return a layer with the C library and its loader, which Go programs link."""
    paths = [path for path in _linked(root, ["/bin/ls"]) if re.search(r"/(libc|ld-linux)[^/]*\.so", path)]
    return archives.layer({path: _resolved(root, path) for path in paths})


def _linked(root: Path, programs: Iterable[str]) -> list[str]:
    """Return the programs and the libraries of a file system that they link."""
    paths = dict[str, None]()
    for program in programs:
        # ldd fails for a program that links nothing.
        listed = run("chroot", str(root), "sh", "-c", f"ldd {program} || true")
        paths |= dict.fromkeys([program, *re.findall(r"(/\S+) \(0x", listed)])
    return list(paths)


def _resolved(root: Path, path: str) -> Path:
    return (root / path.removeprefix("/")).resolve()


def _module(folder: str, name: str) -> Path:
    """Return where Go keeps a module that a folder of `tools/` pins."""
    run("go", "-C", str(TOOLS / folder), "mod", "download", name)
    return Path(run("go", "-C", str(TOOLS / folder), "list", "-m", "-f", "{{.Dir}}", name).strip())


def _copy(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _remove(root: Path, patterns: Iterable[str]) -> None:
    for path in [path for pattern in patterns for path in root.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run(*words: str) -> str:
    """Return what a program prints.

    Raises:
        NodeImageError: the program fails.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeImageError(f"{' '.join(words[:4])} failed: {(done.stderr.strip() or done.stdout.strip())[-1500:]}")
    return done.stdout
