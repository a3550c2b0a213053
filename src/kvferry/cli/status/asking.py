"""Ask engines how they are: all of this user's on this host, one at its socket, or one at its address."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
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

UNANSWERED = Look(error="no answer yet", is_late=True)


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


class EngineAsker:
    """Asks the same engines again and again; each has at most one question to answer."""

    def __init__(self, engine: str, secret: Secret | None) -> None:
        self._engine, self._secret = engine, secret
        self._open: dict[str, Future[Look]] = {}
        if not engine:
            live_sockets()  # removes the files of killed processes

    def look(self) -> dict[str, Look]:
        """How each engine stands; one that has not answered yet is not asked again meanwhile."""
        places = [self._engine] if self._engine else [str(path) for path in sockets()]
        asked = {place: self._open.get(place) or self._asked(place) for place in places}
        wait([asked[place] for place in asked if place not in self._open], PATIENCE_SECONDS)
        looks = {place: future.result() for place, future in asked.items() if future.done()}
        self._open = {place: future for place, future in asked.items() if place not in looks}
        return {
            place: looks.get(place, UNANSWERED)
            for place in places
            if self._engine or place not in looks or not looks[place].is_gone
        }

    def _asked(self, place: str) -> Future[Look]:
        """Ask in a daemon thread: an engine that does not answer delays neither the others nor the end."""
        future = Future[Look]()
        threading.Thread(
            target=lambda: future.set_result(self._ask(place)), name="kvferry-ask", daemon=True
        ).start()
        return future

    def _ask(self, place: str) -> Look:
        try:
            answer = _ask(place, self._secret)
            if error := answer.get("error"):
                return Look(error=printable(str(error)))
            return Look(reported(answer))
        except SpecError as error:
            is_gone = "://" not in place and not is_listening(Path(place))
            return Look(error=printable(str(error)), is_gone=is_gone)
        except Exception as error:  # else the question would stay open for ever
            return Look(error=f"a bug, please report it: {printable(repr(error))}")
