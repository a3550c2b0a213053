import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """What ``--json`` printed: one object and nothing else."""
        assert self.err == ""
        return json.loads(self.out)


@pytest.fixture
def cli(capsys, monkeypatch) -> Callable[..., Ran]:
    """Run the command line in this process, on 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "KVFERRY_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        return Ran(code, *capsys.readouterr())

    return run
