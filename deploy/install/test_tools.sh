#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What tests need beside Python packages; `make dev` runs it. Nothing is done when all is there.
#   promtool    checks and tests the Prometheus rules
#   chromium    shows the status page
set -eu
. "$(dirname "$0")/common.sh"

# command:package
wanted="promtool:prometheus chromium:chromium"

missing=""
for pair in $wanted; do
    PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done

if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # a list of package names
    apt_install "tools that tests need" $missing
fi
