"""Where the lines of this node's ranks go: to stdout and stderr, which srun carries on, or into files of the ranks.

srun knows one task a node, the agent. So whatever differs from rank to rank is done here: labels, and files whose names
hold the number of the task (%t) or the node (%n, %N). All else is srun's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from string import Template

from muster.daemon.agent.launch import file_patterns
from muster.daemon.agent.launch.handover import Shown
from muster.v1.common_pb2 import JobSpec

_NEW_FILE = 0o666
"""The umask takes away from it, as from a file of srun."""
_MOST_AT_ONCE = 1 << 16
"""Bytes of one write: whole lines, if they fit. A write to a pipe returns when all of it has been taken."""


class OutputTarget:
    """The place to which one node writes the output of its ranks.

    Args:
        shown: how the launcher would show its ranks.
        stdout, stderr: descriptors.

    writes: it grows while somebody reads.
    """

    def __init__(self, spec: JobSpec, node: str, shown: Shown, stdout: int = 1, stderr: int = 2) -> None:
        self._output, self._node, self._shown = spec.script_output, node.partition(".")[0], shown
        self._ranks_per_node = max(spec.ranks_per_node, 1)
        self._stdout, self._stderr = stdout, stderr
        self._on_terminal = os.isatty(stdout)
        self._patterns = file_patterns.of_step(os.environ)
        self._files: dict[str, int] = {}
        self._open = True
        self.writes = 0
        self.script_node = next(iter(spec.own_nodes), "")

    @property
    def needs_srun(self) -> bool:
        """Whether the output ends where srun is lost."""
        return not self._output.apart and not self._output.of_rank

    @property
    def script_file(self) -> str:
        """The file that srun writes to; empty: it is no plain file."""
        return file_patterns.expand(self._output.file, self._patterns)

    def shows(self, rank: int) -> bool:
        """Whether the lines of a rank go anywhere but to its log."""
        return rank % self._ranks_per_node not in self._shown.silent

    def front(self, rank: int) -> bytes:
        """What stands in front of each line of a rank."""
        width = self._output.label_width
        label = f"{rank:>{width}}: " if width else ""
        mark = "".join(self._shown.marks[rank % self._ranks_per_node :][:1])
        said = label + Template(mark).safe_substitute(rank=rank, hostname=self._node)
        return os.fsencode(said or (_coloured(rank) if self._on_terminal else ""))

    def labelled(self, rank: int, lines: bytes) -> bytes:
        """Whole lines of a rank, each with what stands in front. srun ends no line at \\r."""
        front = self.front(rank)
        return b"".join(front + line + b"\n" for line in lines.split(b"\n")[:-1]) if front else lines

    def write(self, generation: int, rank: int, lines: bytes) -> None:
        """Write whole lines of a rank; blocks until all is written. Once this fails, nothing is written any more."""
        if not lines or not self._open:
            return
        try:
            to = self._file_of(self._output.of_rank, generation, rank, self._stdout)
            self.write_all(to, self.labelled(rank, lines))
        except OSError as error:
            self.close()
            what = f"{error.filename or self._output.of_rank or 'stdout'}: {error.strerror}"
            with suppress(OSError):
                words = f"muster-agent: the output of ranks goes to their logs alone: {what}\n"
                self.write_all(self._stderr, words.encode())

    def tell(self, generation: int, rank: int, words: str) -> None:
        """Say how a rank has failed. The status of the job says it, too."""
        with suppress(OSError):
            to = self._file_of(self._output.error_of_rank, generation, rank, self._stderr)
            self.write_all(to, f"{words}\n".encode())

    def write_all(self, descriptor: int, data: bytes) -> None:
        """Write all of `data`. Raises OSError."""
        start = 0
        while start < len(data):
            end = min(start + _MOST_AT_ONCE, len(data))
            end = data.rfind(b"\n", start, end) + 1 or end
            start += os.write(descriptor, memoryview(data)[start:end])
            self.writes += 1

    def close(self) -> None:
        """Write no line any more: nobody reads it."""
        self._open = False

    def _file_of(self, name: str, generation: int, rank: int, otherwise: int) -> int:
        """The descriptor of a file of a rank's own, or `otherwise`. The first generation begins the file anew, unless
        --open-mode=append."""
        if not name:
            return otherwise
        number = str(rank // self._ranks_per_node)
        path = file_patterns.expand(name, {**self._patterns, "t": str(rank), "n": number, "N": self._node})
        if path not in self._files:
            anew = 0 if self._output.append or generation > 1 else os.O_TRUNC
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | anew
            self._files[path] = os.open(path, flags, _NEW_FILE)
        return self._files[path]


def _coloured(rank: int) -> str:
    """The number of a rank for a terminal, in one of six colours."""
    return f"\x1b[3{1 + rank % 6}m[{rank}]\x1b[0m "
