"""FedAvg beside its twin: what it shares with distributed SGD, draws, liars, calibration and evaluation."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.fold import FoldedNorm, fold, unfold
from fedbatchnorm.simulation.recipe import Recipe, learning_rate, stream
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation
from fedbatchnorm.simulation.survey import calibrate

sys.path.insert(0, str(Path(__file__).parent))
from fedavg_twin import FedAvgTwin, norms, variance
from test_fedavg import SCHEMES_HERE, assert_same, both, federation
from test_simulator import assert_same_model
from test_simulator import federation as dsgd_federation
from twin import Twin

WITH_STATISTICS = [name for name in SCHEMES_HERE if SCHEMES[name].replace is None]


def digits(parts, model="mlp", dropout=False, abreast=None, **recipe):
    """A federation of these parts of the digits, and the network that it starts from."""
    data = datasets.load("digits")
    settings = {"algorithm": "fedavg", "batch": 7, "rounds": 4, "precision": "float64", "lr": 0.01}
    liars = recipe.get("byzantine", 0)
    recipe = Recipe(clients=len(parts) + liars, **settings | recipe)
    net = models.build(model, (1, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return Simulation(copy.deepcopy(net), data, parts, recipe, abreast=abreast), net


def parts_of(*sizes):
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def snapshot(simulation):
    return {name: value.clone() for name, value in simulation.state().items()}


def same_bits(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# One local step without momentum is distributed SGD.

ONE_STEP = {
    "plain": {},
    "clipped": {"clip": 0.3},
    "weight decay": {"weight_decay": 0.1},
    "clipped, with weight decay": {"clip": 0.3, "weight_decay": 0.1},
    "constant": {"schedule": "constant"},
    "step": {"schedule": "step"},
    "cosine": {"schedule": "cosine"},
    "exponential": {"schedule": "exponential", "decay": 0.7},
}


def one_step(algorithm, scheme, **recipe):
    sizes = {"kind": ("dirichlet", 0.5)}
    settings = {"rounds": 6, "switch": 3, "momentum": 0.0, "lr": 0.05, "schedule": "constant"}
    steps = {"local_steps": 1} if algorithm == "fedavg" else {}
    chosen = {"algorithm": algorithm, "weighting": "equal"} | settings | steps | recipe
    simulation, _ = federation(scheme, **sizes, **chosen)
    losses = [simulation.round().item() for _ in range(6)]
    return simulation, losses


@pytest.mark.parametrize("setting", ONE_STEP)
@pytest.mark.parametrize("scheme", ["fbn", "naive", "fixbn", "groupnorm", "none"])
def test_one_local_step_without_momentum_is_distributed_sgd(scheme, setting):
    (ours, losses), (theirs, expected) = (
        one_step(algorithm, scheme, **ONE_STEP[setting]) for algorithm in ("fedavg", "dsgd")
    )
    assert_same_model(ours.model, theirs.model, rtol=1e-12, atol=1e-12)
    assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scheme", ["fbn", "naive", "groupnorm", "none"])
def test_one_local_step_is_distributed_sgd_where_clients_weigh_by_size_too(scheme):
    (ours, losses), (theirs, expected) = (
        one_step(algorithm, scheme, weighting="size") for algorithm in ("fedavg", "dsgd")
    )
    equal, _ = one_step("fedavg", scheme)
    assert not torch.allclose(ours.model[1].weight, equal.model[1].weight)
    assert losses == pytest.approx(expected, rel=1e-12)
    if scheme == "naive":  # distributed SGD averages running statistics without weights
        for model in (ours.model, theirs.model):
            for layer in (model[3], model[6]):
                layer.reset_running_stats()
    assert_same_model(ours.model, theirs.model, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", ["clipped", "weight decay", "step", "cosine", "exponential"])
def test_each_of_these_settings_makes_a_difference(setting):
    plain, _ = one_step("fedavg", "fbn")
    other, _ = one_step("fedavg", "fbn", **ONE_STEP[setting])
    assert not torch.allclose(plain.model[1].weight, other.model[1].weight, rtol=1e-4, atol=0)


@pytest.mark.parametrize("defense", ["none", "nnm+median"])
@pytest.mark.parametrize("scheme", ["fbn", "naive"])
def test_one_local_step_among_liars_is_distributed_sgd_among_liars(scheme, defense):
    lies = {"clients": 6, "byzantine": 2, "attack": "foe", "targets": "all", "defense": defense, "lr": 0.01}
    (ours, _), (theirs, _) = (one_step(algorithm, scheme, **lies) for algorithm in ("fedavg", "dsgd"))
    assert_same_model(ours.model, theirs.model, rtol=1e-9, atol=1e-10)


# Distributed SGD's own new options.

OPTIONS = {
    "ordinary momentum": {"momentum_kind": "ordinary", "momentum": 0.9, "lr": 0.01},
    "clipped": {"clip": 0.3},
    "weight decay": {"weight_decay": 0.1, "momentum": 0.5},
    "cosine": {"schedule": "cosine", "momentum": 0.5},
    "exponential": {"schedule": "exponential", "decay": 0.7, "momentum": 0.5},
    "constant": {"schedule": "constant", "momentum": 0.5},
    "all": {
        "momentum_kind": "ordinary",
        "momentum": 0.8,
        "lr": 0.02,
        "clip": 0.3,
        "weight_decay": 0.1,
        "schedule": "cosine",
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("scheme", ["centralized", "fbn", "naive", "fixbn", "groupnorm"])
def test_options_of_distributed_sgd_equal_the_loop_over_clients(scheme, option):
    simulation, twin = dsgd_federation(scheme, chunk=2, **OPTIONS[option])
    plain, _ = dsgd_federation(scheme, chunk=2)
    twin = twin()
    for _ in range(6):
        simulation.round()
        plain.round()
        twin.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(simulation.model[1].weight, plain.model[1].weight, rtol=1e-5, atol=0)


def test_clipping_a_union_s_gradient_is_not_clipping_each_client_s():
    """One machine has one gradient; of many clients each is clipped on its own."""
    simulation, _ = dsgd_federation("centralized", momentum=0.0, clip=0.3, lr=1.0, schedule="constant")
    before = parameters_to_vector(simulation.model.parameters()).detach().clone()
    simulation.round()
    moved = parameters_to_vector(simulation.model.parameters()).detach() - before
    assert moved.norm().item() == pytest.approx(0.3, rel=1e-5)
    clients, _ = dsgd_federation("none", momentum=0.0, clip=0.3, lr=1.0, schedule="constant")
    before = parameters_to_vector(clients.model.parameters()).detach().clone()
    clients.round()
    moved = parameters_to_vector(clients.model.parameters()).detach() - before
    assert 0 < moved.norm().item() < 0.299  # a mean of vectors of that length that point elsewhere


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.2, 0.2, 0.2, 0.2]),
        ("step", [0.2, 0.2, 0.1, 0.2 / 3]),
        ("cosine", [0.2, 0.1 * (1 + 0.5**0.5), 0.1, 0.1 * (1 - 0.5**0.5)]),
        ("exponential", [0.2, 0.1, 0.05, 0.025]),
    ],
)
def test_the_learning_rate_follows_the_schedule(schedule, expected):
    for algorithm in ("dsgd", "fedavg"):
        recipe = Recipe(algorithm=algorithm, lr=0.2, rounds=4, schedule=schedule, decay=0.5)
        assert [learning_rate(recipe, t) for t in range(4)] == pytest.approx(expected)


# Draws.


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_local_epoch_takes_every_sample_once_and_its_last_batch_is_short(epochs):
    sizes = (1, 6, 7, 15, 20)
    simulation, _ = digits(parts_of(*sizes), local_epochs=epochs)
    work = simulation.federation.work(0)
    for part, index, counts in zip(simulation.parts, work.index, work.sizes, strict=True):
        batches = [-(-len(part) // 7)] * epochs
        assert counts[counts > 0].tolist() == [*[7] * (batches[0] - 1), (len(part) - 1) % 7 + 1] * epochs
        assert not counts[sum(batches) :].any()
        for epoch in range(epochs):
            rows = range(epoch * batches[0], (epoch + 1) * batches[0])
            taken = np.concatenate([index[row, : counts[row]] for row in rows])
            assert sorted(taken) == part.tolist()
            last = rows[-1]
            assert set(index[last, counts[last] :]) <= {index[last, 0]}
    if epochs == 2:
        assert not np.array_equal(work.index[4, 0], work.index[4, 3])
        assert work.steps().tolist() == [2, 2, 2, 6, 6]


def test_local_steps_are_batches_without_repetition_and_other_ones_each_time():
    simulation, _ = digits(parts_of(3, 40, 50), local_steps=4)
    work = simulation.federation.work(2)
    assert work.index.shape == (3, 4, 7)
    assert (work.sizes == 7).all()
    for part, batches in zip(simulation.parts, work.index, strict=True):
        assert set(batches.ravel()) <= set(part)
    for batches in work.index[1:]:
        assert all(len(set(batch)) == 7 for batch in batches)
        assert len({tuple(batch) for batch in batches}) == 4


def test_cohorts_are_ascending_without_repetition_and_reach_everybody_alike():
    simulation, _ = digits(parts_of(*[4] * 20), cohort=6)
    cohorts = [simulation.federation.cohort(step) for step in range(300)]
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    assert all(len(c) == 6 and (np.diff(c) > 0).all() for c in cohorts)
    assert len({tuple(c) for c in cohorts}) > 290
    assert len(counts) == 20
    assert counts.min() > 60  # 90 each, on average
    assert counts.max() < 120


def test_a_cohort_of_everybody_is_everybody():
    for cohort in (None, 5):
        simulation, _ = digits(parts_of(*[4] * 5), cohort=cohort)
        assert simulation.federation.cohort(3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps", [{"local_steps": 2}, {"local_epochs": 2}])
def test_draws_depend_on_seed_and_round_alone(steps):
    def drawn(step, **recipe):
        simulation, _ = digits(parts_of(5, 9, 30, 11), cohort=2, **steps | recipe)
        return simulation.federation.work(step), simulation.federation.survey_batches(step, 8)

    def alike(one, two):
        (a, (clients, batches)), (b, (others, theirs)) = one, two
        pairs = [*zip(a, b, strict=True), (clients, others), *zip(batches, theirs, strict=False)]
        return all(np.array_equal(x, y) for x, y in pairs)

    expected = drawn(3)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    simulation, _ = digits(parts_of(5, 9, 30, 11), cohort=2, **steps)
    for step in (7, 0, 3):
        found = simulation.federation.work(step), simulation.federation.survey_batches(step, 8)
    assert alike(expected, found)
    simulation.round()
    assert alike(expected, (simulation.federation.work(3), simulation.federation.survey_batches(3, 8)))
    other = {"scheme": "naive", "lr": 0.5, "optimizer": "adam", "clip": 1.0, "server": "adam"}
    assert alike(expected, drawn(3, **other))
    assert not alike(expected, drawn(3, seed=1))
    assert not alike(expected, drawn(4))


class Watched(list):
    """A list that notes what is taken out of it."""

    def __init__(self, values):
        super().__init__(values)
        self.touched = set()

    def __getitem__(self, i):
        self.touched.add(int(i))
        return super().__getitem__(i)

    def __iter__(self):
        raise AssertionError("somebody goes through all clients")


@pytest.mark.parametrize("steps", [{"local_steps": 2}, {"local_epochs": 1}])
def test_a_round_looks_at_its_cohort_alone_and_memory_does_not_grow_with_the_clients(steps):
    held = {}
    for clients in (10, 10_000):
        parts = [np.arange(i % 1400, i % 1400 + 9) for i in range(clients)]
        simulation, _ = digits(parts, abreast=False, cohort=10, scheme="naive", server="momentum", **steps)
        fed = simulation.federation
        fed.parts = Watched(fed.parts)
        work = fed.work(0)
        assert fed.parts.touched == set(work.clients)
        assert work.clients.shape == (10,)
        assert work.index.shape == (10, 2, 7)
        simulation.round()
        assert fed.parts.touched == set(work.clients)
        algorithm = simulation.algorithm
        assert [len(rows) for rows in algorithm._rows] == [10, 0, 0, 10, 10, 10, 10]
        for kept in ("client_state", "client_steps", "own_weights", "own_statistics"):
            assert getattr(algorithm, kept).numel() == 0
        held[clients] = {name: value.shape for name, value in simulation.state().items()}
    assert held[10] == held[10_000]


def test_what_clients_keep_takes_a_row_for_each_of_them():
    simulation, _ = digits(
        parts_of(*[5] * 12), cohort=4, scheme="fedbn", local_state="keep", optimizer="adam"
    )
    state, size = simulation.state(), sum(p.numel() for p in simulation.model.parameters())
    assert state["client_state"].shape == (12, 2, size)
    assert state["client_steps"].shape == (12,)
    assert state["own_weights"].shape == (12, 4 * 128)
    assert state["own_statistics"].shape == (12, 2, 2 * 128)


# Batches of a single sample.


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_a_last_batch_of_a_single_sample_works_under_every_scheme(scheme):
    simulation, _ = digits(parts_of(1, 8, 15, 14), scheme=scheme, switch=2)
    work = simulation.federation.work(0)
    assert [counts[counts > 0].tolist() for counts in work.sizes] == [[1], [7, 1], [7, 7, 1], [7, 7]]
    losses = [simulation.round() for _ in range(4)]
    assert all(loss.isfinite() for loss in losses)
    assert all(value.isfinite().all() for value in simulation.state().values())


def test_a_single_sample_counts_as_in_the_loop_over_clients_under_fbn():
    simulation, net = digits(parts_of(1, 8, 15, 14), scheme="fbn")
    twin = FedAvgTwin(net, simulation.data, simulation.parts, simulation.recipe)
    both(simulation, twin)
    assert_same(simulation, twin)


# States.

KEPT = {
    "kept momentum, a cohort": {"local_state": "keep", "cohort": 3, "local_steps": 2},
    "kept adam, a server's momentum": {
        "local_state": "keep",
        "optimizer": "adam",
        "lr": 1e-3,
        "local_epochs": 1,
        "server": "momentum",
    },
    "a server's adam, a cohort": {"server": "adam", "server_lr": 0.01, "cohort": 3, "local_epochs": 1},
}


@pytest.mark.parametrize("setting", KEPT)
@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_a_state_goes_on_to_the_same_bits(scheme, setting):
    def made():
        chosen = {"scheme": scheme, "precision": "float32", "rounds": 6, "switch": 3, "calibrate": True}
        torch.manual_seed(len(states))  # whatever state the process is in
        return digits(parts_of(9, 20, 14, 8, 30), "mlp", **chosen | KEPT[setting])[0]

    states = []
    whole = made()
    for _ in range(2):
        whole.round()
    states.append(snapshot(whole))
    for _ in range(4):
        whole.round()
    resumed = made()
    resumed.load_state(states[0], 2)
    assert same_bits(states[0], resumed.state())
    assert not same_bits(states[0], whole.state())
    for _ in range(4):
        resumed.round()
        resumed.evaluate()
        resumed.evaluate_clients()
    assert same_bits(whole.state(), resumed.state())


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
@pytest.mark.parametrize("more", [{}, {"augment": True}], ids=["dropout", "augmented"])
def test_random_numbers_do_not_depend_on_what_was_drawn_before(scheme, more):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        settings = {"scheme": scheme, "precision": "float32", "local_steps": 2, "batch": 4, "calibrate": True}
        simulation, _ = digits(parts_of(12, 9, 20), "cnn", dropout=True, **settings | more)
        losses = [simulation.round().item() for _ in range(2)]
        found.append((losses, simulation.evaluate(), snapshot(simulation)))
    assert found[0][:2] == found[1][:2]
    assert same_bits(found[0][2], found[1][2])


BASE = {"scheme": "fbn", "local_steps": 1}
OTHERS = {
    "a server's momentum": (BASE | {"server": "momentum"}, BASE),
    "a server's adam": (BASE | {"server": "momentum"}, BASE | {"server": "adam"}),
    "kept momentum": (BASE | {"local_state": "keep"}, BASE),
    "nothing kept": (BASE, BASE | {"local_state": "keep"}),
    "kept adam": (
        BASE | {"local_state": "keep", "optimizer": "adam"},
        BASE | {"local_state": "keep"},
    ),
    "own layers": (BASE | {"scheme": "fedbn"}, BASE),
    "own statistics": (BASE | {"scheme": "silobn"}, BASE | {"scheme": "fedbn"}),
    "own mixtures": (BASE | {"scheme": "hbn"}, BASE),
    "another layer": (BASE | {"scheme": "groupnorm"}, BASE),
    "distributed sgd": ({"algorithm": "dsgd"}, BASE),
    "fedavg": (BASE, {"algorithm": "dsgd"}),
    "other clients": (BASE | {"local_state": "keep", "parts": 4}, BASE | {"local_state": "keep"}),
    "another model": (BASE | {"model": "cnn16"}, BASE),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_recipe_is_refused_and_changes_nothing(other):
    made = []
    for settings in OTHERS[other]:
        settings = dict(settings)
        parts = parts_of(*[9] * settings.pop("parts", 3))
        made.append(digits(parts, settings.pop("model", "mlp"), **settings)[0])
    source, target = made
    for simulation in made:
        simulation.round()
    before = snapshot(target)
    with pytest.raises(ValueError, match="the state is that of another model"):
        target.load_state(snapshot(source), 1)
    assert same_bits(before, target.state())


# Byzantine clients.

LIES = {  # by hand, from the honest rows (h, d)
    "sf": lambda rows: -rows.mean(0),
    "foe": lambda rows: -2 * rows.mean(0),
    "nan": lambda rows: np.full(rows.shape[1], np.nan),
}


def nnm_median(rows, f):
    good = np.isfinite(rows).all(1)
    mixed = []
    for row, fine in zip(rows, good, strict=True):
        others = rows[good]
        nearest = np.argsort(((others - row) ** 2).sum(1), kind="stable")[: len(rows) - f]
        mixed.append((others[nearest] if fine else others).mean(0))
    return np.median(mixed, axis=0)


RULES = {"none": lambda rows, f: rows.mean(0), "nnm+median": nnm_median}


class LiarsTwin(FedAvgTwin):
    """The honest clients as ever; then the liars, and the server's rule on updates and statistics."""

    def share(self, trained, shares, updates, statistics, work):
        self.came = trained, updates, work

    def rule(self, rows):
        return RULES[self.recipe.defense](rows, self.lying)

    def with_lies(self, rows, what):
        lie = LIES[self.recipe.attack](rows) if what in self.recipe.targets_struck() else rows.mean(0)
        return np.concatenate([rows, np.repeat(lie[None], self.lying, axis=0)])

    def round(self, work, surveyed=None):
        r, before = self.recipe, copy.deepcopy(self.model)
        self.lying = int(np.ceil(r.byzantine * (r.cohort or r.clients) / r.clients))
        super().round(work, surveyed)
        self.model = before
        trained, updates, work = self.came
        start = parameters_to_vector(before.parameters()).detach()
        rows = np.stack([(parameters_to_vector(m.parameters()).detach() - start).numpy() for m in trained])
        lied = "gradients" in r.targets_struck()
        update = self.rule(self.with_lies(rows, "gradients")) if lied else rows.mean(0)
        vector_to_parameters(start + torch.from_numpy(update), before.parameters())
        layers = norms(before)
        m, v = (
            np.concatenate([getattr(b, k).numpy() for b in layers]) for k in ("running_mean", "running_var")
        )
        if r.scheme == "fbn":
            mean, var = self.merged(m, v, updates, work)
        else:
            means, variances = (
                np.stack([np.concatenate([getattr(b, k).numpy() for b in norms(model)]) for model in trained])
                for k in ("running_mean", "running_var")
            )
            mean = self.rule(self.with_lies(means, "means"))
            var = self.rule(self.with_lies(variances, "variances"))
        var = np.maximum(var, 1e-5)
        cuts = np.cumsum([b.num_features for b in layers])[:-1]
        for layer, new_mean, new_var in zip(layers, np.split(mean, cuts), np.split(var, cuts), strict=True):
            layer.running_mean.copy_(torch.from_numpy(new_mean))
            layer.running_var.copy_(torch.from_numpy(new_var))

    def merged(self, m, v, updates, work):
        seen = work.sizes.sum(1)
        steps = (seen * (work.sizes > 0).sum(1)).sum() / seen.sum()
        beta = 1 - (1 - self.recipe.beta) ** steps
        # The mlp's layers see a value of each sample. Liars claim as many as the others, on average.
        total = seen.sum() / len(seen) * (len(seen) + self.lying)
        unbiased = total / (total - 1)
        u, s = (
            np.stack([np.concatenate([getattr(x, k).numpy() for x in update.values()]) for update in updates])
            for k in ("mean", "var")
        )
        means = self.with_lies((1 - beta) * m + beta * u, "means")
        variances = self.with_lies((1 - beta) * v + beta * unbiased * s, "variances")
        mean = self.rule(means)
        between = self.rule((means - mean) ** 2)
        return mean, self.rule(variances) + unbiased / beta * between


