"""The folded round equals a plain loop over clients, for every scheme, to the last few digits."""

import copy
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.fold import unfold
from fedbatchnorm.simulation.recipe import Recipe, learning_rate, stream
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation, draw

sys.path.insert(0, str(Path(__file__).parent))
from twin import Twin

DSGD = [name for name, scheme in SCHEMES.items() if "dsgd" in scheme.algorithms]


def federation(
    scheme="fbn", model="mlp", dataset="digits", clients=5, kind=("gamma", 0.0), chunk=None, **recipe
):
    data = datasets.load(dataset)
    recipe = Recipe(
        **{"scheme": scheme, "clients": clients, "batch": 6, "rounds": 9, "precision": "float64"} | recipe
    )
    parts = partition.split(kind[0], data.train.y.numpy(), clients, kind[1], stream(recipe.seed, "partition"))
    net = models.build(model, tuple(data.train.x.shape[1:]), len(data.classes), seed=recipe.seed)
    for module in net.modules():
        if isinstance(module, nn.Dropout) and recipe.precision == "float64":
            module.p = 0.0
    twin = copy.deepcopy(net)
    return Simulation(net, data, parts, recipe, chunk=chunk), lambda: Twin(twin, data, parts, recipe)


def assert_same_model(one, two, **tolerance):
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("chunk", [None, 1, 2, 5])
@pytest.mark.parametrize("scheme", DSGD)
def test_a_folded_round_equals_the_loop_over_clients(scheme, chunk):
    simulation, twin = federation(scheme, chunk=chunk)
    twin = twin()
    for _ in range(simulation.recipe.rounds):
        simulation.round()
        twin.round()
        assert_same_model(simulation.model, twin.model, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
@pytest.mark.parametrize("scheme", DSGD)
def test_networks_on_images_too(scheme, model):
    simulation, twin = federation(
        scheme, model, clients=3, batch=3, rounds=2, kind=("dirichlet", 0.5), chunk=2
    )
    twin = twin()
    for _ in range(simulation.recipe.rounds):
        simulation.round()
        twin.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("scheme", ["naive", "fixbn", "fbn"])
def test_clients_may_weigh_by_what_they_hold(scheme):
    kind = ("dirichlet", 0.3)
    simulation, twin = federation(scheme, kind=kind, weighting="size", chunk=2)
    equal, _ = federation(scheme, kind=kind, chunk=2)
    twin = twin()
    for _ in range(4):
        simulation.round()
        twin.round()
        equal.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(simulation.model[1].weight, equal.model[1].weight)


def test_momentum_rate_beta_and_switch_are_followed():
    settings = {"lr": 0.3, "momentum": 0.5, "beta": 0.3, "switch": 2, "rounds": 5}
    simulation, twin = federation("fixbn", **settings)
    twin = twin()
    for _ in range(5):
        simulation.round()
        twin.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-9, atol=1e-11)


def test_the_loss_returned_is_the_mean_over_clients():
    simulation, _ = federation("fbn", chunk=2)
    index = torch.from_numpy(draw(simulation.parts, 6, stream(0, "batches", 0)).ravel())
    model = copy.deepcopy(simulation.model).eval()  # the same, as FBN normalizes with the running statistics
    scores = model(simulation.data.inputs(simulation.data.train.x[index]))
    expected = nn.functional.cross_entropy(scores, simulation.data.train.y[index])
    torch.testing.assert_close(simulation.round(), expected.detach())


def test_evaluation_is_batch_norm_s_own_with_the_running_statistics():
    simulation, twin = federation("fbn", rounds=9)
    for _ in range(9):
        simulation.round()
    plain = twin().model
    plain.load_state_dict(simulation.model.state_dict())
    x, y = simulation.data.test
    with torch.no_grad():
        scores = plain.eval()(simulation.data.inputs(x))
    found = simulation.evaluate()
    assert found.accuracy == (scores.argmax(1) == y).double().mean().item()
    assert found.loss == pytest.approx(nn.functional.cross_entropy(scores, y).item())


