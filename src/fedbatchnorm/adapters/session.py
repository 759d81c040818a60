"""The server's side of federated BatchNorm, for any engine.

An engine translates: it sends the content of a `Request`, returns each reply as a `Reply`, aggregates the
parameters of the clients that `take` names (or lets `average` do it), and passes the result to `finish`.

    session = Session(model=convert(Net()))
    arrays = session.start(Net().state_dict(), rounds)
    for number in range(session.done + 1, rounds + 1):
        request = session.begin(number, asked=clients)
        taken = session.take(number, replies_to(request))
        arrays = session.finish(number, session.average(taken) if taken.used else None) or arrays
    session.end(rounds)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from logging import WARNING, Logger, getLogger
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from ..aggregation.statistics import MergeResult
from ..aggregation.verdicts import Verdict, judge
from ..norm.exchange import statistics
from ..norm.moments import Running
from .arrays import Names, Parts, as_numpy, guessed_names, is_finite, split, statistic_names
from .checkpoint import read_checkpoint, write_checkpoint
from .divergence import DivergedError, NothingTrainedError, State, Watch, alarm, expected_sizes
from .events import Teller
from .memory import arrays_of, plain_state, restore, snapshot
from .replies import NO_STATISTICS, Examined, Reply, Wanted, examine, finite_metrics
from .rounds import calibrated, is_fresh, merged
from .settings import Options, Settings
from .share import Share

_RESTORED = 3  # how often a run goes back before it is stopped all the same
Arrays = dict[str, np.ndarray]


class Request(NamedTuple):
    """What is sent to clients: parameters, the rest of the state_dict, and the settings for training."""

    parameters: Arrays
    statistics: Arrays
    settings: dict[str, float | str | list[str] | list[float]]


class Taken(NamedTuple):
    """The clients whose parameters a round uses, in order (None if it changes nothing), their metrics and
    weights.
    """

    used: list[Hashable] | None
    metrics: dict[Hashable, dict[str, Any]]
    weights: dict[Hashable, float]


class Session:
    """The state and the decisions of a server of federated BatchNorm in a run.

    Attributes:
        done: the rounds that are finished, of the whole run.
        arrays: the current model.
        shared: its statistics.
        result: the result of the last round's merge, None if there was none.
        left_out: who was left out of the last round, and why.
    """

    def __init__(
        self,
        *,
        remembers: object = None,
        weight: Callable[[], str] | str = "num-examples",
        log: Logger | None = None,
        called: str = "client",
        to_calibrate: str = "",
        **options: Unpack[Options],
    ):
        """Make a session.

        Args:
            remembers: what aggregates the parameters, if it has a state, which is saved in checkpoints and
                restored.
            weight: the metric that is a reply's weight, or a function that returns its name.
            log: receives the lines.
            called: the engine's word for a client.
            to_calibrate: what clients need for round 0, for the log.
            options: see `Options`.
        """
        self.settings = given = Settings(**options)
        self._weight = weight if callable(weight) else lambda: weight
        self.tell = Teller(log or getLogger("fedbatchnorm"), given.on_event, called, to_calibrate)
        self._names: Names | None = None
        self._layers: dict[str, Any] = {}
        if given.model is not None:
            self._names = statistic_names(given.model)
            shared = statistics(given.model)
            self._layers = {layer: (r.momentum, r.eps) for layer, r in shared.items()}
            judge(
                shared, {}, given.max_count, given.nonnegative
            )  # an error if these do not go with the model
        self._rules: dict[str, Any] = {
            name: getattr(given, name) for name in ("max_count", "nonnegative", "aggregator", "quorum")
        }
        self.share = Share(given.gradient, given.limit)
        self._remembers = remembers
        self._first = plain_state(remembers)
        self._checkpoint = None if given.checkpoint is None else Path(given.checkpoint)
        self.arrays: Arrays = {}
        self._parts = Parts([], {}, {}, {})
        self.shared: dict[str, Running] = {}
        self.result: MergeResult | None = None
        self.left_out: dict[Hashable, Verdict] = {}
        self._asked: list[Hashable] | None = None
        self._population: int | None = None
        self._found = Examined({}, {}, {}, {})
        self._before: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.done = self._began_at = self._restored = 0
        self._watch: Watch | None = None
        self._resumed = self._tried = self._changed = self._went_back = False
        self.tell.first = ""
        self.share.start()

    def start(self, arrays: Mapping[str, Any], rounds: int | None = None) -> Arrays:
        """Begin a run with this model, or continue from the checkpoint; returns the whole model.

        Args:
            arrays: the whole model, the state_dict.
            rounds: how many there are to be, for the log.
        """
        self._reset()
        arrays = {name: as_numpy(value, name) for name, value in arrays.items()}
        saved = None
        if self._checkpoint is not None:
            saved = read_checkpoint(self._checkpoint, self._remembers, arrays)
        if saved is not None:
            self.done, arrays, self._resumed = saved.done, saved.arrays, True
            self.share.start(saved.gradient, saved.between)
            tell_resumed(self.tell, saved.done, rounds, self._checkpoint)
        self._began_at = self.done
        self._set(arrays)
        return self.arrays

    @property
    def gradient(self) -> float | None:
        """The share of BatchNorm's gradient for the next round; None if clients decide themselves."""
        return self.share.gradient

    @property
    def parameters(self) -> Arrays:
        """The part of the model that is averaged."""
        return self._parts.parameters

    def wants_calibration(self) -> bool:
        """Whether there will be a round 0."""
        if self._resumed or not self.settings.calibrate:
            return False
        if not self.shared or not is_fresh(self.shared):
            self.tell(0, "calibrated", "no calibration: there are no statistics, or not those of new layers")
            return False
        return True

    def request(self, arrays: Mapping[str, np.ndarray] | None = None) -> Request:
        """What to send, for training, evaluation or calibration.

        Args:
            arrays: the whole model, if it is not as the session has it.
        """
        if arrays is not None:
            self._set(dict(arrays))
        return Request(
            dict(self._parts.parameters),
            self._parts.statistics(self.shared) | self._parts.fixed,
            self.share.settings(),
        )

    def calibrated(
        self,
        replies: Iterable[Reply],
        asked: Collection[Hashable] | None = None,
        population: int | None = None,
    ) -> Arrays:
        """End round 0: returns the whole model, with the statistics that the clients have measured."""
        replies = in_order(replies)
        self.tell.silent(0, asked or (), [reply.client for reply in replies])
        rules = {**self._rules, "population": population}
        of = len(replies if asked is None else asked)
        found, self.left_out = calibrated(self.tell, self.shared, replies, of, rules)
        if found is not None:
            self._set(self._parts.join(self._parts.parameters, found))
        return self.arrays

    def begin(
        self,
        number: int,
        arrays: Mapping[str, np.ndarray] | None = None,
        asked: Collection[Hashable] | None = None,
        population: int | None = None,
    ) -> Request:
        """Begin a round of training; returns what to send.

        Args:
            number: of the round, in the whole run.
            arrays: the whole model, if it is not as the session has it.
            asked: the clients that it is sent to; `ask` can say so later.
            population: how many clients those represent, if more.
        """
        request = self.request(arrays)
        self.ask(asked, population)
        if self._watch is None:
            known = {} if is_fresh(self.shared) else expected_sizes(self.shared)
            self._watch = Watch(self._state(number - 1, self.arrays), known)
        return request

    def ask(self, asked: Collection[Hashable] | None, population: int | None = None) -> None:
        """Say which clients are asked in this round, and how many they represent."""
        self._asked = None if asked is None else list(asked)
        self._population = population

    def take(self, number: int, replies: Iterable[Reply]) -> Taken:
        """Judge a round's replies and merge their statistics; `DivergedError` if the model diverged."""
        answers = self._heard(number, replies)
        self._tried = self._tried or bool(self._asked or answers)
        given = self.settings
        limits = given.max_examples, bool(self.shared), given.max_count is not None
        found = examine(answers, Wanted(self._parts.parameters, self._weight(), *limits))
        verdicts, seen_nothing = dict(found.left_out), set[Hashable]()
        self._found, self.result = found, None
        if self.shared and found.updates:
            steps = found.steps if given.steps is None else given.steps
            rules = {**self._rules, "population": self._population, "steps": steps}
            self.result, bad, seen_nothing = merged(self.tell, number, self.shared, found, rules)
            verdicts |= bad
        self.left_out = verdicts
        self.tell.left_out(number, verdicts)
        good = [client for client in found.replies if client not in verdicts]
        # Layers that are frozen see nothing, and parameters are learned all the same.
        stays = self.result is not None and not self.result.updated and not seen_nothing.issuperset(good)
        enough = bool(good) and len(good) >= given.quorum and not stays
        self._tell_round(number, len(answers), good, enough)
        if self._watch is not None:
            wrong = alarm(self._watch, self.tell, number, self.shared, found, good, verdicts)
            if wrong and given.on_divergence != "ignore":
                self._back(number, wrong)
                return Taken(None, {}, {})
        if not enough:
            self._refuse_unconverted(answers, verdicts)
            return Taken(None, {}, {})
        self._before = snapshot(self._remembers)
        return self._taken(number, {client: found.replies[client] for client in good})

    def average(self, taken: Taken) -> Arrays:
        """The weighted mean of the used clients' parameters, for engines that do not average."""
        assert taken.used, "the round uses nobody: pass None to finish"
        total = sum(taken.weights.values())
        mean: Arrays = {}
        for client in taken.used:
            share = taken.weights[client] / total
            parameters = self._found.replies[client].parameters or {}
            for name in self._parts.parameters:
                value = as_numpy(parameters[name], name) * np.float64(share)
                mean[name] = mean[name] + value if name in mean else value
        return mean

    def finish(self, number: int, parameters: Mapping[str, Any] | None) -> Arrays | None:
        """End a round with the aggregated parameters: the whole model, saved; None if nothing has changed.

        Args:
            number: of the round.
            parameters: the aggregated parameters of the clients that `take` named, None if it named none.
        """
        if self._went_back:
            self._went_back = False
            return self.arrays
        found = None
        if parameters is not None:
            found = {name: as_numpy(value, name) for name, value in parameters.items()}
            state = arrays_of(self._remembers).values()
            if not all(map(is_finite, found.values())) or not all(map(is_finite, state)):
                text = "the aggregated parameters are not finite: nothing changes"
                self.tell(number, "nothing_changed", text, WARNING)
                restore(self._remembers, self._before)
                found = None
            elif self.result is not None:
                self.share.follow(self.shared, self.result)
                self.shared = self.result.statistics
        whole = self._parts.join(found or self._parts.parameters, self.shared)
        if found is not None:
            self._changed = True
            self._set(whole)
        self._save(whole, number)
        if self._watch is not None:
            self._watch.after(self._state(number, whole))
        return None if found is None else whole

    def refused(self, number: int) -> None:
        """Say that the wrapped strategy returned no parameters."""
        self.tell(number, "nothing_changed", "the strategy returned no parameters: nothing changes", WARNING)

    def evaluated(self, number: int, replies: Iterable[Reply]) -> Taken:
        """Judge the metrics of an evaluation."""
        answers = self._heard(number, replies)
        found = examine(answers, Wanted(None, self._weight(), statistics=False))
        self.tell.left_out(number, found.left_out)
        return self._taken(number, found.replies)

    def end(self, number: int) -> None:
        """End a run; an error if it had rounds and none of them changed anything."""
        if number > self._began_at and self._tried and not self._changed:
            self._save(self.arrays, self._began_at)  # who starts again starts there
            why = f" The first that was wrong: {self.tell.first}" if self.tell.first else ""
            if "Missing key(s) in state_dict" in why:
                why += " Statistics travel separately from the parameters: let clients call load"
            raise NothingTrainedError(
                f"nothing was trained: in {number - self._began_at} rounds no model came back.{why}"
            )

    def _set(self, arrays: Arrays) -> None:
        names = guessed_names(arrays) if self._names is None else self._names
        usual = self.settings.momentum, self.settings.eps
        self._parts, self.shared = split(arrays, names, self._layers, usual)
        self.arrays = arrays

    def _heard(self, number: int, replies: Iterable[Reply]) -> list[Reply]:
        """The usable replies of a round, in the order of the clients; failures are logged."""
        replies = in_order(replies)
        self.tell.failed(number, {reply.client: reply.failure for reply in replies if reply.failure})
        self.tell.silent(number, self._asked or (), [reply.client for reply in replies])
        return [reply for reply in replies if not reply.failure]

    def _tell_round(self, number: int, answered: int, good: list[Hashable], enough: bool) -> None:
        asked = answered if self._asked is None else len(self._asked)
        values: dict[str, float] = {
            "asked": asked,
            "answered": answered,
            "used": len(good),
            "left_out": len(self.left_out),
        }
        text = f"{asked} asked, {answered} answered, {len(good)} used"
        if self.gradient is not None:
            values["gradient"] = self.gradient
        if not enough:
            least = f", {self.settings.quorum} are needed" if self.settings.quorum > len(good) > 0 else ""
            self.tell(number, "nothing_changed", f"{text}{least}: nothing changes", WARNING, values=values)
        else:
            self.tell(number, "round", text, values=values)

    def _taken(self, number: int, replies: Mapping[Hashable, Reply]) -> Taken:
        weight = self._weight()
        metrics, odd = finite_metrics(replies, weight)
        for name, clients in odd.items():
            who = ", ".join(map(str, clients))
            text = f"metric {name} is not finite at {self.tell.called} {who}: taken as the others' mean"
            self.tell(number, "metric", text, WARNING)
        weights = {client: float(row[weight]) for client, row in metrics.items()}
        return Taken(list(replies) or None, metrics, weights)

    def _refuse_unconverted(self, answers: list[Reply], verdicts: Mapping[Hashable, Verdict]) -> None:
        """An error if no client has a converted model, because then no round can change anything."""
        foreign = [verdict for verdict in verdicts.values() if verdict.detail == NO_STATISTICS]
        if answers and not self._changed and len(foreign) == len(answers):
            self._save(self.arrays, self._began_at)
            raise NothingTrainedError(
                f"nothing can be trained: no {self.tell.called} sends statistics. Convert the model "
                "of the clients, and let them call load, and reply instead of a reply of their own"
            )

    def _back(self, number: int, wrong: str) -> None:
        """Return to the last good state, to continue or to stop."""
        assert self._watch is not None
        began, state = self._watch.began or number, self._watch.back()
        # A budget of privacy that was spent stays spent, whatever became of the model.
        restore(self._remembers, {k: v for k, v in state.strategy.items() if not k.endswith("/state/")})
        self._restored += 1
        self._set(state.arrays)
        if self.settings.on_divergence == "restore" and self._restored <= _RESTORED:
            self.tell(number, "restored", f"back to the state after round {state.round}", WARNING)
            self.share.hold()  # else it would diverge again
            self._watch.after(state._replace(gradient=self.gradient))
            self._save(state.arrays, number)
            self._went_back = True
            return
        self.share.start(state.gradient)  # whoever continues changes something else first
        self._save(state.arrays, state.round)
        raise DivergedError(wrong, began, state, self._checkpoint)

    def _save(self, arrays: Arrays, done: int) -> None:
        self.done = done
        if self._checkpoint is not None:
            shared = self.share.to_save()
            write_checkpoint(self._checkpoint, self._remembers, arrays, done, self._first, *shared)

    def _state(self, number: int, arrays: Arrays) -> State:
        return State(number, arrays, snapshot(self._remembers), self.gradient)


