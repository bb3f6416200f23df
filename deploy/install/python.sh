#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python 3.11 that can make virtual environments.
set -eu
. "$(dirname "$0")/common.sh"

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

for name in ${PYTHON:-} python3.11 python3; do
    path=$(command -v "$name" 2>/dev/null) || continue
    is_311 "$path" || continue
    if ! "$path" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        apt_install "Python's venv module" python3.11-venv >&2
    fi
    printf '%s\n' "$path"
    exit 0
done
fail "Python 3.11 not found (python3 is $(python3 --version 2>/dev/null || echo missing)); \
install it (on Debian 12: apt-get install python3.11 python3.11-venv), or name it: make install PYTHON=/path/to/python3.11"
