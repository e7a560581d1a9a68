"""Which of two coordinators may act: the lease, its holder, the watchdog, the checks of the state folder, the clock.

`__main__` imports it; `shell` imports the clock.

May import: `daemon.coordinator.journal`, `daemon.host`, `daemon.transport`.
"""