def among_liars(scheme="fbn", sizes=(20, 31, 16, 26, 40), **recipe):
    settings = {"byzantine": 2, "attack": "foe", "targets": "all", "switch": 2, "local_epochs": 1, "batch": 8}
    simulation, net = digits(parts_of(*sizes), scheme=scheme, **settings | recipe)
    return simulation, LiarsTwin(net, simulation.data, simulation.parts, simulation.recipe)


@pytest.mark.parametrize("targets", ["usual", "gradients", "all"])
@pytest.mark.parametrize("defense", ["none", "nnm+median"])
@pytest.mark.parametrize("attack", ["sf", "foe", "nan"])
@pytest.mark.parametrize("scheme", ["fbn", "naive", "fedtan"])
def test_a_round_among_liars_equals_the_loop_over_clients(scheme, attack, defense, targets):
    simulation, twin = among_liars(scheme, attack=attack, defense=defense, targets=targets)
    rounds = 1 if (attack, defense) == ("nan", "none") else 3  # after which there is nothing left to compare
    both(simulation, twin, rounds)
    ours, theirs = simulation.model.state_dict(), twin.model.state_dict()
    for name in (k for k in ours if "tracked" not in k):
        close = {"rtol": 1e-8, "atol": 1e-9, "equal_nan": True}
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda m, n=name: f"{n}: {m}", **close)


