"""Layers that `convert` is told to leave alone, modules that it does not know, and messages about many."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import fedbatchnorm as fbn


def net():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    head = nn.ModuleDict({"bn1": nn.BatchNorm1d(3), "bn2": nn.BatchNorm1d(3, momentum=0.0)})
    return nn.ModuleDict({"body": body, "head": nn.Sequential(head["bn1"], head["bn2"])})


def run(model, x):
    return model["head"](model["body"](x))


HEAD = ["head.0", "head.1"]


@pytest.mark.parametrize(
    "skip",
    [
        HEAD,
        "head.*",
        ["head.[01]"],
        ("head.?",),
        {"head.0", "*1"} - {"*1"} | {"head.1"},
        lambda name, layer: name.startswith("head"),
        lambda name, layer: not isinstance(layer, nn.BatchNorm1d) or "head" in name,
    ],
)
def test_skipped_layers_stay_exactly_as_they_are(skip):
    model, plain = net(), net()
    assert fbn.convert(model, skip=skip) is model
    assert type(model["body"][1]) is fbn.FederatedBatchNorm1d
    assert [type(layer) for layer in model["head"]] == [nn.BatchNorm1d, nn.BatchNorm1d]
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(8, 4)
    model["body"][1].eval()
    plain["body"][1].eval()
    assert torch.equal(run(model, x), run(plain, x))
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert list(fbn.statistics(model)) == ["body.1"]
    fbn.load_statistics(model, fbn.statistics(model))
    assert list(fbn.collect(model)) == ["body.1"]
    fbn.discard_step(model)
    fbn.set_gradient(model, 0.5)
    with fbn.calibrating(model):
        run(model, x)


def test_a_layer_that_would_be_refused_can_be_skipped():
    with pytest.raises(fbn.ConversionError, match="momentum is 0"):
        fbn.convert(net())
    fbn.convert(net(), skip="head.1")


def test_inspect_says_what_was_skipped():
    model = fbn.convert(net(), skip=HEAD)
    found = {f.layer: f for f in fbn.inspect(model)}
    assert found["head.1"] == fbn.Finding(
        "head.1", "BatchNorm1d", None, problem=None, skipped=True, note="skipped, as asked"
    )
    assert found["body.1"] == ("body.1", "FederatedBatchNorm1d", "FederatedBatchNorm1d", None, False, None)


def test_copies_and_pickles_remember():
    model = fbn.convert(net(), skip=HEAD)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert list(fbn.collect(other)) == ["body.1"]
        assert [f.skipped for f in fbn.inspect(other)] == [False, True, True]
        fbn.convert(other)
        assert list(fbn.collect(other)) == ["body.1"]


def test_what_is_given_later_takes_the_place_of_what_was_given_before():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    fbn.convert(model, skip="0")
    fbn.convert(model, gradient=0.5)
    assert list(fbn.statistics(model)) == ["1", "2"]
    fbn.convert(model, skip=["1"])
    assert list(fbn.statistics(model)) == ["0", "2"]
    assert type(model[1]) is nn.BatchNorm1d
    fbn.convert(model, skip=())
    assert list(fbn.statistics(model)) == ["0", "1", "2"]


def test_revert_forgets():
    model = fbn.convert(net(), skip=HEAD)
    attributes = set(net()["head"][0].__dict__)
    fbn.revert(model)
    assert set(model["head"][0].__dict__) == attributes
    fbn.convert(model["body"])
    with pytest.raises(ValueError, match=r"head\.0' is a plain BatchNorm1d"):
        fbn.statistics(model)


@pytest.mark.parametrize(
    ("skip", "near"),
    [
        (["head.2"], "'head.2'.*near it are 'head.[01]'"),
        ("haed.*", r"'haed\.\*'.*near it are 'head.[01]'"),
        (["head.*", "nothing like it"], "'nothing like it'"),
        ("head", "'head'.*near it are 'head.[01]'"),
        ("", "''"),
        ([3], "skip has 3"),
    ],
)
def test_a_name_that_fits_nothing_is_an_error_with_names_near_it(skip, near):
    model = net()
    with pytest.raises(ValueError, match=near):
        fbn.convert(model, skip=skip)
    assert {type(m).__name__ for m in model.modules() if hasattr(m, "eps")} == {"BatchNorm1d"}
    assert not any(f.skipped for f in fbn.inspect(model))


def test_an_error_changes_nothing_that_was_skipped_before():
    model = fbn.convert(net(), skip=HEAD)
    with pytest.raises(fbn.ConversionError):
        fbn.convert(model, skip=["head.0"])
    assert list(fbn.statistics(model)) == ["body.1"]


def test_everything_may_be_skipped():
    model = fbn.convert(net(), skip="*")
    assert fbn.collect(model).layers == {}


class ByHand(fbn.FederatedBatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def test_a_class_federated_by_hand_cannot_be_skipped():
    with pytest.raises(fbn.ConversionError, match="1 x ByHand: 0: it was written as a federated class"):
        fbn.convert(nn.Sequential(ByHand(2)), skip="0")


# --- what keeps statistics and is no BatchNorm ---


class Hetero(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("running_mean", torch.zeros(2, 3))
        self.register_buffer("running_var", torch.ones(2, 3))


class Evo(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_var", torch.ones(3))


class Renorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_avg_std", torch.ones(3))


class FrozenBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(3))


class Wrapper(nn.Module):
    """As PyTorch Geometric's BatchNorm."""

    def __init__(self):
        super().__init__()
        self.module = nn.BatchNorm1d(3)


