"""What the kernel says of the host in files of /sys and /proc: read in a thread with a deadline, believed with care.

`daemon/node/sensors` imports it.

May import: nothing.
"""