@pytest.mark.parametrize("targets", ["means", "variances", "gradients"])
def test_liars_change_what_they_lie_about_alone(targets):
    simulation, _ = among_liars("naive", targets=targets)
    honest, _ = digits(parts_of(20, 31, 16, 26, 40), scheme="naive", batch=8, weighting="equal")
    simulation.round()
    honest.round()
    ours, theirs = simulation.model.state_dict(), honest.model.state_dict()
    kinds = {"means": "3.running_mean", "variances": "3.running_var", "gradients": "1.weight"}
    for kind, name in kinds.items():
        assert torch.allclose(ours[name], theirs[name]) == (kind != targets), kind


@pytest.mark.parametrize("defense", ["none", "nnm+median"])
@pytest.mark.parametrize("scheme", ["fbn", "naive"])
def test_a_cohort_holds_its_share_of_the_liars_rounded_up(scheme, defense):
    sizes = (20, 31, 16, 26, 40, 22, 10)
    lies = {"byzantine": 3, "cohort": 6, "attack": "sf", "defense": defense}
    simulation, twin = among_liars(scheme, sizes, **lies)
    assert simulation.recipe.shares_of_cohort() == (4, 2)  # 1.8 of 6
    assert simulation.federation.cohort(0).shape == (4,)
    both(simulation, twin, 3)
    assert_same(simulation, twin, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
@pytest.mark.parametrize("targets", ["gradients", "all"])
def test_a_defended_federation_stays_finite_where_liars_send_nan(scheme, targets):
    simulation, _ = among_liars(scheme, attack="nan", targets=targets, defense="nnm+median")
    for _ in range(3):
        simulation.round()
    assert all(value.isfinite().all() for value in simulation.state().values())
    assert np.isfinite(simulation.evaluate().loss)


@pytest.mark.parametrize("scheme", ["fbn", "naive", "hbn"])
def test_honest_updates_that_are_not_finite_leave_no_weights_and_the_old_statistics(scheme):
    simulation, _ = among_liars(scheme, attack="foe", defense="nnm+median")
    simulation.round()
    layer = simulation.layers["6"]
    before = layer.running_mean.clone(), layer.running_var.clone()
    with torch.no_grad():
        simulation.model[1].weight[0, 0] = torch.nan
    simulation.round()
    assert simulation.model[1].weight.isnan().all()
    assert simulation.model[-1].bias.isnan().all()
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])


