"""Queries the status of engines: all of this user on this host, or one by its socket or address."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.cli.options import at
from kvferry.cli.status.reported import Look, Reported, reported
from kvferry.endpoint.asking import ask_status
from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.endpoint.status import is_listening, live_sockets, read_status, sockets
from kvferry.errors import SpecError
from kvferry.wire.reading import printable
from kvferry.wire.secret import Secret

PATIENCE_SECONDS = 1.0
"""How long a refresh waits for slow engines."""

UNANSWERED = Look(error="no answer yet", is_late=True)


def secret_for(engine: str, secret_file: Path | None) -> Secret | None:
    """The fleet's secret if ``engine`` is an address; None for a socket."""
    if "://" not in engine:
        return None
    if not re.fullmatch(r"tcp://[^/]+:[0-9]{1,5}", engine):
        raise SpecError(f"{engine}: malformed address: expected tcp://HOST:PORT")
    return secret_from_file(secret_file) if secret_file else secret_from_environment()


def answers_of(engine: str, secret: Secret | None, *, is_raw: bool) -> list[dict[str, Any]]:
    """The engines' answers, sources first. Without ``engine``, failures are listed as answers.

    Unless ``is_raw``, an answer that this version cannot parse is a failure.
    """
    ask = _ask if is_raw else _readable
    if engine:
        return [ask(engine, secret)]
    asked = {path: _in_thread(partial(ask, str(path), None)) for path in live_sockets()}
    found = []
    for path, future in asked.items():
        try:
            found.append(future.result())
        except SpecError as error:  # it may just have ended; show the others
            found.append({"socket": str(path), "error": str(error)})
    return sorted(found, key=lambda answer: answer.get("side") != "source")


def _ask(place: str, secret: Secret | None) -> dict[str, Any]:
    return ask_status(place, secret) if "://" in place else {"socket": place, **read_status(Path(place))}


def _readable(place: str, secret: Secret | None) -> dict[str, Any]:
    answer = _ask(place, secret)
    with at(place):
        _parsed(answer)
    return answer


def _parsed(answer: dict[str, Any]) -> Reported:
    if error := answer.get("error"):
        raise SpecError(printable(str(error)))
    return reported(answer)


def _in_thread(ask: Callable[[], Any]) -> Future[Any]:
    """Ask in a daemon thread, so that a silent engine delays neither the others nor the exit."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvferry-ask", daemon=True).start()
    return future


class EngineAsker:
    """Queries engines repeatedly, with at most one open query per engine."""

    def __init__(self, engine: str, secret: Secret | None) -> None:
        self._engine, self._secret = engine, secret
        self._open: dict[str, Future[Look]] = {}
        if not engine:
            live_sockets()  # removes the files of killed processes

    def look(self) -> dict[str, Look]:
        """The current state of each engine; an engine with an open query is not queried again."""
        places = [self._engine] if self._engine else [str(path) for path in sockets()]
        asked = {place: self._open.get(place) or _in_thread(partial(self._ask, place)) for place in places}
        wait([asked[place] for place in asked if place not in self._open], PATIENCE_SECONDS)
        looks = {place: future.result() for place, future in asked.items() if future.done()}
        self._open = {place: future for place, future in asked.items() if place not in looks}
        return {
            place: looks.get(place, UNANSWERED)
            for place in places
            if self._engine or place not in looks or not looks[place].is_gone
        }

    def _ask(self, place: str) -> Look:
        try:
            return Look(_parsed(_ask(place, self._secret)))
        except SpecError as error:
            is_gone = "://" not in place and not is_listening(Path(place))
            return Look(error=printable(str(error)), is_gone=is_gone)
        except Exception as error:  # else the query would stay open forever
            return Look(error=f"internal error, please report it: {printable(repr(error))}")
