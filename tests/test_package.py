"""What is installed with what: a bare kvferry says which extra brings what is missing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import package
import pytest
import sbom

import kvferry
from kvferry.errors import MissingPackage
from kvferry.integrations import vllm_plugin

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def bare(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Python in which only what kvferry itself requires can be imported."""
    text = f"HIDDEN = {sorted(MissingPackage.EXTRAS)}\n{HIDE}\n{code}"
    return subprocess.run([sys.executable, "-c", text, *argv], capture_output=True, text=True, check=False)


def test_bare_it_needs_numpy_and_msgspec_alone():
    assert sorted(line.partition(">")[0] for line in PROJECT["dependencies"]) == ["msgspec", "numpy"]


def test_every_extra_that_is_named_exists_and_brings_the_package():
    for needed, extra in MissingPackage.EXTRAS.values():
        assert any(line.startswith(needed) for line in EXTRAS[extra]), extra


def test_all_is_all_that_users_need():
    extras, bindings = EXTRAS["all"]
    named = set(extras.partition("[")[2].rstrip("]").split(","))
    own = {"all", "dev", "docs", "mutants", "package", "vllm", "nixl-cu12", "nixl-cu13"}
    assert named | {"cuda"} == EXTRAS.keys() - own
    assert [bindings] == [line.replace("[all]", "") for line in EXTRAS["cuda"]], "torch brings the compiler"


def test_bare_it_plans_and_proves():
    ran = bare(
        "import kvferry\n"
        "from kvferry.models import Topology, describe, model_named\n"
        "from kvferry.wire.manifest import manifest_to_json\n"
        "src, dst = (describe(model_named('gpt2'), Topology(tp=tp), 'e') for tp in (2, 3))\n"
        "print(kvferry.lower(kvferry.prove(kvferry.plan(src, dst, 0))))"
    )
    assert ran.stderr == ""
    assert ran.stdout.startswith("Route(")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("kvferry.endpoint", "engine"),
        ("kvferry.channel", "engine"),
        ("kvferry.endpoint.metrics", "engine"),
    ],
)
def test_a_room_that_needs_more_says_which_extra(module, extra):
    ran = bare(f"import {module}")
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("kvferry.errors.MissingPackage: ")
    assert last.endswith(f' is not installed: pip install ".[{extra}]" in a clone of kvferry')


def test_engines_need_no_package_for_metrics():
    probe = "HIDDEN = ['prometheus_client']\n" + HIDE + "import kvferry.endpoint"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
    ran = subprocess.run(
        [sys.executable, "-c", probe + ".metrics"], capture_output=True, text=True, check=False
    )
    assert 'pip install ".[metrics]"' in ran.stderr


@pytest.mark.parametrize("argv", [["--help"], ["plan"], ["--version"]])
def test_the_command_says_it_too(argv):
    ran = bare("import kvferry.cli; sys.exit(kvferry.cli.main())", *argv)
    assert (ran.returncode, ran.stdout) == (2, "")
    said = 'typer is not installed: pip install ".[cli]" in a clone of kvferry'
    assert ran.stderr == f"kvferry: {said}\n"


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert PROJECT["version"] == kvferry.__version__
    assert f"\nversion: {kvferry.__version__}\n" in citation


def test_the_bill_of_materials_has_every_dependency_once():
    made = sbom.bill(["engine"])
    names = [each["name"] for each in made["components"]]
    assert names == sorted(set(names))
    assert {"numpy", "msgspec", "pyzmq", "cryptography"} <= set(names)
    assert "typer" not in names
    refs = {each["ref"] for each in made["dependencies"]}
    assert {needed for each in made["dependencies"] for needed in each["dependsOn"]} < refs
    assert made["metadata"]["component"]["name"] == "kvferry"
    assert sbom.bill(["engine"]) == made


COMPLETE = {
    "bash": {"COMP_WORDS": "kvferry sta", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "kvferry sta"},
}


@pytest.mark.parametrize("shell", COMPLETE)
def test_a_shell_completes_commands(shell):
    argv = [sys.executable, "-c", "import sys, kvferry.cli; sys.exit(kvferry.cli.main())"]
    env = {**os.environ, **COMPLETE[shell], "_KVFERRY_COMPLETE": f"complete_{shell}"}
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "status" in ran.stdout
    assert "plan" not in ran.stdout
    script = subprocess.run(
        argv, capture_output=True, text=True, check=True, env={**env, "_KVFERRY_COMPLETE": f"source_{shell}"}
    )
    assert "_kvferry_completion" in script.stdout


