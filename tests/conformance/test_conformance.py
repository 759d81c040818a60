"""Every engine, the same properties: what a cell of the table in docs/engines.md says, a test has found."""

import fcntl
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import FAULTS, LAYERS, Case, Net, read_outcome
from engines import ENGINES, fobs_bytes

CLIENTS = 4


def engines(name, *only):
    """The engines with which a property is tried, as parameters."""
    found = [e for e in ENGINES if name not in e.cannot and (not only or e in only)]
    marks = [pytest.mark.property(name)]
    rows = [pytest.param(e, id=e.__name__, marks=[*marks, *[pytest.mark.slow] * e.slow]) for e in found]
    return pytest.mark.parametrize("engine", rows)


# The verdicts are of one run, and so is the quorum of 2, which round 3 does not reach.
HOSTILE = {
    "2/1": "NaN",
    "2/2": "negative variance",
    "3/0": "wrong shape",
    "3/1": "missing key",
    "3/2": "huge count",
    "4/1": "stale round",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, worker_id):
    """Runs each case once for each engine, also where several processes run the tests."""
    root, started, failed = tmp_path_factory.getbasetemp(), {}, {}
    root = (root if worker_id == "master" else root.parent) / "conformance"
    root.mkdir(exist_ok=True)

    def outcome(engine, name, **case):
        folder = root / f"{engine.__name__}-{name}"
        if folder in failed:
            raise failed[folder]
        with (root / f"{engine.__name__}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if found := read_outcome(folder):
                return found
            if engine not in started:
                started[engine] = engine(tmp_path_factory.mktemp(engine.__name__)).__enter__()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                found = started[engine].run(Case(str(folder), CLIENTS, **case))
            except BaseException as error:  # of this and of every test that wants the same run
                failed[folder] = error
                raise
            found.save()
            return found

    yield outcome
    for engine in started.values():
        engine.__exit__()


@pytest.fixture
def hostile(outcomes):
    """Four rounds of two local steps with unequal clients: faults in three of them, a client that dies in the
    last, and a server that is killed in mid-round, in round 2, where the engine lets us."""

    def run(engine):
        faults, restarts = dict(HOSTILE), 2
        if "a client killed in mid-round" not in engine.cannot:
            faults["4/3"] = "dies"
        if "a server killed and resumed" in engine.cannot:
            restarts = 0
        elif engine.slow:
            faults["2/0"] = "waits"
        sizes = (4, 6, 8, 10)
        how = {"rounds": 4, "sizes": sizes, "steps": 2, "quorum": 2}
        return outcomes(engine, "hostile", faults=faults, restarts=restarts, **how)

    return run


def assert_exact(outcome):
    """The final statistics are float64 BatchNorm's, fed with what the clients that count saw."""
    for layer in LAYERS:
        mean, var, tracked = outcome.expected(layer)
        found = {name: outcome.state[f"{layer}.{name}"] for name in ("running_mean", "running_var")}
        np.testing.assert_allclose(found["running_mean"], mean, rtol=1e-5, atol=1e-5, err_msg=layer)
        np.testing.assert_allclose(found["running_var"], var, rtol=1e-5, atol=1e-5, err_msg=layer)
        counter = outcome.state[f"{layer}.num_batches_tracked"]
        assert (counter.dtype, int(counter)) == (np.int64, tracked)


@engines("exact statistics")
def test_statistics_are_those_of_float64_batch_norm(engine, hostile):
    outcome = hostile(engine)
    assert len(outcome.used(1)) == CLIENTS
    assert_exact(outcome)
    for name, value in Net().named_parameters():
        assert not np.array_equal(outcome.state[name], value.detach().numpy()), name
    for number, (_, _, used) in outcome.rounds().items():
        assert used == outcome.good(number), number


@engines("unequal clients")
def test_clients_of_unequal_size_count_by_what_they_saw(engine, hostile):
    outcome = hostile(engine)
    counts = {i: len(rows) for i, rows in outcome.seen(1, "last_norm").items()}
    assert counts == {0: 2 * 4, 1: 2 * 6, 2: 2 * 8, 3: 2 * 10}
    assert_exact(outcome)
    rows = list(outcome.seen(1, "norm").values())
    equally, weighted = np.mean([r.mean(0) for r in rows], 0), np.concatenate(rows).mean(0)
    assert np.abs(equally - weighted).max() > 1e-2  # so that the test could fail


@engines("local epochs")
def test_several_local_steps_weigh_as_one_update_on_all_they_saw(engine, hostile):
    outcome = hostile(engine)
    assert outcome.state["norm.num_batches_tracked"] == 2 * 3  # round 3 changes nothing
    assert_exact(outcome)


@engines("cohorts")
def test_a_cohort_stands_for_all_clients(engine, outcomes):
    outcome = outcomes(engine, "cohort", rounds=2, cohort=2)
    assert all(len(outcome.seen(number, "norm")) == 2 for number in (1, 2))
    assert {row[:2] for row in outcome.rounds().values()} == {(2, 2)}
    assert_exact(outcome)


def fault_tests():
    for name in FAULTS:
        rows = [e for e in ENGINES if name not in e.cannot]
        for e in rows:
            marks = [pytest.mark.property(name), *[pytest.mark.slow] * e.slow]
            yield pytest.param(e, name, id=f"{e.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("engine", "fault"), list(fault_tests()))
def test_a_client_at_fault_is_left_out_of_statistics_and_parameters(engine, fault, hostile):
    outcome = hostile(engine)
    [key] = [key for key, what in HOSTILE.items() if what == fault]
    number, client = map(int, key.split("/"))
    assert outcome.verdicts()[number, client] == FAULTS[fault]
    assert outcome.rounds()[number][2] == outcome.good(number)
    assert_exact(outcome)
    values = [outcome.state[name] for name in outcome.state]
    assert all(np.isfinite(value).all() for value in values)


@engines("a client killed in mid-round")
def test_a_round_is_that_of_those_who_are_left(engine, hostile):
    outcome = hostile(engine)
    assert outcome.rounds()[4] == (CLIENTS, CLIENTS - 1, CLIENTS - 2)  # another one is stale
    about = [x for x in outcome.lines if "round 4: " in x and ("no answer" in x or "failed" in x)]
    assert len(about) == 1, about
    assert re.search(rf"\b{outcome.names[3]}\b", about[0])
    assert 3 in outcome.seen(4, "norm")  # it had trained
    assert_exact(outcome)


@engines("a server killed and resumed")
def test_a_server_that_was_killed_continues_where_it_was(engine, hostile, outcomes):
    outcome = hostile(engine)
    assert any("continuing with round 2 of 4" in line for line in outcome.lines)
    assert sum(1 for line in outcome.lines if "round 1: " in line and "used" in line) == 1
    assert_exact(outcome)
    if not engine.slow:  # to the bit as if it had not been
        how = {k: v for k, v in vars(outcome.case).items() if k not in ("folder", "clients", "restarts")}
        whole = outcomes(engine, "whole", **how)
        for name, value in whole.state.items():
            np.testing.assert_array_equal(outcome.state[name], value, err_msg=name)


@engines("quorum not met")
def test_below_the_quorum_nothing_changes(engine, hostile):
    outcome = hostile(engine)
    assert outcome.rounds()[3] == (CLIENTS, CLIENTS, 1)
    [counts] = [line for line in outcome.lines if "round 3: " in line and "asked, " in line]
    assert "2 are needed: nothing changes" in counts
    assert_exact(outcome)


@engines("robust rule")
def test_a_lie_does_not_get_through_a_robust_rule(engine, outcomes):
    """Means of a million, which no verdict sees, against nnm+median with f = 1."""
    faults = {f"{number}/2": "lie" for number in (1, 2)}
    outcome = outcomes(engine, "robust", rounds=2, liars=1, faults=faults)
    assert outcome.verdicts() == {}
    assert set(outcome.rounds().values()) == {(CLIENTS, CLIENTS, CLIENTS)}
    for number in (1, 2):
        honest = np.stack([rows.mean(0) for rows in outcome.seen(number, "norm").values()])
        assert np.abs(honest).max() < 100
    assert np.abs(outcome.state["norm.running_mean"]).max() < np.abs(honest).max()
    assert outcome.state["norm.running_var"].max() < 1e3


@engines("traffic")
def test_statistics_add_a_few_numbers_per_channel(engine, hostile):
    """And not another model: at most 16 bytes for each channel of BatchNorm and 2 KB, either way."""
    outcome = hostile(engine)
    own = sum(value.nbytes for value in outcome.state.values())
    channels = sum(len(outcome.state[f"{layer}.running_mean"]) for layer in LAYERS)
    form = fobs_bytes(plain()) - own if engine.__name__ == "NVFlareHere" else 0
    if engine.__name__ == "FlowerHere":  # every array has a header of 128 bytes
        form = 128 * len(outcome.state)
    down, up = (size - own - form for size in outcome.traffic)
    assert min(outcome.traffic) > sum(outcome.state[name].nbytes for name, _ in Net().named_parameters())
    assert down <= 16 * channels + 2048
    assert up <= 16 * channels + 2048


def plain():
    """What NVFlare sends without us."""
    from nvflare.app_common.abstract.fl_model import FLModel

    return FLModel(params={k: v.numpy() for k, v in Net().state_dict().items()}, current_round=1)
