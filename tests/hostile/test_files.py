"""Files that peers cause: private, bounded, and never through somebody's symlink."""

import os
import stat
import tempfile

import pytest

from kvferry.errors import SpecError
from kvferry.host.this_user import MAX_FILE_BYTES, MAX_FILES, own_folder, write_private


def test_a_symlink_is_replaced_and_not_followed(tmp_path):
    """On the old code the manifest of a peer was written over whatever the link named."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "src-of-prefill.json").symlink_to(precious)
    path = write_private(folder, "src-of-prefill.json", b"a peer's")
    assert precious.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_bytes() == b"a peer's"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\0b", "..", "x" * 5000, "é\n/..", "."])
def test_no_name_leaves_the_folder(tmp_path, name):
    path = write_private(tmp_path / "dumps", f"{name}.json", b"{}")
    assert path.parent == tmp_path / "dumps"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert len(path.name) <= 150


def test_there_are_only_so_many_files_of_such_a_length(tmp_path):
    for number in range(MAX_FILES):
        write_private(tmp_path, f"{number}.json", b"{}")
    with pytest.raises(SpecError, match="64 files or more: remove some"):
        write_private(tmp_path, "another.json", b"{}")
    write_private(tmp_path, "7.json", b"[]")
    with pytest.raises(SpecError, match="is not written: its"):
        write_private(tmp_path, "7.json", bytes(MAX_FILE_BYTES + 1))
    assert len(os.listdir(tmp_path)) == MAX_FILES


def test_the_folder_is_this_user_s_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = own_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert own_folder() == folder
    folder.chmod(0o755)
    with pytest.raises(SpecError, match="not a private folder of this user"):
        own_folder()
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(SpecError, match="not a private folder of this user"):
        own_folder()
