"""What the zoo needs before its packages are imported. Nothing is downloaded: models start untrained."""

import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
os.environ |= {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}

with warnings.catch_warnings():  # those of other people's packages are not ours to raise
    warnings.simplefilter("ignore")
    from torchvision_python import importable

    importable()
    import zoo  # noqa: F401


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.zoo)
            for kind in ("FutureWarning", "DeprecationWarning"):  # in other packages; ours are errors
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
