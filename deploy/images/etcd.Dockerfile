# SPDX-License-Identifier: Apache-2.0
# etcd and etcdctl as Debian 12 has them: 3.4.23 is a version that this project supports and is tested with.
#   docker build -f deploy/images/etcd.Dockerfile -t deltaserve/etcd:3.4.23 deploy/images

ARG BASE=debian:12.12-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c

FROM ${BASE} AS unpack
WORKDIR /unpack
# Unpacked, not installed: the package's scripts are for a machine with a service manager.
RUN apt-get update \
    && apt-get download etcd-server=3.4.23-4+b4 etcd-client=3.4.23-4+b4 \
    && for package in ./*.deb; do dpkg-deb -x "$package" /rootfs; done \
    && /rootfs/usr/bin/etcd --version \
    && ETCDCTL_API=3 /rootfs/usr/bin/etcdctl version

FROM ${BASE}
LABEL org.opencontainers.image.title="deltaserve-etcd" \
      org.opencontainers.image.description="etcd 3.4.23, as Debian 12 has it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="3.4.23"
COPY --from=unpack /rootfs/usr/bin/etcd /rootfs/usr/bin/etcdctl /usr/local/bin/
RUN groupadd --gid 10001 etcd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/etcd --shell /usr/sbin/nologin etcd \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/etcd
ENV ETCDCTL_API=3
USER 10001:10001
ENTRYPOINT ["etcd"]
