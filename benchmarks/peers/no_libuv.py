"""Importing this lets torchrun and its workers run on a PyTorch that was built without libuv, as Debian's was.

Where they connect to each other's store they ask for libuv whatever USE_LIBUV says. As a program it is torchrun.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed


class PlainStore(torch.distributed.TCPStore):  # type: ignore[misc]
    """A TCPStore on plain sockets unless it is told otherwise."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"use_libuv": False, **options})


torch.distributed.TCPStore = PlainStore
# By the module's full name: torch.distributed has a function of the same name.
sys.modules["torch.distributed.rendezvous"].TCPStore = PlainStore  # type: ignore[attr-defined]

if __name__ == "__main__":
    from torch.distributed.run import main  # binds the name TCPStore: not before it is replaced

    main()
