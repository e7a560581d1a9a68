"""What all processes use to talk: gRPC channels, identity, authorization, reachability probes, fencing timeouts, site
settings.

Every program imports it.

May import: `daemon.host`, `daemon.transport.calls`.
"""
