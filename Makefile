# Every command a person or CI needs. `make demo` and `make test` work on a fresh machine with Python 3.11 or
# later and, for the control plane, Go 1.26 or later; nothing needs root, Docker or a GPU, and what could not be tested without
# one of them is named.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := requirements.lock
COMPILE := --generate-hashes --no-emit-index-url --no-header --universal --python-version 3.11
JOB ?= examples/jobs/llama-7b-pretrain.yaml
NODES ?= examples/clusters/mixed.yaml
SETUP := $(VENV)/.installed
UNIT := not cluster and not image and not kind and not long and not data and not launchers
# Of `make bundle`: the reference by digest that was signed.
IMAGE ?= registry.example/tilecast

# Bytecode is written once, not by every process that a test starts, also where a container's image switches that off.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check unit lint types crds dashboards chart docs pictures e2e launchers accuracy dist bundle cluster-demo setup lock clean

demo: $(SETUP)
	@echo "tilecast advise $(JOB) --nodes $(NODES)"
	@$(BIN)/tilecast advise $(JOB) --nodes $(NODES)

# Stories on kind mostly wait, so the unit tests run beside them, and then what the launchers read.
test: lint types
	@echo "tests against a real control plane (its first build takes some minutes)"
	@$(BIN)/python tools/binaries.py all >/dev/null
	@$(BIN)/python tools/checkov.py >/dev/null
	@$(BIN)/python tools/schedulers.py >/dev/null
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target e2e unit launchers
	$(BIN)/pytest -m "cluster or image or long or data" -n 2 --dist loadfile --no-loadscope-reorder

# For use while one writes: what takes half a second or more is left to `make unit`.
check: lint types
	$(BIN)/pytest -m "$(UNIT) and not slow" -n 2 --dist worksteal

unit: $(SETUP)
	$(BIN)/pytest -m "$(UNIT)" -n 2 --dist worksteal

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(SETUP)
	$(BIN)/mypy

crds: $(SETUP)
	$(BIN)/python tools/job_kinds.py
	$(BIN)/python -m tilecast.api.crds --output-dir crds --output-dir charts/tilecast/crds
	$(BIN)/python -m tilecast.api.advice --output schemas/advice.schema.json

dashboards: $(SETUP)
	$(BIN)/python tools/dashboards.py

chart: $(SETUP)
	$(BIN)/python tools/chart_readme.py

docs: $(SETUP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The first screen, which the documentation shows, and photographs of the pages for a release, which need Chromium.
pictures: $(SETUP)
	$(BIN)/python tools/pictures.py --pages dist/pictures

# The stories on real kubelets, in a cluster of kind that is made and deleted: in Docker where an engine answers; else root gets
# an engine for the time being, and whoever is not root is told that they are skipped.
e2e: $(SETUP)
	$(BIN)/python tools/kind_node.py -- $(BIN)/pytest -m kind tests/test_cluster_observe.py $(wildcard tests/test_kind_*.py)

# What `--launch` writes, before the launchers' own parsers, and two processes of it on CPUs. They need torch, so they have an
# environment of their own (3 minutes and 6 GB the first time, in the cache of tools/), where a skip is a failure.
launchers: $(SETUP)
	$(BIN)/python tools/launchers.py pytest -m launchers tests/test_launch_parsers.py tests/test_launch_runs.py -n 2 --dist worksteal

# Forecasts every measured training step below TILECAST_DATA and fails if one differs from the committed forecast; ARGS=--write
# accepts the new ones.
accuracy: $(SETUP)
	$(BIN)/python -m tilecast_lab reprice $(ARGS)

# What a release publishes: wheel, source distribution and kubectl's plugin.
dist: $(SETUP)
	$(BIN)/hatchling build --directory dist
	tar --sort=name --owner=0 --group=0 --mtime=@0 -czf dist/kubectl-tilecast.tar.gz LICENSE -C tools kubectl-tilecast

# What a cluster without a way out needs, as one archive; see docs/releasing.md.
bundle: $(SETUP)
	$(BIN)/python tools/bundle.py --image $(IMAGE) --output dist

cluster-demo: $(SETUP)
	$(BIN)/python tools/demo.py

setup: $(SETUP)

$(SETUP): pyproject.toml lab/pyproject.toml $(LOCK) requirements-build.lock
	@echo "setting up $(VENV) from $(LOCK) (about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit("Tilecast needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-build.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable ./lab
	@touch $@

# Names, versions and hashes only; uv is needed for this target alone.
lock:
	uv pip compile pyproject.toml lab/pyproject.toml --no-emit-package tilecast --extra hub --extra mcp --extra operator --extra plot --extra web --extra dev $(COMPILE) -o $(LOCK)
	uv pip compile pyproject.toml --extra operator $(COMPILE) --constraint $(LOCK) --no-annotate -o requirements-operator.lock
	printf 'editables\nhatchling==1.27.0\n' | uv pip compile - $(COMPILE) --no-annotate -o requirements-build.lock
	printf 'checkov>=3.3\n' | uv pip compile - $(COMPILE) --no-annotate -o requirements-checkov.lock
	printf 'ray==2.60.0\nskypilot==0.14.1\n' | uv pip compile - $(COMPILE) --no-annotate -o requirements-schedulers.lock
	printf 'uv>=0.9\n' | uv pip compile - $(COMPILE) --no-annotate -o requirements-uv.lock
	printf 'hypothesis>=6.120\njsonschema\npytest>=8.3\npytest-asyncio>=0.25\npytest-timeout>=2.3\npytest-xdist>=3.6\n' | uv pip compile pyproject.toml - --extra launchers --extra vision $(COMPILE) --no-annotate -o requirements-launchers.lock
	printf 'cyclonedx-bom>=7\n' | uv pip compile - $(COMPILE) --no-annotate --constraint $(LOCK) -o requirements-sbom.lock

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
