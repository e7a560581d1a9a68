"""Which of two coordinators may act: the lease, its holder, the watchdog, the checks of the state folder, the clock.

Imports `journal`. `__main__` imports it; `shell` imports the clock.
"""
