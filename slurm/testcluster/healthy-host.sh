#!/bin/bash
# The files of /sys that show a host without a fault, below the folder $1: a port of InfiniBand, a memory controller.
# usage: healthy-host.sh ROOT
set -eu
root=$1
device=$root/sys/class/infiniband/mlx5_0
port=$device/ports/1
memory=$root/sys/devices/system/edac/mc/mc0
mkdir -p "$port/counters" "$port/hw_counters" "$memory" "$root/proc"
for name in meminfo loadavg self; do ln -sfn "/proc/$name" "$root/proc/$name"; done

put() { # put FILE TEXT: in place whole, for a program may read it at any moment; a repair may run beside the boot
    printf '%s\n' "$2" >"$1.$$"
    mv "$1.$$" "$1"
}

put "$device/board_id" MT_0000000838
put "$port/link_layer" InfiniBand
put "$port/rate" "400 Gb/sec (4X NDR)"
put "$port/phys_state" "5: LinkUp"
put "$port/state" "4: ACTIVE"
for counter in counters/{link_downed,symbol_error,link_error_recovery,port_rcv_errors,port_xmit_discards} \
    counters/{local_link_integrity_errors,excessive_buffer_overrun_errors} \
    hw_counters/{local_ack_timeout_err,roce_slow_restart}; do
    put "$port/$counter" 0
done
put "$memory/ue_count" 0
put "$memory/ce_count" 0
