"""What a program that prints does when nobody reads on, as behind ``| head``."""

import signal


def end_with_the_reader() -> None:
    """Ends this process without a traceback when what it prints to is closed; where there are no such signals, not."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
