"""Bad usage and bad input: exit code 2, one line that says where and what, never a traceback."""

import json
import subprocess
import sys

import pytest

from kvferry.models import Topology, describe, model_named
from kvferry.wire import manifest_to_json

ENDS = ("--src", "tp=2", "--dst", "tp=4")
MODEL = ("--model", "llama-3.1-8b")

BAD = {
    "no-command-known": (("plann",), "No such command 'plann'"),
    "no-option-known": (("plan", "--sources", "tp=2"), "No such option: --sources"),
    "no-sides": (("plan",), "0 files for 2 sides without a topology"),
    "one-side": (("plan", *MODEL, "--src", "tp=2"), "0 files for 1 side without a topology"),
    "a-file-too-many": (("plan", "a.json", *MODEL, *ENDS), "1 file for 0 sides without a topology"),
    "three-files": (("plan", "a.json", "b.json", "c.json"), "unexpected extra argument"),
    "a-model-for-files": (("plan", "a.json", "b.json", *MODEL), "files need neither"),
    "no-model": (("plan", *ENDS), "a topology needs a model: give --model NAME"),
    "two-models": (
        ("plan", *MODEL, "--config", "c.json", *ENDS),
        "--model and --config are mutually exclusive",
    ),
    "unknown-model": (("plan", "--model", "lama-3.1-8b", *ENDS), "did you mean llama-3.1-8b"),
    "unknown-key": (
        ("plan", *MODEL, "--src", "tp=2,blok=4", "--dst", "tp=2"),
        "--src tp=2,blok=4: unknown key",
    ),
    "unknown-key-of-a-diff": (("diff", *MODEL, "tp=2,blok=4", "tp=2"), "kvferry: A tp=2,blok=4: unknown key"),
    "no-number": (
        ("plan", *MODEL, "--src", "tp=2", "--dst", "tp=two"),
        "--dst tp=two: tp must be a whole number",
    ),
    "unknown-layout": (("plan", *MODEL, "--src", "layout=DHN", "--dst", ""), "unknown layout 'DHN'"),
    "no-block": (("plan", *MODEL, "--src", "block=0", "--dst", ""), "block must be at least 1"),
    "unknown-group": (
        ("plan", *MODEL, "--src", "block.window-9=32", "--dst", ""),
        "block.window-9: llama-3.1-8b has full",
    ),
    "a-model-of-a-file": (
        ("plan", "a.json", "--src-model", "gpt2", "--dst-model", "gpt2", "--dst", "tp=2"),
        "--src-model gpt2: --src is a manifest",
    ),
    "a-model-of-no-side": (
        ("plan", *MODEL, "--src-model", "gpt2", "--dst-model", "gpt2", *ENDS),
        "name the models of both sides",
    ),
    "uneven-ranks": (
        ("plan", "--model", "kimi-linear-48b", "--src", "tp=3", "--dst", ""),
        "cannot be split over 3",
    ),
    "small-pool": (
        ("plan", *MODEL, "--src", "blocks=3", "--dst", "", "--tokens", 99),
        "set blocks=N",
    ),
    "no-tokens": (("plan", *MODEL, *ENDS, "--tokens", 0), "--tokens"),
    "far-too-many-tokens": (("plan", *MODEL, *ENDS, "--tokens", 1 << 40), "--tokens 1099511627776"),
    "kept-too-many": (("plan", *MODEL, *ENDS, "--tokens", 9, "--kept", 10), "--kept 10 must not exceed"),
    "kept-more-than-the-default": (("plan", *MODEL, *ENDS, "--kept", 5000), "the 4096 tokens of the request"),
    "a-key-without-its-sign": (("plan", *MODEL, "--src", "tp4", "--dst", "tp=2"), "did you mean tp=4?"),
    "kept-inside-a-block": (
        ("plan", *MODEL, "--src", "layout=opaque", "--dst", "layout=opaque", "--tokens", 99, "--kept", 50),
        "--tokens 99 --kept 50: need-kept: group full",
    ),
    "unknown-rank": (
        ("plan", *MODEL, *ENDS, "--dst-rank", 4),
        "--dst-rank 4: engine dst has ranks 0, 1, 2, 3",
    ),
    "no-server": (
        ("plan", *MODEL, "--src", "http://127.0.0.1:9", "--dst", "tp=1"),
        "http://127.0.0.1:9: http://127.0.0.1:9/v1/models cannot be reached",
    ),
    "unknown-placement": (("plan", *MODEL, *ENDS, "--placement", "random"), "--placement"),
    "no-such-file": (("plan", "none.json", *MODEL, "--dst", "tp=2"), "none.json: No such file or directory"),
    "a-folder": (("plan", ".", *MODEL, "--dst", "tp=2"), ".: Is a directory"),
    "not-json": (("plan", "broken.json", *MODEL, "--dst", "tp=2"), "broken.json: $: not well formed"),
    "not-a-manifest": (("plan", "other.json", *MODEL, "--dst", "tp=2"), "other.json: $"),
    "a-wrong-manifest": (("plan", "wrong.json", *MODEL, "--dst", "tp=2"), "wrong.json: $.ranks[0].views[0]"),
    "no-such-config": (("plan", "--config", "none.json", *ENDS), "none.json: No such file or directory"),
    "config-not-json": (("plan", "--config", "broken.json", *ENDS), "broken.json: not JSON: "),
    "config-no-object": (("plan", "--config", "list.json", *ENDS), "list.json: a JSON object is expected"),
    "config-no-family": (("plan", "--config", "other.json", *ENDS), "other.json: config: model_type "),
    "describe-where": (("describe", *MODEL), "Missing option '--at'"),
    "describe-rank": (
        ("describe", *MODEL, "--at", "tp=2", "--rank", 2),
        "--rank 2: the engine has ranks 0, 1",
    ),
    "describe-the-only-rank": (
        ("describe", *MODEL, "--at", "tp=1", "--rank", 1),
        "--rank 1: the engine has rank 0 only",
    ),
    "describe-nowhere": (
        ("describe", *MODEL, "--at", "tp=2", "-o", "no/where.json"),
        "no/where.json: No such",
    ),
    "runs-no-request": (("runs", "a.json", "b.json", "--dst-rank", 0), "Missing option '--request'"),
    "runs-no-file": (
        ("runs", "a.json", "b.json", "--dst-rank", 0, "--request", "r.json"),
        "a.json: No such file",
    ),
    "runs-bad-request": (
        ("runs", "good.json", "good.json", "--dst-rank", 0, "--request", "other.json"),
        "other.json: $",
    ),
    "runs-rank": (
        ("runs", "good.json", "good.json", "--dst-rank", 7, "--request", "other.json"),
        "--dst-rank 7: engine ",
    ),
    "unknown-in-models": (("models", "llama"), "no model 'llama' in the catalogue"),
    "demo-memory": (("demo", *MODEL, "--tokens", 1 << 24), "reduce --tokens, --layers or ranks"),
    "proxy-nobody": (("proxy", "--decode", "http://d:1"), "--prefill: no server is given"),
    "proxy-no-decode": (("proxy", "--prefill", "http://p:1"), "--decode: no server is given"),
    "proxy-no-scheme": (("proxy", "--prefill", "p:1"), "--prefill p:1: the address must start with http://"),
    "proxy-ftp": (("proxy", "--prefill", "ftp://p:1"), "--prefill ftp://p:1: the address must start with"),
    "proxy-port": (("proxy", "--prefill", "http://p:99999"), "--prefill http://p:99999: Port out of range"),
    "proxy-host": (
        ("proxy", "--prefill", "http://a..b:80"),
        "http://a..b:80: a part of the host name is empty",
    ),
    "proxy-no-host": (("proxy", "--prefill", "http://:80"), "--prefill http://:80: an address needs a host"),
    "proxy-path": (("proxy", "--prefill", "http://p:1/v1/"), "--prefill http://p:1/v1/: leave out /v1"),
    "proxy-user": (("proxy", "--prefill", "http://a:b@p:1"), "an address must not contain a user name"),
    "proxy-twice": (
        ("proxy", "--prefill", "http://p:1", "--prefill", "http://p:1/"),
        "--prefill http://p:1: named twice",
    ),
    "proxy-listen": (("proxy", "--listen", "8000"), "--listen 8000: expected HOST:PORT"),
    "proxy-listen-port": (("proxy", "--listen", "h:70000"), "--listen h:70000: expected HOST:PORT"),
    "proxy-listen-v6": (("proxy", "--listen", "::1:80"), "--listen ::1:80: expected HOST:PORT"),
    "proxy-body": (("proxy", "--max-body-mib", 0), "--max-body-mib"),
    "proxy-timeout": (("proxy", "--timeout", "nan"), "--timeout"),
    "status-every": (("status", "--watch", "--every", "inf"), "--every inf: must be 0.1 to 86400 seconds"),
    "status-nan": (("status", "--watch", "--every", "nan"), "--every nan: must be 0.1 to 86400 seconds"),
    "status-no-watch": (("status", "--count", 2), "--every and --count need --watch"),
    "status-no-port": (("status", "tcp://127.0.0.1"), "malformed address: expected tcp://HOST:PORT"),
    "status-scheme": (("status", "udp://127.0.0.1:2"), "malformed address"),
    "demo-topology": (("demo", *MODEL, "--dst", "tp=0"), "--dst tp=0: tp must be at least 1"),
}


