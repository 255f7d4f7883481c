"""How a run is asked to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by Ctrl-C or SIGTERM. Whoever waits for something that may never come registers how to wake it up."""

    def __init__(self) -> None:
        self.requested = False
        self.wake: Callable[[], None] = lambda: None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:  # the second one means it
            raise KeyboardInterrupt
        self.requested = True
        # Not print: a handler may interrupt one.
        os.write(2, b"\nstopping as soon as the step is done and checkpointed; once more to quit at once\n")
        self.wake()


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM ask for a stop at the next safe point; a second one interrupts at once."""
    request = StopRequest()
    previous = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
