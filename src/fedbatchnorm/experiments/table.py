"""Results as tables: a row for each run, a row for each evaluation, mean and deviation over seeds."""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, overload

import pandas as pd

from ..simulation.schemes import SCHEMES
from ..storage.files import write_bytes
from .archive import gather
from .config import Run, to_json
from .grids import FIELDS, levels
from .outcome import divergence
from .results import LeftOut, Result

# The columns that come first, and say which run a row is of.
_WHAT = ["run", "dataset", "model", "partition"]
_HOW = ["scheme", "algorithm", "byzantine", "attack", "defense", "seed"]
_OUTCOME = ["accuracy", "best_accuracy", "loss", "client_accuracy", "seconds", "diverged"]
_PLACE = ["device", "commit", "fedbatchnorm"]
_CURVES = ["accuracy", "loss", "train_loss", "client_accuracy", "client_loss", "learning_rate", "seconds"]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the start of a formula


class Results(Sequence[Result]):
    """Finished runs, in order, as a sequence of `Result` and as tables.

    `left_out` has the runs that are missing, each with the reason.

    Example:
        >>> import tempfile
        >>> from fedbatchnorm.experiments import sweep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = sweep(scheme=["fbn", "naive"], seed=range(2), rounds=2, out=folder, progress=False)
        >>> results.to_pandas()[["scheme", "gamma", "seed"]].values.tolist()
        [['fbn', 0.0, 0], ['naive', 0.0, 0], ['fbn', 0.0, 1], ['naive', 0.0, 1]]
        >>> list(results.summary().columns)
        ['scheme', 'seeds', 'accuracy', 'sd', 'diverged']
    """

    def __init__(self, results: Iterable[Result], left_out: Iterable[LeftOut] = ()):
        self._results, self.left_out = tuple(results), tuple(left_out)

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> "Results": ...
    def __getitem__(self, index: int | slice) -> "Result | Results":
        if isinstance(index, slice):
            return Results(self._results[index], self.left_out)
        return self._results[index]

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def to_pandas(self) -> pd.DataFrame:
        """A row for each run: what it is, how it ended, every setting, and where it ran.

        Accuracies are shares of 1. `gamma`, `alpha` and a partition's own parameters are missing where the
        run does not use them; `diverged` says what happened, or is empty; `own` has names and hashes of the
        user's own parts. Runs on the Gaussian ring have a `distance` instead of an accuracy.
        """
        return _in_order(pd.DataFrame([_row(result) for result in self]), _parameters(self))

    def curves(self) -> pd.DataFrame:
        """A row for each evaluation of each run: which run, the round, accuracy, losses, learning rate."""
        rows = [{"run": r.name, **row} for r in self for row in r.metrics]
        found = pd.DataFrame(rows, columns=_columns(rows, ["run", "round", *_CURVES]))
        found = found.astype({name: float for name in _CURVES if name in found})
        return self._told().merge(found, on="run", validate="one_to_many")

    def summary(self) -> pd.DataFrame:
        """Mean and standard deviation (n - 1) of the final accuracy over seeds, for every combination that
        was varied.
        """
        runs = self.to_pandas()
        if "kind" in runs:
            runs = runs[runs.kind == "training"]
        if runs.empty:
            return pd.DataFrame(columns=["scheme", "seeds", "accuracy", "sd", "diverged"])
        by = _varied(runs) or ["scheme"]
        found = runs.assign(lost=runs.diverged != "").groupby(by, sort=False, dropna=False)
        table = found.agg(
            seeds=("seed", "count"),
            accuracy=("accuracy", "mean"),
            sd=("accuracy", "std"),
            diverged=("lost", "sum"),
        )
        if runs.client_accuracy.notna().any():
            table["client_accuracy"] = found.client_accuracy.mean()
        return table.reset_index()

    def to_csv(self, file: str | Path, curves: bool = False) -> Path:
        """Write `to_pandas()`, or `curves()`, as CSV; returns the file."""
        table = (self.curves() if curves else self.to_pandas()).map(_harmless)
        return _write(file, table.to_csv(index=False).encode())

    def to_parquet(self, file: str | Path, curves: bool = False) -> Path:
        """Write `to_pandas()`, or `curves()`, as Parquet; needs pyarrow. Returns the file."""
        if importlib.util.find_spec("pyarrow") is None:
            raise ImportError("a Parquet file needs pyarrow: pip install pyarrow, or write CSV with to_csv")
        content = (self.curves() if curves else self.to_pandas()).to_parquet(index=False)
        return _write(file, content)

    def __repr__(self) -> str:
        table = self.summary()
        return f"{self._headline()}\n" + (_for_people(table).to_string(index=False) if len(table) else "")

    def _repr_html_(self) -> str:
        return f"<p>{self._headline()}</p>" + _for_people(self.summary()).to_html(index=False, border=0)

    def _headline(self) -> str:
        rings = sum(not isinstance(result.config, Run) for result in self)
        count = len(self) - rings
        runs = f"{count} run{'' if count == 1 else 's'}" + (f" and {rings} on the ring" if rings else "")
        missing = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"{runs}{missing}; final test accuracy (%), mean ± sd over seeds"

    def _told(self) -> pd.DataFrame:
        """The columns of `to_pandas` that tell the runs apart, and the usual ones."""
        runs = self.to_pandas()
        usual = [*_WHAT, *levels(), *_parameters(self), *_HOW]
        more = [name for name in _varied(runs) if name not in usual]
        return runs[[*(name for name in usual if name in runs), *more]]


