"""Standard streams whose failures do not stop the work: closed, full, or ASCII only; and tables on them."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pandas import DataFrame

_PLAIN = str.maketrans({"±": "+-", "“": '"', "”": '"', "…": "...", "→": "->", "•": "*"})
_PLAIN |= dict.fromkeys(map(ord, "╭╮╰╯├┤┬┴┼┌┐└┘"), "+") | {ord("─"): "-", ord("│"): "|"}


class Patient:
    """A text stream that notes failures instead of raising them: `lost` says why output is missing.

    If a reader has left (`| head`), that is not a failure.
    """

    def __init__(self, stream: TextIO):
        self.stream, self.lost, self._over = stream, None, False
        self.lost: OSError | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write what the stream can show of a text."""
        self._try(lambda: self.stream.write(self._possible(text)))
        return len(text)

    def flush(self) -> None:
        """Flush everything that was written."""
        self._try(self.stream.flush)

    def _possible(self, text: str) -> str:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
            return text
        except UnicodeEncodeError:
            return "".join(_shown(character, encoding) for character in text)

    def _try(self, do: Callable[[], Any]) -> None:
        if self._over:
            return
        try:
            do()
        except RuntimeError:
            return  # a signal came in the middle of another write, and what answers it is dropped
        except (OSError, ValueError) as error:  # a closed stream is a ValueError
            self._over = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.lost = error
            with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
                # What is still in the buffer would fail again when the interpreter ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def _shown(character: str, encoding: str) -> str:
    """The character, or a replacement if it cannot be written."""
    try:
        character.encode(encoding)
        return character
    except UnicodeEncodeError:
        return character.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def patient_streams() -> Iterator[Patient]:
    """Replace standard output and errors by patient streams for a while; yields the output."""
    before = sys.stdout, sys.stderr
    out, err = (Patient(s if s is not None else open(os.devnull, "w")) for s in before)  # noqa: PTH123, SIM115
    sys.stdout, sys.stderr = out, err  # pyrefly: ignore
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        for stream, own in zip((out, err), before, strict=True):
            if own is None:
                stream.stream.close()


_WIDE = 1000  # columns of what is no terminal: a table in a file is not folded


def print_table(cells: "DataFrame") -> None:
    """A table on the standard output; on a narrow terminal long cells are folded, never cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _WIDE, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=True, padding=(0, 1, 0, 2))
    numbers = cells.map(lambda cell: cell[:1].isdigit() or cell == "-").all()
    for i, name in enumerate(cells.columns):
        side = "right" if i and numbers[name] else "left"
        table.add_column(Text(str(name)), overflow="fold", justify=side)
    for row in cells.itertuples(index=False):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
