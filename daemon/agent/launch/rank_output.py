"""Copies what ranks write to the agent's own output, which srun carries to the output of the job's script.

A rank writes to its log file, and waits for nobody. This follows the files of the ranks of this node in a thread, and
copies whole lines: stdout and stderr of a rank are one file, so both go to stdout. However slowly somebody reads, the
files keep what is to come, and memory holds a part of it. When a rank has failed, stderr says how, as torchrun would.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import BinaryIO

from muster.daemon.agent.launch import rank_failure
from muster.daemon.agent.launch.copy_thread import CopyThread
from muster.daemon.agent.launch.output_file import OutputFile
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.agent.ranks.rank_process import Outcome
from muster.daemon.host import rank_log_files

CHUNK_BYTES = 1 << 20
"""Bytes in one read, and of the longest line that is copied as a whole."""
_POLL_S = 0.1
_Key = tuple[int, int]


class RankOutput(CopyThread):
    """The output of the ranks of one node."""

    def __init__(self, run_dir: str, gang: str, node: str, target: OutputTarget) -> None:
        super().__init__("muster-output", _POLL_S, target)
        self._run_dir, self._gang, self._node = run_dir, gang, node
        self._outcomes: dict[_Key, Outcome] = {}
        self._files: dict[_Key, _Followed] = {}
        self._copied: set[_Key] = set()
        self._failed_first: dict[int, int] = {}
        self._carrier = ""
        self._file: OutputFile | None = None

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """These are the ranks of this node now; earlier ones have ended."""
        left = {key: one for key, one in self._outcomes.items() if key not in self._copied}
        self._outcomes = {**left, **{(one.generation, one.rank): one for one in outcomes}}
        for one in outcomes:
            if one.failed:
                self._failed_first.setdefault(one.generation, one.rank)

    def carried_by(self, node: str) -> None:
        """srun is lost, and the agent on `node` goes on with the output of all ranks; empty: srun has it."""
        if node == self._carrier or not self._target.needs_srun:
            return
        self._carrier = node
        self._target.close()
        self._ending.set()
        if self._file is not None:
            self._file.stop()
        self._file = None
        if node == self._node and self._target.script_file:
            self._file = OutputFile(self._run_dir, self._gang, node, self._target)
            self._file.start()

    def close(self) -> None:
        """See CopyThread.close."""
        if not self._carrier:
            super().close()
        elif self._file is not None:  # nobody reads stdout, and a write to it may never end
            self._file.close()

    def copy_once(self) -> bool:
        """See CopyThread.copy_once."""
        outcomes, more = self._outcomes, False
        newest = max((generation for generation, _ in outcomes), default=0)
        for key, outcome in sorted(outcomes.items()):
            # Read after this is known: then nothing can be written behind what is read.
            has_ended = not outcome.alive or key[0] < newest or self._ending.is_set()
            if key in self._copied:
                continue
            if self._target.shows(outcome.rank) and self._copy(outcome):
                more = True
            elif has_ended:
                self._end(key, outcome)
        return more

    def _copy(self, outcome: Outcome) -> bool:
        key = outcome.generation, outcome.rank
        if key not in self._files:
            try:
                path = rank_log_files.log_path(self._run_dir, self._gang, *key)
                self._files[key] = _Followed(rank_log_files.open_to_read(path))
            except OSError:  # the rank has not opened it yet, or never could
                return False
        lines, has_more = self._files[key].read()
        self._target.write(*key, lines)
        return has_more

    def _end(self, key: _Key, outcome: Outcome) -> None:
        self._copied.add(key)
        if followed := self._files.pop(key, None):
            self._target.write(*key, followed.close())
        if self._failed_first.get(outcome.generation) == outcome.rank:
            recorded = rank_failure.recorded_error(self._run_dir, self._gang, outcome)
            file = str(rank_log_files.error_path(self._run_dir, self._gang, *key)) if recorded else ""
            error = outcome.start_error or recorded
            self._target.tell(*key, rank_failure.describe(outcome, self._node, error, file))


class _Followed:
    """A log that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._partial = b""

    def read(self) -> tuple[bytes, bool]:
        """The next whole lines, and whether there may be more."""
        data = os.read(self._file.fileno(), CHUNK_BYTES)
        whole, end, partial = data.rpartition(b"\n")
        if not end and len(self._partial) + len(partial) < CHUNK_BYTES:
            self._partial += partial
            return b"", bool(data)
        if not end:  # a line of this length is split
            lines, self._partial = self._partial + partial, b""
        else:
            lines, self._partial = self._partial + whole + end, partial
        return lines, bool(data)

    def close(self) -> bytes:
        """The last line, if the rank has not ended it."""
        self._file.close()
        return self._partial + b"\n" if self._partial else b""
