"""Run one command: exit codes, and every error as one line (or, with ``--json``, as one object)."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from kvferry.errors import KVFerryError, MissingPackage, Refused

GOOD, REFUSED, BAD_INPUT, BUG, INTERRUPTED, CUT_OFF = 0, 1, 2, 3, 130, 141

STDOUT, STDERR = 1, 2
OUTPUT_ERRORS = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE}
"""Of a full disk, a closed descriptor or pipe, a lost terminal."""

DEBUG = "KVFERRY_DEBUG"
"""The environment variable that shows unexpected errors with a traceback."""


def run_command(argv: Sequence[str]) -> int:
    """Run a command line; every error becomes an exit code and a message."""
    as_json = "--json" in argv
    _never_choke()
    try:
        code = _outcome(argv, as_json=as_json)
        sys.stdout.flush()
        return code
    except OSError as error:
        if error.errno in OUTPUT_ERRORS and not error.filename:
            return _cut_off(error)
        return _bug(error, as_json=as_json)


def _outcome(argv: Sequence[str], *, as_json: bool) -> int:
    try:
        from kvferry.cli.app import app

        return app(list(argv) or ["--help"], prog_name="kvferry", standalone_mode=False) or GOOD
    except Refused as refused:
        return _refuse(refused, as_json=as_json)
    except KVFerryError as error:
        return _say(str(error), as_json=as_json)
    except ModuleNotFoundError as error:
        if not MissingPackage.is_of_ours(error):
            return _bug(error, as_json=as_json)
        return _say(str(MissingPackage.named(error)), as_json=as_json)
    except SystemExit as ended:  # Typer exits with 1 for a broken pipe, and with 0 after a completion
        return _cut_off(BrokenPipeError(errno.EPIPE, "")) if ended.code else GOOD
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError:
        raise  # perhaps of the output
    except Exception as error:
        if usage := getattr(error, "format_message", None):
            return _say(_with_hint(usage(), argv), as_json=as_json)
        return _bug(error, as_json=as_json)


def _bug(error: Exception, *, as_json: bool) -> int:
    if os.environ.get(DEBUG):
        raise error
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    message = f"internal error; please report it ({DEBUG}=1 shows the traceback): {what}"
    return _say(message, as_json=as_json, code=BUG)


def _never_choke() -> None:
    """Replace characters that the terminal cannot show. Writing to a closed output fails."""
    if sys.stdout is None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDOUT)
        sys.stdout = os.fdopen(STDOUT, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refuse(refused: Refused, *, as_json: bool) -> int:
    from kvferry.cli import output

    if as_json:
        found = [output.finding_object(finding) for finding in refused.findings]
        answer = {"verdict": "refused", "findings": found, "num_more_findings": refused.num_more}
        print(json.dumps(answer, ensure_ascii=False))
    else:
        out = output.console()
        output.verdict(out, "REFUSED", "these two engines, as described")
        output.findings(out, {finding: [0] for finding in refused.findings}, 1, refused.num_more)
    return REFUSED


def _with_hint(message: str, argv: Sequence[str]) -> str:
    from kvferry.cli.app import COMMANDS

    command = next((word for word in argv[:1] if word in COMMANDS), "")
    return f"{message.rstrip('.')}; see `kvferry {command}{' ' * bool(command)}--help`"


def _say(message: str, *, as_json: bool, code: int = BAD_INPUT) -> int:
    from kvferry.wire.reading import printable

    line = printable(" ".join(message.split()), len(message))
    if as_json:
        print(json.dumps({"verdict": "error", "message": line}, ensure_ascii=False))
    else:
        print(f"kvferry: {line}", file=sys.stderr)
    return code


def _cut_off(error: OSError) -> int:
    """The output cannot be written: print nothing more, not even at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    if isinstance(error, BrokenPipeError):  # its reader has closed it (``| head``)
        return CUT_OFF
    try:
        return _say(f"cannot write the output: {error.strerror or error}", as_json=False)
    except OSError:
        os.dup2(nowhere, STDERR)
        return BAD_INPUT
