"""The datasets: what is in them, and that they are the same every time."""

import hashlib
import math

import numpy as np
import pytest
import torch

from fedbatchnorm.data import cifar10, datasets


@pytest.mark.parametrize("name", ["gaussian_ring", "digits"])
def test_embedded_data_is_the_same_every_time(name):
    one, two = datasets.load(name), datasets.load(name)
    for a, b in zip((*one.train, *one.test), (*two.train, *two.test), strict=True):
        assert torch.equal(a, b)


def test_digits_are_scikit_learn_s_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data = datasets.load("digits")
    assert len(data.train.y) + len(data.test.y) == 1797
    everything = np.concatenate([data.train.x.numpy(), data.test.x.numpy()]).reshape(-1, 64)
    assert sorted(map(tuple, everything)) == sorted(map(tuple, load_digits().data.astype(np.uint8)))
    assert torch.bincount(data.test.y).min() >= 34  # every class is in the test set
    digest = hashlib.sha256(data.test.x.numpy().tobytes()).hexdigest()
    assert digest.startswith("817b9d88ab4b8c25"), digest


@pytest.mark.parametrize("name", ["gaussian_ring", "digits"])
def test_inputs_have_mean_0_and_deviation_1_over_the_training_set(name):
    data = datasets.load(name).to(torch.device("cpu"), torch.float64)
    x = data.inputs(data.train.x)
    channels = x.movedim(1, 0).flatten(1) if x.dim() > 1 else x
    torch.testing.assert_close(channels.mean(1), torch.zeros(len(channels)).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        channels.std(1, correction=0), torch.ones(len(channels)).double(), atol=1e-5, rtol=0
    )


def test_the_ring_lies_where_the_paper_puts_it():
    x, y = datasets.ring_points(10, 20_000, 1.0, torch.Generator().manual_seed(0))
    for i in range(10):
        own = x[y == i]
        angle = 2 * math.pi * i / 10
        center = torch.tensor([10 * math.cos(angle), 10 * math.sin(angle)])
        torch.testing.assert_close(own.mean(0), center, atol=0.05, rtol=0)
        torch.testing.assert_close(own.T.cov(), torch.eye(2), atol=0.05, rtol=0)


def test_gamma_is_the_share_of_points_of_any_class():
    for gamma in (0.0, 0.1, 0.3, 1.0):
        _, y = datasets.ring_points(10, 20_000, gamma, torch.Generator().manual_seed(0))
        others = (y != torch.arange(10).unsqueeze(1)).double().mean().item()
        assert others == pytest.approx(0.9 * gamma, abs=0.01)


def test_an_unknown_name_gets_the_list():
    with pytest.raises(
        ValueError, match="'kmnist' is not known; choose from gaussian_ring, digits, cifar10, mnist"
    ):
        datasets.load("kmnist")


@pytest.mark.cifar10
def test_cifar10_is_complete_and_reads_as_documented():
    data = datasets.load("cifar10")
    assert data.train.x.shape == (50_000, 3, 32, 32)
    assert data.test.x.shape == (10_000, 3, 32, 32)
    assert data.train.x.dtype == torch.uint8
    assert torch.bincount(data.train.y).tolist() == [5000] * 10
    assert torch.bincount(data.test.y).tolist() == [1000] * 10
    # The first record by hand: one byte of label, then the red, green and blue planes, row by row.
    record = np.fromfile(cifar10.find() / "data_batch_1.bin", np.uint8, 3073)
    assert data.train.y[0] == record[0]
    assert data.train.x[0, 1, 2, 3] == record[1 + 1024 + 2 * 32 + 3]
    by_hand = data.train.x[:, 2].numpy().astype(np.float64)
    assert data.mean[2].item() == pytest.approx(by_hand.mean(), rel=1e-6)
    assert data.std[2].item() == pytest.approx(by_hand.std(), rel=1e-6)
