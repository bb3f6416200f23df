#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The shared libraries that Mooncake's transfer engine is linked against, and the RDMA providers it looks for.
# Nothing is done when all are there.
set -eu
. "$(dirname "$0")/common.sh"

# library:package
wanted="libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnl-3.so.200:libnl-3-200
libnl-route-3.so.200:libnl-route-3-200 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4"

known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true)
missing=""
for pair in $wanted; do
    library=${pair%%:*}
    case $known in
    *"$library "*) ;;
    *) missing="$missing ${pair#*:}" ;;
    esac
done
[ -d /etc/libibverbs.d ] || missing="$missing ibverbs-providers"

if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # a list of package names
    apt_install "libraries that Mooncake needs" $missing
fi
