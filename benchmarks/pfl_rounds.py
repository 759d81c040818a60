"""Rounds of FedAvg by pfl-research (`pip install pfl`), to be timed in the same run as the simulator.

    contender = Pfl(pfl_cnn(), data, parts, cohort=50, batch=10, epochs=1, lr=0.1, device="cuda")
    contender.round()

It is set up as in pfl's own benchmark on CIFAR-10, and wherever pfl leaves a choice, the faster one is made:
normalized images are on the device from the start, a user's dataset is made once and keeps its batches, there
is no privacy mechanism, no callback, no evaluation, and nobody reads metrics. pfl itself stays as it is.

Two things to know: pfl never shuffles a user's samples, and it averages parameters but not buffers, so that
BatchNorm's run on from one user to the next.
"""

import copy
import functools
import importlib.util
import multiprocessing
import os
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

from fedbatchnorm.simulation.device import arithmetic


def _prepare():
    """Let pfl be imported without what its rounds never use, and without a change to this process.

    All of it imports `pfl.privacy`, whose accountants want more libraries than the rest: without them an
    empty module takes its place. `multiprocess`, a fork of the standard module, is for several GPUs. And on
    import pfl sets how the process starts others, unless that is settled: asking for it settles it.
    """
    if any(importlib.util.find_spec(name) is None for name in ("scipy", "dp_accounting", "prv_accountant")):
        sys.modules.setdefault("pfl.privacy", types.ModuleType("pfl.privacy"))
    if "multiprocess" not in sys.modules and importlib.util.find_spec("multiprocess") is None:
        sys.modules["multiprocess"] = multiprocessing
    multiprocessing.get_start_method()


def available():
    """Whether pfl can be imported here."""
    _prepare()
    try:
        import pfl.aggregate.simulate
        import pfl.model.pytorch  # noqa: F401
    except Exception:  # it may be there, and what it needs not, or not in a version that fits
        return False
    return True


def pfl_cnn(classes=10):
    """The network of pfl's CIFAR-10 benchmark: no padding, no BatchNorm, Glorot's uniform weights."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.xavier_uniform_(parameter)
    return network


class Task(nn.Module):
    """A network with the two methods that pfl calls on a model."""

    def __init__(self, network, compile=None):
        super().__init__()
        self.network = network
        if compile:
            self.loss = torch.compile(self.loss, mode=compile, dynamic=False)

    def loss(self, inputs, targets):
        return F.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs, targets):
        """Never called in a round; pfl asks only that it is there."""
        raise NotImplementedError


class Pfl:
    """One FedAvg round of pfl after another: a cohort of users, local SGD, and the mean of what they learned.

    Args:
        model: gives scores for normalized inputs; a copy of it is trained, `network`.
        data: a `Dataset`; `parts` has the indices of each user's samples in `data.train`.
        cohort: users in a round.
        batch: samples in a local step, in the order of `parts`; None takes all of a user's.
        epochs, local_steps: how long a user trains, one or the other; pfl does not start a second pass over
            a user's samples to make up a number of steps, so they have to suffice.
        sampler: "minimize_reuse" takes users in turn; "random" is what pfl's benchmark has, and can draw
            a user twice in a cohort.
        precision: "tf32", "float32", or "bf16", which is pfl's own mixed precision.
        channels_last: keep images and weights so; pfl's benchmark has images so, and weights not.
        compile: a mode of torch.compile, such as "default", for forward and loss. What pfl offers
            (`use_torch_compile`) wraps the model, but then calls its `loss`, which is not compiled.
    """

    def __init__(
        self,
        model,
        data,
        parts,
        *,
        cohort,
        batch,
        lr,
        device,
        epochs=None,
        local_steps=None,
        momentum=0.0,
        sampler="minimize_reuse",
        precision="tf32",
        channels_last=False,
        compile=None,
    ):
        _prepare()
        self.device, self.precision = torch.device(device), precision
        os.environ["PFL_PYTORCH_DEVICE"] = str(device)  # it reads this whenever it is handed a tensor
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        steps = min(1 if batch is None else len(part) // batch for part in parts)  # whole ones, in one pass
        if local_steps is not None and local_steps > steps:
            raise ValueError(f"a user has {steps} batches of {batch}, and pfl would stop after them")

        layout = torch.channels_last if channels_last else torch.contiguous_format
        data = data.to(self.device)

        def user(number, part):
            index = torch.as_tensor(part, device=self.device)
            x = data.inputs(data.train.x[index]).contiguous(memory_format=layout)
            return Dataset((x, data.train.y[index]), user_id=number)

        users = [user(number, part) for number, part in enumerate(parts)]
        federation = FederatedDataset(users.__getitem__, get_user_sampler(sampler, range(len(users))))
        self.backend = SimulatedBackend(federation, federation, postprocessors=[WeightByUser()])

        self.network = copy.deepcopy(model).to(self.device, memory_format=layout).train()
        self.model = PyTorchModel(
            model=Task(self.network, compile),
            local_optimizer_create=functools.partial(torch.optim.SGD, momentum=momentum),
            central_optimizer=torch.optim.SGD(self.network.parameters(), lr=1.0),
            amp_dtype=torch.bfloat16 if precision == "bf16" else None,
        )
        self.local = NNTrainHyperParams(
            local_batch_size=batch,
            local_num_epochs=epochs,
            local_num_steps=local_steps,
            local_learning_rate=lr,
        )
        self.cohort, self.algorithm, self.iteration = cohort, FederatedAveraging(), 1
        self.algorithm._current_central_iteration = 1  # it would evaluate every user in iteration 0

    def round(self):
        from pfl.algorithm.base import NNAlgorithmParams

        self.iteration += 1
        central = NNAlgorithmParams(
            central_num_iterations=self.iteration,
            evaluation_frequency=sys.maxsize,
            train_cohort_size=self.cohort,
            val_cohort_size=0,
        )
        with arithmetic(self.device, self.precision):
            self.algorithm.run(central, self.backend, self.model, self.local, send_metrics_to_platform=False)
