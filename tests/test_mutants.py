"""The list of mutants keeps up with the code: each text is there once, each named test exists."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvferry_mutants", ROOT / "tools" / "mutants.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


mutants = load()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_breaks_a_line_that_is_there(mutant):
    text = (ROOT / "src" / "kvferry" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.tests


def test_mutants_have_names_of_their_own():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)


def test_every_test_that_must_notice_is_collected():
    nodes = sorted({test for mutant in mutants.MUTANTS for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_file_of_the_core_that_decides_has_mutants():
    files = {mutant.file for mutant in mutants.MUTANTS}
    assert files >= {
        f"core/{name}.py" for name in ("prove", "overlap", "manifest", "plan", "lower", "select")
    }
