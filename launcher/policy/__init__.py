"""What `muster policy` shows: what a site's file changes, which row decides about a signal, what a saved log leads to.

It decides nothing itself: the kernel log's parser, the windows and the policy are those of the daemons. Pure, except
that `replay` reads lines. Only `commands` imports this folder.

May import: `daemon.coordinator.policy`, `daemon.host`, `daemon.node`, `daemon.node.kernel`, `daemon.node.sensors`,
`launcher`, `launcher.output`.
"""
