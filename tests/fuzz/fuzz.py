"""The coverage-guided fuzzer: atheris, which keeps every input that reaches new code.

    make fuzz                                   every decoder, SECONDS=30 each
    python -m tests.fuzz.fuzz ticket 600        one of them, for ten minutes

What it finds worth keeping goes to tests/fuzz/corpus, where ``make test`` replays it. An input that breaks a
decoder is kept as well, and named.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_BYTES = 4096
"""Of an input that is kept."""
MOST_KEPT = 60
"""Inputs of a decoder, the shortest first: enough to begin from."""


def fuzz_one(name: str, seconds: int, folder: str) -> None:
    """In a process of its own: libFuzzer ends it."""
    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=["kvferry"]):
        from tests.fuzz.decoders import DECODERS, corpus
    for data in corpus(name):
        (Path(folder) / _title(data)).write_bytes(data)
    arguments = [
        sys.argv[0],
        folder,
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={folder}/broken-",
    ]
    atheris.Setup(arguments, DECODERS[name].check)
    atheris.Fuzz()


def _title(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz a decoder, and keep what was found; whether nothing broke."""
    from tests.fuzz.decoders import DECODERS, keep

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz.fuzz", name, str(seconds), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(
            (path.read_bytes() for path in Path(folder).iterdir()), key=lambda data: (len(data), data)
        )
        broken = [path.read_bytes() for path in Path(folder).glob("broken-*")]
    shortest = [data for data in found if data and data not in DECODERS[name].seeds][:MOST_KEPT]
    keep(name, {*shortest, *broken})
    counts = [line for line in done.stderr.splitlines() if "DONE" in line or line.startswith("Done ")]
    print(f"{name:18} {len(found)} inputs, {len(broken)} broken; {' '.join(counts[-1:])}", flush=True)
    if done.returncode and not broken:
        print(done.stderr[-2000:])
    return not broken and not done.returncode


def main() -> int:
    if len(sys.argv) == 4:
        fuzz_one(sys.argv[1], int(sys.argv[2]), sys.argv[3])
        return 0
    from tests.fuzz.decoders import DECODERS

    names = [*DECODERS] if sys.argv[1] == "all" else [sys.argv[1]]
    are_fine = [fuzz(name, int(sys.argv[2])) for name in names]
    return 0 if all(are_fine) else 1


if __name__ == "__main__":
    sys.exit(main())
