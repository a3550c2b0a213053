"""A ticket is proved before anybody is called."""

import msgspec
import pytest

from kvferry.errors import SpecError
from kvferry.runtime import FailureCode
from kvferry.runtime.failure import refusal, text_refusal
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import TableDoc, Ticket, from_text, is_sealed, seal, sign, to_text

HERE = "boot-1/4026531840"
FLEET = Trust(Secret(b"of this fleet, 128 bit"))
OTHERS = Trust(Secret(b"of another one, 128 bit"))


def made(authority="tcp://127.0.0.1:5555", host=HERE, trust=None):
    ticket = Ticket("prefill", 7, 1, "req", authority, 30, {"full": TableDoc((3, 4))}, 30_000, host=host)
    return seal(sign(ticket, b"its own"), trust.ticket_key if trust else b"")


FAR = {"authority": "tcp://10.0.0.7:5555", "host": ""}


@pytest.mark.parametrize(
    ("ticket", "trust", "code"),
    [
        (made(), Trust(), None),
        (made(host="boot-1/4026532208"), Trust(), "elsewhere"),
        (made(host="boot-2/4026531840"), Trust(), "elsewhere"),
        (made(**FAR), Trust(), "no-secret"),
        (made(**FAR, trust=FLEET), Trust(), "no-secret"),
        (made("tcp://10.0.0.7:5555"), Trust(), "forged"),
        (made(**FAR, trust=FLEET), FLEET, None),
        (made(trust=FLEET), FLEET, None),
        (made(host="boot-2/1", trust=FLEET), FLEET, "elsewhere"),
        (made(**FAR), FLEET, "forged"),
        (made(), FLEET, "forged"),
        (made(**FAR, trust=OTHERS), FLEET, "forged"),
        (made(**FAR), Trust(insecure=True), None),
        (made(host="boot-2/1"), Trust(insecure=True), "elsewhere"),
        (made(**FAR), Trust(insecure=True, authorities=("tcp://10.0.0.7",)), None),
        (made(**FAR), Trust(insecure=True, authorities=("tcp://10.0.0.7:5555",)), None),
        (
            made(**FAR),
            Trust(insecure=True, authorities=("tcp://10.0.0.7:5556", "tcp://10.0.0")),
            "not-allowed",
        ),
        (made(), Trust(authorities=("tcp://10.0.0.7",)), "not-allowed"),
    ],
)
def test_who_is_called(ticket, trust, code):
    found = refusal(ticket, trust, HERE)
    assert (found.code.value if found else None) == code


def test_a_reader_elsewhere_is_told_what_to_do():
    text = str(refusal(made(), Trust(), "boot-1/another pod"))
    assert "the source listens on loopback only" in text
    assert "set KVFERRY_SECRET_FILE to the same secret on both engines" in text


def test_whatever_is_changed_breaks_the_seal():
    ticket, key = made(trust=FLEET), FLEET.ticket_key
    assert is_sealed(ticket, key)
    for field, value in msgspec.structs.asdict(ticket).items():
        others: dict[type, object] = {str: f"{value}x", bytes: b"x" * 32, dict: {}}
        other = others.get(type(value), 99)
        changed = msgspec.structs.replace(ticket, **{field: other})
        found = refusal(changed, FLEET, HERE)
        assert found is not None, field
        assert found.code is FailureCode.FORGED


def test_nothing_of_a_text_is_read_before_its_seal():
    ticket, key = made(trust=FLEET), FLEET.ticket_key
    text = to_text(ticket)
    assert from_text(text, key) == ticket
    body, _, proof = text.partition(".")
    data = bytearray(text, "ascii")
    for at in range(len(data)):
        spoiled = bytearray(data)
        spoiled[at] ^= 1
        with pytest.raises(SpecError, match="issued without this fleet's secret"):
            from_text(spoiled.decode("latin-1"), key)
    for junk in (body, f"{body}.", f"{proof}", "", ".", "{}", f"{body}.{proof}.", f"!.{proof}"):
        with pytest.raises(SpecError, match="issued without this fleet's secret"):
            from_text(junk, key)


def test_a_text_of_another_secret_is_forged_not_unreadable():
    text = to_text(made(trust=FLEET))
    assert text_refusal(text, FLEET) is None
    assert text_refusal("junk", Trust()) is None
    for wrong, words in (
        (to_text(made(trust=OTHERS)), "without this engine's secret"),
        (text.partition(".")[0], "no proof"),
    ):
        found = text_refusal(wrong, FLEET)
        assert found is not None
        assert found.code is FailureCode.FORGED
        assert words in found.detail
