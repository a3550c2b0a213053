"""The pages for operators against the code of both sides: every option of ours, every setting of vLLM's."""

import ast
import inspect
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # since 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

from kvferry.errors import SpecError
from kvferry.integrations.vllm.shared.options import Options

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes" / "prefill-decode.yaml"
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
MOVE = PAGES["from-nixlconnector.md"]


def known_options() -> list[str]:
    with pytest.raises(SpecError) as refused:
        Options.of({"no such option": 1}, host="10.0.0.7")
    return str(refused.value).partition("known are ")[2].split(", ")


def settings_of_nixl_connector() -> set[str]:
    """What vLLM's own connector reads: keys of its extra config, and variables of the environment."""
    found = set()
    for path in sorted(Path(inspect.getfile(nixl)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Call(func=ast.Attribute(attr="get_from_extra_config"), args=[key, *_]):
                    found.add(ast.literal_eval(key))
                case ast.Attribute(value=ast.Name(id="envs"), attr=name):
                    found.add(name)
                case _:
                    pass
    return found


def configurations() -> list[tuple[str, dict]]:
    """Every transfer configuration on a page that is whole JSON."""
    quoted = re.compile(r"--kv-transfer-config '(\{.*?\})'|```json\n(\{\"kv_connector\".*?)```", re.DOTALL)
    return [(page, json.loads(a or b)) for page, text in PAGES.items() for a, b in quoted.findall(text)]


def commands() -> list[list[str]]:
    """The arguments of every server that a page, or the example for Kubernetes, starts."""
    yaml = pytest.importorskip("yaml")
    typed = re.compile(r"^\$ vllm serve (MODEL.*?)(?=^\$|^```)", re.MULTILINE | re.DOTALL)
    lines = [shlex.split(s.replace("\\\n", " ")) for text in PAGES.values() for s in typed.findall(text)]
    found = [line for line in lines if "|" not in line]
    for document in yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")):
        if document["kind"] == "StatefulSet":
            found += [each["args"] for each in document["spec"]["template"]["spec"]["containers"]]
    return found


def test_every_server_on_a_page_has_arguments_that_vllm_understands():
    parser = make_arg_parser(FlexibleArgumentParser())
    asked = commands()
    assert len(asked) >= 6
    for argv in asked:
        config = parser.parse_args(argv).kv_transfer_config
        assert KVTransferConfig(**json.loads(config) if isinstance(config, str) else vars(config)).kv_role


def test_every_option_is_on_the_page():
    options = known_options()
    assert len(options) > 10
    assert [name for name in options if f"| `{name}` |" not in PAGES["vllm.md"]] == []


def test_every_setting_of_vllms_connector_has_an_answer():
    settings = settings_of_nixl_connector()
    assert {"kv_lease_duration", "VLLM_NIXL_SIDE_CHANNEL_PORT"} <= settings
    assert [name for name in sorted(settings) if f"`{name}`" not in MOVE] == []


def test_every_option_of_vllms_connector_is_refused_with_what_to_do_instead():
    options = sorted(name for name in settings_of_nixl_connector() if name.islower())
    strange = [name for name in options if name not in known_options()]
    assert len(strange) > 5
    with pytest.raises(SpecError) as refused:
        Options.of(dict.fromkeys(strange, 1), host="10.0.0.7")
    assert [name for name in strange if f"{name} (NixlConnector's; " not in str(refused.value)] == []


def test_a_layout_that_is_set_wins_over_what_the_connector_asks_for(monkeypatch):
    """As the page says; and vLLM does not even ask."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    nobody = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
    assert resolve_kv_cache_layout(nobody, [["LBHNC", "LBNHC"]]).name == "LBNHC"
    assert "An explicit value takes precedence" in MOVE


def test_every_field_of_the_flag_has_an_answer():
    assert [field.name for field in fields(KVTransferConfig) if f"| `{field.name}` |" not in MOVE] == []


@pytest.mark.parametrize(("page", "config"), configurations(), ids=lambda value: str(value)[:40])
def test_a_configuration_on_a_page_is_one(page, config):
    whole = KVTransferConfig(**config)
    parts = whole.kv_connector_extra_config.get("connectors", [config])
    for part in parts:
        if KVTransferConfig(**part).kv_connector == "KVFerryConnector":
            extra = dict(part.get("kv_connector_extra_config", {}))
            extra.pop("secret_file", None)  # the file is the reader's
            Options.of(extra | {"insecure": True} if "listen" in extra else extra, host="10.0.0.7")


def test_there_are_configurations():
    assert {"vllm.md", "from-nixlconnector.md"} <= {page for page, _ in configurations()}
