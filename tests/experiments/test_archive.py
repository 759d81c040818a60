"""Runs kept in one file: nothing that the report needs is lost, and what is wrong with a line is named."""

import json

import pytest

from fedbatchnorm.experiments.archive import gather, read_archive, write_archive
from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, Watcher, run_all
from fedbatchnorm.simulation.ring import Ring

RUNS = [
    Run(scheme=scheme, rounds=6, evaluate_every=2, seed=seed)
    for scheme in ("fbn", "naive")
    for seed in (0, 1)
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run_all([*RUNS, Ring(scheme="fbn", rounds=3)], root)
    return root


def test_a_file_holds_what_the_folders_held(root, tmp_path):
    file = tmp_path / "some.runs.jsonl"
    results, _ = read_results(root)
    assert write_archive(file, results) == (4, 4)  # runs on the ring have points: they stay in folders
    kept = {r.config: r for r in read_archive(file)}
    assert kept.keys() == set(RUNS)
    for result in results:
        if result.config in kept:
            found = kept[result.config]
            assert found.environment == result.environment
            assert found.summary["accuracy"] == pytest.approx(result.summary["accuracy"], rel=1e-5)
            for name in ("round", "accuracy", "loss", "train_loss"):
                assert [m[name] for m in found.metrics] == pytest.approx(
                    [m[name] for m in result.metrics], rel=1e-5
                )


def test_adding_keeps_what_is_there_and_the_order_does_not_matter(root, tmp_path):
    results = [r for r in read_results(root)[0] if isinstance(r.config, Run)]
    one, other = tmp_path / "one.runs.jsonl", tmp_path / "other.runs.jsonl"
    write_archive(one, results[:2])
    changed = results[0]._replace(summary=results[0].summary | {"accuracy": 0.0})
    assert write_archive(one, [changed, *results[1:]]) == (4, 2)
    assert write_archive(other, reversed(results)) == (4, 4)
    assert one.read_bytes() == other.read_bytes()


def test_gather_reads_folders_and_files_and_takes_each_run_once(root, tmp_path):
    file = tmp_path / "kept" / "some.runs.jsonl"
    write_archive(file, read_results(root)[0])
    assert len(gather(root, file)[0]) == 5
    assert len(gather(file.parent)[0]) == 4
    assert gather(tmp_path / "nowhere") == ([], [])


def test_what_is_kept_elsewhere_is_not_run_again(root, tmp_path):
    skipped = []

    class Note(Watcher):
        def skip(self, config):
            skipped.append(config)

    known = frozenset(digest(run) for run in RUNS[:3])
    run_all(RUNS, tmp_path / "new", Options(watcher=Note(), known=known))
    assert skipped == RUNS[:3]
    assert [r.config for r in read_results(tmp_path / "new")[0]] == RUNS[3:]


@pytest.mark.parametrize(
    "broken",
    [
        lambda line: "{",
        lambda line: json.dumps(line | {"config": line["config"] | {"gamma": 7}}),
        lambda line: json.dumps(line | {"accuracy": line["accuracy"][1:]}),
        lambda line: json.dumps(line | {"summary": {}}),
        lambda line: json.dumps(line | {"environment": []}),
        lambda line: json.dumps([]),
    ],
)
def test_a_line_that_is_wrong_is_named(root, tmp_path, broken):
    file = tmp_path / "some.runs.jsonl"
    write_archive(file, read_results(root)[0])
    lines = file.read_text().splitlines()
    lines[2] = broken(json.loads(lines[2]))
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"some.runs.jsonl, line 3: "):
        read_archive(file)


def test_a_file_has_its_ending(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .runs.jsonl"):
        write_archive(tmp_path / "some.json", [])
