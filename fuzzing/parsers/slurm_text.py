"""What Slurm prints as text: lists of nodes, the topology, errors; and batch scripts for the in-memory Slurm."""

from muster.slurm.client.errors import SlurmError
from muster.slurm.client.parsing import error_messages, hostlist, records, sbatch_request
from muster.slurm.client.types import Topology

_MOST_CHARS = hostlist.MAX_NAMES * hostlist.MAX_NAME_CHARS


def check(data: bytes) -> None:
    """Each line of `data` as each of these texts."""
    text = data.decode(errors="replace")
    for line in text.split("\n"):
        _check_list(line)
        assert isinstance(error_messages.to_error("look", line), SlurmError)
    try:
        assert isinstance(records.topology(text.split("\n")), Topology)
    except ValueError:
        pass
    try:
        assert sbatch_request.read_request(text, (), "/").work_dir == "/"
    except ValueError:
        pass


def _check_list(line: str) -> None:
    try:
        names = hostlist.expand(line)
    except ValueError:
        return
    assert len(names) <= hostlist.MAX_NAMES
    assert all(len(name) <= hostlist.MAX_NAME_CHARS for name in names)
    assert "[" in line or len(names) <= line.count(",") + 1
