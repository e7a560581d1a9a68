"""Calls libslurm's `slurm_complete_job` in a process of its own.

    python -m muster.slurm.client.backends.complete_worker [JOB EXIT_CODE]

Exit status: 0 if Slurm accepted the call; 1 if it refused, with Slurm's error message on stderr. Without a job it only
loads the library, and prints its path. This module imports few modules, because a job waits while it starts.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Final

_LIBRARIES: Final = (
    "libslurmfull.so",
    "/usr/lib/*/slurm-wlm/libslurmfull.so",
    "/usr/lib*/slurm/libslurmfull.so",
    "/usr/local/lib*/slurm/libslurmfull.so",
    "/opt/slurm/lib*/slurm/libslurmfull.so",
)
_STEP_ID_SINCE: Final = 44 << 16
"""From Slurm 25.11 on, slurm_complete_job takes a pointer to a step id. Older versions take a plain job id. What
slurm_api_version gives is API_CURRENT of Slurm's file META: 42 for 24.11, 43 for 25.05, 44 for 25.11, 45 for 26.05.
"""
_NO_VAL: Final = 0xFFFFFFFE


class _StepId(ctypes.Structure):
    """slurm_step_id_t of 25.11 and 26.05 (slurm.h)."""

    _fields_ = (
        ("sluid", ctypes.c_uint64),
        ("job_id", ctypes.c_uint32),
        ("step_het_comp", ctypes.c_uint32),
        ("step_id", ctypes.c_uint32),
    )


def _load() -> ctypes.CDLL:
    """Loads libslurmfull with global symbols, because Slurm's plugins need the library's symbols."""
    tried = list(_places())
    for path in (path for pattern in tried for path in glob.glob(pattern) or [pattern]):
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL, use_errno=True)
        except OSError:
            continue
    sys.exit(f"could not load libslurmfull: not in {', '.join(tried)}; set MUSTER_LIBSLURM to its path")


def _places() -> Iterator[str]:
    """What the site names, that of the Slurm whose commands are on PATH, then the usual ones."""
    if named := os.environ.get("MUSTER_LIBSLURM"):
        yield named
    if scontrol := shutil.which("scontrol"):
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(scontrol)))
        yield f"{glob.escape(prefix)}/lib*/slurm/libslurmfull.so"
    yield from _LIBRARIES


def _complete(job: int, exit_code: int) -> str:
    """Calls the library. Returns "" on success, else Slurm's error message."""
    slurm = _load()
    slurm.slurm_init(None)
    slurm.slurm_api_version.restype = ctypes.c_long
    slurm.slurm_strerror.restype = ctypes.c_char_p
    status = ctypes.c_uint32(exit_code << 8)
    if slurm.slurm_api_version() >= _STEP_ID_SINCE:
        step = _StepId(sluid=0, job_id=job, step_het_comp=_NO_VAL, step_id=_NO_VAL)
        failed = slurm.slurm_complete_job(ctypes.byref(step), status)
    else:
        failed = slurm.slurm_complete_job(ctypes.c_uint32(job), status)
    return slurm.slurm_strerror(ctypes.get_errno()).decode() if failed else ""


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(_load()._name)
        sys.exit()
    sys.exit(_complete(int(sys.argv[1]), int(sys.argv[2])) or 0)
