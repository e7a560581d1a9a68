"""A mount whose server answers nothing, as of NFS that hangs: a process that looks at it waits, and SIGKILL with it.

usage: hung_mount.py PID FOLDER. The mount is made in the mount namespace of process PID, and hangs until this ends.
"""

import ctypes
import os
import struct
import sys

CLONE_NEWNS = 0x20000
FUSE_INIT = 26
READY = "mounted"


def main(pid: str, folder: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "setns")
    os.makedirs(folder, exist_ok=True)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other"
    if libc.mount(b"hung", folder.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    print(READY, flush=True)
    while True:
        _, opcode, unique = struct.unpack_from("<IIQ", os.read(device, 1 << 18))
        if opcode == FUSE_INIT:  # version 7.31, buffers of 64 KiB; fuse_init_out in linux/fuse.h
            answer = struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 12, 10, 65536, 1, 1, 0, 0, *[0] * 7)
            os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
