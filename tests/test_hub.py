"""Models by their names on the Hugging Face Hub: from the local cache, or by a package that fetches them."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilecast.cli import main
from tilecast.inputs.job import read_job
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.spec import SpecError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
FLAGS = {"batch": 64, "seq": 1024}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model in a cache of the Hub, with a blob as the package writes it."""
    model = tmp_path / "models--acme--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "blobs").mkdir()
    (model / "blobs" / "a").write_text(json.dumps(CONFIG))
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").symlink_to("../../blobs/a")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return model


@pytest.mark.parametrize("name", ["hf://acme/tiny", "acme/tiny", f"hf://acme/tiny@{COMMIT}", "hf://acme/tiny@main"])
def test_a_model_of_the_cache_is_read_and_its_revision_pinned(cache: Path, name: str) -> None:
    advice = compute_advice(AdviceInputs(JobOptions(name, FLAGS), PoolOptions(gpus="h100-sxm:8"))).advice
    assert advice.request.workload.model.hidden == 512
    assert f"The model is acme/tiny of the Hugging Face Hub at revision {COMMIT}." in advice.notes


def test_a_known_name_stays_a_preset_without_a_look_at_the_hub(cache: Path) -> None:
    job = read_job(JobOptions("meta-llama/Llama-3.1-8B", FLAGS))
    assert job.request().workload.model.name == "llama-3.1-8b"
    assert job.notes == ()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf://acme/other", "huggingface_hub is not installed; give its config.json, or install the extra"),
        ("acme/other", "unknown model 'acme/other'"),
        ("hf://acme/tiny@v2", "is not in the local cache"),
        ("hf://acme", "is no name on the Hugging Face Hub"),
        ("hf://../etc/passwd", "is no name on the Hugging Face Hub"),
        ("hf://acme/tiny@../../x", "is no name on the Hugging Face Hub"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_in_one_line(cache: Path, name: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_job(JobOptions(name, FLAGS))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_cache_is_not_followed(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.json").write_text(json.dumps(CONFIG))
    (cache / "blobs" / "a").unlink()
    (cache / "blobs" / "a").symlink_to(tmp_path / "outside.json")
    with pytest.raises(SpecError, match="is not in the local cache"):
        read_job(JobOptions("hf://acme/tiny", FLAGS))


def test_the_package_fetches_what_the_cache_lacks(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        if name == "acme/gone":
            raise OSError("404 Client Error.\nRepository Not Found")
        return str(cache / "snapshots" / COMMIT / "config.json")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    job = read_job(JobOptions("hf://acme/new@v1", FLAGS))
    assert asked == [("acme/new", "config.json", "v1")]
    assert COMMIT in job.notes[0]
    with pytest.raises(SpecError, match=r"cannot be fetched .*404 Client Error. Repository Not Found"):
        read_job(JobOptions("hf://acme/gone", FLAGS))


@pytest.mark.parametrize("name", ["hf://acme/far", "acme/far", "acme/llama-9-8b"])
def test_without_a_network_one_line_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class LocalEntryNotFoundError(OSError):
        pass

    logger = logging.getLogger("huggingface_hub.utils._http")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)

    def download(*_: object, **__: object) -> str:
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")

    class Package:
        @property
        def hf_hub_download(self) -> object:
            logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
            return download

    monkeypatch.setitem(sys.modules, "huggingface_hub", Package())
    try:
        assert main(["advise", name, "--gpus", "l4:8", "--seq", "1024", "--batch", "64"]) == 2
        logger.warning("as before")
    finally:
        logger.removeHandler(handler)
    line, after = capsys.readouterr().err.splitlines()
    assert after == "as before"
    assert line.startswith(f"tilecast: {name}: " if "://" in name else f"tilecast: model: unknown model '{name}'")
    assert "the Hugging Face Hub cannot be reached; " in line
    assert line.endswith("heck the network, or give its config.json as a file")
    assert "ConfigMap" not in line


def test_a_config_that_is_no_mapping_is_refused(cache: Path) -> None:
    (cache / "blobs" / "a").write_text("[1")
    with pytest.raises(SpecError, match="is no JSON mapping"):
        read_job(JobOptions("hf://acme/tiny", FLAGS))
