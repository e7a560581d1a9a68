"""Goes on with the output of a user's own script when the script's node is lost, and with it srun.

Ranks write to their logs, on shared storage. One agent then copies the logs of all ranks to the end of the file that
srun has written to, as whole lines. What srun had written of a log is seen in the file itself: its last line that is in
the file, and is there once in the log, was copied. Logs are opened anew for each look, because a file server shows
another client's lines for certain only then, and because a job has more ranks than a process may have files open.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from pathlib import Path

from muster.daemon.agent.launch.copy_thread import CopyThread
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.host import rank_log_files

_CHUNK_BYTES = 1 << 20
"""Bytes in one read of a log, and of the longest line that is copied as a whole."""
_KNOWN_BYTES = 4 << 20
"""Bytes at the end of the output in which lines of logs are looked for."""
_QUIET_S = 2.0
"""A log whose last line is older than the output by more than this was copied to its end."""
_LABEL = re.compile(rb"^ *\d+: ", re.MULTILINE)
"""What srun --label puts in front of a line."""
_POLL_S = 1.0
_Key = tuple[int, int]


class OutputFile(CopyThread):
    """The output of all ranks of a gang, from the loss of srun on.

    Args:
        target: where it went.
    """

    def __init__(self, run_dir: str, gang: str, node: str, target: OutputTarget) -> None:
        super().__init__("muster-output-file", _POLL_S, target)
        self._run_dir, self._gang = run_dir, gang
        words = f"muster: the script's node {target.script_node} is lost: {node} goes on with the output of ranks\n"
        self._mark = words.encode()
        self._offsets: dict[_Key, int] = {}
        self._ended: set[_Key] = set()
        self._output = -1
        self._first = 0
        self._stopped = False

    def stop(self) -> None:
        """Copy nothing more: another agent does."""
        self._stopped = True
        self._ending.set()

    def _run(self) -> None:
        self.open()
        super()._run()

    def open(self) -> None:
        """Find out what the file holds already, and mark the place where it goes on."""
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._output = os.open(self._target.script_file, flags)
            status = os.fstat(self._output)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("no plain file")
            known = os.pread(self._output, _KNOWN_BYTES, max(status.st_size - _KNOWN_BYTES, 0))
            logs = self._logs(0)
            newest = max((generation for generation, _ in logs), default=1)
            self._first = newest - 1
            lines = set(_LABEL.sub(b"", known).split(b"\n"))
            for key, path in logs.items():
                if key[0] >= self._first:
                    front = _LABEL.sub(b"", self._target.front(key[1]))
                    self._offsets[key] = _copied(path, lines, status.st_mtime, front)
            cut_off = known and not known.endswith(b"\n")
            self._target.write_all(self._output, b"\n" + self._mark if cut_off else self._mark)
        except OSError:  # the logs of ranks have all of it
            self._output = -1

    def copy_once(self) -> bool:
        """See CopyThread.copy_once."""
        if self._output < 0 or self._stopped:
            return False
        try:
            logs = self._logs(self._first)
            newest = max((generation for generation, _ in logs), default=0)
            return any([self._copy(key, path, key[0] < newest) for key, path in sorted(logs.items())])
        except OSError:
            self._output = -1
            return False

    def _logs(self, first: int) -> dict[_Key, Path]:
        """The logs of ranks whose output is shown."""
        logs = rank_log_files.newest_logs(self._run_dir, self._gang, first)
        return {key: path for key, path in logs.items() if self._target.shows(key[1])}

    def _copy(self, key: _Key, path: Path, has_ended: bool) -> bool:
        if key in self._ended:
            return False
        offset = self._offsets.setdefault(key, 0)
        # Read after this is known: then nothing can be written behind what is read.
        has_ended = has_ended or self._ending.is_set()
        data = _read(path, offset, _CHUNK_BYTES)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _CHUNK_BYTES else b"")
        self._offsets[key] += len(whole)
        if has_ended and not whole:
            self._ended.add(key)
            whole = data and data + b"\n"
        self._target.write_all(self._output, self._target.labelled(key[1], whole))
        return bool(whole)


def _read(path: Path, offset: int, most: int) -> bytes:
    try:
        with rank_log_files.open_to_read(path) as file:
            return os.pread(file.fileno(), most, offset)
    except OSError:
        return b""


def _copied(path: Path, known: set[bytes], written_at: float, front: bytes) -> int:
    """How much of a log is in the output already, of which `known` has the last lines, without labels, but with
    `front` before each."""
    status = path.stat()
    if status.st_mtime < written_at - _QUIET_S:
        return status.st_size
    begin = max(status.st_size - _CHUNK_BYTES, 0)
    lines = _read(path, begin, _CHUNK_BYTES).split(b"\n")[:-1]
    count, end = Counter(lines), begin + sum(len(line) + 1 for line in lines)
    for line in reversed(lines):
        if line.strip() and count[line] == 1 and front + line in known:
            return end
        end -= len(line) + 1
    return begin
