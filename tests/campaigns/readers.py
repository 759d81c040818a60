"""Hostile inputs for all that reads: a reader refuses in its own words, or gives what was written."""

import collections
import contextlib
import json
import shutil

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam
from mutate import raw, structured, tensors
from safetensors.numpy import save

import fedbatchnorm as fbn
from fedbatchnorm.adapters import checkpoint as server
from fedbatchnorm.adapters.memory import plain_state
from fedbatchnorm.experiments import folder as folders
from fedbatchnorm.experiments.archive import gather, write_archive
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.results import read_result, read_results
from fedbatchnorm.experiments.runner import Options, Stopped, run_all
from fedbatchnorm.report.groups import comparisons, final_table, ring_table, rings
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.storage.files import DamagedError

ATTRIBUTES = ("aggregate_train/value/", "__class__/value/", "strategy/x/value/", "eta/code/", "eta/state/")
SHORT = {"rounds": 6, "evaluate_every": 2, "clients": 4}


def messages(count, rng, place):
    """`from_bytes`: a message or a FormatError; what gets through goes through `merge` without an error."""
    layers = {f"bn{i}": fbn.Moments(8, torch.randn(i + 1), torch.rand(i + 1)) for i in range(3)}
    shared = {name: fbn.Running(torch.zeros_like(m.mean), m.var) for name, m in layers.items()}
    good = [fbn.to_bytes(fbn.Update(layers, round=0, id=7)), fbn.to_bytes(shared)]
    found = collections.Counter()
    for _ in range(count):
        data = (raw if rng.random() < 0.5 else tensors)(rng.choice(good), rng)
        try:
            message = fbn.from_bytes(data)
        except fbn.FormatError:
            found["refused"] += 1
            continue
        found["read"] += 1
        if isinstance(message, fbn.Update):
            merged = fbn.merge(shared, [message, fbn.Update(layers, round=0, id=8)])
            assert all(r.mean.isfinite().all() and (r.var >= 0).all() for r in merged.statistics.values())
    return found


def _names(error, path):
    """The message says where, and is short."""
    assert str(path) in str(error)
    assert len(str(error)) < 2000


def _possible(result):
    """What comes through without a digest is possible, and can be shown."""
    if isinstance(result.config, Ring):
        assert result.summary["distance"] >= 0
        for ring in rings([result]):
            ring_table(ring)
        return
    assert all(0 <= row["accuracy"] <= 1 for row in result.metrics)
    assert 0 <= result.summary["accuracy"] <= result.summary["best_accuracy"] <= 1
    for group in comparisons([result]):
        final_table(group)


def run_folders(count, rng, place):
    """Folders of finished runs, with digests and without: a `DamagedError`, or what was written."""
    whole = {}
    for path in run_all([Run(**SHORT), Ring(rounds=3)], place / "good"):
        old = place / "old" / path.name
        shutil.copytree(path, old)
        summary = json.loads((old / "summary.json").read_text())
        kept = {name: value for name, value in summary.items() if name not in ("files", "digest")}
        (old / "summary.json").write_text(json.dumps(kept))
        whole |= {path: read_result(path), old: read_result(old)}
    found = collections.Counter()
    for _ in range(count):
        path = rng.choice(list(whole))
        file = rng.choice([p for p in path.iterdir() if p.name != "lock"])
        content = file.read_bytes()
        changed = _spoiled(file.name, content, rng)
        file.write_bytes(changed)
        try:
            result = read_result(path)
        except DamagedError as error:
            _names(error, path)
            found["refused"] += 1
        else:
            found["read"] += 1
            _possible(result)
            if path.parent.name == "good":
                wanted = whole[path]
                assert result.metrics == wanted.metrics
                assert result.environment == wanted.environment
                assert result.holdings == wanted.holdings
                same = {k: v for k, v in wanted.summary.items() if k in result.summary}
                assert result.summary == same
                assert result.name == wanted.name
        finally:
            file.write_bytes(content)
    return found


def _spoiled(name, content, rng):
    if name.endswith("safetensors"):
        return tensors(content, rng)
    if rng.random() < 0.4:
        return raw(content, rng)
    if name.endswith("jsonl"):
        lines = content.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = structured(json.loads(lines[at]), rng)
        return b"\n".join(lines) + b"\n"
    return structured(json.loads(content), rng)


