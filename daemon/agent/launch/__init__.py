"""A user's own launcher (torchrun, `accelerate launch`) that becomes the gang: the task, the hand-over, the output.

`daemon/agent` imports this room. Its folder `user_path` is for the user's interpreter.

May import: `daemon.agent.launch.user_path`, `daemon.agent.ranks`, `daemon.host`, `daemon.host.process`,
`daemon.transport`.
"""
