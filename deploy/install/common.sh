# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts in this folder; sourced, POSIX sh.

say() { printf '%s\n' "install: $*"; }

fail() {
    printf '%s\n' "error: $*" >&2
    exit 1
}

# Prints how to run a command as the administrator: nothing for root, "sudo -n" where sudo asks for no password.
# Fails where neither is the case.
admin() {
    if [ "$(id -u)" = 0 ]; then
        return 0
    fi
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        printf 'sudo -n'
        return 0
    fi
    return 1
}

# apt_install PURPOSE PACKAGE…: install Debian packages, or end with the command that somebody has to run.
apt_install() {
    purpose=$1
    shift
    command -v apt-get >/dev/null 2>&1 ||
        fail "$purpose: missing, and this system has no apt-get. Install what Debian calls: $*"
    if ! as_admin=$(admin); then
        fail "$purpose: missing, and installing needs the administrator. Run:
    sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    fi
    say "$purpose: installing $*"
    # shellcheck disable=SC2086  # as_admin is one or two words, or none
    if ! DEBIAN_FRONTEND=noninteractive $as_admin apt-get install -y -q --no-install-recommends "$@" \
        >/dev/null 2>&1; then
        # The package lists may be missing or old.
        $as_admin apt-get update -q >/dev/null || say "apt-get update failed; trying with the lists there are"
        DEBIAN_FRONTEND=noninteractive $as_admin apt-get install -y -q --no-install-recommends "$@" >/dev/null ||
            fail "$purpose: apt-get could not install $*"
    fi
}
