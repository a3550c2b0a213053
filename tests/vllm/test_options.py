"""What the connector may be told: a closed door unless somebody opens it, no secret where vLLM prints it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.errors import SpecError
from kvferry.integrations.vllm.shared.options import Options

TEXT = "3q2-7wAAq83vEjRWeJCrzf7cuph2VDIQ"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch):
    for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def options(**extra):
    return Options.of(extra, host="10.0.0.7")


def test_one_host_works_with_one_flag():
    assert options().trust.is_one_host
    assert options().listen == "tcp://127.0.0.1:*"


def test_a_secret_opens_the_door_for_those_who_know_it(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    by_option = options(secret_file=str(path))
    monkeypatch.setenv("KVFERRY_SECRET_FILE", str(path))
    by_file = options()
    monkeypatch.delenv("KVFERRY_SECRET_FILE")
    monkeypatch.setenv("KVFERRY_SECRET", TEXT)
    for chosen in (by_option, by_file, options()):
        assert (chosen.listen, chosen.trust.is_one_host) == ("tcp://10.0.0.7:*", False)
        assert chosen.trust.ticket_key == by_option.trust.ticket_key
        assert TEXT not in repr(chosen)


def test_a_secret_among_the_options_is_refused_and_not_repeated():
    with pytest.raises(SpecError, match="vLLM prints these options") as refused:
        options(secret=TEXT)
    assert TEXT not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"insecure": "yes"}, "insecure must be true or false"),
        ({"authorities": "tcp://10.0.0.7"}, "authorities must be a list"),
        ({"authorities": ["10.0.0.7"]}, "authorities are addresses"),
        ({"secret_file": "/nowhere"}, "cannot be read"),
    ],
)
def test_senseless_options_are_refused_by_name(extra, words):
    with pytest.raises(SpecError, match=words):
        options(**extra)


def test_an_open_door_is_said_explicitly():
    chosen = options(insecure=True, authorities=["tcp://10.0.0.8"])
    assert chosen.trust.insecure
    assert chosen.listen == "tcp://10.0.0.7:*"
    assert not chosen.trust.may_call("tcp://10.0.0.9:5555")
