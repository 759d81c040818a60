"""Results as tables, against numbers worked out by hand."""

import importlib.util
import io
import json
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbatchnorm.experiments import Ring, Run, partition, read, scheme, with_own_batch
from fedbatchnorm.experiments.results import LeftOut, Result
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.experiments.table import Results, tables


def split_of(labels, clients, rng, each=2):
    return np.array_split(np.argsort(labels, kind="stable"), clients * each)[::each]


def result(accuracy, lost=False, own=None, **settings):
    run = Run(**({"rounds": 2, "evaluate_every": 1} | settings))
    rows = [
        {"round": i + 1, "accuracy": value, "loss": None if lost else 1.0, "train_loss": 1.0, "seconds": 1.0}
        for i, value in enumerate((accuracy / 2, accuracy))
    ]
    summary = {"accuracy": accuracy, "best_accuracy": accuracy, "loss": rows[-1]["loss"], "seconds": 1.0}
    summary |= {} if own is None else {"client_accuracy": own}
    where = [{"device": "a CPU", "commit": "abc", "fedbatchnorm": "0"}]
    return Result(Path(f"{settings.get('scheme', 'fbn')}-{accuracy}"), run, rows, summary, where, None)


ODD = scheme("odd", with_own_batch, title="a, title | with <marks>")
MADE_UP = Results(
    [
        result(0.9, seed=0),
        result(0.8, seed=1),
        result(0.1, seed=0, scheme=ODD, lost=True),
        result(0.3, seed=1, scheme=ODD),
        result(0.7, gamma=0.5),
    ],
    [LeftOut("x", "not finished", "unfinished")],
)


def test_a_row_for_each_run_with_every_setting():
    runs = MADE_UP.to_pandas()
    assert list(runs.columns[:8]) == [
        "run",
        "dataset",
        "model",
        "partition",
        "gamma",
        "alpha",
        "scheme",
        "algorithm",
    ]
    assert {*Run.__dataclass_fields__} - {*runs.columns} == set()
    assert runs.gamma.tolist() == [0, 0, 0, 0, 0.5]
    assert runs.alpha.isna().all()  # they do not use it
    assert runs.accuracy.tolist() == [0.9, 0.8, 0.1, 0.3, 0.7]
    assert runs.diverged.ne("").tolist() == [False, False, True, False, False]
    own = json.loads(runs.own[2])
    assert own == {"scheme": ["odd", ODD.source]}
    assert (runs.own[0], runs.device[0], runs.commit[0]) == ("", "a CPU", "abc")


def test_a_row_for_each_evaluation():
    curves = MADE_UP.curves()
    assert len(curves) == 2 * len(MADE_UP)
    assert curves.groupby("run").size().eq(2).all()
    last = curves[curves["round"] == 2].set_index("run").accuracy
    assert last["fbn-0.9"] == 0.9
    assert curves.loss.isna().sum() == 2
    assert {"scheme", "gamma", "seed", "train_loss"} <= {*curves.columns}


def test_mean_and_deviation_over_seeds_for_all_that_was_varied():
    table = MADE_UP.summary()
    assert list(table.columns[:2]) == ["gamma", "scheme"]
    rows = {(row.gamma, row.scheme): row for row in table.itertuples()}
    assert len(rows) == 3
    assert rows[0, "fbn"].accuracy == pytest.approx(0.85)
    assert rows[0, "fbn"].sd == pytest.approx(statistics.stdev([0.9, 0.8]))
    assert (rows[0, "odd"].seeds, rows[0, "odd"].diverged) == (2, 1)
    assert np.isnan(rows[0.5, "fbn"].sd)
    one = Results([result(0.5)]).summary()
    assert one[["scheme", "seeds", "accuracy"]].values.tolist() == [["fbn", 1, 0.5]]
    assert Results([]).summary().empty


def test_people_see_percent():
    text = repr(MADE_UP)
    assert text.startswith("5 runs, 1 left out; final test accuracy (%), mean ± sd over seeds\n")
    assert "85.0 ± 7.1" in text
    assert "1 of 2" in text
    assert "<table" in MADE_UP._repr_html_()
    assert "<b>" not in Results([result(0.5, partition=partition("p", split_of))])._repr_html_()
    assert repr(Results([])).startswith("0 runs")


