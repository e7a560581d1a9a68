"""Why a call has not reached its server, in plain words.

gRPC's own words speak of its parts ("SETTINGS frame") and repeat themselves. What a server itself has answered is left
as it is. Pure.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_OF_CONNECTING = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
"""How gRPC begins what it says of a connection that it could not make."""
_TRIED = re.compile(r"ipv[46]:(\S+?): ")
"""The address that gRPC tried last."""
_WHILE_CONNECTING = {
    "Connection refused": "nothing listens at {tried} (connection refused)",
    "No route to host": "no route leads to {tried}",
    "Network is unreachable": "no route leads to {tried}",
    "SETTINGS frame": "what listens at {tried} accepts connections and says nothing",
    "timed out": "{tried} is silent",
    "Timeout": "{tried} is silent",
    "Socket closed": "what listens at {tried} closes each connection",
    "Connection reset": "what listens at {tried} closes each connection",
    "lookup": "this host can't resolve the name",
    "DNS resolution failed": "this host can't resolve the name",
}
"""The first words that gRPC's have decide."""
_LATER = {
    "Deadline Exceeded": "no answer came in time",
    "Socket closed": "the connection was closed",
    "recvmsg:Connection reset by peer": "the connection was closed",
    "sendmsg:Broken pipe": "the connection was closed",
    "ping timeout": "the connection has gone silent",
    "keepalive watchdog timeout": "the connection has gone silent",
}


def why_unreached(details: str) -> str:
    """The details of a call's error in plain words, if gRPC has written them; otherwise as they are."""
    if not details.startswith(_OF_CONNECTING):
        return _LATER.get(details, details)
    tried = _TRIED.search(details)
    place = unquote(tried[1]) if tried else "the address"
    known = next((words for sign, words in _WHILE_CONNECTING.items() if sign in details), "")
    return known.format(tried=place) or details.rpartition("last error: ")[2]
