"""Code is compiled once, kept where nobody else can bend it, and never waited for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvferry.host import compiler
from kvferry.host.compiler import FROM_BYTES, SETTING, LateCode, NotCompiled, compiled, find_compiler

TEXT = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def found() -> str:
    try:
        return find_compiler({})
    except NotCompiled as error:
        pytest.skip(f"{error}: compiled code is tested where there is one")


def test_what_was_compiled_is_found_again_and_is_private(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled(found, "answer", TEXT, tmp_path).answer() == 42
    (library,) = tmp_path.iterdir()
    assert library.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(compiler, "_compile", None)
    assert compiled(found, "answer", TEXT, tmp_path).answer() == 42


def test_another_text_is_other_code(found: str, tmp_path: Path) -> None:
    for number in (1, 2):
        code = compiled(found, "answer", TEXT.replace("42", str(number)), tmp_path)
        assert code.answer() == number


@pytest.mark.parametrize(
    ("text", "why"), [("no code at all", "failed: "), ("", "cannot be loaded")], ids=["no code", "no library"]
)
def test_what_cannot_be_used_says_why(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    if not text:
        monkeypatch.setattr(compiler, "_compile", lambda *_: b"no library")
    with pytest.raises(NotCompiled, match=why):
        compiled(found, "answer", text, tmp_path)


def test_few_bytes_start_no_compiler() -> None:
    late: LateCode[ctypes.CDLL] = LateCode("things are done", lambda _: pytest.fail("not wanted"))
    assert late.for_bytes(FROM_BYTES - 1) is None
    assert late._thread is None


def test_code_is_used_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "true")
    late: LateCode[str] = LateCode("things are done", lambda name: f"by {Path(name).name}")
    late.for_bytes(FROM_BYTES // 2)
    late.for_bytes(FROM_BYTES // 2)
    late.start().join(60)
    assert (late.for_bytes(1), late.how) == ("by true", "compiled code")