@pytest.fixture(scope="module")
def good() -> bytes:
    return manifest_to_json(describe(model_named("gemma-2b"), Topology.parse("blocks=4"), "good"))


@pytest.fixture
def files(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"engine": ')
    (tmp_path / "other.json").write_text('{"model_type": "no such family"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "good.json").write_bytes(good)
    wrong = json.loads(good)
    wrong["ranks"][0]["views"][0]["block_stride"] = -1
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", BAD)
def test_one_line_that_says_what_is_wrong(cli, name):
    argv, expected = BAD[name]
    ran = cli(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("kvferry: ")
    assert ran.err.count("\n") == 1
    assert expected in ran.err


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "name", [name for name in BAD if BAD[name][0][0] in ("plan", "runs", "models", "demo")]
)
def test_as_json_it_is_an_object(cli, name):
    argv, expected = BAD[name]
    ran = cli(*argv, "--json")
    assert ran.code == 2
    assert ran.answer["verdict"] == "error"
    assert expected in ran.answer["message"]


@pytest.mark.usefixtures("files")
def test_names_do_not_reach_the_terminal_as_commands(cli, good, tmp_path):
    evil = json.dumps("x\x1b[31m\x07\nPROVED  by itself\x9b2J")[1:-1]
    hostile = good.decode().replace("gemma-2b", evil).replace("layers.0", evil).replace("bf16", evil)
    (tmp_path / "hostile.json").write_text(hostile)
    for words in (("diff", "good.json"), ("plan", "hostile.json", "--full"), ("plan", "good.json")):
        ran = cli(*words, "hostile.json")
        assert "x\\x1b[31m\\x07" in ran.out
        assert "\nPROVED  by" not in ran.out
        assert all(line.isprintable() for line in ran.out.split("\n"))
    assert "\\x1b[2J" in cli("models", "none\x1b[2J").err


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("KVFERRY_EXPOSE", "bogus", "KVFERRY_EXPOSE='bogus': must be one of"),
        ("KVFERRY_WAY", "direct", "KVFERRY_WAY=direct needs KVFERRY_EXPOSE=fabric"),
    ],
)
def test_a_setting_that_is_refused_is_no_bug(cli, monkeypatch, setting, value, why):
    monkeypatch.setenv(setting, value)
    ran = cli("demo")
    assert (ran.code, ran.out) == (2, "")
    assert why in ran.err


