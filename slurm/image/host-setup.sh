#!/bin/sh
# Installs on this host what the test cluster and its tests need and lack, through apt-get (Debian and Ubuntu);
# if packages are named, these and nothing else.
# Does nothing if everything is there already; a docker that answers is used as it is.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
missing="${*:+ $*}"
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
if [ $# -eq 0 ]; then
    need mmdebstrap mmdebstrap
    need ip iproute2
    need chromium chromium
    need promtool prometheus
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"
    if [ "${MUSTER_ENGINE:-podman}" = podman ] && { command -v podman >/dev/null 2>&1 || ! docker version >/dev/null 2>&1; }; then
        need podman podman
        need runc runc
        [ -e /usr/lib/podman/netavark ] || missing="$missing netavark"
        need iptables iptables
    fi
fi
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "host-setup: this system has no apt-get; install by hand:$missing" >&2
    exit 1
fi
root=""
if [ "$(id -u)" -ne 0 ]; then
    root="sudo"
    if ! command -v sudo >/dev/null 2>&1; then
        echo "host-setup: this takes root or sudo; install as root:$missing" >&2
        exit 1
    fi
fi
echo "host-setup: installing$missing" >&2
$root apt-get -qq update
# shellcheck disable=SC2086 -- a list of package names
DEBIAN_FRONTEND=noninteractive $root apt-get -qq install -y --no-install-recommends $missing >/dev/null
