# The operator's image: `docker build -t tilecast .`, or buildah, podman, kaniko.
# The base image is any that has Python 3.11 or newer as python3, with venv and pip.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src

# Dependencies first, by version and hash: this layer is rebuilt only when a lock file changes.
COPY requirements-operator.lock requirements-build.lock requirements-sbom.lock ./
RUN python3 -m venv /opt/tilecast \
 && python3 -m venv /opt/build \
 && /opt/tilecast/bin/python -m pip install --no-compile --require-hashes --only-binary :all: --requirement requirements-operator.lock \
 && /opt/build/bin/python -m pip install --require-hashes --only-binary :all: --requirement requirements-build.lock --requirement requirements-sbom.lock

# Times are those of the epoch and nothing is compiled, so that equal sources make equal files.
ENV SOURCE_DATE_EPOCH=315532800 PYTHONDONTWRITEBYTECODE=1

# The wheel, built with the pinned build backend, and nothing that the lock file does not name.
COPY pyproject.toml README.md LICENSE ./
COPY predictor predictor
COPY operator operator
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/tilecast/bin/python -m pip install --no-compile --no-deps --no-index /wheels/*.whl \
 && /opt/tilecast/bin/python -m pip check \
 && /opt/tilecast/bin/python -m pip uninstall --yes pip setuptools \
 && find /opt/tilecast -name __pycache__ -prune -exec rm -r {} +

# What is inside, as a CycloneDX bill of materials.
RUN /opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
      --output-file /opt/tilecast/sbom.cdx.json /opt/tilecast/bin/python

FROM ${BASE_IMAGE}
COPY --from=build /opt/tilecast /opt/tilecast
ENV PATH=/opt/tilecast/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# onnxruntime reports its use to its maker unless it is told not to.
ENV ORT_DISABLE_TELEMETRY=1
# kopf asks for the user's name; a cluster may give a number that has none.
ENV LOGNAME=tilecast
WORKDIR /tmp
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["kopf", "run", "--standalone", "--all-namespaces", "--log-format=json", "-m", "tilecast_operator.main"]
