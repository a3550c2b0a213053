"""A secret is long enough, and nobody gets to see it."""

import copy
import logging
import pickle
import traceback

import pytest

from kvferry.errors import SpecError
from kvferry.wire.secret import Purpose, Secret, Trust

TEXT = "3q2-7wAAq83vEjRWeJCrzf7cuph2VDIQ"


def test_nothing_shows_a_secret(caplog):
    secret = Secret.from_text(TEXT)
    trust = Trust(secret)
    logging.getLogger("kvferry").error("started with %s, %r, %s", secret, secret, trust)
    try:
        raise ValueError(trust)
    except ValueError as error:
        shown = "".join(traceback.format_exception(error))
    shown += f"{secret} {secret!r} {trust} {vars(type(secret))} {caplog.text}"
    assert "Secret(…)" in shown
    assert TEXT not in shown
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SpecError, match="cannot be copied or pickled"):
            copied(secret)


@pytest.mark.parametrize(
    "text", ["", "open sesame", "a" * 64, "hunter2" * 9, "0123456789abcdef", TEXT[:21], f"{TEXT} {TEXT}"]
)
def test_what_can_be_guessed_is_refused(text):
    with pytest.raises(SpecError, match="at least 32 hexadecimal or 22 base64 characters") as refused:
        Secret.from_text(text)
    assert not text or text not in str(refused.value)


@pytest.mark.parametrize("text", [TEXT, f"  {TEXT}\n", "0123456789abcdef" * 2, "AAECAwQFBgcICQoLDA0ODw=="])
def test_what_was_drawn_is_taken(text):
    assert Secret.from_text(text).key(Purpose.TICKETS) == Secret.from_text(text.strip()).key(Purpose.TICKETS)


def test_a_key_is_for_one_purpose_and_one_secret():
    keys = {Secret.from_text(text).key(purpose) for text in (TEXT, TEXT[::-1]) for purpose in Purpose}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}


def test_a_secret_and_insecure_exclude_each_other():
    with pytest.raises(SpecError, match="remove one"):
        Trust(Secret.from_text(TEXT), insecure=True)


def test_a_short_secret_is_refused():
    with pytest.raises(SpecError, match="at least 16 bytes"):
        Secret(bytes(range(15)))
    assert Secret(bytes(range(16))).keys(Purpose.TICKETS)
