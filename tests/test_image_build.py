"""The image, built as users build it, and its programs, run as the image's user."""

import json
from collections.abc import Iterator

import pytest

import image as builder
from conftest import need
from image import Image, ImageError
from test_image import locked

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    try:
        builder.prepare()
    except ImageError as error:
        need("image", f"no image can be built here: {error}")
    return builder.build("localhost/tilecast:test")


def test_it_answers_as_nobody_in_particular(image: Image) -> None:
    done = image.run("tilecast", "advise", "gpt2", "--seq=1024", "--batch=64", "--gpus=h100-sxm:8,t4:4", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recommendation"]["pool"] == "h100-sxm"
    assert image.run("id", "-u").stdout.strip() == "65532"


@pytest.mark.parametrize("user", ["", "1000660000:0"], ids=["as itself", "as OpenShift's"])
def test_the_operator_loads_and_says_what_it_lacks(image: Image, user: str) -> None:
    done = image.run("kopf", "run", "--standalone", "--all-namespaces", "-m", "tilecast_operator.main", user=user)
    assert done.returncode != 0
    assert "login" in (done.stdout + done.stderr).lower()


def test_neither_compiler_nor_installer_nor_training_stack_is_inside(image: Image) -> None:
    for module in ("pip", "setuptools", "jax", "onnx", "torch", "tilecast_lab"):
        assert image.run("python", "-c", f"import {module}").returncode != 0, module
    for program in ("gcc", "cc", "make"):
        assert image.run(program, "--version").returncode != 0, program


def test_its_bill_of_materials_names_what_the_lock_file_names(image: Image) -> None:
    bill = json.loads(image.run("cat", "/opt/tilecast/sbom.cdx.json").stdout)
    assert bill["bomFormat"] == "CycloneDX"
    parts = {f"{part['name'].lower().replace('_', '-')}=={part['version']}" for part in bill["components"]}
    parts = {part for part in parts if not part.startswith("tilecast==")}
    assert len(parts) > 20
    assert parts <= {entry.split()[0] for entry in locked("requirements-operator.lock")}
    assert bill["metadata"]["component"]["name"] == "tilecast"


def test_equal_sources_make_the_same_image(image: Image) -> None:
    if image.engine == "docker":
        pytest.skip("Docker's classic builder stamps layers with the time; buildah does not")
    assert builder.build("localhost/tilecast:again").digest == image.digest
