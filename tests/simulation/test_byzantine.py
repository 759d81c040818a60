"""Rounds with liars equal a plain loop over clients; what is attacked, defended and refused."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbatchnorm as fbn
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.runner import federation as federation_of
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.byzantine import client_gradients, with_lies
from fedbatchnorm.simulation.recipe import Recipe, learning_rate, stream
from fedbatchnorm.simulation.simulator import Simulation, draw

sys.path.insert(0, str(Path(__file__).parent))
from twin import batch_norms, gradient

N, F = 7, 2
LIES = {  # by hand, from the honest rows (h, d)
    "sf": lambda rows: -rows.mean(0),
    "foe": lambda rows: -2 * rows.mean(0),
    "alie": lambda rows: rows.mean(0) + 1.5 * rows.std(0, ddof=1),
}
RULES = {
    "none": lambda rows: rows.mean(0),
    "median": lambda rows: np.median(rows, axis=0),
    "trimmed_mean": lambda rows: np.sort(rows, axis=0)[F : N - F].mean(0),
    "nnm+median": lambda rows: np.median(neighbors(rows), axis=0),
}


def neighbors(rows):
    out = []
    for x in rows:
        ranked = sorted(rows, key=lambda y, x=x: ((x - y) ** 2).sum())
        out.append(np.mean(ranked[: len(rows) - F], axis=0))
    return np.array(out)


def federation(**recipe):
    data = datasets.load("digits")
    recipe = Recipe(
        **{"clients": N, "byzantine": F, "batch": 6, "rounds": 6, "precision": "float64", "momentum": 0.8}
        | recipe
    )
    parts = partition.split("gamma", data.train.y.numpy(), recipe.honest(), 0.2, stream(0, "partition"))
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    return copy.deepcopy(model).double(), Simulation(model, data, parts, recipe)


class LiarsTwin:
    """One client after another, then the liars, then the server; nothing folded, numpy where it can be."""

    def __init__(self, model, simulation):
        self.model, self.recipe, self.parts, self.data = (
            model,
            simulation.recipe,
            simulation.parts,
            simulation.data,
        )
        self.momenta = [[torch.zeros_like(p) for p in model.parameters()] for _ in self.parts]
        self.step = 0

    def aggregate(self, rows, what):
        lie = LIES[self.recipe.attack](rows) if what in self.recipe.targets_struck() else rows.mean(0)
        return RULES[self.recipe.defense](np.concatenate([rows, np.repeat(lie[None], F, axis=0)]))

    def round(self):
        recipe, beta = self.recipe, 0.1
        moments, gradients = [], []
        for index in draw(self.parts, recipe.batch, stream(recipe.seed, "batches", self.step)):
            client = copy.deepcopy(self.model).train()
            seen = []
            hooks = [
                b.register_forward_pre_hook(lambda m, x, seen=seen: seen.append(x[0].detach()))
                for b in batch_norms(client)
            ]
            if recipe.scheme == "fbn":
                fbn.convert(client, gradient=recipe.gradient)
            gradients.append(gradient(client, self.data, torch.from_numpy(index)))
            moments.append([(x.mean(0).numpy(), x.var(0, correction=0).numpy(), len(x)) for x in seen])
            for hook in hooks:
                hook.remove()
        self.descend(gradients)
        layers = batch_norms(self.model)
        sizes = np.cumsum([b.num_features for b in layers])[:-1]
        m, v = (
            np.concatenate([getattr(b, k).numpy() for b in layers]) for k in ("running_mean", "running_var")
        )
        count = moments[0][0][2] * (N if recipe.scheme == "fbn" else 1)
        unbiased = count / (count - 1)
        means = np.array([(1 - beta) * m + beta * np.concatenate([u for u, _, _ in c]) for c in moments])
        variances = np.array(
            [(1 - beta) * v + beta * unbiased * np.concatenate([s for _, s, _ in c]) for c in moments]
        )
        if recipe.scheme == "fbn":
            lie = LIES[recipe.attack](means) if "means" in recipe.targets_struck() else means.mean(0)
            sent = np.concatenate([means, np.repeat(lie[None], F, axis=0)])
            mean = RULES[recipe.defense](sent)
            between = RULES[recipe.defense]((sent - mean) ** 2)
            var = self.aggregate(variances, "variances") + unbiased / beta * between
        else:
            mean, var = self.aggregate(means, "means"), self.aggregate(variances, "variances")
        var = np.maximum(var, 1e-5)
        for layer, new_mean, new_var in zip(layers, np.split(mean, sizes), np.split(var, sizes), strict=True):
            layer.running_mean.copy_(torch.from_numpy(new_mean))
            layer.running_var.copy_(torch.from_numpy(new_var))
            layer.num_batches_tracked += 1
        self.step += 1

    def descend(self, gradients):
        keep, rows = self.recipe.momentum, []
        for momentum, grads in zip(self.momenta, gradients, strict=True):
            for m, g in zip(momentum, grads, strict=True):
                m.mul_(keep).add_(g, alpha=1 - keep)
            rows.append(torch.cat([m.flatten() for m in momentum]).numpy())
        rows = np.array(rows)
        attacked = "gradients" in self.recipe.targets_struck()
        step = self.aggregate(rows, "gradients") if attacked else rows.mean(0)
        with torch.no_grad():
            moved = torch.nn.utils.parameters_to_vector(self.model.parameters())
            moved = moved - learning_rate(self.recipe, self.step) * torch.from_numpy(step)
            torch.nn.utils.vector_to_parameters(moved, self.model.parameters())


@pytest.mark.parametrize("targets", ["usual", "all", "variances", "gradients"])
@pytest.mark.parametrize(
    ("attack", "defense"),
    [("sf", "none"), ("foe", "median"), ("alie", "trimmed_mean"), ("foe", "nnm+median")],
)
@pytest.mark.parametrize("scheme", ["fbn", "naive"])
def test_a_round_with_liars_equals_the_loop_over_clients(scheme, attack, defense, targets):
    model, simulation = federation(scheme=scheme, attack=attack, defense=defense, targets=targets)
    twin = LiarsTwin(model, simulation)
    for _ in range(4):
        simulation.round()
        twin.round()
    for name, value in simulation.model.state_dict().items():
        expected = twin.model.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scheme", ["fbn", "naive", "fixbn"])
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet20"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_gradients_and_moments_of_each_client_equal_a_loop(scheme, model, chunk):
    data = datasets.load("digits")
    parts = partition.split("iid", data.train.y.numpy(), 3, None, stream(0, "partition"))
    net = models.build(model, (1, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    recipe = Recipe(scheme=scheme, clients=3, batch=4, switch=0, rounds=2, precision="float64")
    simulation = Simulation(net, data, parts, recipe)
    index = torch.arange(12)
    x, y = simulation.data.inputs(data.train.x[index]).view(3, 4, 1, 8, 8), data.train.y[index].view(3, 4)
    simulation.model.train()
    for layer in simulation.layers.values():
        layer.start(simulation.federation.scheme.phase(0, 0))
    rows, losses = client_gradients(simulation.model, simulation.layers, x, y, chunk)
    found = {name: layer.rows(name, 1) for name, layer in simulation.layers.items()}
    for i in range(3):
        for layer in simulation.layers.values():
            layer.clients, layer.seen = 1, []
        simulation.model.zero_grad()
        loss = torch.nn.functional.cross_entropy(simulation.model(x[i]), y[i])
        loss.backward()
        own = torch.cat([p.grad.flatten() for p in simulation.federation.parameters])
        torch.testing.assert_close(rows[i], own, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(losses[i], loss.detach())
        for name, layer in simulation.layers.items():
            if found[name] is None:
                assert scheme == "fixbn"
                continue
            seen = layer.rows(name, 1)
            assert found[name].count == seen.count
            torch.testing.assert_close(found[name].mean[i], seen.mean[0])
            torch.testing.assert_close(found[name].var[i], seen.var[0])


def test_liars_hold_no_data_and_sign_flipping_strikes_means_alone():
    _, simulation = federation(attack="sf")
    assert len(simulation.parts) == N - F
    assert simulation.recipe.targets_struck() == ("means",)
    assert Recipe(clients=5, byzantine=1, attack="sf", targets="all").targets_struck() == (
        "means",
        "variances",
        "gradients",
    )
    assert Recipe().targets_struck() == ()


def test_a_defense_without_liars_is_allowed_and_f_0_changes_nothing_but_rounding():
    _, plain = federation(byzantine=0)
    _, defended = federation(byzantine=0, defense="trimmed_mean")
    for _ in range(3):
        plain.round()
        defended.round()
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(defended.model.state_dict()[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attack", ["nan", "infinity", "gaussian"])
def test_faults_are_survived_under_a_robust_rule_and_not_without(attack):
    _, simulation = federation(attack=attack, defense="nnm+median")
    for _ in range(3):
        simulation.round()
    assert all(v.isfinite().all() for v in simulation.model.state_dict().values())
    if attack != "gaussian":
        _, undefended = federation(attack=attack)
        for _ in range(3):
            undefended.round()
        assert not undefended.layers["3"].running_mean.isfinite().all()
        assert undefended.evaluate().accuracy < 0.2


@pytest.mark.parametrize("targets", ["usual", "gradients"])
def test_the_same_bits_again_and_from_a_state(targets):
    settings = {"attack": "gaussian", "targets": targets, "defense": "median", "precision": "float32"}
    (_, one), (_, two) = federation(**settings), federation(**settings)
    for _ in range(4):
        one.round()
    for _ in range(2):
        two.round()
    state = {k: v.clone() for k, v in two.state().items()}
    _, resumed = federation(**settings)
    resumed.load_state(state, 2)
    for _ in range(2):
        resumed.round()
    assert all(torch.equal(v, resumed.state()[k]) for k, v in one.state().items())


def test_a_diverged_training_keeps_its_statistics():
    _, simulation = federation(attack="sf", defense="median")
    simulation.round()
    before = simulation.layers["3"].running_mean.clone()
    with torch.no_grad():
        simulation.federation.parameters[0].fill_(torch.nan)
    simulation.round()
    assert torch.equal(simulation.layers["3"].running_mean, before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"byzantine": 3}, "byzantine is 3 and attack is 'none'; give both, or neither"),
        ({"attack": "sf"}, "byzantine is 0 and attack is 'sf'"),
        ({"byzantine": 5, "attack": "sf"}, "byzantine is 5 of 10 clients"),
        ({"byzantine": 3, "attack": "sff"}, "attack 'sff' is not known: it is one of sf, foe"),
        ({"byzantine": 3, "attack": "sf", "targets": "weights"}, "targets is 'weights'"),
        ({"defense": "nnm+mode"}, "defense 'nnm\\+mode' is not known"),
        ({"defense": "median", "scheme": "centralized"}, "has no clients that could be Byzantine"),
        ({"byzantine": 1, "attack": "sf", "targets": "all", "weighting": "size"}, "weighting is 'size'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Run(**fields)


def test_names_of_runs_without_liars_stay_and_those_with_them_differ():
    plain = {digest(Run()), digest(Run(targets="all"))}
    assert len(plain) == 1
    base = {"byzantine": 3, "attack": "foe"}
    names = [
        digest(Run(**base)),
        digest(Run(**base, targets="all")),
        digest(Run(**base, defense="median")),
        digest(Run(**base | {"attack": "alie"})),
        digest(Run(**base | {"byzantine": 2})),
        digest(Run(defense="median")),
    ]
    assert len({*names, *plain}) == len(names) + 1
    assert digest(Run(**base)) == digest(Run(**base, targets="variances+means"))


def test_half_precision_holds_for_the_gradients_of_each_client_too():
    """bf16 and float32 differ, and not by much, when gradients are attacked."""
    states = {}
    for precision in ("bf16", "float32"):
        lies = {"byzantine": 1, "attack": "sf", "targets": "all", "defense": "median", "precision": precision}
        run = Run(dataset="digits", clients=4, rounds=10, **lies)
        simulation, _ = federation_of(run, torch.device("cpu"), None)
        for _ in range(3):
            simulation.round()
        states[precision] = simulation.model.state_dict()["1.weight"]
    assert not torch.equal(states["bf16"], states["float32"])
    torch.testing.assert_close(states["bf16"], states["float32"], rtol=0.05, atol=0.01)


def test_random_lies_differ_from_field_to_field():
    recipe = Recipe(clients=4, byzantine=1, attack="gaussian", targets="all")
    honest = torch.zeros(3, 5)
    sent = [with_lies(honest, recipe, what, None, 0)[-1] for what in ("means", "variances", "gradients")]
    assert not torch.equal(sent[0], sent[1])
    assert not torch.equal(sent[1], sent[2])
    assert torch.equal(sent[0], with_lies(honest, recipe, "means", None, 0)[-1])


def test_an_attack_with_its_usual_factor_is_the_same_run():
    lies = {"byzantine": 3}
    names = {digest(Run(attack=name, **lies)) for name in ("foe", "foe:2", "foe:2.0")}
    assert len(names) == 1
    assert digest(Run(attack="foe:10", **lies)) not in names
