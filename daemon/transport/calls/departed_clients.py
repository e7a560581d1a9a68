"""A client that leaves while it is answered is no error of this process.

gRPC logs a traceback for each. Any user could fill the log of a server with them, as fast as they can open calls.
"""

from __future__ import annotations

import logging

_GRPC = logging.getLogger("grpc._cython.cygrpc")


def log_none() -> None:
    """Have gRPC log no client that has left. It logs other errors of handlers as before."""
    _GRPC.addFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    # The class is in no interface of gRPC.
    return not record.exc_info or getattr(record.exc_info[0], "__name__", "") != "ExecuteBatchError"
