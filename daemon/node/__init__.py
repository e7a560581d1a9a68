"""musterd, the node daemon: heartbeats, hardware signals, answers to probes.

Its rooms: `sensors` (one sensor per file), `nvml` (the process that calls NVIDIA's library) and `kept_memory` (shards
that outlive a run of a job). No other program imports it.

May import: `daemon.host`, `daemon.metrics`, `daemon.node.kept_memory`, `daemon.node.nvml`, `daemon.node.sensors`,
`daemon.node.sysfs`, `daemon.preflight`, `daemon.transport`.
"""
