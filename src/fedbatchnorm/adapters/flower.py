"""Federated BatchNorm on Flower: a wrapper for any strategy, and helpers for the client.

The server sends parameters and statistics apart, so that the wrapped strategy sees parameters alone; clients
answer with parameters and with what their layers have seen; the wrapper merges that with `merge`.

    strategy = FederatedBatchNormStrategy(FedAvg(), model=model)      # server_app.py
    load(model, message); ...; return reply(model, message, metrics)  # client_app.py, @app.train()
    return calibrate(model, message, batches)                         # client_app.py, @app.train("calibrate")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..aggregation.statistics import Aggregator, MergeResult
from ..aggregation.verdicts import Verdict, judge
from ..norm.exchange import statistics
from ..norm.gradient import Limit
from ..norm.moments import Running
from .arrays import Names, Parts, guessed_names, records, split, statistic_names
from .calibration import calibrated, is_fresh, requests
from .checkpoint import arrays_of, plain_state, read_checkpoint, restore, snapshot, write_checkpoint
from .divergence import DivergedError, State, Watch, alarm, expected_sizes
from .flower_client import calibrate, load, reply, statistics_mod
from .replies import MOST_EXAMPLES, STATISTICS, Wanted, attribute, examine, log_left_out, sorted_out
from .rounds import finite, merged, renumber
from .settings import check_choices, check_settings
from .share import GRADIENT, Share

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

__all__ = [
    "STATISTICS",
    "DivergedError",
    "FederatedBatchNormStrategy",
    "calibrate",
    "load",
    "reply",
    "statistics_mod",
]
log = getLogger("flwr").log
_RESTORED = 3  # how often a run goes back before it is stopped all the same


class FederatedBatchNormStrategy(Strategy):
    """Any Flower strategy for the parameters, and federated BatchNorm for the statistics.

    Replies that are malformed, of another round, repeated, or fail a verdict are left out of both, with the
    node's id and the reason in the log, before the wrapped strategy sees them. What the wrapped strategy
    drops by itself (Krum, say) stays in the statistics.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        model: nn.Module | None = None,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
        aggregator: Aggregator | None = None,
        quorum: int = 1,
        max_count: float | Mapping[str, float] | None = None,
        max_examples: float = MOST_EXAMPLES,
        nonnegative: Collection[str] = (),
        steps: int | None = None,
        population: int | Literal["grid"] | None = "grid",
        calibrate: bool = True,
        gradient: float | Literal["auto"] | None = "auto",
        limit: Limit = "auto",
        on_divergence: Literal["stop", "restore", "ignore"] = "stop",
        checkpoint: Path | str | None = None,
    ):
        """Wrap a strategy.

        Args:
            strategy: what aggregates the parameters: FedAvg, FedAdam, Krum, ...
            model: the converted model: which arrays are statistics, and its layers' momentum and eps. Without
                it, what is called running_mean, running_var and num_batches_tracked is taken for statistics.
            momentum: of all layers, where no model is given.
            eps: of all layers, where no model is given.
            aggregator: None is exact; a rule such as `defense("nnm+median", f=2)` withstands liars.
            quorum: with fewer usable replies the round changes nothing.
            max_count: the most values per channel that an honest client can see, a number or by layer.
            max_examples: the most that an honest client's weight in training, `num-examples`, can be.
            nonnegative: layers that follow a ReLU: a negative mean there is a lie.
            steps: local steps a round; what clients report if not given.
            population: how many clients there are, where a round has only some of them: the spread between
                those few is corrected to that between all. "grid" takes the nodes that are connected, where
                the strategy asks fewer than all of them; None corrects nothing.
            calibrate: start from the data: a round 0 in which clients measure and nothing is learned. Only
                with fresh statistics; clients without `@app.train("calibrate")` are passed over.
            gradient: the share of BatchNorm's gradient that clients take, sent with every request to train.
                "auto" starts at 0.8 and follows how far the statistics drift (`next_gradient`), and layers
                in which clients are alike take more (`set_gradient`); None sends neither it nor the limit,
                and clients train with what they gave `convert`.
            limit: how wide and how far away a normalized batch may come out, as for `convert`: "auto" goes
                with the share, None leaves it to the clients.
            on_divergence: when most clients' replies are not finite, or losses or activations explode, it is
                the model that diverged. "stop" raises `DivergedError`, with the last good state in it and in
                the checkpoint; "restore" continues from that state, with the largest share of the gradient
                that "auto" can take, and stops at the fourth time; "ignore" says so in the log.
            checkpoint: a file to save to after every round, and to continue from if it is there.
        """
        check_settings(strategy, (momentum, eps), steps, quorum, max_examples)
        check_choices(population, on_divergence)
        self.strategy = strategy
        self._usual = (momentum, eps)
        self._names: Names | None = None
        self._settings: dict[str, Any] = {}
        if model is not None:
            self._names = statistic_names(model)
            shared = statistics(model)
            self._settings = {layer: (r.momentum, r.eps) for layer, r in shared.items()}
            judge(shared, {}, max_count, nonnegative)  # an error if these do not go with the model
        self._checks = {"max_count": max_count, "nonnegative": nonnegative}
        self._rules = {"aggregator": aggregator, "quorum": quorum}
        self._max_examples, self._steps = max_examples, steps
        self._population, self._calibrate, self._on_divergence = population, calibrate, on_divergence
        self._share = Share(gradient, limit)
        self._of: int | None = None
        self._watch: Watch | None = None
        self._restored, self._diverged = 0, ""
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._first = plain_state(strategy)
        self._done = 0
        self._parts = Parts([], {}, {}, {})
        self.shared: dict[str, Running] = {}
        self.result: MergeResult | None = None
        self.left_out: dict[Hashable, Verdict] = {}
        """The statistics as they are; of the last round the merge's outcome, and who was left out and why."""

    @property
    def gradient(self) -> float | None:
        """The share of BatchNorm's gradient that clients take in the next round; None if it is theirs."""
        return self._share.gradient

    def summary(self) -> None:
        """Log what the strategies are set to."""
        log(INFO, "\t├──> Federated BatchNorm: %s", self._rules["aggregator"] or "exact merge")
        log(INFO, "\t│\t├── Quorum: %s", self._rules["quorum"])
        log(INFO, "\t│\t└── Share of BatchNorm's gradient: %s", self._share)
        self.strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds, or those that a checkpoint leaves; see `flwr.serverapp.strategy.Strategy.start`."""
        self._done = 0
        self._share.start()
        saved = None
        if self._checkpoint is not None:
            saved = read_checkpoint(self._checkpoint, self.strategy, initial_arrays)
        if saved is not None:
            self._done = saved.done
            self._share.start(saved.gradient, saved.between)
            initial_arrays = ArrayRecord({name: Array(value) for name, value in saved.arrays.items()})
            log(INFO, "continuing after round %s, from %s", self._done, self._checkpoint)
        elif self._calibrate:
            initial_arrays = self._calibrated(grid, initial_arrays, train_config, timeout)
        done, self._watch, self._restored = self._done, None, 0
        result = super().start(
            grid,
            initial_arrays,
            max(0, num_rounds - done),
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and (lambda step, arrays: evaluate_fn(step + done, arrays)),
        )
        renumber(result, done)
        if not result.arrays:  # no round has changed anything
            result.arrays = initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with statistics and the gradient's share in records apart."""
        messages = self._configure(self.strategy.configure_train, server_round, arrays, config, grid)
        record = self._share.record()
        for message in messages:
            if record is not None:
                message.content[GRADIENT] = record
        self._of = self._population_of(len(messages), grid)
        if self._watch is None:
            before = server_round - 1 + self._done
            known = {} if is_fresh(self.shared) else expected_sizes(self.shared)
            self._watch = Watch(self._state(before, arrays), known)
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with the statistics in a record of their own."""
        return self._configure(self.strategy.configure_evaluate, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the statistics, and let the wrapped strategy aggregate the parameters of the same replies."""
        server_round += self._done
        answers, failures = sorted_out(server_round, replies)
        used = self._used(server_round, answers)
        if self._diverged:
            return self._back(server_round), None
        arrays, metrics = None, None
        if used is not None:
            before = snapshot(self.strategy)
            arrays, metrics = self.strategy.aggregate_train(server_round, failures + used)
            if arrays is None:
                log(WARNING, "round %s: the strategy returned no parameters: nothing changes", server_round)
            elif not (
                finite(a.numpy() for a in arrays.values()) and finite(arrays_of(self.strategy).values())
            ):
                log(WARNING, "round %s: it came out not finite: nothing changes", server_round)
                restore(self.strategy, before)
                arrays = None
            elif self.result is not None:
                self._share.follow(self.shared, self.result)
                self.shared = self.result.statistics
        whole = self._parts.join(arrays or self._parts.parameters, self.shared)
        self._save(whole, server_round)
        if self._watch is not None:
            self._watch.after(self._state(server_round, whole))
        return (None if arrays is None else whole), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does, of the replies whose metrics can be used."""
        server_round += self._done
        answers, failures = sorted_out(server_round, replies)
        found = examine(answers, Wanted(None, self._weight(), statistics=False))
        log_left_out(server_round, found.left_out)
        return self.strategy.aggregate_evaluate(server_round, failures + list(found.replies.values()))

    def initialize_parameters(self, client_manager: object) -> None:
        """Called by workflows of Flower's earlier API, which this strategy is not of: always an error."""
        raise TypeError(
            "FederatedBatchNormStrategy does not go through workflows such as SecAggPlusWorkflow: with "
            "secure aggregation use fedbatchnorm.adapters.secagg.SecAggBatchNorm, which takes no robust rule"
        )

    def _configure(
        self, configure: Callable[..., Iterable[Message]], server_round: int, arrays: ArrayRecord, *rest: Any
    ) -> list[Message]:
        self._parts, self.shared = self._split(arrays)
        sent, record = records(self._parts, self.shared)
        messages = list(configure(server_round + self._done, sent, *rest))
        for message in messages:
            if STATISTICS not in message.content:  # messages may share their content
                message.content[STATISTICS] = record
        return messages

    def _weight(self) -> str:
        return attribute(self.strategy, "weighted_by_key") or "num-examples"

    def _used(self, server_round: int, answers: list[Message]) -> list[Message] | None:
        """The replies that both sides use, without their statistics; None if the round changes nothing."""
        wanted = Wanted(self._parts.parameters, self._weight(), self._max_examples, bool(self.shared))
        found = examine(answers, wanted)
        verdicts, seen_nothing = dict(found.left_out), set[Hashable]()
        self.result = None
        if self.shared and found.updates:
            steps = found.steps if self._steps is None else self._steps
            rules = {**self._checks, **self._rules, "population": self._of, "steps": steps}
            self.result, bad, seen_nothing = merged(server_round, self.shared, found, rules)
            verdicts |= bad
        self.left_out = verdicts
        log_left_out(server_round, verdicts)
        good = [node for node in found.replies if node not in verdicts]
        self._diverged = ""
        if self._watch is not None:
            wrong = alarm(self._watch, server_round, self.shared, found, good, verdicts)
            self._diverged = "" if self._on_divergence == "ignore" else wrong
        # Layers that are frozen see nothing, and parameters are learned all the same.
        stays = self.result is not None and not self.result.updated and not seen_nothing.issuperset(good)
        if len(good) < self._rules["quorum"] or stays:
            log(WARNING, "round %s: %s usable replies: nothing changes", server_round, len(good))
            return None
        return [found.replies[node] for node in good]

    def _back(self, server_round: int) -> ArrayRecord:
        """The last good state, to continue from, or to stop with."""
        assert self._watch is not None
        began, state = self._watch.began or server_round, self._watch.back()
        # A budget of privacy that was spent stays spent, whatever became of the model.
        restore(self.strategy, {k: v for k, v in state.strategy.items() if not k.endswith("/state/")})
        self._restored += 1
        if self._on_divergence == "restore" and self._restored <= _RESTORED:
            log(WARNING, "round %s: back to the state after round %s", server_round, state.round)
            self._share.hold()  # else it would diverge again
            self._watch.after(state._replace(gradient=self.gradient))
            self._save(state.arrays, server_round)
            return state.arrays
        self._share.start(state.gradient)  # whoever continues changes something else first
        self._save(state.arrays, state.round)
        raise DivergedError(self._diverged, began, state, self._checkpoint)

    def _save(self, arrays: ArrayRecord, done: int) -> None:
        if self._checkpoint is not None:
            write_checkpoint(
                self._checkpoint, self.strategy, arrays, done, self._first, *self._share.to_save()
            )

    def _state(self, server_round: int, arrays: ArrayRecord) -> State:
        return State(server_round, arrays, snapshot(self.strategy), self.gradient)

    def _calibrated(
        self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord | None, timeout: float
    ) -> ArrayRecord:
        """Round 0: the arrays with statistics that the clients have measured, if they can."""
        parts, shared = self._split(arrays)
        if not shared or not is_fresh(shared):
            log(INFO, "no calibration: there are no statistics, or not those of new layers")
            return arrays
        messages = requests(self.strategy, *records(parts, shared), config, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        of = self._population_of(len(messages), grid)
        rules: dict[str, Any] = {**self._checks, **self._rules, "population": of}
        found, self.left_out = calibrated(shared, replies, rules)
        return arrays if found is None else parts.join(parts.parameters, found)

    def _population_of(self, asked: int, grid: Grid) -> int | None:
        """How many clients those of a round stand for; who drops out stands for nobody."""
        if not isinstance(self._population, str):
            return self._population
        nodes = len(list(grid.get_node_ids()))
        return nodes if asked < nodes else None

    def _split(self, arrays: ArrayRecord) -> tuple[Parts, dict[str, Running]]:
        names = guessed_names(arrays) if self._names is None else self._names
        return split(arrays, names, self._settings, self._usual)
