"""The stand-in for NVIDIA's management library: its build, and the control file that says what its GPUs report.

`nvml_stand_in.c` describes the control file. A node of a test cluster has no control file until a fault writes one:
for Muster it is then a node without GPUs.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.slurm.image.engine import EngineError, cache_dir

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libnvidia-ml.so.1"
"""The name under which programs load NVIDIA's library."""
CONTROL_SUFFIX = ".control"
MAX_GPUS = 16
"""How many GPUs the library can have."""
LINKS = 18
"""NVLinks of an H100."""
FABRIC_CLUSTER = "0" * 32
"""The id of the NVLink fabric that the GPUs belong to: 16 bytes. The fabric of a single node has zeros."""
_COMPILE_TIMEOUT_S = 60.0


def library(into: Path | None = None) -> Path | None:
    """The compiled library: in the folder `into`, else in Muster's cache folder. None: this host has no gcc.

    Raises:
        EngineError: gcc failed.
    """
    if not shutil.which("gcc"):
        return None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = (into or cache_dir() / f"nvml-{digest}") / LIBRARY
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(path)
    return path


def _compile(path: Path) -> None:
    aside = path.with_suffix(".new")
    options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}")
    command = ["gcc", *options, "-o", str(aside), str(SOURCE), "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    if done.returncode:
        raise EngineError(f"gcc can't compile {SOURCE.name}: {done.stderr.strip()}")
    aside.rename(path)


def healthy_gpu(index: int) -> dict[str, str]:
    """What a GPU without a fault reports, by the key of the control file's line."""
    return {
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "pci": f"00000000:{0x1B + 0x10 * index:02X}:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "reasons": "0x0",
        "violation 1": "0",
        "temperature": "45",
        "threshold 1": "90",
        "margin": "42",
        "power": "110000",
        "ecc 0 0": "0",
        "ecc 1 0": "0",
        "memory 2": "0",
        "memory 7": "0",
        "sram-threshold": "0",
        "remapped": "0 0 0 0",
        "mig": "0",
        "framebuffer": "60000000000 80000000000",
        "busy": "97",
        "pcie": "5 16",
        "max-pcie": "5 16",
        "replays": "0",
        "field 77": "0",
        "field 79": "0",
        "field 194": "-2",
        "field 230": "0",
        "field 271": "0",
        "fabric": f"3 0 {FABRIC_CLUSTER} 7 0",
        **{f"link {link}": "1 0 0 0 0" for link in range(LINKS)},
    }


@dataclass
class ControlFile:
    """The content of a control file. `gpus` has a table for each GPU, `library` the lines about no GPU."""

    gpus: list[dict[str, str]]
    library: dict[str, str] = field(default_factory=lambda: {"driver": "580.95.05"})

    @classmethod
    def of_healthy_gpus(cls, count: int) -> ControlFile:
        """A node with `count` GPUs without a fault."""
        return cls([healthy_gpu(index) for index in range(count)])

    @classmethod
    def parse(cls, text: str) -> ControlFile:
        """The file that `render` has written."""
        file = cls([], {})
        table = file.library
        for line in filter(None, text.splitlines()):
            if line.startswith("gpu "):
                table = {}
                file.gpus.append(table)
            else:
                _read_line(line, table)
        return file

    def render(self) -> str:
        """The text of the file."""
        lines = _lines(self.library)
        for index, gpu in enumerate(self.gpus):
            lines += [f"gpu {index}", *_lines(gpu)]
        return "".join(f"{line}\n" for line in lines)

    def write(self, path: Path) -> None:
        """Put the file in place whole: a program may read it at any moment."""
        aside = path.with_suffix(".new")
        aside.write_text(self.render())
        aside.rename(path)


_KEY_WORDS = {
    "violation": 2,
    "threshold": 2,
    "ecc": 3,
    "memory": 2,
    "link": 2,
    "field": 2,
    "error": 2,
    "delay": 2,
    "hang": 2,
}
"""How many words of a line are its key; one where it is not said: two lines of one key can't both count."""


def _read_line(line: str, table: dict[str, str]) -> None:
    words = line.split(" ")
    key_words = _KEY_WORDS.get(words[0], 1)
    table[" ".join(words[:key_words])] = " ".join(words[key_words:])


def _lines(table: Mapping[str, str]) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in table.items()]