def test_readme_has_whole_links_on_a_package_index():
    """hatchling runs the hook where it builds; here its pattern is enough."""
    text = (ROOT / "hatch_build.py").read_text(encoding="utf-8").replace("from hatchling", "# from hatchling")
    hook: dict = {"MetadataHookInterface": object}
    exec(compile(text, "hatch_build.py", "exec"), hook)
    page = "[a](docs/a.md#b), ![c](docs/c.svg), [d](https://e.org/d), [f](#f)"
    assert hook["with_whole_links"](page, "") == "a, c, [d](https://e.org/d), [f](#f)"
    whole = hook["with_whole_links"](page, "https://h.org/k")
    assert whole.startswith(
        "[a](https://h.org/k/blob/main/docs/a.md#b), ![c](https://h.org/k/raw/main/docs/c.svg)"
    )
    for target in hook["PAGES"].values():
        assert (ROOT / target).exists()


# -- what `make package-serve` fails for


def test_serving_takes_the_name_that_vllm_is_told():
    """No module path, in the example as in README: the plugin's name is enough."""
    script = (ROOT / "examples" / "vllm" / "serve.sh").read_text(encoding="utf-8")
    assert f'"kv_connector": "{vllm_plugin.NAME}"' in script
    assert "module_path" not in script
    assert "../src" not in script, "it serves where there is no checkout"
    (function,) = PROJECT["entry-points"]["vllm.general_plugins"].values()
    assert function == f"{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"


@pytest.mark.parametrize("last", ["==> DIFFERENT: a token", "==> NOT MOVED: equal, but", "==> all ended", ""])
def test_only_equal_tokens_are_a_success(last):
    package.check_verdict(["==> all ended", "==> EQUAL: all 32 tokens"])
    with pytest.raises(package.Failed, match=r"serve\.sh ends with"):
        package.check_verdict(["==> EQUAL: was said before", last])


def test_what_takes_minutes_is_shown_as_it_comes(capsys):
    say = [sys.executable, "-c", "import sys; print('one'); print('two'); sys.exit(int(sys.argv[1]))"]
    assert package.ran_aloud(*say, 0) == ["one", "two"]
    with pytest.raises(package.Failed, match="exit code 3"):
        package.ran_aloud(*say, 3)
    assert capsys.readouterr().out == "    one\n    two\n" * 2


def test_a_kvferry_of_the_checkout_is_none_that_was_installed(tmp_path):
    inside = tmp_path / "environment" / "lib" / "kvferry" / "__init__.py"
    package.check_place(inside, tmp_path / "environment")
    for module in (Path(kvferry.__file__), tmp_path / "elsewhere" / "kvferry" / "__init__.py"):
        with pytest.raises(package.Failed, match="kvferry is imported from"):
            package.check_place(module, tmp_path / "environment")
    with pytest.raises(package.Failed, match="kvferry is imported from"):
        package.check_place(ROOT / "src" / "kvferry" / "__init__.py", ROOT)


def test_whoever_has_a_vllm_keeps_it():
    before = {"torch": "2.13.0+cpu", "vllm": "0.32.0", "numpy": "2.3.5"}
    package.check_replaced(before, {**before, "nixl": "1.5.1"})
    with pytest.raises(package.Failed, match=r"replaces torch 2\.13\.0\+cpu by 2\.13\.0, vllm .* by nothing"):
        package.check_replaced(before, {"torch": "2.13.0", "numpy": "2.3.5"})


def test_what_an_uninstall_leaves_is_named(tmp_path, monkeypatch):
    environment = package.Environment(tmp_path / "kvferry-package-1")
    (environment.folder / "lib" / "__pycache__").mkdir(parents=True)
    (environment.folder / "lib" / "__pycache__" / "kvferry.pyc").touch()
    monkeypatch.setattr(environment, "pip", lambda *words: "")
    package.check_uninstall(environment)
    (environment.folder / "lib" / "kvferry.pth").touch()
    with pytest.raises(package.Failed, match=r"leaves lib/kvferry\.pth$"):
        package.check_uninstall(environment)


def test_nothing_of_a_developer_is_handed_on(monkeypatch):
    for name in package.NOT_FOR_USERS:
        monkeypatch.setenv(name, "mine")
    assert "mine" not in package.users_environment(HOME="theirs").values()
    assert package.users_environment(HOME="theirs")["HOME"] == "theirs"
