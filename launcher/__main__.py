"""Where the program `muster` begins. Ctrl-C ends it without a word as long as it only imports: nothing has begun."""

import signal
from typing import NoReturn


def program() -> NoReturn:
    """Entry point of the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as for nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from muster.launcher.main import program as run

    run()


if __name__ == "__main__":
    program()
