"""`muster policy`: what the policy makes of a hardware signal, before it happens.

`check` validates a site's file, `explain` names the row that decides about a signal, `replay` runs a saved kernel log
through the policy. Nothing is sent anywhere. The code is that of the daemons.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from muster.launcher.command import Command

_SITE_POLICY = "/etc/muster/policy.toml"
"""policy.SITE_POLICY: `muster` imports the policy only for this command."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    words = "check a site's policy file, and say what it changes; exit status 2: it has mistakes"
    check = actions.add_parser("check", help=words, description=words)
    check.add_argument("file", type=Path, metavar="FILE", help="the site's policy file")
    words = "say which row decides about a line of the kernel log, or about a signal: 'gpu-throttle', 'xid 79'"
    explanation = actions.add_parser("explain", help=words, description=words)
    explanation.add_argument("text", metavar="TEXT", help="a line of the kernel log, or the name of a signal")
    words = "say what a saved kernel log would have led to; it may be that of dmesg, journalctl -k or /dev/kmsg"
    replay = actions.add_parser("replay", help=words, description=words)
    replay.add_argument("log", metavar="LOG", help='a file; "-" is the standard input')
    for action in (explanation, replay):
        action.add_argument(
            "--policy", type=Path, metavar="FILE", help=f"the site's policy file; default {_SITE_POLICY} if it exists"
        )


async def _run(options: argparse.Namespace) -> int:
    from muster.launcher.policy import actions  # only here: it imports the policy and the node daemon's parser

    if options.action == "check":
        return actions.check(options.file)
    if options.action == "explain":
        return actions.explain_text(options.text, options.policy)
    return actions.replay_log(options.log, options.policy)


COMMAND = Command(_arguments, _run, remote=False)
