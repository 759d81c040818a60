"""A Flower server that is stopped and goes on: as if it had never been."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
)
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from flower_clients import change, client_app, cnn, run


class Decaying(FedAvg):
    """A server whose rate is halved in every round."""

    rate = np.float32(1)

    def configure_train(self, server_round, arrays, config, grid):
        self.rate, self.before = self.rate / 2, {k: a.numpy() for k, a in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        after = {k: b + self.rate * (arrays[k].numpy() - b) for k, b in self.before.items()}
        return ArrayRecord({k: Array(v.astype(np.float32)) for k, v in after.items()}), metrics


def fixed(strategy, **options):
    return DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, 4, **options)


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(eta=0.1),
    "FedYogi": lambda: FedYogi(eta=0.1),
    "a rate that decays": Decaying,
    "clipping that adapts": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(fraction_evaluate=0.0),
        0.0,
        4,
        initial_clipping_norm=0.01,
        clip_norm_lr=1.0,
        clipped_count_stddev=0.0,
    ),
    "clipped FedAdam": lambda: fixed(FedAdam(eta=0.1, fraction_evaluate=0.0)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_server_that_was_stopped_goes_on_to_the_same_result(name, tmp_path):
    make = STRATEGIES[name]
    _, whole = run(client_app(lr=0.02), rounds=6, strategy=make())
    app, file = client_app(lr=0.02), tmp_path / "server.safetensors"
    run(app, rounds=4, strategy=make(), checkpoint=file)
    _, result = run(app, rounds=6, strategy=make(), checkpoint=file)
    assert set(result.train_metrics_clientapp) == {5, 6}
    for key, array in whole.arrays.items():
        np.testing.assert_array_equal(array.numpy(), result.arrays[key].numpy(), err_msg=key)
    _, again = run(app, rounds=6, strategy=make(), checkpoint=file)  # there is nothing left to do
    np.testing.assert_array_equal(again.arrays["0.bias"].numpy(), whole.arrays["0.bias"].numpy())


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "server.safetensors"
    run(client_app(), rounds=1, checkpoint=file)
    with pytest.raises(ValueError, match="of a run with FedAvg, not FedMedian"):
        run(client_app(), rounds=2, strategy=FedMedian(), checkpoint=file)
    small = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))  # noqa: E731
    with pytest.raises(ValueError, match="of another model"):
        run(client_app(make=small), rounds=2, make=small, checkpoint=file)
    file.write_bytes(file.read_bytes()[:100])
    file.with_name("server.safetensors.previous").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="no checkpoint, or a damaged one"):
        run(client_app(), rounds=2, checkpoint=file)
    file.unlink()
    run(client_app(), rounds=2, strategy=fixed(FedAdam()), checkpoint=file)
    with pytest.raises(ValueError, match=r"Clipping of FedAdam, not .*Clipping of FedYogi"):
        run(client_app(), rounds=3, strategy=fixed(FedYogi()), checkpoint=file)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    app, file = client_app(), tmp_path / "server.safetensors"
    _, whole = run(client_app(), rounds=3)
    run(app, rounds=3, checkpoint=file)
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x40  # one bit of an array
    file.write_bytes(content)
    again = client_app()
    run(again, rounds=2)  # so that clients are where they were after two rounds
    _, result = run(again, rounds=3, checkpoint=file)
    assert list(result.train_metrics_clientapp) == [3]
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy(), err_msg=name)


def test_the_good_file_stays_until_a_new_one_is_written(tmp_path, monkeypatch):
    app, file = client_app(), tmp_path / "server.safetensors"
    run(app, rounds=2, checkpoint=file)
    good = (tmp_path / "server.safetensors.previous").read_bytes()
    file.write_bytes(b"damaged")

    def full(path, content, before):
        raise OSError("no space left")

    monkeypatch.setattr("fedbatchnorm.adapters.checkpoint.write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        run(app, rounds=3, checkpoint=file)
    monkeypatch.undo()
    assert (tmp_path / "server.safetensors.previous").read_bytes() == good
    assert (tmp_path / "server.safetensors.damaged").read_bytes() == b"damaged"
    _, result = run(app, rounds=3, checkpoint=file)
    assert set(result.train_metrics_clientapp) == {2, 3}


def test_rounds_that_change_nothing_count_as_done(tmp_path):
    def bad_in(rounds):
        asked = {}

        def spoil(node, answer):
            asked[node] = asked.get(node, 0) + 1
            return change(answer, var=torch.full((4,), -1.0)) if asked[node] in rounds else answer

        return spoil

    file = tmp_path / "server.safetensors"
    _, whole = run(client_app(spoil=bad_in({3, 4})), rounds=6)
    app = client_app(spoil=bad_in({3, 4}))
    run(app, rounds=4, checkpoint=file)
    _, result = run(app, rounds=6, checkpoint=file)
    assert set(result.train_metrics_clientapp) == {5, 6}
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy(), err_msg=name)


class Accountant:
    """Counts releases, with the methods of Flower's accountants that a checkpoint needs."""

    def __init__(self):
        self.releases = 0

    def state_dict(self):
        return {"releases": self.releases}

    def load_state_dict(self, state):
        self.releases = state["releases"]


