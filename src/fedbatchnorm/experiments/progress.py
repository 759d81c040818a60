"""How far a list of runs is: a bar in a terminal or a notebook, and counts in any case."""

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from ..simulation.ring import Ring
from .config import Run, describe
from .runner import Watcher


class Display(Protocol):
    """Something that shows progress."""

    def update(self, text: str, outcome: str, done: int, total: int) -> None:
        """Show a run, its accuracy, and rounds done of all."""

    def close(self) -> None:
        """Leave the last state on the screen."""


class Progress(Watcher):
    """Counts what happens to a list of runs, and shows it on whatever there is.

    runs: how many; show: whether to show anything. `done`, `skipped` and `left` count runs.
    """

    def __init__(self, runs: int, show: bool = True):
        self.runs, self.done, self.skipped = runs, 0, 0
        self.left: list[Run | Ring] = []
        self._total, self._rounds, self._text, self._outcome = 0, 0, "", ""
        self._display = display() if show else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()

    def expect(self, configs: Iterable[Run | Ring]) -> None:
        """These are to be run."""
        self._total = self._rounds + sum(config.rounds or 0 for config in configs)
        self._show()

    def take_left(self) -> list[Any]:
        """The runs that were left to other processes; they count as not seen any more."""
        found, self.left = self.left, []
        return found

    def wait(self, count: int) -> None:
        """Other processes are at the rest."""
        self._text = f"waiting for {count} run{'' if count == 1 else 's'} of other processes"
        self._show()

    def begin(self, config: Run | Ring, step: int) -> None:
        """Show which run is on."""
        self.done += 1
        self._text, self._outcome = f"{self.done}/{self.runs} {describe(config)}", ""
        self._total -= step  # what an earlier session did says nothing about the time left
        self._show()

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """Move on, and show the accuracy when there is a new one."""
        if metrics is not None:
            self._outcome = f"accuracy {100 * metrics['accuracy']:.1f}%"
        self._rounds += rounds
        self._show()

    def skip(self, config: Run | Ring) -> None:
        """A run was finished before."""
        self.done += 1
        self.skipped += 1
        self._total -= config.rounds or 0

    def leave(self, config: Run | Ring) -> None:
        """Another process is at a run."""
        self.left.append(config)
        self._total -= config.rounds or 0

    def stopping(self) -> None:
        """Say that the first Ctrl-C was heard."""
        print("\nstopping after this round (again to stop at once)", file=sys.stderr)

    def _show(self) -> None:
        if self._display is not None:
            self._display.update(self._text, self._outcome, self._rounds, max(self._total, self._rounds))


def display() -> Display | None:
    """What can show progress here: a notebook's bar, a terminal's, or nothing."""
    if in_notebook():
        return _Notebook()
    stream = sys.stderr
    return _Terminal() if stream is not None and stream.isatty() else None


def in_notebook() -> bool:
    """Whether this is Jupyter or a kin of it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or type(shell).__module__.startswith("google.colab")


class _TimeLeft(ProgressColumn):
    """1:23 left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """The time left, once it is known."""
        if task.finished:
            return Text(f"{clock(task.finished_time or 0)} in all")
        left = task.time_remaining
        return Text("-:-- left" if left is None else f"{clock(left)} left")


class _Field(ProgressColumn):
    """A text of the task, as it is: what looks like markup is text."""

    def __init__(self, name: str, column: Column):
        super().__init__(column)
        self._name = name

    def render(self, task: Task) -> Text:
        """The text."""
        return Text(task.fields[self._name], overflow="ellipsis", no_wrap=True)


class _Terminal:
    """A line of rich: the run takes the room that bar, accuracy and time left leave."""

    def __init__(self):
        console = Console(file=sys.stderr)
        fixed = Column(no_wrap=True)
        columns = [_Field("run", Column(ratio=1, no_wrap=True, overflow="ellipsis"))]
        columns += [BarColumn(max(5, min(40, console.width // 6)), table_column=fixed)]
        columns += [_Field("outcome", Column(min_width=14, no_wrap=True)), _TimeLeft(fixed)]
        self._progress = RichProgress(
            *columns, console=console, expand=True, redirect_stdout=False, refresh_per_second=5
        )
        self._task = self._progress.add_task("", total=None, run="", outcome="")
        self._progress.start()

    def update(self, text: str, outcome: str, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total, run=text, outcome=outcome)

    def close(self) -> None:
        self._progress.stop()


class _Notebook:
    """tqdm's widget, or its text where there are no widgets."""

    def __init__(self):
        from tqdm.auto import tqdm

        self._bar = tqdm(unit="round", smoothing=0.05)

    def update(self, text: str, outcome: str, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.set_description_str(text, refresh=False)
        self._bar.set_postfix_str(outcome, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bar.close()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> clock(75), clock(3675)
        ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
