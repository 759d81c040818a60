"""MNIST's and Fashion-MNIST's files: found, downloaded, checked and read; a crafted one is refused."""

import functools
import gzip
import hashlib
import http.server
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from fedbatchnorm.data import datasets, mnist
from fedbatchnorm.data.mnist import EDITIONS, SHAPES, DataError, Sums

NAMES = list(EDITIONS)
IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = SHAPES


def md5(content):
    return hashlib.md5(content).hexdigest()


def idx(values):
    """An IDX file by hand: two zeros, 8 for bytes, the number of dimensions; the dimensions; the bytes."""
    dimensions = b"".join(struct.pack(">I", size) for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + dimensions + values.astype(np.uint8).tobytes()


def vouch(monkeypatch, name, file, packed=b"", unpacked=b""):
    """Let these bytes be the official ones."""
    monkeypatch.setitem(EDITIONS[name].sums, file, Sums(md5(packed), md5(unpacked)))


@pytest.fixture
def arrays(monkeypatch):
    """Both datasets at a size that is quick to handle: the values, by dataset and file."""
    rng = np.random.default_rng(0)
    for file, shape in SHAPES.items():
        monkeypatch.setitem(SHAPES, file, (30 if "train" in file else 20, *shape[1:]))
    made = {
        name: {
            file: rng.integers(256 if len(shape) == 3 else 10, size=shape) for file, shape in SHAPES.items()
        }
        for name in NAMES
    }
    for name, files in made.items():
        for file, values in files.items():
            vouch(monkeypatch, name, file, gzip.compress(idx(values), mtime=0), idx(values))
    return made


def place(folder, files, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for file, values in files.items():
        name, content = (f"{file}.gz", gzip.compress(idx(values), mtime=0)) if packed else (file, idx(values))
        (folder / name).write_bytes(content)
    return folder


def no_network(monkeypatch):
    for name in NAMES:
        monkeypatch.setitem(EDITIONS, name, EDITIONS[name]._replace(mirrors=("http://127.0.0.1:9/",)))


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


LAYOUTS = {
    "mnist": ["mnist", "MNIST/raw", "."],
    "fashion_mnist": ["fashion-mnist", "FashionMNIST/raw", "."],
}


@pytest.mark.parametrize(("name", "layout"), [(n, folder) for n in NAMES for folder in LAYOUTS[n]])
@pytest.mark.parametrize("packed", [True, False])
def test_files_are_found_in_every_layout_and_read(arrays, tmp_path, name, layout, packed):
    files = arrays[name]
    folder = place(tmp_path / layout, files, packed)
    assert mnist.find(tmp_path, name) == folder
    (train_x, train_y), (test_x, test_y) = mnist.read(tmp_path, name)
    for x, y, images, labels in (
        (train_x, train_y, IMAGES, LABELS),
        (test_x, test_y, TEST_IMAGES, TEST_LABELS),
    ):
        assert x.dtype == np.uint8
        assert y.dtype == np.int64
        assert np.array_equal(x, files[images][:, None])
        assert np.array_equal(y, files[labels])


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_the_table_give_tensors(arrays, tmp_path, name):
    place(tmp_path / LAYOUTS[name][0], arrays[name])
    data = datasets.load(name, tmp_path)
    assert data.train.x.shape == (30, 1, 28, 28)
    assert data.test.x.shape == (20, 1, 28, 28)
    assert data.train.x.dtype == torch.uint8
    assert data.test.y.tolist() == arrays[name][TEST_LABELS].tolist()
    assert data.mean.shape == data.std.shape == (1, 1, 1)
    assert data.mean.item() == pytest.approx(arrays[name][IMAGES].mean(), rel=1e-6)
    assert data.std.item() == pytest.approx(arrays[name][IMAGES].std(), rel=1e-6)
    assert len(data.classes) == 10
    assert data.classes[9] == {"mnist": "9", "fashion_mnist": "ankle boot"}[name]


@pytest.mark.parametrize("packed", [True, False])
def test_one_dataset_is_not_taken_for_the_other(arrays, tmp_path, packed):
    place(tmp_path, arrays["mnist"], packed)
    assert mnist.find(tmp_path, "mnist") == tmp_path
    assert mnist.find(tmp_path, "fashion_mnist") is None
    place(tmp_path / "fashion-mnist", arrays["mnist"], packed)
    with pytest.raises(DataError, match="is damaged"):
        mnist.read(tmp_path, "fashion_mnist")


def test_nothing_is_found_where_nothing_or_not_all_is(arrays, tmp_path, monkeypatch):
    no_network(monkeypatch)
    assert mnist.find(tmp_path / "nowhere") is None
    folder = place(tmp_path / "mnist", arrays["mnist"])
    (folder / f"{LABELS}.gz").unlink()
    assert mnist.find(tmp_path) is None
    with pytest.raises(DataError) as error:
        mnist.read(tmp_path)
    assert f"{folder} lacks {LABELS}." in str(error.value)
    (folder / LABELS).write_bytes(idx(arrays["mnist"][LABELS]))
    assert mnist.find(tmp_path) == folder  # some gzipped, some not
    assert mnist.read(tmp_path)[0][1].tolist() == arrays["mnist"][LABELS].tolist()


good = idx(np.zeros(30))
HOSTILE = {
    "nothing": (LABELS, b"", "begins with the bytes , not 00000801"),
    "a magic number of three dimensions": (
        LABELS,
        b"\0\0\x08\x03" + good[4:],
        "bytes 00000803, not 00000801",
    ),
    "values of four bytes": (LABELS, b"\0\0\x0d\x01" + good[4:], "bytes 00000d01, not 00000801"),
    "a torn header": (LABELS, good[:6], "it holds 6 bytes, not 38"),
    "one byte too few": (LABELS, good[:-1], "it holds 37 bytes, not 38"),
    "one byte too many": (LABELS, good + b"\0", "it holds more bytes, not 38"),
    "one label too many": (LABELS, idx(np.zeros(31)), r"its dimensions are \(31,\), not \(30,\)"),
    "label 10": (LABELS, idx(np.full(30, 10)), "it holds the label 10; labels are 0 to 9"),
    "other dimensions": (IMAGES, idx(np.zeros((30, 14, 56))), r"dimensions are \(30, 14, 56\), not \(30, 28"),
    "a huge promise": (IMAGES, b"\0\0\x08\x03" + b"\xff" * 12, "dimensions are"),
}


@pytest.mark.parametrize(("file", "content", "message"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("packed", [True, False])
def test_a_crafted_file_is_refused_by_name(arrays, tmp_path, monkeypatch, file, content, message, packed):
    """Even where the checksum is right: it is not the only guard."""
    folder = place(tmp_path / "mnist", arrays["mnist"], packed)
    compressed = gzip.compress(content, mtime=0)
    vouch(monkeypatch, "mnist", file, compressed, content)
    path = folder / (f"{file}.gz" if packed else file)
    path.write_bytes(compressed if packed else content)
    with pytest.raises(DataError, match=message) as error:
        mnist.read(tmp_path)
    assert str(path) in str(error.value)
    assert "Delete it and run again to download it" in str(error.value)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("file", SHAPES)
def test_a_flipped_bit_is_found(arrays, tmp_path, packed, file):
    folder = place(tmp_path / "mnist", arrays["mnist"], packed)
    path = folder / (f"{file}.gz" if packed else file)
    content = bytearray(path.read_bytes())
    content[24] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="Delete it and run again to download it") as error:
        mnist.read(tmp_path)
    assert str(path) in str(error.value)


def test_a_gzip_file_that_cannot_be_unpacked_is_named(arrays, tmp_path, monkeypatch):
    folder = place(tmp_path / "mnist", arrays["mnist"])
    path = folder / f"{LABELS}.gz"
    whole = path.read_bytes()
    wrong_sum = whole[:-8] + bytes(4) + whole[-4:]
    for content in (b"", b"text", whole[:-9], whole[:5], wrong_sum):
        path.write_bytes(content)
        vouch(monkeypatch, "mnist", LABELS, content)
        with pytest.raises(DataError, match=rf"{LABELS}.gz is not the file it should be"):
            mnist.read(tmp_path)


@pytest.mark.parametrize("start", [b"", good])
def test_a_gzip_bomb_is_not_unpacked(arrays, tmp_path, monkeypatch, start):
    bomb = gzip.compress(start + bytes(100_000_000), mtime=0)
    folder = place(tmp_path / "mnist", arrays["mnist"])
    (folder / f"{LABELS}.gz").write_bytes(bomb)
    monkeypatch.setattr(mnist, "_longest_packed", lambda file: 200_000)  # as if such a length were allowed
    vouch(monkeypatch, "mnist", LABELS, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="is not the file it should be"):
            mnist.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [True, False])
def test_a_huge_file_is_not_read(arrays, tmp_path, packed):
    folder = place(tmp_path / "mnist", arrays["mnist"], packed)
    with (folder / (f"{LABELS}.gz" if packed else LABELS)).open("r+b") as stream:
        stream.truncate(1_000_000_000)  # sparse: takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="Delete it"):
            mnist.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.fixture
def server(tmp_path):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_download_takes_the_first_mirror_that_has_a_file(arrays, tmp_path, monkeypatch, server, name):
    served, address = server
    place(served / "here", arrays[name])
    (served / "wrong").mkdir()
    (served / f"wrong/{IMAGES}.gz").write_bytes(b"an error page")
    mirrors = tuple(f"{address}/{folder}/" for folder in ("wrong", "here", "nowhere"))
    monkeypatch.setitem(EDITIONS, name, EDITIONS[name]._replace(mirrors=mirrors))
    root = tmp_path / "data"
    (train_x, _), _ = mnist.read(root, name)
    assert np.array_equal(train_x[:, 0], arrays[name][IMAGES])
    assert files_below(root) == sorted(f"{LAYOUTS[name][0]}/{file}.gz" for file in SHAPES)
    monkeypatch.setattr(mnist, "download", None)  # from now on it is found
    mnist.read(root, name)


@pytest.mark.parametrize("what", ["wrong checksum", "not there", "nobody listens"])
def test_a_failed_download_says_what_to_fetch_and_where_to_put_it(
    arrays, tmp_path, monkeypatch, server, what
):
    served, address = server
    place(served, arrays["mnist"])
    if what == "wrong checksum":
        (served / f"{TEST_LABELS}.gz").write_bytes(b"an error page")
    mirror = {"wrong checksum": f"{address}/", "not there": f"{address}/no/"}.get(what, "http://127.0.0.1:9/")
    monkeypatch.setitem(EDITIONS, "mnist", EDITIONS["mnist"]._replace(mirrors=(mirror,)))
    root = tmp_path / "data"
    with pytest.raises(DataError) as error:
        mnist.read(root)
    sums = (EDITIONS["mnist"].sums[file].packed for file in SHAPES)
    for part in (
        *SHAPES,
        *sums,
        mirror,
        str(root / "mnist"),
        "MNIST is not in",
        "--data-dir",
        "FEDBATCHNORM_DATA",
    ):
        assert part in str(error.value)
    assert files_below(root) == []  # the files that did arrive are not left behind


def test_the_official_sizes_and_sums():
    assert [mnist._size(file) for file in SHAPES] == [47_040_016, 60_008, 7_840_016, 10_008]
    for edition in EDITIONS.values():
        assert list(edition.sums) == list(SHAPES)
        assert len(edition.classes) == 10
    sums = [s for edition in EDITIONS.values() for pair in edition.sums.values() for s in pair]
    assert len({s for s in sums if len(s) == 32}) == 16
