#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# etcd.sh PREFIX: a supported etcd, on PATH or under PREFIX/usr/bin. Debian's package is unpacked there without being
# installed: no root is needed and no daemon starts.
#
# Supported is 3.4 from 3.4.23 on, and everything from 3.5.3 on: 3.5.0 to 3.5.2 can lose committed data after a crash.
# deltaserve/up/binaries.py decides the same when a cluster starts.
set -eu
. "$(dirname "$0")/common.sh"
prefix=$1

version_of() { "$1" --version 2>/dev/null | sed -n 's/^etcd Version: *\([0-9][0-9.]*\).*/\1/p'; }

supported() {
    major=$(echo "$1" | cut -d. -f1)
    minor=$(echo "$1" | cut -d. -f2)
    patch=$(echo "$1" | cut -d. -f3)
    [ -n "$patch" ] || return 1
    [ "$major" -gt 3 ] && return 0
    [ "$major" -lt 3 ] && return 1
    case $minor in
    0 | 1 | 2 | 3) return 1 ;;
    4) [ "$patch" -ge 23 ] ;;
    5) [ "$patch" -ge 3 ] ;;
    esac
}

for candidate in "$(command -v etcd 2>/dev/null || true)" "$prefix/usr/bin/etcd"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ]; then
        version=$(version_of "$candidate")
        if supported "$version"; then
            exit 0
        fi
        say "$candidate is ${version:-of unknown version}: not supported, looking for another"
    fi
done

remedy="put etcd 3.4.23, or 3.5.3 or newer, on PATH"
command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 ||
    fail "etcd: not found, and this system has no apt-get to get it with; $remedy"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "etcd: unpacking Debian's etcd-server into $prefix"
if ! (cd "$work" && apt-get download -q etcd-server >/dev/null 2>&1); then
    if as_admin=$(admin); then
        # shellcheck disable=SC2086
        $as_admin apt-get update -q >/dev/null || true
    fi
    # apt drops its rights for downloads; the folder must be writable for that user too.
    chmod 777 "$work"
    (cd "$work" && apt-get download -q etcd-server >/dev/null) ||
        fail "etcd: apt-get cannot download etcd-server (run 'apt-get update' as root?); or $remedy"
fi
mkdir -p "$prefix"
dpkg-deb -x "$work"/etcd-server_*.deb "$prefix"
version=$(version_of "$prefix/usr/bin/etcd")
if ! supported "$version"; then
    rm -rf "$prefix/usr/bin/etcd"
    fail "etcd: this system's package is ${version:-of unknown version}, which is not supported; $remedy"
fi
