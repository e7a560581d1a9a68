#!/bin/bash
# PID 1 of every container of a test cluster.  usage: init.sh ROLE DAEMONS STANDBY CONFINED
# Starts the services of the role, restarts services that have ended (as systemd would), and reaps orphans: bash reaps
# every process that the kernel gives to PID 1.
#
# /run/cluster/NAME.pid   the pid of service NAME
# /run/cluster/NAME.hold  while this file exists, NAME is not restarted
set -u
role=$1 daemons=$2 standby=$3 confined=$4
run=/run/cluster

rm -rf $run /run/munge/* /run/muster /dev/shm/*
mkdir -p $run /run/munge /run/slurm /run/muster /etc/munge /var/log/munge /var/log/muster
chown munge: /run/munge /var/log/munge
chown slurm: /run/slurm /run/muster
chmod 0755 /run/munge
install -o munge -g munge -m 0400 /cluster/munge.key /etc/munge/munge.key
: >/etc/resolv.conf # names come only from /etc/hosts: any other lookup fails at once
export PATH=/opt/muster/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export USE_LIBUV=0 LANG=C.UTF-8

# A service that fails at once is restarted with a backoff of up to 5 s.
supervise() {
    local name=$1 tenths=1 began
    shift
    while :; do
        while [ -e "$run/$name.hold" ]; do sleep 0.1; done
        began=$SECONDS
        "$@" >>"/var/log/muster/$name.log" 2>&1 &
        echo $! >"$run/$name.pid"
        wait $!
        rm -f "$run/$name.pid"
        if ((SECONDS - began > 10)); then tenths=1; else tenths=$((tenths < 25 ? tenths * 2 : 50)); fi
        sleep "$((tenths / 10)).$((tenths % 10))"
    done
}

as() { # as USER command...
    local user=$1
    shift
    exec setpriv --reuid "$user" --regid "$user" --init-groups "$@"
}

if [ -d /cluster/metrics ]; then
    install -d -o slurm -g slurm -m 0700 $run/metrics # muster.toml names it
    install -o slurm -g slurm -m 0400 /cluster/metrics/token /cluster/metrics/metrics/coordinator.{pem,key} $run/metrics
fi

supervise munged as munge munged --foreground &
for _ in {1..200}; do
    [ -S /run/munge/munge.socket.2 ] && break
    sleep 0.05
done

coordinate() {
    install -d -o slurm -g slurm -m 0700 $run/tls # muster.toml names it
    install -o slurm -g slurm -m 0400 "/cluster/pki/$HOSTNAME"/coordinator.{pem,key} $run/tls
    local state=(--state-dir /var/lib/muster)
    if [ "$standby" != 0 ]; then
        install -d -o slurm -g slurm -m 0700 /shared/muster
        state=(--state-dir /shared/muster --shared-state)
    fi
    [ "$daemons" = 0 ] || supervise muster-coordinator as slurm \
        muster-coordinator --listen 0.0.0.0:7070 "${state[@]}" --policy /etc/muster/policy.toml &
}

account() { # slurmdbd wants a folder of its own: its file must belong to the Slurm user
    install -d -o slurm -g slurm $run/slurmdbd /run/mysqld
    install -o slurm -g slurm -m 0600 /cluster/slurmdbd.conf $run/slurmdbd
    ln -s /etc/slurm/slurm.conf $run/slurmdbd
    supervise mariadbd as slurm mariadbd --defaults-file=/etc/mysql/accounts.cnf &
    supervise slurmdbd as slurm env SLURM_CONF=$run/slurmdbd/slurm.conf slurmdbd -D &
    # slurmctld does not start for a cluster that slurmdbd does not know.
    for _ in {1..600}; do
        sacctmgr -iQ add cluster muster >/dev/null 2>&1
        sacctmgr -nP show cluster format=cluster 2>/dev/null | grep -q . && break
        sleep 0.1
    done
}
# slurmd makes cgroups below that of the container. Version 2 allows no processes beside them.
own_cgroups() {
    local group=/sys/fs/cgroup
    if [ -e $group/cgroup.controllers ]; then
        mount -o remount,bind,rw $group
        mkdir -p $group/init
        while read -r process; do echo "$process" >$group/init/cgroup.procs; done <$group/cgroup.procs
        sed 's/[^ ]*/+&/g' $group/cgroup.controllers >$group/cgroup.subtree_control
    else
        for group in $group/*/; do mount -o remount,bind,rw "$group"; done
    fi
}
gpu() { # a device file in place of the GPU with this number
    if [ "$confined" = 0 ]; then mknod -m 0666 "/dev/nvidia$1" c 1 3; else mknod -m 0666 "/dev/nvidia$1" b 7 "$((200 + $1))"; fi
}

case $role in
controller)
    chown slurm: /var/spool/slurmctld /var/lib/muster
    [ ! -e /cluster/slurmdbd.conf ] || account
    supervise slurmctld as slurm slurmctld -D &
    coordinate
    ;;
standby) coordinate ;;
node)
    for number in {0..7}; do [ -e "/dev/nvidia$number" ] || gpu "$number" 2>/dev/null; done
    if [ "$confined" != 0 ]; then
        own_cgroups
        # With what Slurm before 25.11 keeps of a lost job, its next run can't start (docs/operations/confinement.md).
        version=$(slurmd -V) # slurm-wlm 24.11.5
        [[ ${version##* } > 25.11 ]] || rm -rf /var/spool/private/* /var/spool/slurmd/cred_state
    fi
    touch /var/log/muster-kmsg
    chmod 0644 /var/log/muster-kmsg # musterd believes no file that others can write
    mkdir -p $run/host/proc/sys/kernel/random # containers share their kernel, and its boot
    cat /proc/sys/kernel/random/uuid >$run/host/proc/sys/kernel/random/boot_id
    bash /cluster/healthy-host.sh $run/host
    supervise slurmd slurmd -D &
    [ "$daemons" = 0 ] || supervise musterd \
        musterd --listen 0.0.0.0:7071 --kmsg /var/log/muster-kmsg \
        --nvidia-driver /usr/local/lib/libnvidia-ml.so.1.control --host-root $run/host \
        --check-python python3 &
    ;;
login) ;;
esac
while :; do
    sleep 86400 &
    wait $!
done
