"""Run test files, each in a process of its own: vLLM's layers, and so their caches, outlive their engines.

    python -m tests.vllm tests/vllm/test_scheduler.py "tests/vllm/test_faults.py -k llama"

Each process is a fork of this one, which imports vLLM once: that takes longer than most of the files.
Stops at the first file that fails.
"""

import os
import shlex
import sys
import traceback

import pytest

import tests.vllm.conftest  # noqa: F401  (imports vLLM, which starts no threads)

OPTIONS = ("-q", "-m", "", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def run(words: list[str]) -> int:
    sys.stdout.flush()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        code = int(pytest.main([*OPTIONS, *words]))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for arguments in sys.argv[1:]:
    print(f"--- {arguments}", flush=True)
    if code := run(shlex.split(arguments)):
        sys.exit(code)