def test_a_privacy_budget_goes_on_where_it_was(tmp_path):
    class Counted(FedAvg):
        def __init__(self):
            super().__init__()
            self.accountant = Accountant()

        def aggregate_train(self, server_round, replies):
            self.accountant.releases += 1
            return super().aggregate_train(server_round, replies)

    file, app = tmp_path / "server.safetensors", client_app()
    run(app, rounds=3, strategy=Counted(), checkpoint=file)
    strategy, _ = run(app, rounds=5, strategy=Counted(), checkpoint=file)
    assert strategy.strategy.accountant.releases == 5


def test_settings_may_be_changed_between_sessions(tmp_path):
    """What is saved is what a strategy changes by itself, not what it was made with."""
    file, app = tmp_path / "server.safetensors", client_app()
    run(app, rounds=1, strategy=FedAdam(eta=0.1), checkpoint=file)
    strategy, _ = run(app, rounds=2, strategy=FedAdam(eta=0.05), checkpoint=file)
    assert strategy.strategy.eta == 0.05


def test_evaluation_at_the_server_goes_on_counting(tmp_path):
    from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy
    from fedbatchnorm.adapters.local import LocalGrid

    file, rounds = tmp_path / "server.safetensors", []
    for last in (2, 4):
        strategy = FederatedBatchNormStrategy(FedAvg(), checkpoint=file)
        strategy.start(
            LocalGrid(client_app(), 4),
            ArrayRecord(cnn().state_dict()),
            num_rounds=last,
            evaluate_fn=lambda step, arrays: rounds.append(step),
        )
    assert rounds == [0, 1, 2, 2, 3, 4]


ODD = {
    "no strategy": (lambda t, f: f.pop("strategy"), "no checkpoint, or a damaged one"),
    "no memory": (lambda t, f: f.pop("plain"), "no checkpoint, or a damaged one"),
    "a memory that is no object": (lambda t, f: f.update(plain="[1]"), "what the strategy remembers"),
    "a deep memory": (lambda t, f: f.update(plain="[" * 100_000), "nested too deeply"),
    "rounds of text": (lambda t, f: f.update(done="many"), "no checkpoint, or a damaged one"),
    "negative rounds": (lambda t, f: f.update(done="-1"), "-1 rounds done"),
    "an endless gradient": (lambda t, f: f.update(gradient="nan"), "gradient nan"),
    "parts above 1": (lambda t, f: f.update(between='{"2": 7}'), "a number from 0 to 1"),
    "a list of parts": (lambda t, f: f.update(between="[0.5]"), "layer name -> a number from 0 to 1"),
    "a key without parts": (lambda t, f: f.update(plain='{"x": 1}'), "x is not what a strategy remembers"),
    "a kind of its own": (lambda t, f: f.update(plain='{"x/code/": 1}'), "is not what a strategy remembers"),
    "a method": (lambda t, f: f.update(plain='{"aggregate_train/value/": 1}'), "is no data of a FedAdam"),
    "a class": (lambda t, f: f.update(plain='{"__class__/value/": 1}'), "is no data of a FedAdam"),
    "a state that is none": (lambda t, f: f.update(plain='{"eta/state/": {}}'), "is no state of a FedAdam"),
    "text for a rate": (lambda t, f: f.update(plain='{"eta/value/": "x"}'), "is a str in place of a float"),
    "an inner strategy": (lambda t, f: f.update(plain='{"strategy/eta/value/": 1}'), "which holds none"),
    "an array for a number": (lambda t, f: t.update({"strategy/eta/number/": np.ones(3)}), "not a number"),
    "an array for a text": (lambda t, f: t.update({"strategy/n/value/": np.ones(3)}), "is not what a"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_content_under_a_right_digest_is_refused_and_changes_nothing(name, tmp_path):
    from safetensors.numpy import save

    from fedbatchnorm.adapters import checkpoint

    file, strategy = tmp_path / "server.safetensors", FedAdam(eta=0.1)
    arrays = ArrayRecord(cnn().state_dict())
    checkpoint.write_checkpoint(file, strategy, arrays, 1, {})
    tensors, facts, _ = checkpoint._read(file)
    spoil, message = ODD[name]
    spoil(tensors, facts)
    file.write_bytes(save(tensors, facts | {"digest": checkpoint._digest(tensors, facts)}))
    before = dict(vars(strategy))
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.read_checkpoint(file, strategy, arrays)
    assert str(file) in str(caught.value)
    assert vars(strategy) == before


def test_what_a_checkpoint_is_written_with_does_not_follow_links(tmp_path):
    from fedbatchnorm.adapters.checkpoint import write_checkpoint

    file, victim = tmp_path / "server.safetensors", tmp_path / "victim"
    victim.write_text("precious")
    for ending in (".new", ".new.part", ".part"):
        file.with_name(file.name + ending).symlink_to(victim)
    write_checkpoint(file, FedAvg(), ArrayRecord(cnn().state_dict()), 1, {})
    write_checkpoint(file, FedAvg(), ArrayRecord(cnn().state_dict()), 2, {})
    assert victim.read_text() == "precious"
    assert file.is_file()
    assert file.with_name("server.safetensors.previous").is_file()
    assert not (tmp_path / ".server.safetensors.lock").exists()
