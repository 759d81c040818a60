"""A recipe for NVFlare: FedAvg with federated BatchNorm, for SimEnv, PocEnv and ProdEnv.

recipe = FederatedBatchNormRecipe(
    model=Net(), min_clients=2, num_rounds=20, train_script="client.py",
    aggregator=FederatedBatchNormAggregator(quorum=2),
)
recipe.execute(SimEnv(num_clients=3))
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from .divergence import DivergedError
from .extras import needs
from .nvflare import FederatedBatchNormAggregator

try:
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
except ImportError as error:
    raise needs("NVFlare", "nvflare", error) from error


class FederatedBatchNormFedAvg(FedAvg):
    """FedAvg that counts rounds of training, continues from a checkpoint, and survives clients that fail."""

    def __init__(self, *args: Any, round_timeout: int = 0, **kwargs: Any):
        """As FedAvg, with a time limit for each round.

        Args:
            args: of FedAvg.
            round_timeout: seconds after which a round is that of the clients that have answered; 0 waits.
            kwargs: of FedAvg.
        """
        super().__init__(*args, **kwargs)
        self.round_timeout = round_timeout

    @property
    def _ours(self) -> FederatedBatchNormAggregator:
        return cast(FederatedBatchNormAggregator, self.aggregator)

    def load_model(self) -> FLModel:
        """The initial model, or that of the checkpoint; then only the remaining rounds count."""
        model = super().load_model()
        if model is not None:
            self.num_rounds = self._ours.start(model.params, self.num_rounds)
            self.start_round = self._ours.number  # so that current_round is the same after a resume
            model.params = self._ours.params()
            if not self.num_rounds:
                self.save_model(model)
        return model

    def send_model(self, *args: Any, targets: list[str] | None = None, **kwargs: Any) -> None:
        """Send the model, and tell the aggregator to whom."""
        self._ours.ask(targets or self.sample_clients())
        super().send_model(*args, targets=targets, timeout=self.round_timeout, **kwargs)

    def _get_aggregated_result(self) -> FLModel:
        try:
            return super()._get_aggregated_result()
        except DivergedError as error:  # the job's model is the last good one, and the job has failed
            self.save_model(FLModel(params=self._ours.params()))
            raise error

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        code = result.get_return_code()
        if code and code != ReturnCode.OK and not is_unknown_task:
            self._ours.fail(client_name, f"{code}; the log of {client_name} says why")
        return super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)


class FederatedBatchNormRecipe(FedAvgRecipe):
    """Like FedAvgRecipe: the same arguments, and an aggregator that merges statistics.

    `num_rounds` counts rounds of training; the calibration comes before them. A client that fails is skipped:
    `quorum=` of the aggregator says how many replies a round needs.
    """

    def __init__(
        self,
        *,
        aggregator: FederatedBatchNormAggregator | None = None,
        clients_per_round: int | None = None,
        round_timeout: int = 0,
        **fedavg: Any,
    ):
        """Make a recipe.

        Args:
            aggregator: has the settings of federated BatchNorm; by default its model is the recipe's.
            clients_per_round: how many clients are sampled for each round; all if not given.
            round_timeout: seconds after which a round is that of the clients that have answered; 0 waits.
            fedavg: the arguments of `nvflare.app_opt.pt.recipes.fedavg.FedAvgRecipe`.
        """
        aggregator = FederatedBatchNormAggregator() if aggregator is None else aggregator
        if not isinstance(aggregator, FederatedBatchNormAggregator):
            raise TypeError(
                f"aggregator is a {type(aggregator).__name__}: give FederatedBatchNormAggregator(wrapped=...)"
            )
        if fedavg.get("exclude_vars"):
            raise ValueError("exclude_vars is for NVFlare's own average; give `convert` skip= instead")
        if fedavg.get("aggregation_weights"):
            raise ValueError(
                "give aggregation_weights to FederatedBatchNormAggregator, which does the average"
            )
        if clients_per_round is not None and clients_per_round < 1:
            raise ValueError(f"clients_per_round is {clients_per_round}; it must be at least 1, or None")
        if round_timeout < 0:
            raise ValueError(f"round_timeout is {round_timeout}; it must be seconds, or 0 to wait for all")
        _check_can_be_written(aggregator)
        self.clients_per_round, self.round_timeout = clients_per_round, round_timeout
        super().__init__(aggregator=aggregator.given(fedavg.get("model")), **fedavg)
        self._job.set_app_packages(["fedbatchnorm"])  # which is installed, and not part of the job's own code

    def _create_controller(self, persistor_id: str, model_params: Any, model_aggregator: Any) -> FedAvg:
        return FederatedBatchNormFedAvg(
            num_clients=self.clients_per_round or 0,
            num_rounds=self.num_rounds,
            persistor_id=persistor_id,
            model=model_params,
            save_filename=self.save_filename,
            aggregator=model_aggregator,
            stop_cond=self.stop_cond,
            patience=self.patience,
            memory_gc_rounds=self.server_memory_gc_rounds,
            enable_tensor_disk_offload=self.enable_tensor_disk_offload,
            ignore_result_error=True,
            round_timeout=self.round_timeout,
        )


def _check_can_be_written(aggregator: FederatedBatchNormAggregator) -> None:
    """Refuse functions: NVFlare writes objects into a job by their class and arguments."""
    rule = aggregator.settings.aggregator
    for name, value in (
        ("weight", aggregator.weight),
        ("on_event", aggregator.settings.on_event),
        ("aggregator", rule),
        ("the rule of aggregator", getattr(rule, "rule", None)),
    ):
        if inspect.isroutine(value):
            raise ValueError(
                f"{name} is a function, which cannot be written into a job: give an instance of a class "
                "of your own that has __call__, and keeps the arguments of its constructor as attributes"
            )
