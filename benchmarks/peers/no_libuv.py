"""Makes torchrun and its workers run on a PyTorch that was built without libuv, such as Debian's.

Some parts of PyTorch request libuv for the store even if USE_LIBUV says otherwise. Importing this module replaces the
store's class. Run as a program, it is torchrun.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed


class SocketTCPStore(torch.distributed.TCPStore):  # type: ignore[misc]
    """A TCPStore that uses plain sockets by default."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"use_libuv": False, **options})


torch.distributed.TCPStore = SocketTCPStore
# By the module's full name: torch.distributed has a function of the same name.
sys.modules["torch.distributed.rendezvous"].TCPStore = SocketTCPStore  # type: ignore[attr-defined]

if __name__ == "__main__":
    from torch.distributed.run import main  # binds the name TCPStore: not before it is replaced

    main()
