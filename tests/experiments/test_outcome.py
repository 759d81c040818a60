"""When a run counts as diverged: made-up results on both sides of the rule."""

import math
from pathlib import Path

import pytest

from fedbatchnorm.experiments import Run, read
from fedbatchnorm.experiments.outcome import divergence
from fedbatchnorm.experiments.results import Result

ROOT = Path(__file__).parents[2]
LIMIT = 10 * math.log(10)


def made_up(losses, accuracy=0.1, samples=None, test_losses=None, **settings):
    run = Run(rounds=len(losses), evaluate_every=1, **settings)
    rows = [
        {"round": i + 1, "accuracy": accuracy, "loss": test, "train_loss": train}
        for i, (train, test) in enumerate(zip(losses, test_losses or losses, strict=True))
    ]
    held = None if samples is None else {"classes": [*map(str, range(len(samples[0])))], "samples": samples}
    return Result(Path("x"), run, rows, {"accuracy": accuracy}, [{}], held)


TEN = [[10] * 10]
CASES = {
    "a loss that is lost": (made_up([2.0, None, None]), "the loss is not finite from round 2 on"),
    "a test loss that is lost": (made_up([2.0, 2.0], test_losses=[2.0, None]), "not finite from round 2"),
    "a loss that ran away": (made_up([2.0, 1.01 * LIMIT, 90.0]), "the training loss is 90 from round 2 on"),
    "it came back and went": (made_up([None, 2.0, None], samples=TEN), "from round 3 on"),
    "a large loss below the rule": (made_up([2.0, 0.99 * LIMIT]), ""),
    "a large test loss alone": (made_up([2.0, 2.0], test_losses=[2.0, 1e9]), ""),
    "at chance, and quiet": (made_up([2.3, 2.3]), ""),
    "just above chance": (made_up([2.0, None], accuracy=0.13), ""),
    "above chance of ten, a class of forty percent": (
        made_up([2.0, None], accuracy=0.4, samples=[[40] + [60 // 9] * 9]),
        "accuracy 40.0%, which is chance (the largest class is 43%)",
    ),
    "two classes": (made_up([1.0, 7.0], accuracy=0.5, samples=[[5, 5]]), "the training loss is 7"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_divergence_is_said_in_words(kind):
    result, words = CASES[kind]
    found = divergence(result)
    assert found.startswith("diverged: accuracy") if words else found == ""
    assert words in found


def test_in_the_committed_results_it_is_ten_runs_under_attack():
    results = read(ROOT / "results")
    lost = [result for result in results if divergence(result)]
    assert len(lost) == 10
    assert {(r.config.scheme, r.config.byzantine, r.config.defense) for r in lost} == {("fbn", 3, "none")}
    assert (
        max(r.summary["accuracy"] for r in lost)
        <= 0.12
        < min(r.summary["accuracy"] for r in results if isinstance(r.config, Run) and r not in lost)
    )
    assert results.to_pandas().diverged.fillna("").ne("").sum() == 10
