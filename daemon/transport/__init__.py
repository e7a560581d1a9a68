"""What all processes use to talk: gRPC channels, identity, authorization, reachability probes, fencing timeouts, site
settings, reports of hardware.

Every program imports it.

May import: `daemon.host`, `daemon.host.process`, `daemon.transport.calls`, `fabric.model`, `fabric.sources`.
"""