def read(*places: str | Path) -> Results:
    """Read the finished runs in folders and files of runs, as `sweep` returns them; the code of their own
    parts is not needed.

    Example:
        >>> len(read("no/such/folder"))
        Traceback (most recent call last):
            ...
        FileNotFoundError: no/such/folder is not there
    """
    paths = [Path(place) for place in places]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
    found, left_out = gather(*paths)
    return Results(in_order(found), left_out)


class Table(NamedTuple):
    """Cells as people read them, below a title."""

    title: str
    cells: pd.DataFrame


def tables(results: Results) -> list[Table]:
    """The tables of results for a terminal: final accuracies, a column for each scheme; distances on the
    ring.
    """
    runs = results.to_pandas()
    kind = runs.get("kind", pd.Series("training", runs.index))
    rings, training = runs[(kind == "ring") & (runs.scheme != "centralized")], runs[kind == "training"]
    found = [_distances(rings)] if len(rings) else []
    return [*found, _accuracies(results, training)] if len(training) else found


def _accuracies(results: Results, runs: pd.DataFrame) -> Table:
    titles = _titles(results)
    level = [name for name in (*levels(), *_parameters(results)) if runs[name].notna().any()]
    by = list(dict.fromkeys([*level, *(name for name in _varied(runs) if name != "scheme")]))
    by = by or ["partition"]  # iid alone
    runs = runs.assign(**{name: runs[name].map(_short) for name in by}, lost=runs.diverged != "")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for (scheme, *place), group in runs.groupby(["scheme", *by], sort=False):
        lost = "" if not group.lost.any() else f", {group.lost.sum()} of {len(group)} diverged"
        row = cells.setdefault(tuple(place), {})
        row[titles[scheme]] = accuracy_percent(fmean(group.accuracy), _sd(group.accuracy)) + lost
        own = group.client_accuracy.dropna()
        row |= {f"{titles[scheme]}, own models": accuracy_percent(fmean(own), _sd(own))} if len(own) else {}
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    columns.sort(key=lambda name: "own models" in name)
    rows = [[*place, *(row.get(name, "-") for name in columns)] for place, row in cells.items()]
    title = f"{_same(runs)}final test accuracy (%), mean ± sd over seeds"
    return Table(title, pd.DataFrame(rows, columns=[*by, *columns]))


def _titles(results: Results) -> dict[str, str]:
    """The title of each scheme, with its name if two have the same title."""
    found = {r.config.scheme: r.config.title() for r in results if isinstance(r.config, Run)}
    twice = {title for title in found.values() if [*found.values()].count(title) > 1}
    return {name: f"{title} ({name})" if title in twice else title for name, title in found.items()}


def _same(runs: pd.DataFrame) -> str:
    """What all of these runs have in common, as text."""
    forms = {"dataset": "{}", "model": "{}", "clients": "{} clients", "batch": "batch {}"}
    forms["rounds"] = "{} rounds"
    same = [name for name in forms if runs[name].nunique() == 1]
    said = [forms[name].format(_short(runs[name].iloc[0])) for name in same]
    return f"{', '.join(said)}: " if said else ""


def _distances(rings: pd.DataFrame) -> Table:
    found = rings.groupby(["scheme", "gamma"]).distance.mean().unstack()[sorted(rings.gamma.unique())[::-1]]
    found = found.reindex(pd.unique(rings.scheme)).map(lambda v: "-" if pd.isna(v) else f"{v:.2f}")
    found.index = [SCHEMES[name].title if name in SCHEMES else name for name in found.index]
    found.columns = [f"gamma {value:g}" for value in found.columns]
    title = "Gaussian ring: mean distance of the normalized points from the centralized ones"
    return Table(title, found.rename_axis("scheme").reset_index())


def _sd(values: Iterable[float]) -> float:
    """The deviation (n - 1); not a number for a single value."""
    found = list(values)
    return stdev(found) if len(found) > 1 else float("nan")


