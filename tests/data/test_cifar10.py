"""CIFAR-10's files: found, downloaded, unpacked and checked; a crafted archive writes nothing."""

import functools
import hashlib
import http.server
import io
import tarfile
import threading

import pytest

from fedbatchnorm.data import cifar10
from fedbatchnorm.data.cifar10 import FILES, FOLDER, DataError


@pytest.fixture
def small(monkeypatch):
    """The six files at a size that is quick to handle, with their checksums."""
    contents = {name: bytes([i]) * 3073 for i, name in enumerate(FILES)}
    monkeypatch.setattr(cifar10, "_RECORDS", 1)
    monkeypatch.setattr(cifar10, "_FILE_SIZE", 3073)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    for name, value in sums.items():
        monkeypatch.setitem(FILES, name, value)
    return contents


def pack(path, contents, change=lambda members: members):
    members = [tarfile.TarInfo(FOLDER)]
    members[0].type = tarfile.DIRTYPE
    for name in (*contents, "batches.meta.txt", "readme.html"):
        member = tarfile.TarInfo(f"{FOLDER}/{name}")
        member.size = len(contents.get(name, b"some text"))
        members.append(member)
    with tarfile.open(path, "w:gz") as tar:
        for member in change(members):
            content = contents.get(member.name.rpartition("/")[2], b"some text")
            tar.addfile(member, io.BytesIO(content + bytes(max(0, member.size - len(content)))))
    return path


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_an_official_archive_unpacks(small, tmp_path):
    root = tmp_path / "data"
    folder = cifar10.unpack(pack(tmp_path / "a.tar.gz", small), root)
    assert files_below(root) == sorted(f"{FOLDER}/{name}" for name in FILES)
    assert folder == cifar10.find(root) == cifar10.find(folder)
    (train, labels), (test, _) = cifar10.read(root)
    assert train.shape == (5, 3, 32, 32)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert test[0, 0, 0, 0] == 5


def member(name, **fields):
    made = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(made, key, value)
    return made


HOSTILE = {
    "an absolute path": member("/tmp/evil.bin"),
    "a path outside": member(f"{FOLDER}/../evil.bin"),
    "a path outside under a known name": member("../data_batch_1.bin"),
    "a symbolic link": member(f"{FOLDER}/data_batch_1.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": member(f"{FOLDER}/data_batch_1.bin", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": member(f"{FOLDER}/data_batch_1.bin", type=tarfile.CHRTYPE),
    "a folder under a known name": member(f"{FOLDER}/data_batch_1.bin", type=tarfile.DIRTYPE),
    "another file": member(f"{FOLDER}/setup.py", size=9),
    "a folder below": member(f"{FOLDER}/more/data_batch_1.bin", size=3073),
    "a huge file": member(f"{FOLDER}/data_batch_1.bin", size=50_000),
}


@pytest.mark.parametrize("extra", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", [0, -1])
def test_a_crafted_archive_is_refused_before_anything_is_written(small, tmp_path, extra, place):
    root = tmp_path / "data"
    archive = pack(
        tmp_path / "a.tar.gz", small, lambda members: [*members, extra] if place else [extra, *members]
    )
    with pytest.raises(DataError, match="nothing was unpacked"):
        cifar10.unpack(archive, root)
    assert files_below(tmp_path) == ["a.tar.gz"]


def test_a_missing_file_a_wrong_checksum_or_a_torn_archive_is_refused(small, tmp_path):
    root = tmp_path / "data"
    lacking = pack(tmp_path / "a.tar.gz", small, lambda members: members[:3])
    with pytest.raises(DataError, match=r"lacks data_batch_3.bin, data_batch_4.bin"):
        cifar10.unpack(lacking, root)
    changed = pack(tmp_path / "b.tar.gz", small | {"test_batch.bin": b"x" * 3073})
    with pytest.raises(DataError, match=r"test_batch.bin in b.tar.gz is damaged: its MD5 is"):
        cifar10.unpack(changed, root)
    whole = lacking.read_bytes()
    for i, content in enumerate(
        (b"", b"text", whole[:100], whole[:-9], whole[:60] + b"?" * 40 + whole[100:])
    ):
        torn = tmp_path / f"{i}.tar.gz"
        torn.write_bytes(content)
        with pytest.raises(DataError, match=r"not a readable archive|lacks data_batch"):
            cifar10.unpack(torn, root)
    assert files_below(root) == []


def test_a_damaged_file_is_named_when_it_is_read(small, tmp_path):
    folder = cifar10.unpack(pack(tmp_path / "a.tar.gz", small), tmp_path)
    content = bytearray((folder / "data_batch_4.bin").read_bytes())
    content[100] ^= 1
    (folder / "data_batch_4.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_4.bin is damaged"):
        cifar10.read(tmp_path)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_download_unpacks_what_the_checksum_vouches_for(small, tmp_path, server):
    served, address = server
    archive = pack(served / "cifar.tar.gz", small)
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    root = tmp_path / "data"
    cifar10.download(root, url=f"{address}/cifar.tar.gz", md5=md5)
    assert files_below(root) == sorted(f"{FOLDER}/{name}" for name in FILES)


@pytest.mark.parametrize("what", ["wrong checksum", "not there", "nobody listens"])
def test_a_failed_download_says_what_to_fetch_and_where_to_put_it(small, tmp_path, server, what):
    served, address = server
    pack(served / "cifar.tar.gz", small)
    url = {
        "wrong checksum": f"{address}/cifar.tar.gz",
        "not there": f"{address}/nothing.tar.gz",
        "nobody listens": "http://127.0.0.1:9/cifar.tar.gz",
    }[what]
    root = tmp_path / "data"
    with pytest.raises(DataError) as error:
        cifar10.download(root, url=url)
    for part in (cifar10.URL, cifar10.ARCHIVE_MD5, FOLDER, str(root), "--data-dir", "FEDBATCHNORM_DATA"):
        assert part in str(error.value)
    assert files_below(root) == []


def test_where_data_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBATCHNORM_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cifar10.data_folder(tmp_path / "named") == tmp_path / "named"
    assert cifar10.data_folder() == tmp_path / "variable"
    monkeypatch.delenv("FEDBATCHNORM_DATA")
    assert cifar10.data_folder() == tmp_path / "cache" / "fedbatchnorm"
