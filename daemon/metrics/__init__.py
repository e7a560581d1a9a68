"""How a daemon shows its metrics to Prometheus: who may read them, and the server that answers.

The coordinator and `musterd` import it.

May import: `daemon.host`, `daemon.transport`.
"""
