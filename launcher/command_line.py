"""The parser of the command line, with help and errors in plain words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from muster.daemon.host import clock
from muster.launcher.errors import WrongInput
from muster.launcher.output.terminal_width import columns

_NUMBERS: dict[object, str] = {int: "a whole number", float: "a number"}


_MOST_DIGITS = 18
"""Of a number that the wire and a journal hold."""
_SPANS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def since(text: str) -> float:
    """The type of an option that says how far to look back, in seconds until now: "30min", "12h", "7d", or a date with
    or without a time, in the zone of this host if it names none: "2026-11-20", "2026-11-20T08:30".

    Raises:
        argparse.ArgumentTypeError: it is none, or it is yet to come.
    """
    number = text.rstrip("".join(_SPANS))
    unit = text[len(number) :]
    if unit in _SPANS and number.replace(".", "", 1).isdecimal():
        return float(number) * _SPANS[unit]
    try:
        ago_s = clock.wall() - datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        words = "must be a number with s, min, h or d, as 12h or 7d, or a date, as 2026-11-20 or 2026-11-20T08:30"
        raise argparse.ArgumentTypeError(f"{text!r} {words}") from None
    if ago_s <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is yet to come")
    return ago_s


def whole_number(text: str, least: int = 0) -> int:
    """The type of an option for a number that the wire can hold.

    Raises:
        argparse.ArgumentTypeError: it is none, or less than `least`.
    """
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
        words = f"must be a whole number from {least} on, with {_MOST_DIGITS} digits at most"
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return int(text)


Split = Callable[[Sequence[str], Mapping[str, argparse.Action]], tuple[list[str], dict[str, Any]]]
"""Takes the words that are not for the parser out of a command line: gives those that are, and what it has made of the
others, by the name that the options shall have. Raises ValueError: a word is wrong."""


class _Help(argparse.HelpFormatter):
    """The help. No word is broken at its hyphens, so that a value can be copied."""

    def __init__(self, prog: str) -> None:
        # argparse imports shutil with all its compressors to find the width, for each call of a command.
        super().__init__(prog, width=columns() - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # argparse does so, too: only a help needs it

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandLine(argparse.ArgumentParser):
    """The parser of the whole program, or of one of its commands."""

    def __init__(self, *, advice: str = "", **more: Any) -> None:
        """`advice`: what to do with an option that does not exist."""
        self._advice = advice
        self.split: Split | None = None
        # Cut off names would make --node another word for --nodes or --node-mtbf, whichever there is.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what the command does not know. The whole parser would show its own usage."""
        own: dict[str, Any] = {}
        if self.split is not None:
            try:
                args, own = self.split(args, self._option_string_actions)
            except ValueError as error:
                self.error(str(error))
        found, unknown = super().parse_known_args(args, namespace)
        for name, value in own.items():
            setattr(found, name, value)
        if unknown:
            from muster.launcher.unknown_options import explain

            self.error(explain(unknown, self._option_string_actions, self._advice))
        return found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _NUMBERS:
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r} must be {_NUMBERS[action.type]}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from muster.launcher.unknown_options import explain_choice

            self.error(explain_choice(str(value), action))

    def error(self, message: str) -> NoReturn:
        """Ends the command: the usage, then what is wrong."""
        self.print_usage(sys.stderr)
        self.exit(WrongInput.status, f"{self.prog}: {message}\n")
