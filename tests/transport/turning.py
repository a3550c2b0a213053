"""A thread that takes turns, as that of a channel does."""

import threading
from collections.abc import Callable


class Turning:
    def __init__(self) -> None:
        self._woken, self._is_over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self, turn: Callable[[], float]) -> None:
        def run() -> None:
            while not self._is_over:
                self._woken.wait(min(1.0, turn()))
                self._woken.clear()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._is_over = True
        self.wake()
        assert self._thread
        self._thread.join(20)
