"""The command `fedbatchnorm`: run, reproduce, report, and list."""

import importlib.util
import io
import math
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

try:
    import tyro

    for needed in ("pandas", "pydantic", "rich", "tomli_w"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(name=needed)
except ImportError as error:
    how = "pip install 'PATH[experiments]', where PATH is the folder of fedbatchnorm's source"
    sys.exit(f"the command needs {error.name}: {how}")

from . import __version__, flags
from .adapters.scaffold import write_app
from .aggregation.aggregators import AGGREGATORS
from .aggregation.attacks import ATTACKS
from .aggregation.mixing import MIXING
from .data import cifar10, datasets, mnist, partition
from .experiments import catalogue
from .experiments.archive import SUFFIX, Gathered, gather, nothing_in, write_archive
from .experiments.config import USUAL, Run, describe, digest
from .experiments.environment import choose_device, describe_device
from .experiments.outcome import divergence
from .experiments.progress import Progress
from .experiments.results import LeftOut, read_results
from .experiments.runner import Options, Stopped, run_all
from .simulation.models import MODELS
from .simulation.recipe import Precision, stream
from .simulation.ring import Ring
from .simulation.schemes import SCHEMES
from .simulation.simulator import Engine
from .storage.files import BusyError, write_bytes
from .terminal import patient_streams, print_table

_SEEDS = 1000  # more are a mistake, and their configurations alone would fill the memory
_NAMED = 20  # runs that are left out, at most, by name
_NO_MEMORY = ("out of memory", "can't allocate memory", "failed to allocate")


class IncompleteError(RuntimeError):
    """Everything possible was done, but something that was asked for is missing."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where to run and where to save results. These do not change a run's name."""

    out: Path = Path("runs")
    """Folder of the runs: one folder for each configuration, named after its hash."""
    data_dir: Path | None = None
    """Folder with CIFAR-10, MNIST or Fashion-MNIST; $FEDBATCHNORM_DATA or the user's cache folder if not
    given. They are downloaded there when they are missing."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    engine: Engine = "auto"
    """compiled compiles rounds, and on a CUDA GPU replays them as CUDA graphs; eager runs one operation after
    another; auto is compiled on a CUDA GPU and eager elsewhere."""
    checkpoint_seconds: float = 30.0
    """An interrupted run continues from its last checkpoint: seconds between them."""
    quiet: bool = False
    """No progress bar. There is none either when the output is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """A file with settings instead of flags. It does not change a run's name."""

    config: Path | None = None
    """Read settings from this TOML file, with a value or a list for each; flags that are given, too, count
    instead."""
    write_config: Path | None = None
    """Write the settings to this new TOML file, with all others as comments, and run nothing."""


def demo(seeds: int = 3, out: Path = Path("out/demo"), quiet: bool = False) -> None:
    """Show in about a minute why BatchNorm fails in federated learning, and that FBN does not.

    Trains a small network on scikit-learn's digits with all four schemes, at three levels of heterogeneity,
    and normalizes the paper's Gaussian ring (figures 1 and 2). Nothing is downloaded. Ends with a table and
    the path of a report to open in a browser.

    Args:
        seeds: repetitions, for mean and spread.
        out: folder of the runs and the report.
        quiet: no progress bar.
    """
    configs = catalogue.demo(_check_seeds(seeds))
    _run(configs, Where(out=out, device="cpu", quiet=quiet))
    missing = _tables([out], configs)
    print(
        "\nAt gamma 0 every client holds one digit. Naive BatchNorm collapses there: each client normalizes\n"
        "by its own digit, and the averaged variance misses the variance between clients. FBN's shared\n"
        "statistics are those of all data together, so it stays close to centralized training."
    )
    _report([out])
    _expect_none(missing, len(configs))


def run(
    model_and_data: flags.ModelAndData,
    federation: flags.Federation,
    training: flags.Training,
    normalization: flags.Normalization,
    byzantine_clients: flags.ByzantineClients,
    where_to_run: Where,
    settings_file: SettingsFile,
) -> None:
    """Train federations, from the first round to the last: one, or every combination of a grid.

    Flags accept several values, separated by commas; 0..4 means 0,1,2,3,4. Interrupt with Ctrl-C and run the
    same command again: it continues where it stopped, with the same result. Finished runs are skipped.
    Several processes with the same --out share a grid.

    Example: fedbatchnorm run --dataset cifar10 --scheme fbn --partition gamma --gamma 0 --seed 0

    Example: fedbatchnorm run --scheme fbn,naive --gamma 0,0.1,1 --seed 0..4

    Example: fedbatchnorm run --algorithm fedavg --local-epochs 1 --clients 100 --cohort 10 --clip 1

    Example: fedbatchnorm run --scheme fbn,naive --seed 0..4 --write-config run.toml

    Example: fedbatchnorm run --config run.toml --out elsewhere

    Example: fedbatchnorm run --scheme fbn,my_file:my_scheme
    """
    where = where_to_run
    given = flags.given(model_and_data, federation, training, normalization, byzantine_clients)
    if settings_file.config is not None:
        given = flags.read_toml(settings_file.config) | given
    sys.path.append(str(Path.cwd()))  # for what is the user's own
    configs = flags.runs_of(given)
    if settings_file.write_config is not None:
        file = settings_file.write_config
        flags.write_toml(file, given)
        print(f"{_count(len(configs))} described in {file}: fedbatchnorm run --config {file}")
        return
    _run(configs, where, share=len(configs) > 1)
    missing = 0
    if len(configs) == 1:
        _conclude(where, digest(configs[0]))
    else:
        missing = _tables([where.out], configs)
        print(f"\nrun folders: {where.out}")
    print(f"figures and tables: fedbatchnorm report {where.out}")
    _expect_none(missing, len(configs))


def _conclude(where: Where, name: str) -> None:
    """The result of a run, for the terminal."""
    results, left_out = read_results(where.out / name)
    if not results:
        raise ValueError(
            f"{left_out[0].place} is {left_out[0].why}" if left_out else f"{where.out} has lost the run"
        )
    summary = results[0].summary
    print(f"final accuracy {100 * summary['accuracy']:.2f}%, best {100 * summary['best_accuracy']:.2f}%")
    if "client_accuracy" in summary:
        own = 100 * summary["client_accuracy"]
        print(f"clients with their own models, on test data split as theirs: {own:.2f}% on average")
    if divergence(results[0]):
        print(divergence(results[0]))
    print(f"run folder: {where.out / name}")


def reproduce(
    figure: tyro.conf.Positional[str],
    where: Annotated[Where, tyro.conf.arg(name="")],
    scale: catalogue.Scale = "small",
    seeds: int = 3,
    precision: Precision = "tf32",
    known: Path | None = None,
) -> None:
    """Run everything that a figure of the paper needs, and draw it.

    Finished runs are skipped, so figures share runs, and an interrupted reproduction continues. Processes
    started with the same --out, on several GPUs or as a job array, share the work.

    Example: fedbatchnorm reproduce fig3 --scale full --seeds 3 --data-dir ~/data

    Args:
        figure: fig1 to fig13, numbered as in the paper, or all of them: `all`.
        scale: full is CIFAR-10 with the paper's settings (a GPU, or days); small is digits, in minutes.
        seeds: repetitions, for mean and spread.
        precision: float32, tf32 (float32 with TF32 tensor cores on a GPU), bf16, float64.
        known: a folder or file of runs (see `collect`) that are not run again.
    """
    names = list(catalogue.FIGURES) if figure == "all" else [figure]
    unknown = [name for name in names if name not in catalogue.FIGURES]
    if unknown:
        raise ValueError(
            f"figure {unknown[0]!r} is not known; choose from {', '.join(catalogue.FIGURES)}, all"
        )
    seeds = _check_seeds(seeds)
    configs = catalogue.unique(c for name in names for c in catalogue.FIGURES[name].runs(scale, seeds))
    configs = [replace(c, precision=precision) if isinstance(c, Run) else c for c in configs]
    places = [where.out] if known is None else [where.out, known]
    _check_places(places[1:])
    _run(configs, where, share=True, known=places[1:])
    missing = _tables(places, configs)
    _report(places, where.out / "report")
    _expect_none(missing, len(configs))


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path | None = None,
    markdown: Path | None = None,
    csv: Path | None = None,
    csv_curves: Path | None = None,
    allow_damaged: bool = False,
) -> None:
    """Draw figures and one HTML page from finished runs, or write them as a table.

    Example: fedbatchnorm report runs
    Example: fedbatchnorm report runs --csv runs.csv
    Example: fedbatchnorm report results --markdown docs/reproduction.md

    Args:
        runs: folders given as --out, or files made by `collect`.
        out: folder for the page and the figures; RUNS/report if not given.
        markdown: write a Markdown page here instead of the HTML page, with its figures in a folder beside it.
        csv: write a table here instead of the page: a row for each run, with every setting.
        csv_curves: write a table here instead of the page: a row for each evaluation of each run.
        allow_damaged: exit with status 0 although runs are left out that are damaged or not finished.
    """
    if not runs:
        raise ValueError("give a folder of runs, or a file made by `fedbatchnorm collect`")
    _check_places(runs)
    found = gather(*runs)
    if csv is not None or csv_curves is not None:
        if markdown is not None:
            raise ValueError("markdown and csv are both given; give one of them")
        _write_csv(found, runs[0], csv, csv_curves)
    elif markdown is None:
        from .report.page import write_report

        print(f"report: {write_report(*runs, out=out, found=found)}")
    else:
        from .report.markdown import write_markdown

        print(write_markdown(*runs, page=markdown, found=found))
    _name(found[1], allow_damaged)


