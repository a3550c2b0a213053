"""RB-9: the same files are the same weights wherever they are, and any others are others."""

import hashlib
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvferry import SpecError
from kvferry.checkpoint import weights, weights_values
from kvferry.checkpoint import weights as kept_digests
from kvferry.checkpoint.weights import FileState, keep
from tests.checkpoint.conftest import write


def values(folder, tensors, num_files=1, **options):
    """What identifies these tensors, spread over files in a folder."""
    names = list(tensors)
    files = [
        write(
            folder / f"model-{i}.safetensors",
            {name: tensors[name] for name in names[i::num_files]},
            **options,
        )
        for i in range(num_files)
    ]
    return weights_values(files)


def test_the_same_files_in_two_folders_are_the_same_weights(tmp_path, tensors):
    """RB-9: not names, not paths, not the order in which files are listed."""
    one = values(tmp_path / "a", tensors, num_files=3)
    assert one == values(tmp_path / "b", tensors, num_files=3)
    files = sorted((tmp_path / "b").iterdir(), reverse=True)
    files[0] = files[0].rename(files[0].with_name("renamed.safetensors"))
    assert one == weights_values(files)
    num_bytes = sum(path.stat().st_size for path in files)
    assert one["weights.files"] == f"3 files, {num_bytes:,} bytes"


def test_the_same_tensors_in_other_files_count_as_others(tmp_path, tensors):
    one, split = values(tmp_path / "a", tensors), values(tmp_path / "b", tensors, num_files=4)
    assert one["weights.files"] != split["weights.files"]
    assert one["weights.content"] != split["weights.content"]


@pytest.mark.parametrize("num_rows", [1, 200])
def test_no_row_of_a_large_embedding_can_hide(tmp_path, num_rows):
    """RB-9: a fine-tune of some rows of a large embedding is another model."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((20_000, 64)).astype(np.float32)}
    one = values(tmp_path / "a", tensors)
    tensors["model.embed_tokens.weight"][7_000 : 7_000 + num_rows] += 0.5
    other = values(tmp_path / "b", tensors)
    assert one["weights.files"] == other["weights.files"]
    assert one["weights.content"] != other["weights.content"]


def test_weights_need_not_be_in_safetensors_files(tmp_path):
    one, other = (tmp_path / f"{name}.bin" for name in "ab")
    one.write_bytes(b"\x80\x02pickled")
    other.write_bytes(b"\x80\x02Pickled")
    assert weights_values([one])["weights.content"] != weights_values([other])["weights.content"]


def test_no_files_are_no_weights(tmp_path):
    with pytest.raises(SpecError, match="no weight files were found"):
        weights_values([])
    with pytest.raises(FileNotFoundError):
        weights_values([tmp_path / "gone.safetensors"])


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"a")

    class Writing:
        def update(self, part):
            path.write_bytes(b"ab")

    monkeypatch.setattr(hashlib, "sha256", Writing)
    with pytest.raises(SpecError, match=r"a\.safetensors changed while it was hashed"):
        weights_values([path])


# -- digests that are kept -----------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The files that are read."""
    found: list[Path] = []
    take = weights._sha256

    def counted(path):
        found.append(path)
        return take(path)

    monkeypatch.setattr(weights, "_sha256", counted)
    monkeypatch.setattr(kept_digests, "SETTLED_NS", -1)
    return found


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / name for name in ("1.safetensors", "2.safetensors")]
    for path in made:
        path.write_bytes(path.name.encode())
    return made


def cache(tmp_path):
    return tmp_path / "cache" / "kvferry" / "weights.json"


def test_a_file_is_read_once(files, reads, tmp_path):
    first = weights_values(files)
    assert sorted(reads) == files
    reads.clear()
    assert weights_values(files) == first
    assert reads == []
    assert cache(tmp_path).stat().st_mode & 0o777 == 0o600
    assert cache(tmp_path).parent.stat().st_mode & 0o777 == 0o700


def test_ranks_that_start_together_read_a_file_once(files, reads, monkeypatch):
    """One reads, and the others wait for its digests."""
    take = weights._sha256
    all_started = threading.Barrier(4)

    def slow(path):
        time.sleep(0.05)
        return take(path)

    def start(_):
        all_started.wait()
        return tuple(weights_values(files).items())

    monkeypatch.setattr(weights, "_sha256", slow)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(start, range(4)))) == 1
    assert sorted(reads) == files