def test_a_terminal_has_a_column_for_each_scheme():
    (table,) = tables(MADE_UP)
    assert table.title.startswith("digits, mlp, 10 clients, batch 10, 2 rounds: final test accuracy")
    assert table.cells.columns.tolist() == ["gamma", "FBN", "a, title | with <marks>"]
    assert table.cells.values.tolist() == [
        ["0", "85.0 ± 7.1", "20.0 ± 14.1, 1 of 2 diverged"],
        ["0.5", "70.0", "-"],
    ]
    twin = scheme("twin", with_own_batch, title="FBN")
    (table,) = tables(Results([result(0.5), result(0.6, scheme=twin)]))
    assert table.cells.columns.tolist() == ["gamma", "FBN (fbn)", "FBN (twin)"]


def test_own_parameters_and_own_models_have_columns():
    found = Results(
        [
            result(
                0.5,
                partition=partition("p", split_of)(each=each),
                scheme="fedbn",
                algorithm="fedavg",
                own=0.75,
            )
            for each in (1, 2)
        ]
    )
    assert found.to_pandas()["each"].tolist() == [1, 2]
    (table,) = tables(found)
    assert table.cells.values.tolist() == [["1", "50.0", "75.0"], ["2", "50.0", "75.0"]]
    assert table.cells.columns.tolist() == ["each", "FedBN", "FedBN, own models"]
    assert found.summary().client_accuracy.tolist() == [0.75, 0.75]


def test_csv_is_what_pandas_reads_again_and_holds_no_formula(tmp_path):
    file = MADE_UP.to_csv(tmp_path / "new folder" / "runs.csv")
    again = pd.read_csv(file)
    assert again.accuracy.tolist() == MADE_UP.to_pandas().accuracy.tolist()
    assert again.columns.tolist() == MADE_UP.to_pandas().columns.tolist()
    assert len(pd.read_csv(MADE_UP.to_csv(tmp_path / "c.csv", curves=True))) == 10
    hostile = result(0.5)
    hostile.environment[0]["device"] = "=cmd|' /C calc'!A0"
    text = Results([hostile]).to_csv(tmp_path / "x.csv").read_text()
    assert ",'=cmd|" in text


def test_parquet_holds_the_same(tmp_path):
    file = MADE_UP.to_parquet(tmp_path / "runs.parquet")
    again = pd.read_parquet(io.BytesIO(file.read_bytes()))
    assert again.accuracy.tolist() == MADE_UP.to_pandas().accuracy.tolist()


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install pyarrow, or write CSV with to_csv"):
        MADE_UP.to_parquet(tmp_path / "runs.parquet")


def test_a_folder_is_read_in_an_order_of_its_own_with_what_is_missing(tmp_path):
    short = {"rounds": 2, "clients": 2, "batch": 4}
    runs = [Run(scheme=name, gamma=g, **short) for name in ("naive", "fbn") for g in (0.0, 1.0)]
    rings = [Ring(scheme=name, gamma=0.0, rounds=3, points=20) for name in ("centralized", "naive")]
    run_all([*runs, *rings], tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    results = read(tmp_path)
    assert [left.kind for left in results.left_out] == ["unfinished"]
    found = [(r.config.gamma, r.config.scheme) for r in results if isinstance(r.config, Run)]
    assert found == [(1.0, "fbn"), (1.0, "naive"), (0.0, "fbn"), (0.0, "naive")]
    table = results.to_pandas()
    assert table.distance.notna().tolist() == (table.kind == "ring").tolist() == [False] * 4 + [True] * 2
    assert "4 runs and 2 on the ring, 1 left out" in repr(results)
    ring, _ = tables(results)
    assert ring.cells.scheme.tolist() == ["Naive BN"]
    assert results[:2].to_pandas().gamma.tolist() == [1, 1]
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        read(tmp_path / "nowhere")
