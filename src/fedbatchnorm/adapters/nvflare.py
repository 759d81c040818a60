"""Federated BatchNorm on NVFlare: an aggregator for FedAvg, and helpers for the client.

NVFlare averages running variances, which loses the variance between clients. This aggregator averages only
the parameters, or lets another aggregator do it, and merges the statistics. The `Session` decides which
replies are used.

    recipe = FederatedBatchNormRecipe(model=Net(), min_clients=2, num_rounds=20, train_script="client.py")
    recipe.execute(SimEnv(num_clients=2))                     # job.py; from adapters.nvflare_recipe
    load(model, received); ...; flare.send(reply(model, received, metrics, steps=n))              # client.py
    flare.send(calibrate(model, received, batches))           # client.py, where wants_calibration(received)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from .divergence import DivergedError, NothingTrainedError
from .events import Event
from .extras import needs
from .nvflare_client import STEPS, beside, calibrate, load, reply, wants_calibration
from .nvflare_records import Parameters, Weighting, converted, for_wrapped, in_kind, mean_metrics, reply_of
from .replies import Reply
from .session import OfSession, Request, Session, Taken
from .settings import Options, Settings, check_population

try:
    from nvflare.apis.dxo import from_shareable
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.abstract.model import ModelLearnableKey
    from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.app_event_type import AppEventType
    from nvflare.fuel.utils.log_utils import get_obj_logger
except ImportError as error:
    raise needs("NVFlare", "nvflare", error) from error

__all__ = [
    "DivergedError",
    "Event",
    "FederatedBatchNormAggregator",
    "NothingTrainedError",
    "calibrate",
    "load",
    "reply",
    "wants_calibration",
]


class FederatedBatchNormAggregator(OfSession, ModelAggregator):
    """Any weighting or aggregator for the parameters, and federated BatchNorm for the statistics.

    For NVFlare's FedAvg: `FederatedBatchNormRecipe(aggregator=...)`, or any recipe that takes an aggregator.
    Replies that are malformed, of another round, repeated, or fail a verdict are left out of both, with the
    client's name and the reason in the log.
    """

    def __init__(
        self,
        *,
        wrapped: ModelAggregator | None = None,
        weight: str | Callable[[FLModel], float] = STEPS,
        aggregation_weights: Mapping[str, float] | None = None,
        population: int | Literal["connected"] | None = "connected",
        settings: Settings | None = None,
        **options: Unpack[Options],
    ):
        """Make an aggregator.

        Args:
            wrapped: what aggregates the parameters; their weighted mean if not given. It gets whole
                parameters (FULL), one reply after another in the order of the clients, without statistics.
            weight: the weight of a reply: the name of a number in its meta or its metrics (by default
                NVFlare's NUM_STEPS_CURRENT_ROUND), or a function of the reply.
            aggregation_weights: factors of the weight by client, as in NVFlare; 1 for those not named.
            population: how many clients there are, if a round has only some of them: the spread between them
                is corrected to that between all. "connected" is the number of connected clients; None is no
                correction.
            settings: in place of options.
            options: model, aggregator, quorum, checkpoint, ...: see `adapters.settings.Options`. A model may
                also be given as in NVFlare, {"class_path": ..., "args": ...}, and need not be converted.
        """
        super().__init__()
        if settings is not None and options:
            raise ValueError(f"give settings or {', '.join(options)}, not both")
        check_population(population, "connected")
        if wrapped is not None and not isinstance(wrapped, ModelAggregator):
            raise TypeError(f"wrapped is a {type(wrapped).__name__}; it must be a ModelAggregator, or None")
        # What the constructor takes is what NVFlare writes into the job, and builds from it on the server.
        self.wrapped, self.weight, self.population = wrapped, weight, population
        self.aggregation_weights = None if aggregation_weights is None else dict(aggregation_weights)
        self.settings = Settings(**options) if settings is None else settings
        if self.settings.checkpoint is not None:
            self.settings = replace(self.settings, checkpoint=str(self.settings.checkpoint))
        self._make_session()

    def _make_session(self) -> None:
        self._weighting = Weighting(self.weight, self.aggregation_weights)
        self.session = Session(
            remembers=self.wrapped,
            weight=self._weighting.name,
            log=get_obj_logger(self),
            to_calibrate="Clients answer it with `calibrate` where `wants_calibration` says so",
            **(vars(self.settings) | {"model": converted(self.settings.model)}),
        )
        self._request: Request | None = None
        self._replies: list[Reply] = []
        self._models: dict[Hashable, FLModel] = {}
        self._asked: list[str] | None = None
        self._fetched: list[str] = []
        self._started = self._calibrates = self._open = self._is_last = self._tensors = False
        self._number = 1

    def given(self, model: nn.Module | Mapping[str, Any] | None) -> FederatedBatchNormAggregator:
        """This aggregator, with that model unless it has one."""
        if self.settings.model is None and model is not None:
            self.settings = replace(self.settings, model=model)  # pyrefly: ignore
            self._make_session()
        return self

    def start(self, params: Mapping[str, Any], rounds: int | None = None) -> int:
        """Begin a run with this model, or continue from the checkpoint; returns how many exchanges are left.

        An exchange is a round of training, or the calibration before the first. NVFlare's controllers need
        not call it: the first request does.

        Args:
            params: the whole model, the state_dict, as arrays or tensors.
            rounds: of training, in the whole run.
        """
        self._tensors = any(isinstance(value, Tensor) for value in params.values())
        self.session.start(params, rounds)
        self._calibrates = self.session.wants_calibration()
        self._started, self._open = True, False
        self._number = 0 if self._calibrates else self.session.done + 1
        left = max(0, (rounds or 0) - self.session.done)
        return left + self._calibrates if left else 0

    def request(self, asked: Collection[str] | None = None, population: int | None = None) -> FLModel:
        """What is sent to clients in this round: the whole model, with settings in its meta.

        Args:
            asked: the clients that it is sent to.
            population: how many clients those represent, if more.
        """
        if asked is not None:
            self._asked = list(asked)
        if not self._open:
            self._open = True
            session = self.session
            self._request = session.request() if self._calibrates else session.begin(self._number)
        self.session.ask(self._asked, population)
        assert self._request is not None
        meta = beside(self._request.settings, self._calibrates)
        return FLModel(params=self.params(), current_round=self._number, meta=meta)

    @property
    def number(self) -> int:
        """Of the round that is next, in the whole run: 0 is the calibration."""
        return self._number

    def params(self) -> dict[str, Any]:
        """The current model, as arrays or tensors, whichever it was given as."""
        return in_kind(self.session.arrays, self._tensors)

    def ask(self, clients: Collection[str]) -> None:
        """Say which clients a round is sent to; otherwise those that fetch it count."""
        self._asked = list(clients)

    def fail(self, client: str, why: str) -> None:
        """Say that a client failed in this round."""
        self._replies.append(Reply(client, failure=why))

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """When the model is sent: add the training settings, or the request to calibrate, to its meta."""
        super().handle_event(event_type, fl_ctx)
        if event_type != AppEventType.BEFORE_TRAIN_TASK:
            return
        try:
            self._add_to(fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE), fl_ctx)
        except Exception as error:  # which NVFlare would only log, and send the model as it is
            self.system_panic(f"federated BatchNorm cannot begin the round: {error}", fl_ctx)

    def reset_stats(self) -> None:
        """Forget replies: a round begins."""
        self._replies, self._models, self._fetched = [], {}, []
        self._open, self._asked = False, None

    def accept_model(self, model: FLModel) -> None:
        """Take a client's reply; it is checked when the round ends."""
        self._begin_if_not_begun()
        assert self._request is not None
        reply = reply_of(model, self._weighting, self._request)
        self._replies.append(reply)
        self._models[reply.client] = model

    def aggregate_model(self) -> FLModel:
        """Merge the statistics and aggregate the parameters of the same replies: the whole model."""
        self._begin_if_not_begun()
        number, metrics = self._number, None
        asked = self._fetched or None if self._asked is None else self._asked
        population = self._population_of(asked)
        if self._calibrates:
            self.session.calibrated(self._replies, asked, population)
            self._calibrates = False
        else:
            self.session.ask(asked, population)
            taken = self.session.take(number, self._replies)
            self.session.finish(number, self._aggregated(taken) if taken.used else None)
            metrics = mean_metrics(taken, self._weighting.name)
            if self._is_last:
                self.session.end(number)
        self._number += 1
        self.reset_stats()
        return FLModel(ParamsType.FULL, self.params(), metrics=metrics)

    def _begin_if_not_begun(self) -> None:
        if not self._started:
            learnable = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if self.fl_ctx else None
            if not learnable:
                raise RuntimeError(
                    "the aggregator knows no model: call start(model.state_dict()) first where no controller "
                    "of NVFlare's does the rounds"
                )
            self.start(learnable[ModelLearnableKey.WEIGHTS])
        if not self._open:
            self.request()

    def _add_to(self, shareable: Any, fl_ctx: FLContext) -> None:
        self.fl_ctx = self.fl_ctx or fl_ctx
        is_new = not self._open
        self._begin_if_not_begun()
        peer = fl_ctx.get_peer_context()
        if peer is not None and peer.get_identity_name() not in self._fetched:  # one may fetch it again
            self._fetched.append(peer.get_identity_name())
        now, first, rounds = (
            shareable.get_header(name) or 0
            for name in (AppConstants.CURRENT_ROUND, AppConstants.START_ROUND, AppConstants.NUM_ROUNDS)
        )
        self._is_last = now + 1 == first + rounds
        dxo = from_shareable(shareable)
        assert self._request is not None
        dxo.meta = {**dxo.meta, **beside(self._request.settings, self._calibrates)}
        if is_new:  # all clients of the round get what the first one does
            dxo.data = self.params()
        dxo.update_shareable(shareable)

    def _aggregated(self, taken: Taken) -> Mapping[str, Any] | None:
        """The parameters, by the wrapped aggregator if there is one; None if it returns none."""
        if self.wrapped is None:
            return self.session.average(taken)
        self.wrapped.fl_ctx = self.fl_ctx
        self.wrapped.reset_stats()
        for client in taken.used or ():
            model, parameters = self._models[client], self.session.parameters
            metrics = {k: v for k, v in taken.metrics[client].items() if k != self._weighting.name}
            weight = taken.weights[client]
            self.wrapped.accept_model(for_wrapped(model, parameters, metrics, weight, self._tensors))
        found = self.wrapped.aggregate_model()
        if found is None or not found.params:
            self.session.refused(self._number)
            return None
        whole = Parameters(found, self.session.parameters)
        return {name: whole[name] for name in self.session.parameters}

    def _population_of(self, asked: Collection[str] | None) -> int | None:
        """How many clients those of a round represent; those that drop out do not count."""
        if not isinstance(self.population, str):
            return self.population
        engine = self.fl_ctx.get_engine() if self.fl_ctx else None
        connected = len(engine.get_clients()) if engine else 0
        return connected if asked and len(asked) < connected else None
