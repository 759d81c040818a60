"""Federated BatchNorm on NVFlare for Lightning's trainer: use it instead of `flare.patch`.

model = fbn.convert(LitNet())
trainer = Trainer(max_epochs=1)
patch(trainer)
while flare.is_running():
    trainer.fit(model, data)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from . import client
from .extras import needs
from .nvflare_client import KEY, load, packed, wants_calibration

try:
    import nvflare.client.lightning as flare
    from nvflare.client.api import receive
    from pytorch_lightning import Callback, LightningModule, Trainer  # pyrefly: ignore
except ImportError as error:
    raise needs("NVFlare and Lightning (pip install lightning)", "nvflare", error) from error

_META = "__fl_meta__"  # the module's attribute whose entries NVFlare sends


def patch(trainer: Trainer, **options: Any) -> None:
    """Let a trainer receive from and send to a server with federated BatchNorm.

    Args:
        trainer: a trainer for one device; it must fit a converted module.
        options: of `nvflare.client.lightning.patch`, which is called.
    """
    if trainer.world_size > 1:
        raise ValueError(
            f"the trainer has {trainer.world_size} processes, and patch works with one: write a loop with "
            "flare.receive and flare.send, and give `reply` the process group"
        )
    flare.patch(trainer, **options)
    callbacks: list[Callback] = trainer.callbacks  # pyrefly: ignore
    if not any(isinstance(callback, FederatedBatchNormCallback) for callback in callbacks):
        callbacks.insert(0, FederatedBatchNormCallback())  # ends a round before NVFlare's callback sends


class FederatedBatchNormCallback(Callback):
    """Loads settings and statistics when a round begins, and adds what the layers have seen to the reply.

    If the server asks for a calibration, the layers measure with plain BatchNorm, and nothing is trained.
    """

    def __init__(self):
        self._calibration = ExitStack()
        self._calibrates, self._began = False, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the received model, which NVFlare's callback receives, too, and loads again."""
        received = receive()
        if received is None:
            return
        if KEY not in (received.meta or {}):
            raise RuntimeError("the server does not use FederatedBatchNormRecipe: nothing says how to train")
        load(pl_module, received)
        self._began, self._calibrates = trainer.global_step, wants_calibration(received)
        if self._calibrates:
            self._calibration.enter_context(client.calibrating(pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clear the gradients: without them an optimizer changes neither weights nor its state."""
        if self._calibrates:
            optimizer.zero_grad(set_to_none=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put what the layers have seen where NVFlare's callback finds it."""
        if self._calibrates:
            self._calibration.close()
            found = client.measured(pl_module)
        else:
            found = client.answer(pl_module, steps=trainer.global_step - self._began)
        setattr(pl_module, _META, {**getattr(pl_module, _META, {}), KEY: packed(found.statistics)})
