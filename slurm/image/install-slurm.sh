#!/bin/sh
# Turns the base layer into one with the Slurm of another Debian: the name behind the slash of each package in
# /recipe/requirements.txt. All else stays as it is.
set -eu
suite=$(sed -n '1s,.*/,,p' /recipe/requirements.txt)
sed "s/ [a-z]* main\$/ $suite main/" /etc/apt/sources.list >/tmp/sources.list
set -- -qq -o Dir::Etc::SourceList=/tmp/sources.list -o Acquire::Check-Valid-Until=false -o Acquire::Languages=none
apt-get "$@" update
# shellcheck disable=SC2046 -- a list of package names
DEBIAN_FRONTEND=noninteractive apt-get "$@" install -y --no-install-recommends --allow-downgrades \
    $(cat /recipe/requirements.txt) >/dev/null
apt-get -qq clean
rm -rf /var/lib/apt/lists/* /tmp/sources.list
