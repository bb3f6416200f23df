#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python.sh [cpu|cuda]: prints the path of a Python that can make virtual environments: 3.11, for CUDA 3.12 as well,
# which is preferred there because it is what vLLM was run with on GPUs.
set -eu
. "$(dirname "$0")/common.sh"
device=${1:-cpu}
wanted=3.11
[ "$device" = cpu ] || wanted="3.12 3.11"

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

for minor in $wanted; do
    for name in ${PYTHON:-} "python$minor" python3; do
        path=$(command -v "$name" 2>/dev/null) || continue
        [ "$(version_of "$path")" = "$minor" ] || continue
        if ! "$path" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            apt_install "Python's venv module" "python$minor-venv" >&2
        fi
        printf '%s\n' "$path"
        exit 0
    done
done
first=${wanted%% *}
fail "Python $(echo "$wanted" | sed 's/ / or /') not found (python3 is $(python3 --version 2>/dev/null || echo missing)); \
install it (where the system has it: apt-get install python$first python$first-venv), or name it: \
make install DEVICE=$device PYTHON=/path/to/python$first"