def test_the_learning_rate_is_the_paper_s():
    recipe = Recipe()
    assert [learning_rate(recipe, t) for t in (0, 999, 1000, 1999, 2000, 2999)] == [
        0.1,
        0.1,
        0.05,
        0.05,
        0.1 / 3,
        0.1 / 3,
    ]
    short = Recipe(rounds=10)
    assert [round(0.1 / learning_rate(short, t)) for t in range(10)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_batches_are_drawn_without_replacement_where_there_is_enough():
    parts = [np.arange(10), np.arange(10, 13)]
    counts = np.zeros(10)
    for step in range(500):
        large, small = draw(parts, 5, stream(0, "batches", step))
        assert len(set(large)) == 5
        assert set(large) <= set(range(10))
        assert set(small) <= {10, 11, 12}
        counts[large] += 1
    assert counts.min() > 200  # each of ten has an even chance


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("scheme", DSGD)
def test_the_same_recipe_gives_the_same_bits_and_another_seed_others(scheme, precision):
    def train(seed):
        torch.manual_seed(len(results))  # whatever state the process is in
        model = "cnn" if precision == "float32" else "mlp"
        simulation, _ = federation(scheme, model, precision=precision, rounds=3, seed=seed)
        losses = [simulation.round().item() for _ in range(3)]
        return losses, simulation.state()

    results = []
    for seed in (0, 0, 1):
        results.append(train(seed))
    (a, one), (b, two), (c, _) = results
    assert a == b != c
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_round_leaves_the_caller_s_random_state_alone():
    simulation, _ = federation("fbn", "cnn", precision="float32")
    before = torch.get_rng_state()
    simulation.round()
    simulation.evaluate()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("scheme", DSGD)
def test_a_state_goes_on_to_the_same_result(scheme):
    whole, _ = federation(scheme, "cnn", precision="float32", rounds=6)
    for _ in range(3):
        whole.round()
    state = {k: v.clone() for k, v in whole.state().items()}
    for _ in range(3):
        whole.round()
    resumed, _ = federation(scheme, "cnn", precision="float32", rounds=6)
    resumed.load_state(state, 3)
    for _ in range(3):
        resumed.round()
    assert all(torch.equal(v, resumed.state()[k]) for k, v in whole.state().items())


def test_dropout_is_on_while_fixbn_trains_with_frozen_statistics():
    simulation, _ = federation("fixbn", "cnn", precision="float32", rounds=4, switch=0)
    seen = []
    dropout = next(m for m in simulation.model.modules() if isinstance(m, nn.Dropout))
    dropout.register_forward_hook(lambda module, args, out: seen.append((out == 0).float().mean().item()))
    before = simulation.layers["2"].running_mean.clone()
    simulation.round()
    assert seen
    assert min(seen) > 0.2
    assert torch.equal(before, simulation.layers["2"].running_mean)


def test_a_layer_used_twice_is_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.BatchNorm1d(64)
            self.last = nn.Linear(64, 10)

        def forward(self, x):
            return self.last(self.shared(self.shared(x.flatten(1))))

    data = datasets.load("digits")
    parts = partition.iid(data.train.y.numpy(), 2, stream(0, "partition"))
    simulation = Simulation(Twice(), data, parts, Recipe(clients=2, batch=4, rounds=2))
    with pytest.raises(ValueError, match="layer 'shared' ran 2 times in one pass"):
        simulation.round()


def test_a_layer_without_statistics_is_named():
    data = datasets.load("digits")
    parts = partition.iid(data.train.y.numpy(), 2, stream(0, "partition"))
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10))
    with pytest.raises(ValueError, match="layer '1': track_running_stats is False"):
        Simulation(model, data, parts, Recipe(clients=2))


def digits_with(model, **recipe):
    data = datasets.load("digits")
    parts = partition.iid(data.train.y.numpy(), 2, stream(0, "partition"))
    return Simulation(model, data, parts, Recipe(**{"clients": 2, "batch": 4, "rounds": 2} | recipe))


class Own(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 0


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 10)

    def forward(self, x):
        return self.line(x.flatten(1)), x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), Own(64), nn.Linear(64, 10)), "layer '1': Own does more than normalize"),
        (nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.Linear(64, 10)), "layer '1': it is lazy"),
        (Pair(), r"the model returned tuple; it must be a score for each of 10 classes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), r"the model returned \(1, 5\)"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), r"the model failed on an input of shape \(1, \*\(1, 8, 8\)\)"),
        (nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10)), "no parameter to train"),
    ],
    ids=["own forward", "lazy", "tuple", "too few", "wrong input", "nothing to train"],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(model, message):
    with pytest.raises(ValueError, match=message):
        digits_with(model)


def test_a_model_can_be_simulated_again_and_used_afterwards():
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    for scheme in ("naive", "fbn"):
        digits_with(model, scheme=scheme).round()
    assert type(unfold(model)[3]) is nn.BatchNorm1d
    torch.save(model, io.BytesIO())
    tracked = int(model[3].num_batches_tracked)
    model.train()(torch.randn(4, 1, 8, 8))
    assert int(model[3].num_batches_tracked) == tracked + 1


def test_a_parameter_without_a_gradient_moves_on_with_its_momentum():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.turn = nn.Linear(64, 10), nn.Linear(64, 10), 0

        def forward(self, x):
            x = x.flatten(1)
            self.turn += self.training
            return self.a(x) + (self.b(x) if self.turn <= 1 else 0)

    simulation = digits_with(Sometimes(), momentum=0.5, lr=0.1, precision="float64")
    simulation.round()
    before, velocity = simulation.model.b.bias.clone(), simulation.algorithm.velocity[3].clone()
    simulation.round()
    rate = learning_rate(simulation.recipe, 1)
    torch.testing.assert_close(simulation.model.b.bias, before - rate * 0.5 * velocity)


def test_a_model_without_batch_norm_trains_the_same_under_every_scheme():
    data = datasets.load("gaussian_ring")
    parts = partition.iid(data.train.y.numpy(), 4, stream(0, "partition"))
    torch.manual_seed(0)
    model = nn.Linear(2, 10)
    recipe = {"clients": 4, "batch": 5, "rounds": 3, "precision": "float64"}
    found = []
    for scheme in DSGD:
        simulation = Simulation(copy.deepcopy(model), data, parts, Recipe(scheme=scheme, **recipe))
        for _ in range(3):
            simulation.round()
        found.append(simulation.model.weight)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.slow
@pytest.mark.cifar10
@pytest.mark.parametrize("scheme", DSGD)
def test_cifar10_folded_equals_looped_and_the_loss_falls(scheme):
    settings = {"model": "cnn", "dataset": "cifar10", "clients": 10, "batch": 10, "rounds": 12}
    settings |= {"momentum": 0.5, "lr": 0.05, "beta": 0.5}
    small = settings | {"batch": 3}
    simulation, twin = federation(scheme, precision="float64", chunk=10, switch=1, **small)
    twin = twin()
    for _ in range(2):
        simulation.round()
        twin.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-8, atol=1e-10)
    if scheme == "fbn":
        simulation, _ = federation(scheme, precision="float32", **settings)
        losses = [simulation.round().item() for _ in range(12)]
        assert sum(losses[-3:]) < 0.98 * sum(losses[:3]), losses