def test_modules_with_statistics_are_listed_and_warned_of_once():
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        *(nn.InstanceNorm2d(3, track_running_stats=True) for _ in range(5)),
        *(Hetero(), Evo(), Renorm()),
        *(FrozenBatchNorm(), Wrapper(), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3)),
    )
    found = {f.layer: f for f in fbn.inspect(model)}
    assert list(found) == [*map(str, range(10)), "10.module"]
    assert {found[str(i)].becomes for i in range(1, 10)} == {None}
    assert (
        found["8"].note
        == "is no BatchNorm and keeps running_avg_std, which federated BatchNorm does not share"
    )
    assert "frozen" in found["9"].note
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fbn.convert(model)
        fbn.convert(model)  # nothing new
    (message,) = (str(w.message) for w in caught)
    assert "5 x InstanceNorm2d: 1, 2, 3, ... and 2 more: is no BatchNorm" in message
    for line in ("1 x Hetero: 6: ", "1 x Evo: 7: ", "1 x Renorm: 8: "):
        assert line in message
    assert "Frozen" not in message
    assert caught[0].filename == __file__
    assert type(model[10].module) is fbn.FederatedBatchNorm1d


def test_skip_silences_the_warning():
    model = nn.Sequential(nn.BatchNorm2d(3), Hetero(), Evo())
    fbn.convert(model, skip=["1", "2"])
    assert [f.note for f in fbn.inspect(model)] == [None, "skipped, as asked", "skipped, as asked"]


def test_without_batch_norm_there_is_one_warning_for_all():
    with pytest.warns(UserWarning, match=r"(?s)no BatchNorm layer.*1 x Evo: 0: ") as caught:
        fbn.convert(nn.Sequential(Evo()))
    assert len(caught) == 1


def test_refusals_are_grouped_by_type_and_cause():
    layers = [nn.BatchNorm1d(2, eps=0.0) for _ in range(49)]
    layers += [nn.BatchNorm1d(2, momentum=0.0), nn.BatchNorm2d(2, eps=0.0)]
    with pytest.raises(fbn.ConversionError) as error:
        fbn.convert(nn.Sequential(*layers))
    first, *lines = str(error.value).split("\n")
    assert first == "cannot convert; nothing was changed:"
    assert len(lines) == 3
    assert lines[0].startswith("  49 x BatchNorm1d: 0, 1, 2, ... and 46 more: eps is 0.0")
    assert lines[1].startswith("  1 x BatchNorm1d: 49: momentum is 0.0")
    assert lines[2].startswith("  1 x BatchNorm2d: 50: eps is 0.0")