def _write_csv(found: Gathered, place: Path, runs: Path | None, curves: Path | None) -> None:
    from .experiments.table import Results, in_order

    if not found[0]:
        raise ValueError(nothing_in(place, found[1]))
    results = Results(in_order(found[0]))
    if runs is not None:
        print(f"{results.to_csv(runs)}: {_count(len(results))}")
    if curves is not None:
        print(f"{results.to_csv(curves, curves=True)}: {_count(len(results))}, a row for each evaluation")


def collect(
    runs: tyro.conf.Positional[Path], file: tyro.conf.Positional[Path], allow_damaged: bool = False
) -> None:
    """Put finished training runs, without their weights, into one small text file that can be committed.

    Example: fedbatchnorm collect runs results/cifar10.runs.jsonl

    Args:
        runs: the folder given as --out.
        file: a file whose name ends in .runs.jsonl; runs that are already in it stay.
        allow_damaged: exit with status 0 although runs are left out that are damaged or not finished.
    """
    _check_places([runs])
    results, left_out = gather(runs)
    if not results:
        raise ValueError(nothing_in(runs, left_out))
    rings = sum(isinstance(result.config, Ring) for result in results)
    if rings == len(results):
        _name(left_out, allowed=True)
        raise ValueError(
            f"{runs} holds no finished training run: nothing is collected; those on the ring stay in their "
            "folders, with their points"
        )
    whole, new = write_archive(file, results)
    stay = f"; {rings} on the ring stay in their folders, with their points" if rings else ""
    print(f"{file}: {whole} runs, {new} of them new{stay}")
    _name(left_out, allow_damaged)


