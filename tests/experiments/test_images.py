"""A folder of images as a dataset: what is read, and what is wrong with a folder in one line."""

import numpy as np
import pytest
from PIL import Image

from fedbatchnorm.experiments import image_folder


def fill(root, classes=("cat", "dog"), count=6, size=(8, 6), mode="RGB"):
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new(mode, size, 10 * i + label if mode == "L" else (i, label, 7)).save(
                root / name / f"{i}.png"
            )


def test_classes_are_folders_and_pixels_are_as_stored(tmp_path):
    fill(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".thumbnails").mkdir()
    data = image_folder("pets", tmp_path).value
    assert data.classes == ("cat", "dog")
    assert data.train.x.shape == (8, 3, 6, 8)
    assert data.test.x[:, :, 0, 0].tolist() == [[0, 0, 7], [5, 0, 7], [0, 1, 7], [5, 1, 7]]
    assert data.test.y.tolist() == [0, 0, 1, 1]


def test_train_and_test_folders_sizes_and_gray(tmp_path):
    fill(tmp_path / "train", size=(8, 8), mode="L")
    fill(tmp_path / "test", count=2, size=(4, 4), mode="L")
    with pytest.raises(ValueError, match=r"training samples are .*\(1, 8, 8\), test samples .*\(1, 4, 4\)"):
        image_folder("pets", tmp_path, gray=True)
    data = image_folder("pets", tmp_path, gray=True, size=(5, 3)).value
    assert data.train.x.shape == (12, 1, 5, 3)
    assert data.test.x[:, 0, 0, 0].tolist() == [0, 10, 1, 11]


def test_other_pixels_are_another_dataset(tmp_path):
    fill(tmp_path / "a")
    before = image_folder("pets", tmp_path / "a").source
    assert image_folder("pets", tmp_path / "a").source == before
    Image.fromarray(np.full((6, 8, 3), 3, np.uint8)).save(tmp_path / "a" / "cat" / "2.png")
    assert image_folder("pets", tmp_path / "a").source != before


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(
        ValueError, match="is not a folder: give one that holds a folder of images for each class"
    ):
        image_folder("pets", tmp_path / "none")
    fill(tmp_path / "one", classes=("cat",))
    with pytest.raises(ValueError, match="holds 1 folders: give it one for each class"):
        image_folder("pets", tmp_path / "one")
    fill(tmp_path / "two")
    Image.new("RGB", (3, 3)).save(tmp_path / "two" / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"9\.png is 3 x 3, .*0\.png is 6 x 8: give size=\(height, width\)"):
        image_folder("pets", tmp_path / "two")
    (tmp_path / "two" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"9\.png cannot be read as an image"):
        image_folder("pets", tmp_path / "two")
    (tmp_path / "two" / "elk").mkdir()
    (tmp_path / "two" / "dog" / "9.png").unlink()
    with pytest.raises(ValueError, match="elk holds no image"):
        image_folder("pets", tmp_path / "two")
    fill(tmp_path / "three" / "train")
    fill(tmp_path / "three" / "test", classes=("cat", "elk"))
    with pytest.raises(ValueError, match="test has other classes than"):
        image_folder("pets", tmp_path / "three")
