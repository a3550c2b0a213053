"""Ask engines how they are: all of this user's on this host, one at its socket, or one at its address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.cli.status.reported import Look, reported
from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.endpoint.status import ask_status, is_listening, live_sockets, read_status, sockets
from kvferry.errors import SpecError
from kvferry.wire.reading import printable
from kvferry.wire.secret import Secret

PATIENCE_SECONDS = 1.0
"""How long a look at all engines waits for those that are slow."""

UNANSWERED = Look(error="it was asked, and has not answered yet", is_late=True)


def secret_for(engine: str, secret_file: Path | None) -> Secret | None:
    """The fleet's secret, where an address is asked."""
    if "://" not in engine:
        return None
    return secret_from_file(secret_file) if secret_file else secret_from_environment()


def answers_of(engine: str, secret: Secret | None) -> list[dict[str, Any]]:
    """What the engines say, sources first; of those that were not named one by one, also why not."""
    if engine:
        return [_ask(engine, secret)]
    found = []
    for path in live_sockets():
        try:
            found.append(_ask(str(path), None))
        except SpecError as error:  # it may have ended just now; the others are still worth a look
            found.append({"socket": str(path), "error": str(error)})
    return sorted(found, key=lambda answer: answer.get("side") != "source")


def _ask(place: str, secret: Secret | None) -> dict[str, Any]:
    if "://" in place:
        return ask_status(place, secret)
    return {"socket": place, **read_status(Path(place))}


class _Question:
    """One engine is asked, in a thread of its own: one that is stopped keeps nobody waiting."""

    def __init__(self, ask: Callable[[], Look]) -> None:
        self._look: Look | None = None
        self._ask = ask
        # A daemon: whoever ends the watch does not wait for an engine that does not answer.
        self._thread = threading.Thread(target=self._run, name="kvferry-ask", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._look = self._ask()
        except Exception as error:  # nobody else would see it, and the place would be waited for for ever
            self._look = Look(error=f"a bug, please report it: {printable(repr(error))}")

    def answer(self, until: float) -> Look | None:
        """What came of it, if it comes in time."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return self._look


class EngineAsker:
    """Asks the same engines again and again; each has at most one question to answer."""

    def __init__(self, engine: str, secret: Secret | None) -> None:
        self._engine, self._secret = engine, secret
        self._open: dict[str, _Question] = {}
        if not engine:
            live_sockets()  # removes what killed processes have left

    def look(self) -> dict[str, Look]:
        """How each engine stands; one that has not answered yet says so, and is not asked again meanwhile."""
        late = dict(self._open)
        places = [self._engine] if self._engine else [str(path) for path in sockets()]
        asked = {place: late.get(place) or _Question(partial(self._ask, place)) for place in places}
        until = time.monotonic() + PATIENCE_SECONDS
        looks = {place: question.answer(0.0 if place in late else until) for place, question in asked.items()}
        self._open = {place: asked[place] for place, look in looks.items() if look is None}
        return {
            place: look or UNANSWERED
            for place, look in looks.items()
            if self._engine or not (look and look.is_gone)  # what was not named and is gone is not looked for
        }

    def _ask(self, place: str) -> Look:
        try:
            answer = _ask(place, self._secret)
            if error := answer.get("error"):
                return Look(error=printable(str(error)))
            return Look(reported(answer))
        except SpecError as error:
            is_gone = "://" not in place and not is_listening(Path(place))
            return Look(error=printable(str(error)), is_gone=is_gone)