def list_names() -> None:
    """List all names: schemes, attacks, defenses, datasets, partitions, models, figures."""
    only = {name: f" ({s.algorithms[0]} only)" for name, s in SCHEMES.items() if len(s.algorithms) == 1}
    lines = {name: f"{s.title}: {s.summary}{only.get(name, '')}" for name, s in SCHEMES.items()}
    _print_names("schemes", lines)
    attacks = {name: f"{a.summary} (against {' and '.join(a.targets)})" for name, a in ATTACKS.items()}
    _print_names("attacks (--byzantine 3 --attack ...)", attacks)
    rules = {name: (rule.__doc__ or "").splitlines()[0] for name, rule in (MIXING | AGGREGATORS).items()}
    _print_names("defenses (--defense nnm+median: any of the first three, then one of the rest)", rules)
    usual = {name: ", ".join(f"{k} {v}" for k, v in USUAL[name].items()) for name in datasets.DATASETS}
    _print_names("datasets (and what is usual with them)", usual)
    _print_names("partitions", {name: p.summary for name, p in partition.PARTITIONS.items()})
    own = {"package.module:function": "a function of yours: (input shape, classes) or nothing -> nn.Module"}
    lines = {name: (factory.__doc__ or "").splitlines()[0] for name, factory in MODELS.items()}
    _print_names("models", lines | own)
    _print_names("figures", {name: figure.title for name, figure in catalogue.FIGURES.items()})