def test_a_large_file_whose_digest_is_kept_takes_no_time(tmp_path):
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.truncate(20 << 30)
    os.utime(large, (1e9, 1e9))
    state = FileState.of(large)
    with settled():
        keep(state, "ab" * 32)
    started = time.perf_counter()
    found = weights_values([large])
    assert time.perf_counter() - started < 1
    assert found["weights.files"] == f"1 file, {20 << 30:,} bytes"
    assert found["weights.content"] == f"sha256 {hashlib.sha256(('ab' * 32).encode()).hexdigest()}"


@contextmanager
def settled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_digests, "SETTLED_NS", -1)
        yield


def other_time(path):
    os.utime(path, ns=(1, 1))


def other_size(path):
    path.write_bytes(b"longer than before")


def other_inode(path):
    found = path.stat()
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def same_size_and_time(path):
    """In place: its time is set back afterwards."""
    found = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("change", [other_time, other_size, other_inode, same_size_and_time])
def test_a_file_that_was_written_is_read_again(files, reads, change):
    weights_values(files)
    reads.clear()
    change(files[1])
    weights_values(files)
    assert reads == files[1:]


def test_a_file_that_was_just_written_is_not_kept(files, reads, monkeypatch):
    """Within a tick of the clock it may be written again, and look the same."""
    monkeypatch.setattr(kept_digests, "SETTLED_NS", 2_000_000_000)
    weights_values(files)
    weights_values(files)
    assert len(reads) == 2 * len(files)


@pytest.mark.parametrize(
    "junk",
    [b"", b"{", b"{}", b"[1]", b"[[]]", b'[["a", 1, 2, 3, 4, "no digest"]]', b"\xff", b"[" * 100_000],
    ids=["empty", "cut", "object", "number", "short", "no digest", "no text", "deep"],
)
def test_a_cache_that_makes_no_sense_is_made_again(files, reads, tmp_path, junk):
    first = weights_values(files)
    cache(tmp_path).write_bytes(junk)
    assert weights_values(files) == first
    reads.clear()
    assert weights_values(files) == first
    assert reads == []


def no_folder(path):
    path.write_text("a file")


def open_folder(path):
    path.mkdir(mode=0o755)
    path.chmod(0o755)


def a_link(path):
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("spoil", [no_folder, open_folder, a_link])
def test_a_cache_folder_that_is_not_ours_alone_is_not_used(files, reads, tmp_path, spoil, caplog):
    cache(tmp_path).parent.parent.mkdir()
    spoil(cache(tmp_path).parent)
    first = weights_values(files)
    assert weights_values(files) == first
    assert len(reads) == 2 * len(files)
    assert not cache(tmp_path).exists()
    assert caplog.text.count("cannot be cached: the next start hashes the weights again") == 1


def test_a_link_in_place_of_the_cache_is_not_followed(files, reads, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("[]")
    cache(tmp_path).parent.mkdir(mode=0o700, parents=True)
    cache(tmp_path).symlink_to(victim)
    weights_values(files)
    assert victim.read_text() == "[]"


def test_names_of_the_hugging_face_cache_are_digests(tmp_path, reads):
    """And equal to those of the same files elsewhere. Small files have Git hashes as names, and are read."""
    content = {"model.safetensors": b"large", "small.safetensors": b"small"}
    names = {"model.safetensors": hashlib.sha256(b"large").hexdigest(), "small.safetensors": "1f" * 20}
    hub, plain = tmp_path / "models--a--b", tmp_path / "plain"
    for folder in (hub / "blobs", hub / "snapshots" / "rev", plain):
        folder.mkdir(parents=True)
    for name, data in content.items():
        (hub / "blobs" / names[name]).write_bytes(data)
        (hub / "snapshots" / "rev" / name).symlink_to(f"../../blobs/{names[name]}")
        (plain / name).write_bytes(data)
    found = weights_values(sorted((hub / "snapshots" / "rev").iterdir()))
    assert reads == [hub / "snapshots" / "rev" / "small.safetensors"]
    assert found == weights_values(sorted(plain.iterdir()))


def test_a_name_that_only_looks_like_a_digest_is_none(tmp_path, reads):
    path = tmp_path / ("ab" * 32)
    path.write_bytes(b"weights")
    weights_values([path])
    assert reads == [path]


def test_a_long_read_is_told_with_its_progress(files, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvferry")
    monkeypatch.setattr(weights, "LONG_BYTES", 1)
    monkeypatch.setattr(weights, "PROGRESS_SECONDS", 0)
    weights_values(files)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "kvferry: hashing 0.0 GB of weights to identify the model; the hashes are cached"
    assert "kvferry: hashing 0.0 GB of weights to identify the model: 100 %" in lines
    assert lines[-1].startswith("kvferry: hashed 0.0 GB of weights in 0.")
