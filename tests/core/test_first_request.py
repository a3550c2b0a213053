"""The first request of a process is as quick as the next one."""

import subprocess
import sys

SELECT = """
import sys
from kvferry import lower, plan, prove, select
from kvferry.core.sample import sample_request
from kvferry.models import Topology, describe, model_named
model = model_named("llama-3.1-8b")
src, dst = (describe(model, Topology.parse(f"{cut},blocks=99"), cut) for cut in ("block=16", "block=24"))
route, request = lower(prove(plan(src, dst, 0))), sample_request(src, dst, 1000)
before = set(sys.modules)
select(route, request)
print(*sorted(set(sys.modules) - before))
"""


def test_selecting_imports_nothing():
    """numpy.unique, for one, imports numpy.ma when it is first called: 60 ms in the middle of a request."""
    done = subprocess.run([sys.executable, "-c", SELECT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