def test_a_terminal_without_a_width(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    assert cli("plan", *MODEL, *ENDS, "--full").code == 0


def run_in_shell(command):
    command = command.replace("kvferry", f"{sys.executable} -m kvferry")
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)


def test_a_file_that_cannot_be_written_keeps_what_it_had(tmp_path):
    """A limit of the file size stands for a full disk."""
    good = tmp_path / "good.json"
    good.write_text("kept")
    for command, path in (
        ("describe --model llama-3.1-8b --at tp=1", good),
        ("keygen", tmp_path / "secret"),
    ):
        ran = run_in_shell(f"ulimit -f 0; kvferry {command} -o {path}")
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"kvferry: {path}: File too large\n")
    assert list(tmp_path.iterdir()) == [good]
    assert good.read_text() == "kept"


def test_a_device_is_written_and_not_replaced():
    ran = run_in_shell("kvferry describe --model llama-3.1-8b --at tp=1 -o /dev/stdout | cat")
    assert json.loads(ran.stdout)["model"] == "llama-3.1-8b"


def test_a_bug_is_called_a_bug(cli, monkeypatch):
    import kvferry

    monkeypatch.setattr(kvferry, "compare", lambda src, dst: 1 // 0)
    ran = cli("plan", *MODEL, *ENDS)
    assert ran.code == 3
    assert (
        "internal error; please report it (KVFERRY_DEBUG=1 shows the traceback): ZeroDivisionError" in ran.err
    )
    monkeypatch.setenv("KVFERRY_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli("plan", *MODEL, *ENDS)


@pytest.mark.parametrize("words", ["models", "models --json", "models none --json"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_named(words, unbuffered):
    for output, why in (("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        ran = run_in_shell(f"PYTHONUNBUFFERED={unbuffered} kvferry {words} {output}")
        assert (ran.returncode, ran.stderr) == (2, f"kvferry: cannot write the output: {why}\n")


def test_an_error_that_nobody_reads_is_no_bug():
    assert run_in_shell("(kvferry models none --json; echo $? >&2) | true").stderr == "141\n"
    assert run_in_shell("kvferry models none > /dev/full 2>&1").returncode == 2


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m kvferry describe --model deepseek-v3 --at tp=32 | head -c 20"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (len(done.stdout), done.stderr) == (20, "")