def archives(count, rng, place):
    """Files of runs: every line is what was written, or is named."""
    run_all([Run(**SHORT, seed=seed) for seed in range(3)], place / "runs")
    file = place / "some.runs.jsonl"
    write_archive(file, read_results(place / "runs")[0])
    whole = {result.name: result for result in gather(file)[0]}
    good = file.read_bytes()
    bare = [{k: v for k, v in json.loads(line).items() if k != "digest"} for line in good.splitlines()]
    old = "".join(json.dumps(line) + "\n" for line in bare).encode()
    found = collections.Counter()
    for _ in range(count):
        sealed = rng.random() < 0.5
        changed = _spoiled("runs.jsonl", good if sealed else old, rng)
        file.write_bytes(changed)
        results, left_out = gather(file)
        for left in left_out:
            assert left.place.startswith(str(file))
        for result in results:
            _possible(result)
            # A line that lost its digest is taken for one from before there were digests.
            if sealed and changed.count(b'"digest"') == len(whole):
                one = whole[result.name]
                assert result[1:] == one[1:]
        found["refused" if left_out else "read"] += 1
    return found


def run_checkpoints(count, rng, place):
    """`restore`: one of the checkpoints that were written, bit for bit, or a start from the beginning."""
    config = Run(rounds=30, evaluate_every=5, clients=4)
    answers = iter([False] * 11 + [True])
    options = Options(stop=lambda: next(answers), checkpoint_seconds=0)
    with contextlib.suppress(Stopped):
        run_all([config], place / "runs", options)
    folder = RunFolder(place / "runs", config)
    names = [p.name for p in (folder.metrics_file, *folder.checkpoints)]
    good = {name: (folder.path / name).read_bytes() for name in names}
    whole = {}
    for drop in (None, *names[1:]):
        if drop:
            (folder.path / drop).unlink()
        saved = folder.restore()
        whole[0 if saved is None else saved.step] = saved
        _put(folder.path, good)
    found = collections.Counter()
    for _ in range(count):
        for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
            (folder.path / name).write_bytes(_spoiled(name, good[name], rng))
        if rng.random() < 0.2:
            _forge(folder.checkpoints[0], rng)
            folder.restore()
            found["forged"] += 1
        else:
            saved = folder.restore()
            found["refused" if saved is None else "read"] += 1
            if saved is not None:
                wanted = whole[saved.step]
                assert saved[1:] == wanted[1:]
                assert all(torch.equal(saved.tensors[k], wanted.tensors[k]) for k in wanted.tensors)
                rows = folder.metrics_file.read_bytes()
                assert good["metrics.jsonl"].startswith(rows)
        _put(folder.path, good)
    return found


def _put(path, contents):
    for name, content in contents.items():
        (path / name).write_bytes(content)


def _forge(file, rng):
    """Odd facts under a right digest."""
    held = {"a": torch.ones(2), "loss": torch.ones(())}
    facts = {"run": file.parent.name, "step": "3", "metrics_bytes": "0", "seconds": "1.0"}
    facts["metrics_digest"] = folders._hash(b"")
    for _ in range(rng.randrange(3)):
        odd = ["", "x", "-1", "9" * 5000, "nan", "inf", "1e400", "0"]
        facts[rng.choice(list(facts))] = rng.choice(odd)
    file.write_bytes(folders.save(held, facts | {"digest": folders._digest(held, facts)}))


