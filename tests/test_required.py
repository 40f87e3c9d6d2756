"""`TILECAST_REQUIRE`: tests that a run must not skip."""

from __future__ import annotations

import pytest

from conftest import ROOT, need
from required import is_required


def test_what_is_required_fails_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILECAST_REQUIRE", "image, chromium")
    with pytest.raises(pytest.fail.Exception, match="TILECAST_REQUIRE names chromium, and no Chromium is installed"):
        need("chromium", "no Chromium is installed")
    with pytest.raises(pytest.skip.Exception, match="no Docker engine answers"):
        need("kind", "no Docker engine answers")


def test_a_feature_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILECAST_REQUIRE", "kind, docker")
    with pytest.raises(ValueError, match="TILECAST_REQUIRE names docker: use some of chromium, image, kind, launchers"):
        is_required("kind")


def test_ci_requires_what_may_be_skipped_elsewhere() -> None:
    assert "export TILECAST_REQUIRE=chromium,image,kind\n" in (ROOT / ".ci" / "run").read_text()
