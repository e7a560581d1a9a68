"""What `muster top` receives, and when; and the file of a recording: a JSON object on each line. Pure.

{"at_s": 1800000000.25, "view": {...}}         a GangView (api.proto)
{"at_s": 1800000000.31, "event": {...}}        an EventRecord
{"at_s": 1800000001.02, "jobs": {...}}         a ListReply
{"at_s": 1800000001.09, "nodes": {...}}        a NodesReply
{"at_s": 1800000007.77, "trouble": "..."}      why nothing comes, in words
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from muster.launcher.errors import WrongInput
from muster.v1.api_pb2 import EventRecord, GangView, ListReply, NodesReply

_KINDS = {"view": GangView, "event": EventRecord, "jobs": ListReply, "nodes": NodesReply}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `at_s`: when it came (seconds since the epoch). `content`: a text says why nothing comes."""

    at_s: float
    content: GangView | EventRecord | ListReply | NodesReply | str


def to_line(message: Message) -> str:
    """The message as a line of a recording."""
    content = message.content
    if isinstance(content, str):
        return json.dumps({"at_s": message.at_s, "trouble": content})
    return json.dumps(
        {"at_s": message.at_s, _NAMES[type(content)]: MessageToDict(content, preserving_proto_field_name=True)}
    )


def read_recording(lines: Iterable[str], name: str) -> list[Message]:
    """The messages of a recording. A last line that was not written to its end is left out.

    Raises:
        WrongInput: `name` is no recording.
    """
    texts = [text for text in lines if text.strip()]
    if texts and not texts[-1].endswith("\n"):
        texts.pop()
    found = [_from_line(text, f"line {number} of {name}") for number, text in enumerate(texts, 1)]
    if not found:
        raise WrongInput(f"{name} holds no messages: muster top --record FILE writes them")
    return found


def _from_line(text: str, place: str) -> Message:
    try:
        fields = json.loads(text)
        at_s = float(fields.pop("at_s"))
        [(name, content)] = fields.items()
        if name == "trouble":
            return Message(at_s, str(content))
        return Message(at_s, ParseDict(content, _KINDS[name](), ignore_unknown_fields=True))
    except (ValueError, KeyError, TypeError, AttributeError, ParseError) as error:
        raise WrongInput(f"{place} is no message of a recording of muster top: {str(error)[:200]}") from None
