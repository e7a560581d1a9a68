"""Which of two coordinators may act: the lease, its holder, the leader's watchdog, the shared state folder.

Imports `journal`. The coordinator's `__main__` imports it.
"""