def test_a_defense_that_nobody_calls_for_changes_nothing_but_rounding():
    plain, _ = digits(parts_of(20, 20, 20, 20), scheme="fbn", weighting="equal")
    defended, _ = digits(
        parts_of(20, 20, 20, 20), scheme="fbn", weighting="equal", defense="trimmed_mean"
    )  # of 0 liars: a mean
    for _ in range(3):
        plain.round()
        defended.round()
    assert_same_model(defended.model, plain.model, rtol=1e-9, atol=1e-10)


LIARS = {"algorithm": "fedavg", "clients": 10, "byzantine": 3, "attack": "sf"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weighting": "size"}, "weighting is 'size', but robust rules weigh all clients the same"),
        ({"weighting": "size", "targets": "gradients"}, "weighting is 'size'"),
        ({"cohort": 2}, "byzantine is 3 of 10 clients, which is 1 in a cohort of 2; no rule withstands half"),
        ({"cohort": 4, "byzantine": 4}, "byzantine is 4 of 10 clients, which is 2 in a cohort of 4"),
        ({"byzantine": 5}, "byzantine is 5 of 10 clients; no rule withstands half"),
    ],
)
def test_settings_that_do_not_go_with_liars_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**LIARS | fields)


def test_clients_weigh_the_same_where_somebody_may_lie():
    assert Recipe(**LIARS).weighting == "equal"
    assert Recipe(**LIARS | {"cohort": 5}).shares_of_cohort() == (3, 2)
    assert Recipe(algorithm="fedavg", defense="median").weighting == "equal"


