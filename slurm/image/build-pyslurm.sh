#!/bin/sh
# Builds pyslurm as a wheel into /out, in a throw-away container of the Debian layer.
# usage: build-pyslurm.sh VERSION PACKAGE...
#
# pyslurm 25.11 insists on Slurm 25.11 headers, yet works with 26.05 when it is told that the headers are
# older and three names are bridged: the first definition is the header's own switch for older call
# signatures, the other two give a renamed function and a dropped error code.
set -eu
version=$1
shift
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
mkdir -p /tmp/include
cp -r /usr/include/slurm /tmp/include/slurm
sed -i 's/^\(#define SLURM_VERSION_NUMBER\) .*/\1 0x190b02/' /tmp/include/slurm/slurm_version.h
SLURM_LIB_DIR=/usr/lib/$(gcc -dumpmachine)
SLURM_INCLUDE_DIR=/tmp/include
CFLAGS="-O1 -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=2029"
export SLURM_LIB_DIR SLURM_INCLUDE_DIR CFLAGS
python3 -m venv --system-site-packages /tmp/venv
/tmp/venv/bin/pip wheel --quiet --no-deps --no-binary pyslurm -w /out "pyslurm==$version"
