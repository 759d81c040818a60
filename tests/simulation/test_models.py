"""The models: sizes known from the papers, and factories of the user's own."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from fedbatchnorm.simulation import models

SHAPE = (3, 32, 32)


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Counted by hand from the paper's table; He et al.'s 0.27M; the usual 11.17M for small images.
        (
            "cnn",
            (27 + 1) * 64
            + (576 + 1) * 64
            + (576 + 1) * 128
            + (1152 + 1) * 128
            + 2 * 384
            + 8193 * 128
            + 129 * 10,
        ),
        ("resnet20", 269_722),
        ("resnet18", 11_173_962),
    ],
)
def test_sizes_are_those_of_the_papers(name, parameters):
    assert size(models.build(name, SHAPE, 10, seed=0)) == parameters


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("shape", [SHAPE, (1, 8, 8)])
def test_every_model_takes_any_image_and_trains(name, shape):
    model = models.build(name, shape, 7, seed=0)
    scores = model(torch.randn(4, *shape))
    assert scores.shape == (4, 7)
    scores.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def test_the_paper_s_network_is_the_table_s_line_by_line():
    kinds = [type(m).__name__ for m in models.build("cnn", SHAPE, 10, seed=0)]
    block = ["Conv2d", "ReLU", "BatchNorm2d"]
    half = [*block, *block, "MaxPool2d", "Dropout"]
    assert kinds == [*half, *half, "Flatten", "Linear", "ReLU", "Linear"]


def test_the_seed_decides_the_weights_and_nothing_else_changes():
    before = torch.get_rng_state()
    one, two, other = (models.build("mlp", (2,), 3, seed=s)[1].weight for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_own_models.py").write_text(
        textwrap.dedent("""
        from torch import nn
        def sized(shape, classes): return nn.Linear(shape[0], classes)
        def fixed(width=4): return nn.Linear(2, width)
        def three(a, b, c): return nn.Identity()
        def text(): return "model"
        number = 3
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_own_models", None)


def test_factories_of_the_user_s_own(own):
    assert models.build("my_own_models:sized", (5,), 3, seed=0).in_features == 5
    assert models.build("my_own_models:fixed", (5,), 3, seed=0).out_features == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "'resnet' is not known; choose from cnn, cnn16, mlp, resnet20, resnet18, plain9, or name"),
        ("no_such_module:f", "cannot be imported"),
        ("my_own_models:none", "cannot be imported"),
        ("my_own_models:number", "is a int, not a function"),
        ("my_own_models:three", "needs 3 arguments"),
        ("my_own_models:text", "returned a str"),
        (":f", "cannot be imported"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(own, name, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, (5,), 3, seed=0)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "resnet18"])
def test_points_are_not_images(name):
    with pytest.raises(ValueError, match="use mlp"):
        models.build(name, (2,), 10, seed=0)
