#!/bin/sh
# Runs as the first process of a container, and becomes systemd with a tree of cgroups of its own, whatever the host has.
# Argument: the name of that tree.
set -eu
mkdir -p /mnt/cgroup
mount -t cgroup2 none /mnt/cgroup
mkdir -p "/mnt/cgroup/$1"
echo 1 >"/mnt/cgroup/$1/cgroup.procs"
exec unshare --cgroup sh -c '
    umount -R /sys/fs/cgroup
    umount /mnt/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
    exec /usr/lib/systemd/systemd --unit=basic.target --log-target=console --show-status=no'
