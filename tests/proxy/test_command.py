"""``kvferry proxy`` as people start and stop it."""

import re
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest

SERVERS = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9")
COMMAND = (sys.executable, "-m", "kvferry", "proxy", *SERVERS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_stops_when_told(number):
    command = ["env", "--default-signal=INT", *COMMAND, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as proxy:
        assert proxy.stderr is not None
        first = proxy.stderr.readline()
        address = re.search(r"kvferry proxy: listening on (http://127\.0\.0\.1:(\d+))/v1$", first)
        assert address, first
        with urlopen(f"{address[1]}/live") as answer:
            assert answer.status == 200
        taken = subprocess.run(
            [*COMMAND, "--listen", f"127.0.0.1:{address[2]}"], capture_output=True, text=True, check=False
        )
        assert taken.returncode == 2
        assert f"kvferry: --listen 127.0.0.1:{address[2]}: " in taken.stderr
        assert "in use" in taken.stderr
        assert "Traceback" not in taken.stderr
        proxy.send_signal(number)
        rest = proxy.stderr.read()
        assert proxy.wait() == 0
    assert rest.endswith("kvferry proxy: stopped\n")


def test_without_aiohttp_it_says_what_to_install():
    probe = "import sys; sys.modules['aiohttp'] = None; import kvferry.cli; sys.exit(kvferry.cli.main())"
    ran = subprocess.run(
        [sys.executable, "-c", probe, "proxy", *SERVERS], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    said = 'aiohttp is not installed: pip install ".[proxy]" in a clone of kvferry'
    assert ran.stderr == f"kvferry: {said}\n"
