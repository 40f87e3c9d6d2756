"""The image's recipe: it copies existing files, installs locked packages, and runs as an unprivileged user."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def locked(name: str) -> dict[str, str]:
    """Return the requirements of a lock file: `name==version ; marker` -> its hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    return dict(re.split(r"\s+(?=--hash)", entry, maxsplit=1) for entry in entries)


@pytest.mark.parametrize("name", ["requirements-operator.lock", "requirements-build.lock"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    assert locked(name)
    for hashes in locked(name).values():
        assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64}\s*)+", hashes)


def test_the_image_installs_what_the_tests_ran_with() -> None:
    # A package that the image needs only on Windows may be needed everywhere by the tests.
    whole, image = (
        {entry.split(" ;")[0]: hashes for entry, hashes in locked(name).items()}
        for name in ("requirements.lock", "requirements-operator.lock")
    )
    assert {name: whole.get(name) for name in image} == image


def test_the_operator_needs_nothing_that_is_not_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = project["dependencies"] + project["optional-dependencies"]["operator"]
    names = {re.split(r"[^a-z0-9-]", line.lower())[0] for line in required}
    assert names <= {entry.split("==")[0] for entry in locked("requirements-operator.lock")}


def test_the_build_backend_is_the_locked_one() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(required) <= locked("requirements-build.lock").keys()


def test_everything_it_copies_is_there_and_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.+)$", RECIPE, re.MULTILINE) for source in line.split()[:-1]
    ]
    assert set(copied) == let_in
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_it_runs_as_the_user_that_the_chart_names() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", RECIPE, re.MULTILINE)
    security = (ROOT / "charts" / "tilecast" / "values.yaml").read_text()
    assert re.findall(r"runAs(?:User|Group): (\d+)", security) == list(user)
    assert "0" not in user


def test_the_user_has_a_name_although_the_image_does_not_know_the_number() -> None:
    # kopf asks getpass for it, which fails for a number without an entry in /etc/passwd.
    assert re.search(r"^ENV LOGNAME=\w+$", RECIPE, re.MULTILINE)
