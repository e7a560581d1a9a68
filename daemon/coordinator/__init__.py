"""muster-coordinator: verdicts, recovery, the journal, the public API.

`core` decides, `journal` persists, `shell` acts; `services` speaks gRPC, `slurm` calls Slurm, `leadership` holds the
lease, `policy` holds the tables that a site may change. No other program imports the coordinator; the simulator does.
"""
