"""What ``make`` does when it cannot make the environment for vLLM: it says where and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(folder: Path) -> subprocess.CompletedProcess[str]:
    """Make the environment, with a pip that knows no index."""
    command = ["make", f"VLLM_BASE={folder}", f"PYTHON={sys.executable}", f"{folder}/.ready"]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))
    }
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_failed_step_is_named_with_its_log_and_marks_nothing_as_ready(tmp_path):
    folder = tmp_path / "environment"
    ran = make(folder)
    assert ran.returncode != 0
    assert 'failed at "torch, GPU build"' in ran.stderr
    assert f"The whole output is in {folder}/install.log." in ran.stderr
    assert "No matching distribution found for torch==2.13.0" in ran.stderr
    assert "torch==2.13.0" in (folder / "install.log").read_text(encoding="utf-8")
    assert not (folder / ".ready").exists()


def test_a_folder_of_somebody_elses_is_not_replaced(tmp_path):
    (tmp_path / "letters").write_text("mine")
    ran = make(tmp_path)
    assert ran.returncode != 0
    assert "is no virtual environment: not replaced" in ran.stderr
    assert (tmp_path / "letters").read_text() == "mine"


@pytest.mark.parametrize("name", ["vllm_requirements.txt", "torch_gpu_requirements.txt"])
def test_every_version_is_exact(name):
    lines = (ROOT / "tools" / name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#") and "==" not in line] == []
