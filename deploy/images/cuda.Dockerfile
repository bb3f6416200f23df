# SPDX-License-Identifier: Apache-2.0
# Workers on NVIDIA GPUs. From the root of the repository:
#   docker build -f deploy/images/cuda.Dockerfile -t deltaserve/cuda:0.1.0 .
# CUDA's libraries and compiler are Python packages here, pinned by cuda.lock; the driver comes from the node, through
# NVIDIA's container runtime. The C compiler is for Triton, which builds its launchers when a kernel is first used.
# The versions of Debian's packages are those of Debian 12; when a security update replaces one, apt-get says so here.

ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
WORKDIR /opt/deltaserve
RUN python -m venv venv
COPY deploy/images/cuda.lock cuda.lock
RUN venv/bin/pip install --no-cache-dir --no-deps -r cuda.lock
COPY pyproject.toml README.md LICENSE ./
COPY deltaserve deltaserve
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY statestore statestore
COPY deploy deploy
COPY router router
RUN venv/bin/pip install --no-cache-dir --no-deps -e . \
    && venv/bin/python -m compileall -q venv deltaserve prefill_worker decode_worker statestore \
    && venv/bin/deltaserve --version

FROM ${BASE}
LABEL org.opencontainers.image.title="deltaserve-cuda" \
      org.opencontainers.image.description="deltaserve's prefill and decode workers on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++=4:12.2.0-3 \
        ibverbs-providers=44.0-2 \
        libc6-dev=2.36-9+deb12u14 \
        libcurl4=7.88.1-10+deb12u15 \
        libgomp1=12.2.0-14+deb12u1 \
        libibverbs1=44.0-2 \
        libnl-3-200=3.7.0-0.2+b1 \
        libnl-route-3-200=3.7.0-0.2+b1 \
        libnuma1=2.0.16-1 \
        librdmacm1=44.0-2 \
        tini=0.19.0-1+b3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 deltaserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin deltaserve
COPY --from=build /opt/deltaserve /opt/deltaserve
ENV PATH=/opt/deltaserve/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/deltaserve
USER 10001:10001
# A tensor-parallel worker has children; tini ends what is left of them, and passes SIGTERM on: a worker drains then.
ENTRYPOINT ["tini", "--", "deltaserve"]
CMD ["--help"]