def server_checkpoints(count, rng, place):
    """A Flower server's checkpoint: what was written, or a `ValueError` that names the file."""
    arrays = ArrayRecord({"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(3)})
    file, first = place / "server.safetensors", plain_state(FedAdam())
    strategy = FedAdam()
    strategy.m_t, strategy.eta = [np.ones(3), np.ones((2, 3))], 0.25
    server.write_checkpoint(file, strategy, arrays, 3, first)
    good = file.read_bytes()
    held, facts, _ = server._read(file)
    found = collections.Counter()
    for _ in range(count):
        forged = rng.random() < 0.5
        if forged:
            odd = dict(facts)
            memory = json.loads(facts["plain"])
            if rng.random() < 0.3:
                memory[rng.choice(ATTRIBUTES)] = rng.choice([1, "x", None, {}])
            odd["plain"] = (
                json.dumps(memory) if rng.random() < 0.3 else structured(memory, rng).decode(errors="replace")
            )
            if rng.random() < 0.3:
                odd[rng.choice(list(odd))] = rng.choice(["", "x", "-1", "nan", "9" * 5000])
            kept = {k: v for k, v in held.items() if rng.random() < 0.95}
            file.write_bytes(save(kept, odd | {"digest": server._digest(kept, odd)}))
        else:
            file.write_bytes(tensors(good, rng))
        fresh = FedAdam()
        try:
            saved = server.read_checkpoint(file, fresh, arrays)
        except ValueError as error:
            _names(error, place)
            found["refused"] += 1
        else:
            found["read"] += 1
            for name, value in vars(type(fresh)).items():
                assert getattr(type(fresh), name) is value or not callable(value)
            assert not {n for n, v in vars(fresh).items() if callable(getattr(type(fresh), n, None))}
            if not forged:
                assert (saved.done, fresh.eta) == (3, 0.25)
                assert all(np.array_equal(saved.arrays[k], arrays[k].numpy()) for k in arrays)
    file.unlink()
    return found


def merges(count, rng, place):
    """`merge`: a hostile update changes nothing but its own verdict."""
    shared = {
        "a": fbn.Running(torch.zeros(3), torch.ones(3)),
        "b": fbn.Running(torch.zeros(1), torch.ones(1)),
    }
    found = collections.Counter()
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        good = {f"good {k}": _update(shared, generator, k) for k in range(rng.choice([1, 2, 5]))}
        bad = {f"bad {k}": _hostile(shared, generator, rng) for k in range(rng.choice([1, 1, 3]))}
        rule = rng.choice([None, None, fbn.defense("median", 0)])
        wanted = fbn.merge(shared, good, aggregator=rule)
        order = list((good | bad).items())
        rng.shuffle(order)
        result = fbn.merge(shared, dict(order), aggregator=rule)
        left_out = {name for name in bad if not result.verdicts[name].used}
        found["refused"] += len(left_out)
        found["read"] += len(bad) - len(left_out)
        for name, running in result.statistics.items():
            assert running.mean.isfinite().all()
            assert (running.var >= 0).all()
            if len(left_out) == len(bad):
                assert torch.equal(running.mean, wanted.statistics[name].mean)
                assert torch.equal(running.var, wanted.statistics[name].var)
    return found


def _update(shared, generator, number):
    layers = {}
    for name, running in shared.items():
        noise = torch.rand(2, len(running.mean), generator=generator, dtype=torch.float64)
        layers[name] = fbn.Moments(16, noise[0], noise[1])
    return fbn.Update(layers, round=0, id=number)


def _hostile(shared, generator, rng):
    """An update with something wrong in it."""
    update = _update(shared, generator, 1000 + rng.randrange(10**6))
    layers = dict(update.layers)
    name = rng.choice(list(layers))
    moments = layers[name]
    kind = rng.randrange(11)
    odd = rng.choice([float("nan"), float("inf"), -float("inf")])
    if kind == 0:
        layers[name] = moments._replace(mean=torch.full_like(moments.mean, odd))
    elif kind == 1:
        layers[name] = moments._replace(var=torch.full_like(moments.var, rng.choice([odd, -1.0, -1e300])))
    elif kind == 2:
        layers[name] = moments._replace(count=rng.choice([-1, -(2**40), 2.5, "8", None, True]))
    elif kind == 3:
        layers[name] = moments._replace(mean=torch.zeros(rng.choice([1, 2, 4, 7]) + 3))
    elif kind == 4:
        layers[name] = moments._replace(var=torch.zeros(2, 2))
    elif kind == 5:
        del layers[name]
    elif kind == 6:
        layers["other"] = moments
    elif kind == 7:
        return fbn.Update(layers, round=rng.choice([-1, 1, 2**40, 10**5000]), id=update.id)
    elif kind == 8:
        layers[name] = moments._replace(count=rng.choice([2**63, 10**5000, 10**400]))
    elif kind == 9:
        fake = rng.choice([torch.Tensor.to_sparse, lambda t: t.to("meta"), lambda t: t.to(torch.complex64)])
        layers[name] = moments._replace(mean=fake(moments.mean))
    else:
        return rng.choice([None, [], {}, 5, "x", {name: None}, {name: (1, 2)}, {5: moments}])
    return fbn.Update(layers, round=0, id=update.id)