class OfSession:
    """What the server of any engine shows of its session.

    Attributes:
        session: what decides.
    """

    session: Session

    @property
    def gradient(self) -> float | None:
        """The share of BatchNorm's gradient that clients take in the next round; None if it is theirs."""
        return self.session.gradient

    @property
    def shared(self) -> dict[str, Running]:
        """The statistics as they are, by layer."""
        return self.session.shared

    @property
    def result(self) -> MergeResult | None:
        """Of the last round what came of the merge."""
        return self.session.result

    @property
    def left_out(self) -> dict[Hashable, Verdict]:
        """Of the last round who was left out and why, by client."""
        return self.session.left_out


def in_order(replies: Iterable[Reply]) -> list[Reply]:
    """By client, not in the order of arrival, because rounded sums depend on the order."""
    return sorted(replies, key=lambda r: (r.client if isinstance(r.client, int) else 0, str(r.client)))


def tell_resumed(tell: Teller, done: int, rounds: int | None, file: Path | None) -> None:
    """Say where a run continues, or that it was finished."""
    of = "" if rounds is None else f" of {rounds}"
    if rounds is not None and done >= rounds:
        text = f"all {rounds} rounds are done, says {file}: nothing is trained. To train on, ask for more "
        tell(done, "finished", f"{text}rounds; to start over, move the file away", WARNING)
    else:
        tell(done, "resumed", f"continuing with round {done + 1}{of}, from {file}")