# A calibrated start.


def calibrated(net, simulation):
    """The network with statistics of the union of all clients' values, layer by layer, in float64."""
    net, data = copy.deepcopy(net).double(), simulation.data
    layers = [m for m in net.modules() if isinstance(m, _BatchNorm)]
    inputs = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, x: inputs[m].append(x[0].detach().transpose(0, 1)))
    _, batches = simulation.federation.survey_batches(0, 64)
    for batch in batches:
        with torch.no_grad():
            copied = copy.deepcopy([(b.running_mean, b.running_var) for b in layers])
            net.train()(data.inputs(data.train.x[torch.from_numpy(batch)]))
            for layer, (mean, var) in zip(layers, copied, strict=True):
                layer.running_mean, layer.running_var = mean, var
    for layer in layers:
        parts = [x.flatten(1) for x in inputs[layer]]
        population = simulation.recipe.clients if simulation.recipe.scheme in ("fbn", "fbn_blend") else None
        layer.running_mean, layer.running_var = torch.cat(parts, 1).mean(1), variance(parts, population)
        layer.num_batches_tracked.zero_()
        layer._forward_pre_hooks.clear()
    return net


@pytest.mark.parametrize("model", ["mlp", "cnn16"])
@pytest.mark.parametrize(
    ("scheme", "recipe"),
    [
        *((scheme, {"algorithm": "dsgd"}) for scheme in ("centralized", "fbn", "naive", "fixbn")),
        *((scheme, {"local_steps": 2}) for scheme in WITH_STATISTICS),
        ("fbn", {"cohort": 2}),
    ],
)
def test_calibration_measures_the_union_layer_by_layer(scheme, recipe, model):
    simulation, net = digits(parts_of(12, 100, 70), model, scheme=scheme, calibrate=True, **recipe)
    expected = calibrated(net, simulation).state_dict()
    calibrate(simulation.federation, simulation.machine)
    found = simulation.model.state_dict()
    for name in (k for k in expected if "running" in k):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    assert not any(
        torch.allclose(layer.running_var, torch.ones(()).double()) for layer in simulation.layers.values()
    )
    for name, value in net.double().named_parameters():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_rounds_start_from_the_calibrated_statistics_and_so_do_clients_own(scheme):
    parts = parts_of(12, 100, 70, 30)
    settings = {"scheme": scheme, "local_steps": 2, "cohort": 3, "switch": 0}
    simulation, net = digits(parts, calibrate=True, **settings)
    twin = FedAvgTwin(calibrated(net, simulation), simulation.data, parts, simulation.recipe)
    both(simulation, twin, 2)
    assert_same(simulation, twin)
    for client in range(4):
        own = twin.own.get(client, {k: twin.start[k] for k in twin.own_keys()})
        with simulation.algorithm.as_client(client):
            state = simulation.model.state_dict()
            for name, value in own.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", ["centralized", "fbn", "naive", "fixbn", "groupnorm"])
