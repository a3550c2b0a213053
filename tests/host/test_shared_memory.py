"""Memory that others can look at: the right one or none, never changed by them, never pulled away."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from mmap import PROT_READ, PROT_WRITE, mmap

import pytest

from kvferry.host import this_user as shared_memory
from kvferry.host.this_user import SharedMemory, open_place

PREFIX = "kvferry-test-"


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(PREFIX, 4096)
    memory.memory[:4] = b"ours"
    yield memory
    memory.close()


def test_another_process_sees_what_is_written(shared: SharedMemory) -> None:
    code = (
        "import os, sys; from kvferry.host.this_user import open_place;"
        f"print(os.pread(open_place(sys.argv[1], {PREFIX!r}), 4, 0).decode())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, shared.place], capture_output=True, text=True, check=True
    )
    assert told.stdout == "ours\n"


def test_nobody_else_can_write_to_it_or_cut_it_off(shared: SharedMemory) -> None:
    path = shared.place.split(" ")[0]
    fd = os.open(path, os.O_RDWR)
    try:
        for attempt in (
            lambda: os.ftruncate(fd, 0),
            lambda: os.pwrite(fd, b"theirs", 0),
            lambda: mmap(fd, 4096, prot=PROT_READ | PROT_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
    finally:
        os.close(fd)
    assert shared.memory[:4] == b"ours"


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place[:-1] + ("0" if place[-1] != "0" else "1"),
        lambda place: place.replace(PREFIX, "kvferry-other-"),
        lambda place: place.replace("/fd/", "/fd/9999"),
        lambda place: place.replace("/proc/", "/proc/../"),
        lambda place: "",
        lambda place: place + "\n",
    ],
)
def test_another_place_is_not_opened(shared: SharedMemory, change) -> None:
    with pytest.raises(OSError, match=r"path is invalid|different file|No such file"):
        open_place(change(shared.place), PREFIX)


def test_memory_of_another_kind_is_not_opened(shared: SharedMemory) -> None:
    with pytest.raises(OSError, match="different file"):
        open_place(shared.place, "kvferry-other-")


def test_memory_that_is_dropped_is_given_back() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        SharedMemory(PREFIX, 4096)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_the_seal_against_writers_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SEAL_FUTURE_WRITE", 1 << 20)  # as on an older Linux
    with pytest.raises(OSError, match="Invalid argument"):
        SharedMemory(PREFIX, 4096)


def test_what_is_opened_is_what_was_looked_at(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may close it, and open something else, between the two."""
    other = SharedMemory(PREFIX, 4096)
    number = other.place.split(" ")[0]
    name = shared.place.split(" ")[1]
    readlink = os.readlink
    looks = iter([f"/memfd:{name} (deleted)"])
    monkeypatch.setattr(os, "readlink", lambda path: next(looks, None) or readlink(path))
    with pytest.raises(OSError, match="different file"):
        open_place(f"{number} {name}", PREFIX)
    other.close()


def test_it_is_gone_when_it_is_closed_but_stays_with_who_looks_at_it(shared: SharedMemory) -> None:
    seen = open_place(shared.place, PREFIX)
    shared.close()
    shared.close()
    assert os.pread(seen, 4, 0) == b"ours"
    os.close(seen)
    with pytest.raises(OSError, match=r"No such file|different file"):
        open_place(shared.place, PREFIX)