def data(
    dataset: tyro.conf.Positional[str],
    data_dir: Path | None = None,
    split: Literal["iid", "gamma", "dirichlet"] | None = None,
    gamma: float = 0.0,
    alpha: float = 0.1,
    clients: int = 10,
    seed: int = 0,
    plot: Path = Path("holdings.png"),
) -> None:
    """Download or check a dataset; with --split, draw which client holds which classes.

    Example: fedbatchnorm data cifar10
    Example: fedbatchnorm data digits --split dirichlet --alpha 0.1

    Args:
        dataset: gaussian_ring, digits, cifar10, mnist or fashion_mnist.
        data_dir: folder with the files; $FEDBATCHNORM_DATA or the user's cache folder if not given.
        split: the partition to draw.
        gamma: for the gamma partition, from 0 (each client its own classes) to 1 (iid).
        alpha: for the dirichlet partition: the smaller, the more heterogeneous.
        clients: how many clients.
        seed: of the partition.
        plot: the file of that picture: PNG, SVG or PDF.
    """
    loaded = datasets.load(dataset, data_dir, progress=sys.stderr.isatty())
    train, test = len(loaded.train.y), len(loaded.test.y)
    shape = " x ".join(map(str, loaded.train.x.shape[1:]))
    print(f"{dataset}: {train} training and {test} test samples of {shape}, {len(loaded.classes)} classes")
    if dataset == "cifar10":
        print(f"all six files are there and their MD5 sums are right: {cifar10.find(data_dir)}")
    if dataset in mnist.EDITIONS:
        print(f"all four files are there and their MD5 sums are right: {mnist.find(data_dir, dataset)}")
    if split is None:
        return
    from .report.figures import holdings_figure

    labels = loaded.train.y.numpy()
    parameter = {"gamma": gamma, "alpha": alpha}.get(partition.PARTITIONS[split].parameter or "")
    parts = partition.split(split, labels, clients, parameter, stream(seed, "partition"))
    held = partition.holdings(labels, parts, len(loaded.classes))
    title = split if parameter is None else f"{partition.PARTITIONS[split].parameter} = {parameter:g}"
    picture = holdings_figure({"samples": held.tolist(), "classes": loaded.classes}, f"{dataset}, {title}")
    plot.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    picture.savefig(image, dpi=150, format=plot.suffix.removeprefix(".") or "png")
    write_bytes(plot, image.getvalue())
    sizes = held.sum(1)
    print(
        f"clients hold {sizes.min()} to {sizes.max()} samples of {(held > 0).sum(1).min()} to "
        f"{(held > 0).sum(1).max()} classes: {plot}"
    )


def new(
    kind: tyro.conf.Positional[Literal["flower-app", "nvflare-app"]], folder: tyro.conf.Positional[Path]
) -> None:
    """Write a small, complete app for a real federation, ready to run.

    Example: fedbatchnorm new flower-app my-app

    Args:
        kind: flower-app, a Flower app (pyproject.toml, client, server, task), or nvflare-app, a job for
            NVFlare (job.py, client, model, task); both run offline on digits.
        folder: a new folder.
    """
    for file in write_app(kind, folder):
        print(file)
    then = {"flower-app": "python -m fbn_app", "nvflare-app": "python job.py"}
    print(f"next: cd {folder}, {then[kind]}; README.md has the rest")