def test_rounds_of_distributed_sgd_start_from_the_calibrated_statistics(scheme):
    parts = parts_of(12, 100, 70)
    simulation, net = digits(parts, algorithm="dsgd", scheme=scheme, calibrate=True, switch=0)
    twin = Twin(calibrated(net, simulation), simulation.data, parts, simulation.recipe)
    for _ in range(3):
        simulation.round()
        twin.round()
    assert_same_model(simulation.model, twin.model, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [(1, 30, 20), (30, 20, 1)])
@pytest.mark.parametrize("scheme", ["fbn", "naive"])
@pytest.mark.parametrize("algorithm", ["dsgd", "fedavg"])
def test_a_client_with_a_single_sample_can_take_part_in_a_calibration(algorithm, scheme, sizes):
    settings = {"algorithm": algorithm, "scheme": scheme, "calibrate": True}
    simulation, net = digits(parts_of(*sizes), **settings)
    simulation.round()
    assert all(value.isfinite().all() for value in simulation.state().values())
    _, batches = simulation.federation.survey_batches(0, 64)
    inputs = simulation.data.inputs(simulation.data.train.x[np.concatenate(batches)])
    first = net.double()[:3](inputs).detach()  # what the first layer sees, whoever normalizes how
    again, _ = digits(parts_of(*sizes), **settings)
    calibrate(again.federation, again.machine)
    torch.testing.assert_close(again.layers["3"].running_mean, first.mean(0))
    torch.testing.assert_close(again.layers["3"].running_var, first.var(0))


# Evaluation.


def measured(model, data, x, y):
    with torch.no_grad():
        scores = copy.deepcopy(model).eval()(data.inputs(x))
    return (scores.argmax(1) == y).double().mean().item(), F.cross_entropy(scores, y).item()


def client_tests(simulation):
    """Each client's part of the test set, which has its proportions of classes."""
    data, recipe = simulation.data, simulation.recipe
    held = partition.holdings(data.train.y.numpy(), simulation.parts, 10)
    return held, partition.test_parts(data.test.y.numpy(), held, stream(recipe.seed, "client tests"))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in ("fedbn", "silobn")])
def test_clients_that_own_nothing_that_evaluation_uses_are_not_evaluated(scheme):
    algorithm = "dsgd" if scheme == "centralized" else "fedavg"
    simulation, _ = digits(parts_of(9, 9), algorithm=algorithm, scheme=scheme)
    simulation.round()
    assert simulation.evaluate_clients() is None


@pytest.mark.parametrize("scheme", ["silobn", "fedbn"])
def test_clients_are_evaluated_with_their_own_state_on_their_own_kind_of_test_data(scheme):
    simulation, twin = federation(scheme, cohort=3, local_epochs=1, lr=0.05, kind=("dirichlet", 0.2))
    both(simulation, twin, 3)
    held, tests = client_tests(simulation)
    found, y = [], simulation.data.test.y
    for client, part in enumerate(tests):
        got = np.bincount(y[part].numpy(), minlength=10) / len(part)
        assert np.abs(got - held[client] / held[client].sum()).max() < 1 / len(part)
        found.append(
            measured(twin.downloaded(client), simulation.data, simulation.data.test.x[part], y[part])
        )
    before = snapshot(simulation)
    accuracy, loss = simulation.evaluate_clients()
    assert (accuracy, loss) == pytest.approx(tuple(np.mean(found, axis=0)), rel=1e-8)
    assert same_bits(before, simulation.state())
    assert (accuracy, loss) != pytest.approx(tuple(simulation.evaluate()), rel=1e-3)


def recollected(simulation, twin, step):
    """The twin's model with the statistics that the last round's clients measure with the new weights."""
    batches = simulation.federation.survey_batches(step, 64)
    model = copy.deepcopy(twin.model)
    for layer, (mean, var) in zip(norms(model), twin.survey(batches), strict=True):
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)
    return model


