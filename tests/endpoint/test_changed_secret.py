"""A fleet changes its secret while loads go on: old; old and new; new and old; new."""

import os
import time

import pytest

from kvferry.channel import Channel, Received
from kvferry.endpoint import secret_source
from kvferry.endpoint.secret_source import secret_from_file
from kvferry.errors import SpecError
from kvferry.wire.secret import Purpose, Secret, Trust

OLD, NEW = (f"{character}f00ba4{character * 32}7e5d91" for character in "ab")
STEPS = ((OLD, NEW), (NEW, OLD), (NEW,))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(secret_source, "LOOK_SECONDS", 0.05)


def write(path, *secrets):
    """As a careful person does: whole, or not at all."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{secret}\n" for secret in secrets))
    new.chmod(0o600)
    os.replace(new, path)


@pytest.mark.timed
def test_loads_go_on_while_the_secret_is_changed(pair_of, tmp_path):
    files = [tmp_path / "prefill", tmp_path / "decode"]
    for file in files:
        write(file, OLD)
    engine_trust, trust = (Trust(secret_from_file(file)) for file in files)
    pair, slowest = pair_of(engine_trust=engine_trust, trust=trust), 0.0

    def load(seconds):
        nonlocal slowest
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            started, handle = time.monotonic(), pair.fetch()
            assert pair.reports()[handle].failure is None
            slowest = max(slowest, time.monotonic() - started)

    load(0.3)
    for step in STEPS:
        for file in files:  # one engine after the other
            write(file, *step)
            load(1.5)
    print(f"the slowest load took {slowest:.2f} s")
    assert trust.ticket_keys == Trust(Secret.from_text(NEW)).ticket_keys
    assert slowest < 5


def test_a_caller_finds_the_secret_that_a_listener_has():
    both, channels = Secret.from_text(f"{OLD}\n{NEW}\n"), []
    try:
        for text in (OLD, NEW):
            listener, caller = (
                Channel(listen="tcp://127.0.0.1:*", secret=Secret.from_text(text)),
                Channel(secret=both),
            )
            channels += [listener, caller]
            heard: list = []
            deadline = time.monotonic() + 20
            while not heard:
                assert time.monotonic() < deadline
                caller.send(listener.address, b"hello")
                caller.wait(0.05)
                heard = [one for one in listener.wait(0.05) if isinstance(one, Received)]
    finally:
        for channel in channels:
            channel.close()


def test_a_file_that_has_no_secret_any_more_changes_nothing(tmp_path, caplog):
    path = tmp_path / "secret"
    write(path, OLD)
    secret = secret_from_file(path)
    for lines in (("open sesame",), (OLD, NEW, OLD), ()):
        write(path, *lines)
        time.sleep(0.1)
        caplog.clear()
        secret.refresh()
        assert "is still in use" in caplog.text
        assert OLD not in caplog.text
        assert secret.key(Purpose.TICKETS) == Secret.from_text(OLD).key(Purpose.TICKETS)
    path.unlink()
    time.sleep(0.1)
    secret.refresh()
    write(path, NEW)
    time.sleep(0.1)
    secret.refresh()
    assert secret.keys(Purpose.TICKETS) == Secret.from_text(NEW).keys(Purpose.TICKETS)


def test_nothing_keeps_the_secret_itself(tmp_path):
    write(tmp_path / "secret", OLD)
    secret = secret_from_file(tmp_path / "secret")
    names = [name for kind in type(secret).__mro__ for name in getattr(kind, "__slots__", ())]
    assert OLD not in repr([getattr(secret, name) for name in names])
    with pytest.raises(SpecError, match="cannot be copied or pickled"):
        secret.__reduce__()