def _short(value: Any) -> str:
    """A setting in a cell."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_order(results: Iterable[Result]) -> list[Result]:
    """By dataset, from alike to heterogeneous, schemes as in the table, seeds."""
    return sorted(results, key=_rank)


def accuracy_percent(mean: float, sd: float) -> str:
    """A mean and a deviation as percent: 96.7 ± 0.3; the mean alone without a deviation.

    Example:
        >>> accuracy_percent(0.967, 0.003), accuracy_percent(0.5, float("nan"))
        ('96.7 ± 0.3', '50.0')
    """
    return f"{100 * mean:.1f}" + ("" if pd.isna(sd) else f" ± {100 * sd:.1f}")


def _for_people(table: pd.DataFrame) -> pd.DataFrame:
    """A summary in percent, without columns that carry no information."""
    text = [accuracy_percent(*pair) for pair in zip(table.accuracy, table.sd, strict=True)]
    shown = table.drop(columns="sd").assign(accuracy=text)
    if "client_accuracy" in shown:
        shown["client_accuracy"] = [accuracy_percent(value, float("nan")) for value in table.client_accuracy]
    if (table.diverged > 0).any():
        shown["diverged"] = [
            f"{n} of {of}" if n else "" for n, of in zip(table.diverged, table.seeds, strict=True)
        ]
    else:
        shown = shown.drop(columns="diverged")
    return shown.map(
        lambda value: "" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else value
    )


def _row(result: Result) -> dict[str, Any]:
    config, summary = result.config, result.summary
    last = result.environment[-1]
    found: dict[str, Any] = {"run": result.name, "kind": "training" if isinstance(config, Run) else "ring"}
    settings = {k: v for k, v in to_json(config).items() if k not in ("kind", "source", "own")}
    outcome = {name: summary.get(name) for name in (*_OUTCOME, "distance") if name in summary}
    found |= settings | outcome | {name: last.get(name) for name in _PLACE}
    if isinstance(config, Run):
        unused = config.unused() & {*levels()}
        found |= dict.fromkeys(unused) | {"switch": config.switch_step(), "diverged": divergence(result)}
        split = config.part("partition")
        found |= dict(split.parameters) if split is not None else {}
        own = {part.kind: [part.name, part.source] for part in config.own}
        found["own"] = json.dumps(own) if own else ""
    return found


def _in_order(runs: pd.DataFrame, parameters: list[str]) -> pd.DataFrame:
    """The columns in an order of their own, and those of the ring only where there is one."""
    order = [*_WHAT, *levels(), *parameters, *_HOW, *_OUTCOME, *FIELDS, *parameters, "own", *_PLACE]
    if (runs.get("kind", pd.Series(dtype=str)) == "ring").any():
        order = ["run", "kind", "distance", *order]
    columns = list(dict.fromkeys([*order, *(name for name in runs if name not in ("kind", "distance"))]))
    runs = runs.reindex(columns=columns)
    return runs.astype({name: float for name in (*levels(), *_OUTCOME[:-1]) if name in runs})


def _parameters(results: Iterable[Result]) -> list[str]:
    """The names of the parameters of partitions that are not the package's."""
    splits = [r.config.part("partition") for r in results if isinstance(r.config, Run)]
    return list(dict.fromkeys(name for split in splits if split is not None for name, _ in split.parameters))


def _varied(runs: pd.DataFrame) -> list[str]:
    """The settings that differ between runs, except the seed; the level and the scheme come first."""
    told = [str(name) for name in runs if name not in {"run", "kind", "distance", "seed", *_OUTCOME, *_PLACE}]
    found = [name for name in told if runs[name].astype(str).nunique(dropna=False) > 1]
    # What follows from another setting says nothing: half of the rounds, a thirtieth of them.
    return [name for name in found if name not in ("switch", "evaluate_every", "own")] or found


def _columns(rows: list[dict[str, Any]], first: list[str]) -> list[str]:
    there = dict.fromkeys(name for row in rows for name in row)
    return [name for name in dict.fromkeys([*first, *there]) if name in there or name in ("run", "round")]


def _rank(result: Result) -> tuple[Any, ...]:
    """Where a run comes: by dataset, from alike to heterogeneous, schemes as in the table, seeds."""
    config, order = result.config, list(SCHEMES)
    scheme = order.index(config.scheme) if config.scheme in order else len(order)
    if not isinstance(config, Run):
        return 1, "", "", "", -config.gamma, scheme, config.scheme, "", config.seed
    _, level = config.heterogeneity()
    struck = f"{config.byzantine} {config.attack} {config.defense}"
    place = (config.dataset, str(config.model), config.partition, -(level or 0.0))
    return 0, *place, scheme, config.scheme, struck, config.seed


def _harmless(value: Any) -> Any:
    """A text that no spreadsheet interprets as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _write(file: str | Path, content: bytes) -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return path