def test_hbn_is_evaluated_with_statistics_collected_again_and_stays_as_it_was():
    simulation, twin = federation("hbn", cohort=3, local_epochs=1, lr=0.05)
    both(simulation, twin, 3)
    x, y = simulation.data.test
    before = snapshot(simulation)
    found = simulation.evaluate()
    expected = measured(recollected(simulation, twin, 2), simulation.data, x, y)
    assert tuple(found) == pytest.approx(expected, rel=1e-8)
    assert tuple(found) != pytest.approx(measured(twin.model, simulation.data, x, y), rel=1e-3)
    assert same_bits(before, simulation.state())
    fed = simulation.federation
    twin.round(fed.work(3), fed.survey_batches(3, 64))
    simulation.round()
    assert_same(simulation, twin)


def test_at_most_a_hundred_clients_are_evaluated_spread_over_all():
    simulation, _ = digits([np.arange(i, i + 5) for i in range(250)], scheme="silobn", cohort=3)
    evaluated = []
    real = simulation.algorithm.as_client
    simulation.algorithm.as_client = lambda client: evaluated.append(client) or real(client)
    simulation.evaluate_clients()
    assert len(evaluated) == 100
    assert evaluated[0] == 0
    assert evaluated[-1] == 249
    assert max(np.diff(evaluated)) <= 3


# Layers that take BatchNorm's place.


class Nested(nn.Module):
    """One layer under two names, in two modules."""

    def __init__(self, channels=6, affine=True):
        super().__init__()
        self.line, self.last = nn.Linear(64, channels), nn.Linear(channels, 10)
        self.one = nn.BatchNorm1d(channels, affine=affine)
        self.inner = nn.Sequential(nn.ReLU(), self.one)

    def forward(self, x):
        return self.last(self.inner(self.line(x.flatten(1))))


@pytest.mark.parametrize("algorithm", ["dsgd", "fedavg"])
def test_groups_that_do_not_divide_the_channels_name_the_layer(algorithm):
    data = datasets.load("digits")
    recipe = Recipe(algorithm=algorithm, scheme="groupnorm", clients=2, groups=3)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    with pytest.raises(ValueError, match="layer '1': 64 channels do not split into 3 groups"):
        Simulation(model, data, parts_of(9, 9), recipe)


@pytest.mark.parametrize("scheme", ["groupnorm", "layernorm"])
def test_a_replaced_layer_keeps_weight_and_bias_and_is_replaced_under_all_its_names(scheme):
    model = Nested()
    model.one.eps = 0.25
    weight, bias = model.one.weight, model.one.bias
    assert fold(model, 0.1, SCHEMES[scheme], 3) == {}
    assert type(model.one) is nn.GroupNorm
    assert model.inner[1] is model.one
    assert model.one.weight is weight
    assert model.one.bias is bias
    assert (model.one.num_groups, model.one.eps) == (3 if scheme == "groupnorm" else 1, 0.25)
    assert not any(isinstance(m, _BatchNorm) for m in model.modules())
    without = Nested(affine=False)
    fold(without, 0.1, SCHEMES[scheme], 3)
    assert without.one.weight is without.one.bias is None


def test_a_layer_under_two_names_is_removed_under_both():
    model = Nested()
    fold(model, 0.1, SCHEMES["none"])
    assert type(model.one) is nn.Identity
    assert model.inner[1] is model.one
    assert {name.partition(".")[0] for name in model.state_dict()} == {"line", "last"}


def test_a_layer_under_two_names_stays_one_where_it_is_not_replaced():
    model = Nested()
    layers = fold(model, 0.1, SCHEMES["hbn"])
    assert list(layers) == ["one"]
    assert model.inner[1] is model.one
    assert isinstance(model.one, FoldedNorm)
    assert torch.equal(model.one.mix, torch.zeros(6))


def test_layernorm_is_groupnorm_with_one_group():
    states = []
    for kind in ({"scheme": "layernorm"}, {"scheme": "groupnorm", "groups": 1}, {"scheme": "groupnorm"}):
        simulation, _ = digits(parts_of(20, 30), **kind)
        for _ in range(2):
            simulation.round()
        states.append(simulation.state())
    assert same_bits(*states[:2])
    assert not same_bits(states[0], states[2])


def test_a_model_goes_from_scheme_to_scheme_and_is_a_plain_one_in_the_end():
    data = datasets.load("digits")
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    keys = model.state_dict().keys()
    for scheme in ("hbn", "fedbn", "fedtan", "hbn", "fbn"):
        recipe = Recipe(algorithm="fedavg", scheme=scheme, clients=2, batch=4, local_steps=1)
        Simulation(model, data, parts_of(20, 30), recipe).round()
    assert not hasattr(model[3], "mix")
    assert type(unfold(model)[3]) is nn.BatchNorm1d
    assert model.state_dict().keys() == keys


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_a_model_without_batch_norm_trains_the_same_under_every_scheme(scheme):
    data, found = datasets.load("digits"), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for name in ("none", scheme):
        settings = {"algorithm": "fedavg", "clients": 2, "batch": 4, "local_steps": 2, "calibrate": True}
        recipe = Recipe(scheme=name, precision="float64", **settings)
        simulation = Simulation(copy.deepcopy(model), data, parts_of(20, 30), recipe)
        for _ in range(2):
            simulation.round()
        simulation.evaluate()
        found.append(simulation.model[1].weight)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


# Crops and flips.


@pytest.mark.parametrize(
    ("scheme", "recipe"),
    [
        *((scheme, {"local_steps": 2}) for scheme in SCHEMES_HERE),
        ("fbn", {"local_epochs": 1, "calibrate": True}),
        ("fbn", {"algorithm": "dsgd"}),
        ("centralized", {"algorithm": "dsgd"}),
        ("naive", {"algorithm": "dsgd", "clip": 1.0}),
    ],
)
def test_images_may_be_augmented(scheme, recipe):
    found = {}
    for augment in (False, True):
        simulation, _ = digits(parts_of(20, 31), scheme=scheme, augment=augment, **recipe)
        start = simulation.evaluate()
        losses = [simulation.round().item() for _ in range(3)]
        found[augment] = start, losses
    assert found[True][0] == found[False][0]  # nobody augments test data
    assert np.isfinite(found[True][1]).all()
    assert found[True][1] != pytest.approx(found[False][1], rel=1e-3)


