"""The source side of the API, without a reader."""

import pytest

from kvferry import SpecError
from kvferry.endpoint import SourceEngine


def test_an_address_that_nobody_could_call_is_refused():
    with pytest.raises(SpecError, match="advertise"):
        SourceEngine("prefill", 1, listen="tcp://0.0.0.0:*")


def test_tickets_carry_the_advertised_host():
    engine = SourceEngine("prefill", 1, listen="tcp://127.0.0.1:*", advertise="localhost")
    try:
        assert engine.address.startswith("tcp://localhost:")
    finally:
        engine.close()


def test_an_address_is_written_plainly():
    engine = SourceEngine("prefill", 1)
    try:
        assert engine.address.startswith("tcp://127.0.0.1:")
    finally:
        engine.close()
