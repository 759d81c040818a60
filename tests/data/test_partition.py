"""Partitions: everything is given out once, and heterogeneity is what its parameter says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbatchnorm.data import partition
from fedbatchnorm.data.partition import PARTITIONS, dirichlet, gamma_similarity, holdings, split

CASES = [("iid", None), *(("gamma", g) for g in (0, 0.01, 0.5, 1)), *(("dirichlet", a) for a in (0.1, 1, 10))]
LABELS = np.random.default_rng(0).integers(10, size=2000)


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_every_sample_goes_to_one_client(name, parameter):
    parts = split(name, LABELS, 10, parameter, np.random.default_rng(1))
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))
    assert min(map(len, parts)) > 0


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_the_generator_decides_all(name, parameter):
    one, two, other = (split(name, LABELS, 10, parameter, np.random.default_rng(s)) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_table_is_tested_as_a_whole():
    assert {name for name, _ in CASES} == set(PARTITIONS)


@given(
    size=st.integers(20, 300),
    clients=st.integers(1, 20),
    gamma=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_gamma_similarity_gives_equal_sizes_within_one(size, clients, gamma, seed):
    rng = np.random.default_rng(seed)
    parts = gamma_similarity(rng.integers(10, size=size), clients, gamma, rng)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(np.unique(np.concatenate(parts))) == size


def test_gamma_0_gives_each_client_its_own_class_and_gamma_1_all_of_them():
    labels = np.repeat(np.arange(10), 100)
    apart = holdings(labels, gamma_similarity(labels, 10, 0.0, np.random.default_rng(0)), 10)
    assert np.array_equal(apart, 100 * np.eye(10, dtype=int))
    alike = holdings(labels, gamma_similarity(labels, 10, 1.0, np.random.default_rng(0)), 10)
    assert alike.min() >= 2
    half = holdings(labels, gamma_similarity(labels, 10, 0.5, np.random.default_rng(0)), 10)
    assert np.diag(half).mean() == pytest.approx(55, abs=4)  # its 50, and a tenth of what is shared


def test_dirichlet_has_the_moments_of_its_distribution():
    """A client's share of a class has mean 1/n and variance (n - 1) / (n^2 (n alpha + 1))."""
    labels = np.repeat(np.arange(200), 200)
    for alpha in (0.5, 5.0):
        parts = dirichlet(labels, 4, alpha, np.random.default_rng(0))
        share = holdings(labels, parts, 200) / 200
        assert share.mean() == pytest.approx(1 / 4)
        assert share.var() == pytest.approx(3 / (16 * (4 * alpha + 1)), rel=0.15)


def test_dirichlet_draws_again_until_nobody_is_empty_and_gives_up_in_the_end():
    labels = np.repeat(np.arange(3), 10)
    for seed in range(20):
        parts = dirichlet(labels, 5, 0.3, np.random.default_rng(seed))
        assert min(map(len, parts)) > 0
    with pytest.raises(ValueError, match="take a larger alpha or fewer clients"):
        dirichlet(labels, 25, 0.001, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "clients", "parameter", "message"),
    [
        ("gama", 2, 0.5, "'gama' is not known; choose from iid, gamma, dirichlet"),
        ("iid", 0, None, "clients is 0"),
        ("iid", 5, None, "clients is 5; it must be between 1 and 4"),
        ("gamma", 2, 1.5, "gamma is 1.5"),
        ("gamma", 2, float("nan"), "gamma is nan"),
        ("dirichlet", 2, 0.0, "alpha is 0.0"),
        ("dirichlet", 2, float("inf"), "alpha is inf"),
    ],
)
def test_bad_input_is_named(name, clients, parameter, message):
    with pytest.raises(ValueError, match=message):
        split(name, np.array([0, 1, 0, 1]), clients, parameter, np.random.default_rng(0))


TEST_LABELS = np.repeat(np.arange(10), np.arange(30, 50, 2))[np.random.default_rng(3).permutation(390)]


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_a_client_is_tested_on_what_it_trains_on(name, parameter):
    parts = split(name, LABELS, 10, parameter, np.random.default_rng(1))
    held = holdings(LABELS, parts, 10)
    tested = partition.test_parts(TEST_LABELS, held, np.random.default_rng(2))
    assert len(tested) == 10
    for row, part in zip(held, tested, strict=True):
        assert len(part) == len(np.unique(part)) == 30  # the smallest class; no sample twice
        share = np.bincount(TEST_LABELS[part], minlength=10) / 30
        assert np.abs(share - row / row.sum()).max() < 1 / 30
        assert not share[row == 0].any()


@given(
    held=st.integers(1, 6).flatmap(
        lambda classes: st.lists(
            st.lists(st.integers(0, 50), min_size=classes, max_size=classes).filter(any),
            min_size=1,
            max_size=5,
        )
    ),
    seed=st.integers(0, 1000),
)
def test_test_parts_are_rounded_by_largest_remainders(held, seed):
    held = np.array(held)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(held.shape[1]), rng.integers(1, 20, size=held.shape[1])))
    size = np.bincount(labels).min()
    for row, part in zip(held, partition.test_parts(labels, held, rng), strict=True):
        counts = np.bincount(labels[part], minlength=len(row))
        excess = counts - row / row.sum() * size
        assert len(np.unique(part)) == counts.sum() == size
        assert np.abs(excess).max() < 1
        assert excess.max() - excess.min() <= 1 + 1e-9  # nobody was rounded up before a larger remainder


def test_a_client_of_one_class_is_tested_on_that_class_alone():
    tested = partition.test_parts(TEST_LABELS, 7 * np.eye(10, dtype=int), np.random.default_rng(0))
    assert [np.unique(TEST_LABELS[part]).tolist() for part in tested] == [[i] for i in range(10)]
    assert [len(part) for part in tested] == [30] * 10


def test_the_generator_decides_the_test_parts_and_every_sample_has_its_chance():
    held = np.ones((40, 10), dtype=int)
    one, two, other = (partition.test_parts(TEST_LABELS, held, np.random.default_rng(s)) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], one[1])
    assert len(np.unique(np.concatenate(one + other))) > 380


@pytest.mark.parametrize(
    ("labels", "held", "message"),
    [
        ([0, 0, 1], [[1, 1, 0], [0, 1, 2]], "the test set has no sample of class 2, on which clients train"),
        ([2, 2], [[1, 1, 0]], "no sample of class 0, 1, on which clients train: take a test set"),
        ([], [[1, 1]], "no sample of class 0, 1"),
        ([0, 1, 2], [[1, 1]], "the test set has the class 2; held has columns for 0 to 1"),
        ([0, 1], [[1, 1], [0, 0]], "client 1 holds no sample"),
    ],
)
def test_what_cannot_be_tested_is_named(labels, held, message):
    with pytest.raises(ValueError, match=message):
        partition.test_parts(np.array(labels, dtype=int), np.array(held), np.random.default_rng(0))


def test_a_class_that_nobody_trains_on_need_not_be_in_the_test_set():
    (part,) = partition.test_parts(np.array([0, 0, 2, 2]), np.array([[1, 0, 1]]), np.random.default_rng(0))
    assert sorted(np.array([0, 0, 2, 2])[part]) == [0, 2]
