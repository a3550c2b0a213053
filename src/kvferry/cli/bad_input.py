"""Where bad input came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import RequestError, SpecError


@contextmanager
def at(place: str) -> Iterator[None]:
    """Say where bad input came from: a file, or an option and its value."""
    try:
        yield
    except (SpecError, RequestError) as error:
        raise SpecError(f"{place}: {error}") from None
    except OSError as error:
        raise SpecError(f"{place}: {error.strerror or error}") from None
