"""``kvferry describe`` and ``kvferry models``."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.cli.options import write_output
from kvferry.models import Topology, catalogue, describe, model_named
from kvferry.wire import manifest_from_json


def test_a_manifest_goes_to_standard_output(cli):
    ran = cli("describe", "--model", "kimi-linear-48b", "--at", "tp=4,block=256", "--engine", "e")
    assert ran.code == 0
    expected = describe(model_named("kimi-linear-48b"), Topology.parse("tp=4,block=256"), "e")
    assert manifest_from_json(ran.out.encode()) == expected


def test_one_rank_goes_to_a_file(cli, tmp_path):
    path = tmp_path / "rank.json"
    ran = cli("describe", "--model", "gpt2", "--at", "tp=3", "--rank", 2, "-o", path)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert [rank.rank for rank in manifest_from_json(path.read_bytes()).ranks] == [2]


def described(cli, path):
    return cli("describe", "--model", "gpt2", "--at", "tp=1", "-o", path)


def test_a_file_that_is_replaced_keeps_its_mode_and_its_links(cli, tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    assert described(cli, link).code == 0
    assert manifest_from_json(path.read_bytes()).ranks
    assert (path.stat().st_mode & 0o777, link.is_symlink()) == (0o600, True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "link.json"]


@pytest.mark.parametrize("what", ["open", "replace"])
def test_a_file_in_a_folder_that_cannot_change_is_written_in_place(cli, tmp_path, monkeypatch, what):
    """As one that is mounted into a container."""
    path, of_path = tmp_path / "a.json", getattr(Path, what)
    path.write_text("old")

    def refused(self, *args, **kwargs):
        if self.suffix == ".part":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return of_path(self, *args, **kwargs)

    monkeypatch.setattr(Path, what, refused)
    assert described(cli, path).code == 0
    assert manifest_from_json(path.read_bytes()).ranks
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_loop_of_links_is_replaced(cli, tmp_path):
    path = tmp_path / "a.json"
    path.symlink_to(path)
    assert described(cli, path).code == 0
    assert manifest_from_json(path.read_bytes()).ranks


def test_files_of_one_folder_are_not_mixed_up(tmp_path, monkeypatch):
    """By commands in two containers, which may have one process number."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    files = {tmp_path / f"{name}.json": name.encode() * 1000 for name in "abcd"}
    with ThreadPoolExecutor(len(files)) as pool:
        for _ in range(100):
            list(pool.map(lambda path: write_output(path, files[path]), files))
            assert {path: path.read_bytes() for path in files} == files


def test_the_catalogue_is_listed(cli):
    ran = cli("models")
    assert ran.code == 0
    assert [name for name in catalogue() if name not in ran.out] == []
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "fixed_bytes"),
    [
        ("llama-3.1-70b", 80 * 2 * 8 * 128 * 2, 0),
        ("deepseek-v3.2", 61 * (576 * 2 + 132), 0),
        ("gpt-oss-20b", 12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2 * 128),
        ("kimi-linear-48b", 7 * 576 * 2, 20 * 32 * 128 * (3 * 3 * 2 + 128 * 4)),
        ("kimi-k2.5+kimi-k2.5-eagle3", 61 * 576 * 2 + 2 * 64 * 128 * 2, 0),
    ],
)
def test_bytes_of_a_model(cli, name, bytes_per_token, fixed_bytes):
    (entry,) = cli("models", name, "--json").answer["models"]
    assert (entry["name"], entry["bytes_per_token"], entry["fixed_bytes"]) == (
        name,
        bytes_per_token,
        fixed_bytes,
    )


def test_the_bytes_are_those_of_the_manifest(cli):
    """What the list says of a model and what a plan moves are the same bytes."""
    (entry,) = cli("models", "qwen3-next-80b", "--json").answer["models"]
    ends = ("--src", "tp=2", "--dst", "tp=1", "--tokens", 1024)
    answer = cli("plan", "--model", "qwen3-next-80b", *ends, "--json").answer
    assert answer["total_bytes"] == 1024 * entry["bytes_per_token"] + entry["fixed_bytes"]


def test_every_entry_has_its_words(cli):
    for entry in cli("models", "--json").answer["models"]:
        assert all(entry[key] for key in ("title", "family", "num_layers", "caches", "note", "source"))
    assert "Every layer keeps a 128 token window" in " ".join(cli("models", "deepseek-v4").out.split())
