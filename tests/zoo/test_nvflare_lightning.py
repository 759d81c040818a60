"""Lightning's trainer on NVFlare: the module as `flare.patch` sends it, without NVFlare's processes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pl = pytest.importorskip("pytorch_lightning")
import nvflare.app_opt.lightning.api as nvflare_api  # noqa: E402
from nvflare.app_common.abstract.fl_model import FLModel  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import fedbatchnorm as fbn  # noqa: E402
from fedbatchnorm.adapters import nvflare_lightning  # noqa: E402
from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator  # noqa: E402

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:pytorch_lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class LitNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def data_of(client, size):
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(size, 4, generator=generator) * (1 + client) + 5 * client
    return x, (x.sum(1) > 0).long()


class Site:
    """A client's process: one trainer and one module for the whole job, and NVFlare's API beneath them."""

    def __init__(self, client, size, monkeypatch, folder):
        self.x, self.y = data_of(client, size)
        self.patched, self.received, self.sent = monkeypatch, None, None
        for name, value in {
            "init": lambda rank: None,
            "get_config": dict,
            "is_train": lambda: True,
            "is_evaluate": lambda: False,
            "is_submit_model": lambda: False,
        }.items():
            monkeypatch.setattr(nvflare_api, name, value)
        self.module = fbn.convert(LitNet())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        self.trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", enable_model_summary=False, default_root_dir=folder, **quiet
        )
        nvflare_lightning.patch(self.trainer)

    def answer(self, sent):
        copy = {name: torch.tensor(np.array(value)) for name, value in sent.params.items()}
        received = FLModel(params=copy, meta=sent.meta, current_round=sent.current_round)
        for module in (nvflare_api, nvflare_lightning):
            self.patched.setattr(module, "receive", lambda: received)
        self.patched.setattr(nvflare_api, "send", lambda model, clear_cache: setattr(self, "sent", model))
        self.patched.setattr(nvflare_api, "clear", lambda: None)
        self.trainer.fit(self.module, DataLoader(TensorDataset(self.x, self.y), batch_size=16))
        params = {name: value.numpy().copy() for name, value in self.sent.params.items()}
        return FLModel(params=params, meta=dict(self.sent.meta))


def test_a_trainer_calibrates_trains_and_reports_what_its_layers_saw(monkeypatch, tmp_path):
    sizes = [32, 48]
    sites = [Site(i, size, monkeypatch, tmp_path) for i, size in enumerate(sizes)]
    first = LitNet().state_dict()
    aggregator = FederatedBatchNormAggregator(model=LitNet())
    aggregator.start({name: value.numpy() for name, value in first.items()}, 2)
    union = torch.cat([site.x for site in sites]).double()
    for number in range(3):
        aggregator.reset_stats()
        aggregator.ask(["site-1", "site-2"])
        sent = aggregator.request()
        for i, site in enumerate(sites):
            found = site.answer(sent)
            assert found.meta["NUM_STEPS_CURRENT_ROUND"] == sizes[i] // 16
            found.meta["client_name"] = f"site-{i + 1}"
            aggregator.accept_model(found)
        params = aggregator.aggregate_model().params
        assert aggregator.left_out == {}
        # The first layer gets the data itself: it is the union's, whatever was learned.
        np.testing.assert_allclose(params["net.0.running_mean"], union.mean(0), rtol=1e-5)
        np.testing.assert_allclose(params["net.0.running_var"], union.var(0), rtol=1e-5)
        learned = not np.array_equal(params["net.1.weight"], first["net.1.weight"].numpy())
        assert learned == (number > 0)


def test_several_processes_are_refused_with_words(tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    trainer.strategy.world_size = 2
    with pytest.raises(ValueError, match="2 processes, and patch works with one"):
        nvflare_lightning.patch(trainer)
