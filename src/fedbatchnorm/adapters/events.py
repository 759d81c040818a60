"""What a server reports: lines in a log, and the same as data, for dashboards and alerts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from logging import INFO, WARNING, Logger
from typing import Any, NamedTuple

from ..aggregation.verdicts import Verdict

_NAMED = 10  # clients that a line names


class Event(NamedTuple):
    """One line of the log.

    Attributes:
        round: of training; 0 is the calibration.
        kind: left_out, empty, failed, no_answer, notice, metric, round, nothing_changed (in place of round
            where a round is without effect), calibrated, diverged, restored, resumed or finished.
        text: the line.
        level: of `logging`.
        client: the id of the client that it is about.
        layer: the layer that it is about.
        reason: of a verdict or a notice.
        values: numbers by name, of a round: asked, answered, used, left_out, gradient.
    """

    round: int
    kind: str
    text: str
    level: int = INFO
    client: Hashable | None = None
    layer: str | None = None
    reason: str | None = None
    values: Mapping[str, float] = {}


class Teller:
    """Writes each event to a log, and passes it to a callback."""

    def __init__(
        self, log: Logger, on_event: Callable[[Event], None] | None, called: str, to_calibrate: str = ""
    ):
        """Take a logger, a callback, the engine's word for a client, and what a client needs to calibrate."""
        if on_event is not None and not callable(on_event):
            raise ValueError(f"on_event is {on_event!r}; it must be a function of an event, or None")
        self._log, self._on_event = log, on_event
        self.called, self.to_calibrate = called, to_calibrate
        self.first = ""
        """The first thing that was wrong with a client, for a run that ends with nothing trained."""

    def __call__(self, number: int, kind: str, text: str, level: int = INFO, **about: Any) -> None:
        """Report an event of a round; a callback that fails does not end the run."""
        text = f"round {number}: {text}"
        if kind in ("failed", "left_out", "no_answer"):
            self.first = self.first or text
        self._log.log(level, "%s", text)
        if self._on_event is None:
            return
        try:
            self._on_event(Event(number, kind, text, level, **about))
        except Exception as error:  # whatever somebody else's dashboard may raise
            self._log.log(WARNING, "on_event failed at %r of round %s: %r", kind, number, error)

    def left_out(self, number: int, verdicts: Mapping[Hashable, Verdict]) -> None:
        """A line for each client that was left out, with the reason; having no data is not a fault."""
        for client, verdict in verdicts.items():
            about = {"client": client, "layer": verdict.layer, "reason": verdict.reason}
            where, name = f" in layer {verdict.layer}" if verdict.layer else "", f"{self.called} {client}"
            if verdict.reason == "empty":
                self(number, "empty", f"{name} has nothing to add ({verdict.detail})", **about)
                continue
            text = f"{name} left out: {verdict.reason}{where} ({verdict.detail})"
            self(number, "left_out", text, WARNING, **about)

    def failed(self, number: int, failures: Mapping[Hashable, str]) -> None:
        """A line for each client that failed."""
        for client, why in failures.items():
            self(number, "failed", f"{self.called} {client} failed: {why}", WARNING, client=client)

    def silent(self, number: int, asked: Collection[Hashable], answered: Collection[Hashable]) -> None:
        """A line for the clients that were asked and did not reply."""
        missing = sorted(set(asked) - set(answered), key=lambda c: (c if isinstance(c, int) else 0, str(c)))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            names = ", ".join(map(str, missing[:_NAMED])) + more
            which = self.called if len(missing) == 1 else f"{self.called}s"
            text = f"no answer from {which} {names}, {len(missing)} of {len(asked)} asked"
            self(number, "no_answer", text, WARNING, values={"missing": len(missing)})