@pytest.mark.parametrize("algorithm", ["dsgd", "fedavg"])
def test_what_is_no_image_cannot_be_augmented(algorithm):
    data = datasets.load("gaussian_ring")
    recipe = Recipe(algorithm=algorithm, clients=2, augment=True)
    with pytest.raises(ValueError, match="augment is for images; these samples have no height and width"):
        Simulation(models.build("mlp", (2,), 10, seed=0), data, parts_of(9, 9), recipe)


# What a review found.


class Scaled(nn.Module):
    """A network with a single number among its parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = models.build("mlp", (1, 8, 8), 10, seed=0), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * self.body(x)


def on_digits(model, abreast=None, **recipe):
    data = datasets.load("digits")
    settings = {"algorithm": "fedavg", "clients": 4, "local_steps": 2, "batch": 8, "rounds": 4}
    recipe = Recipe(**settings | recipe)
    parts = partition.iid(data.train.y.numpy(), recipe.honest(), stream(0, "partition"))
    return Simulation(model, data, parts, recipe, abreast=abreast)


def test_a_parameter_may_be_a_single_number():
    simulation = on_digits(Scaled())
    simulation.round()
    assert simulation.model.scale.item() != 0.5


@pytest.mark.parametrize("kind", ["spectral norm", "InstanceNorm"])
def test_a_model_whose_training_changes_other_buffers_is_refused(kind):
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    if kind == "spectral norm":
        nn.utils.parametrizations.spectral_norm(model[1])
        name = r"1\.parametrizations\.weight\.0\._u"
    else:
        model.insert(0, nn.InstanceNorm2d(1, track_running_stats=True))
        name = r"0\.running_mean"
    with pytest.raises(ValueError, match=f"buffer '{name}' of the model changes while a client trains"):
        on_digits(model)


def test_hbn_is_evaluated_with_the_lies_that_clients_tell():
    lies = {"scheme": "hbn", "clients": 7, "byzantine": 2, "attack": "foe:10", "rounds": 3}
    found = {}
    for defense in ("none", "median"):
        simulation = on_digits(models.build("mlp", (1, 8, 8), 10, seed=0), defense=defense, **lies)
        for _ in range(3):
            simulation.round()
        with simulation.algorithm.evaluating(3):
            found[defense] = simulation.algorithm.statistics.clone()
    # Twice ten times minus the honest means, among five honest ones.
    means = {kind: statistics[0] for kind, statistics in found.items()}
    assert means["none"].sum() < 0 < means["median"].sum()


def test_a_round_that_fails_after_training_is_not_repeated_on_top(monkeypatch):
    simulation = on_digits(models.build("mlp", (1, 8, 8), 10, seed=0), abreast=False, local_state="keep")
    simulation.round()
    calls = []

    def broken(*args):
        calls.append(args)
        raise RuntimeError("no memory for the rule")

    monkeypatch.setattr(simulation.algorithm, "_share", broken)
    monkeypatch.setattr(simulation.machine, "replays", True)  # as on a GPU, where capturing may fail
    monkeypatch.setattr(simulation.algorithm, "_train", lambda *args: None)
    with pytest.raises(RuntimeError, match="no memory"):
        simulation.round()
    assert len(calls) == 1


def test_no_rule_and_no_server_sees_what_clients_keep_to_themselves():
    liars = {"byzantine": 1, "attack": "gaussian", "targets": "gradients", "defense": "nnm+median"}
    simulation = on_digits(
        models.build("mlp", (1, 8, 8), 10, seed=0), scheme="fedbn", server="momentum", **liars
    )
    algorithm = simulation.algorithm
    for _ in range(2):
        simulation.round()
    mean = algorithm.own_weights.mean(0)
    torch.testing.assert_close(algorithm.weights[algorithm.places], mean)
    assert not algorithm.server[0][algorithm.places].any()
    assert algorithm.server[0].any()
    names = dict(simulation.model.named_parameters())
    torch.testing.assert_close(torch.cat([names["3.weight"], names["3.bias"]]), mean[:256])


@pytest.mark.parametrize("scheme", ["fbn", "naive"])
def test_a_layer_that_takes_no_part_keeps_its_variance_under_a_robust_rule(scheme):
    class Unused(Scaled):
        def __init__(self):
            super().__init__()
            self.unused = nn.BatchNorm1d(3)

    simulation = on_digits(Unused(), scheme=scheme, defense="median")
    for _ in range(3):
        simulation.round()
    model = simulation.model
    assert torch.equal(model.unused.running_var, torch.ones(3))
    assert int(model.unused.num_batches_tracked) == 0
    assert int(model.body[3].num_batches_tracked) == 6
    assert not torch.equal(model.body[3].running_var, torch.ones(128))


@pytest.mark.parametrize("scheme", ["groupnorm", "none", "fedbn", "silobn"])
def test_an_attack_on_statistics_that_nobody_shares_is_refused(scheme):
    with pytest.raises(ValueError, match=f"scheme '{scheme}' shares no statistics"):
        Recipe(algorithm="fedavg", scheme=scheme, byzantine=2, attack="foe")
    assert Recipe(algorithm="fedavg", scheme=scheme, byzantine=2, attack="foe", targets="gradients")
