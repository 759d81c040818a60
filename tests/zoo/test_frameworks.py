"""Converted models in other people's training loops: what is collected is what the layers got."""

import lightning
import numpy as np
import onnx
import pytest
import timm
import timm.layers
import torch
import transformers
from lightning.pytorch.callbacks import StochasticWeightAveraging
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedbatchnorm as fbn


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    images = 2 * torch.randn(24, 3, 16, 16, generator=generator) + 1
    return TensorDataset(images, torch.arange(24) % 5)


def network():
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4)
    second = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def recorded(layer):
    """A list that fills with what a layer gets in training, one entry for each batch, (channels, values)."""
    inputs = []

    def keep(layer, args):
        if layer.training:
            inputs.append(args[0].detach().double().movedim(1, 0).flatten(1))

    layer.register_forward_pre_hook(keep)
    return inputs


def assert_measured(moments, inputs):
    values = torch.cat(inputs, 1)
    assert moments.count == values.shape[1]
    torch.testing.assert_close(moments.mean, values.mean(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments.var, values.var(1, unbiased=False), rtol=1e-6, atol=1e-6)


class Classifier(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class AtTheEndOfEpoch(lightning.Callback):
    def __init__(self, epoch, action):
        self.epoch, self.action = epoch, action

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            self.action()


def fit(net, data, epochs, *callbacks):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = dict.fromkeys(quiet, False) | {"max_epochs": epochs, "accelerator": "cpu"}
    trainer = lightning.Trainer(callbacks=list(callbacks), **settings)
    trainer.fit(Classifier(net), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))


LIGHTNING = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval")


@LIGHTNING
def test_a_lightning_fit_with_validation_collects_its_training_data_alone(data):
    net = fbn.convert(network())
    seen = {name: recorded(net[int(name)]) for name in ("1", "3")}
    fit(net, data, 2)
    update = fbn.collect(net)
    for name, inputs in seen.items():
        assert len(inputs) == 2 * 3
        assert_measured(update[name], inputs)
    assert all(running.tracked == 0 for running in fbn.statistics(net).values())


@LIGHTNING
def test_stochastic_weight_averaging_leaves_the_statistics_that_it_should(data):
    net, updates = fbn.convert(network()), []
    seen = {name: recorded(net[int(name)]) for name in ("1", "3")}
    collect = AtTheEndOfEpoch(3, lambda: updates.append(fbn.collect(net)))
    fit(net, data, 4, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1), collect)
    after = fbn.statistics(net)
    for name, inputs in seen.items():
        assert len(inputs) == (4 + 1) * 3
        assert_measured(updates[0][name], inputs[:-3])
        # The epoch that it adds: a plain mean over batches.
        mean = torch.stack([x.mean(1) for x in inputs[-3:]]).mean(0)
        var = torch.stack([x.var(1) for x in inputs[-3:]]).mean(0)
        torch.testing.assert_close(after[name].mean.double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[name].var.double(), var, rtol=1e-5, atol=1e-5)
        assert after[name].momentum == 0.1
    assert fbn.collect(net)["1"].count == 0


def test_transformers_trainer_collects_what_it_trained_on(data, tmp_path):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    model = fbn.convert(transformers.ResNetForImageClassification(config))
    seen = {name: recorded(model.get_submodule(name)) for name in fbn.statistics(model)}
    rows = [{"pixel_values": image, "labels": label} for image, label in data]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:6]).train()
    update = fbn.collect(model)
    for name, inputs in seen.items():
        assert len(inputs) == 4 * 2
        assert_measured(update[name], inputs)


@pytest.mark.parametrize(("best", "count"), [(False, 4 * 6 * 64), (True, 0)])
def test_the_trainer_that_loads_its_best_model_discards_what_was_measured(best, count, data, tmp_path):
    """As docs/recipes.md says: it loads a state dict before `on_train_end`."""

    class Client(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, model, **kwargs):
            self.update = fbn.collect(model)

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    model, client = fbn.convert(transformers.ResNetForImageClassification(config)), Client()
    rows = [{"pixel_values": image, "labels": label} for image, label in data]
    every = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    settings = {"max_steps": 4, "per_device_train_batch_size": 6, "load_best_model_at_end": best}
    arguments = transformers.TrainingArguments(str(tmp_path), **settings, **every, **quiet)
    sets = {"train_dataset": rows, "eval_dataset": rows[:6]}
    transformers.Trainer(model, arguments, callbacks=[client], **sets).train()
    assert client.update["resnet.embedder.embedder.normalization"].count == count


def test_timm_s_converter_after_ours_is_noticed():
    model = timm.layers.convert_sync_batchnorm(fbn.convert(timm.create_model("test_efficientnet")))
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        fbn.collect(model)


def test_a_class_with_own_forward_drops_and_acts_after_the_shared_statistics():
    """With a dropout and an activation that change everything, and against timm's own code in evaluation."""
    layer = timm.layers.BatchNormAct2d(4, act_layer=nn.Tanh, drop_layer=nn.Dropout)
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(1, 2)
    x = torch.randn(3, 4, 5, 5)
    layer.eval()
    layer.drop.train()
    torch.manual_seed(1)
    expected = layer(x)
    model = fbn.convert(nn.Sequential(layer)).train()
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), expected)
    assert fbn.collect(model)["0"].count == 3 * 25


def test_a_reverted_model_goes_to_onnx(data, tmp_path):
    model = fbn.convert(network())
    images = data[:2][0]
    model(data[:][0])
    fbn.load_statistics(model, fbn.merge(fbn.statistics(model), [fbn.collect(model)]).statistics)
    expected = model.eval()(images).detach().numpy()
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(fbn.revert(model), (images,), file, dynamo=True, verbose=False)
    found = ReferenceEvaluator(onnx.load(file))
    (output,) = found.run(None, {found.input_names[0]: images.numpy()})
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