COMMANDS = {
    "demo": demo,
    "run": run,
    "reproduce": reproduce,
    "report": report,
    "collect": collect,
    "new": new,
    "list": list_names,
    "data": data,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command `fedbatchnorm`; errors are one line, and the exit status says what happened.

    0: everything that was asked for is there. 1: something is missing, and a line says why. 2: a wrong flag.
        128 + n: signal n.
    """
    with patient_streams() as output:
        _command(sys.argv[1:] if arguments is None else arguments)
    if output.lost is not None:
        print(f"error: the standard output is incomplete: {output.lost}", file=sys.stderr)
        sys.exit(1)


def _command(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(f"fedbatchnorm {__version__}")
        return
    description = (
        "BatchNorm for federated learning: simulate, reproduce the paper's figures, report. "
        "--version prints the version."
    )
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="fedbatchnorm",
            description=description,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except flags.WrongFlagError as error:
        print(f"error: {error} (see fedbatchnorm run --help)", file=sys.stderr)
        sys.exit(2)
    except (ValueError, ImportError, cifar10.DataError, BusyError, IncompleteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        why = (str(error).splitlines() or [""])[0][:200]
        print(
            f"error: out of memory: a smaller --batch, model or number of --clients needs less ({why}). "
            "What was saved stays.",
            file=sys.stderr,
        )
        sys.exit(1)
    except Stopped as stopped:
        print(f"\n{stopped}. Run the same command again to continue.", file=sys.stderr)
        sys.exit(128 + (stopped.signal or signal.SIGINT))
    except KeyboardInterrupt:
        print(
            "\nstopped at once; what was saved stays. Run the same command again to continue.",
            file=sys.stderr,
        )
        sys.exit(130)
    finally:
        warnings.formatwarning = usual


def _run(
    configs: Sequence[Run | Ring], where: Where, share: bool = False, known: Sequence[Path] = ()
) -> None:
    seconds = where.checkpoint_seconds
    if not 0 <= seconds <= math.inf:
        raise ValueError(f"checkpoint_seconds is {seconds}; it must be at least 0")
    device = choose_device(where.device)
    start = time.monotonic()
    print(f"{_count(len(configs))} on {describe_device(device)}, in {where.out}", flush=True)
    elsewhere, left_out = gather(*known)
    _name(left_out, allowed=True)
    with Progress(len(configs), not where.quiet) as progress:
        progress.expect(configs)
        options = Options(
            device,
            where.data_dir,
            where.checkpoint_seconds,
            progress,
            signals=True,
            engine=where.engine,
            share=share,
            known=frozenset(result.name for result in elsewhere),
        )
        run_all(configs, where.out, options)
    again = f", {progress.skipped} of them finished before" if progress.skipped else ""
    print(f"done in {time.monotonic() - start:.0f} s{again}")
    if progress.left:
        print(f"{len(progress.left)} of them are still being run by other processes, and are missing below")


def _count(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"


def _name(left_out: list[LeftOut], allowed: bool) -> None:
    """List the missing runs on standard error; an error unless that is allowed."""
    lost = [left for left in left_out if left.kind != "copy"]
    for left in lost[:_NAMED]:
        print(f"left out: {left.place}: {left.why}", file=sys.stderr)
    if len(lost) > _NAMED:
        print(f"left out: {len(lost) - _NAMED} more", file=sys.stderr)
    if lost and not allowed:
        raise IncompleteError(f"{len(lost)} runs are left out; add --allow-damaged to accept that")


def _expect_none(missing: int, of: int) -> None:
    if missing:
        raise IncompleteError(f"{missing} of {of} runs are not there; run the same command again to continue")


def _check_places(places: Iterable[Path]) -> None:
    for place in places:
        if not place.is_dir() and not (place.is_file() and place.name.endswith(SUFFIX)):
            raise ValueError(f"{place} is neither a folder of runs nor a file that ends in {SUFFIX}")


def _tables(places: Iterable[Path], configs: Iterable[Run | Ring]) -> int:
    """Final accuracies of these runs as tables; returns how many have no result."""
    from .experiments.table import Results, in_order, tables

    order = {digest(config): i for i, config in enumerate(configs)}
    found, left_out = gather(*places)
    _name([left for left in left_out if left.kind != "unfinished"], allowed=True)
    results = [r for r in found if r.name in order]
    for title, cells in tables(Results(in_order(results))):
        print(f"\n{title}")
        print_table(cells)
    for result in results:
        if divergence(result):
            print(f"{describe(result.config)}: {divergence(result)}")
    return len(order) - len(results)


def _print_names(title: str, lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    print(f"{title}:")
    for name, text in lines.items():
        print(f"  {name:<{width}}  {text}")


def _report(places: Iterable[Path], out: Path | None = None) -> None:
    from .report.page import write_report

    print(f"\nreport: {write_report(*places, out=out)}")


def _check_seeds(seeds: int) -> int:
    if not 1 <= seeds <= _SEEDS:
        raise ValueError(f"seeds is {seeds}; it must be between 1 and {_SEEDS}")
    return seeds
