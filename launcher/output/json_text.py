"""Protobuf messages as JSON for scripts: one line, field names as in the .proto files, defaults included. Pure."""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message


def to_json(message: Message) -> str:
    """Returns `message` as one line. 64-bit numbers are strings, as protobuf's JSON requires."""
    return MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    )
