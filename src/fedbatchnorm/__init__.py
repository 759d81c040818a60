"""BatchNorm for federated learning: shared, unbiased running statistics.

Everywhere: `convert(model)`. A client, each round: `load_statistics`, train, `collect`. The server,
each round: `merge`. For deployment: `revert`. The README has a complete example.
"""

from .aggregation.defenses import defense
from .aggregation.drift import next_gradient
from .aggregation.statistics import MergeResult, Notice, merge
from .aggregation.verdicts import Verdict
from .norm.calibrate import calibrating
from .norm.convert import ConversionError, Finding, convert, inspect, revert, set_gradient
from .norm.exchange import collect, discard_step, load_statistics, statistics
from .norm.layers import (
    FederatedBatchNorm1d,
    FederatedBatchNorm2d,
    FederatedBatchNorm3d,
    FederatedSyncBatchNorm,
)
from .norm.messages import Sums, Update, from_sums, to_sums
from .norm.moments import Moments, Running, normalize
from .norm.registry import register
from .norm.wire import FormatError, from_bytes, to_bytes

__version__ = "0.1.0"

normalise = normalize  # its name in the first release

__all__ = [
    "ConversionError",
    "FederatedBatchNorm1d",
    "FederatedBatchNorm2d",
    "FederatedBatchNorm3d",
    "FederatedSyncBatchNorm",
    "Finding",
    "FormatError",
    "MergeResult",
    "Moments",
    "Notice",
    "Running",
    "Sums",
    "Update",
    "Verdict",
    "__version__",
    "calibrating",
    "collect",
    "convert",
    "defense",
    "discard_step",
    "from_bytes",
    "from_sums",
    "inspect",
    "load_statistics",
    "merge",
    "next_gradient",
    "normalize",
    "register",
    "revert",
    "set_gradient",
    "statistics",
    "to_bytes",
    "to_sums",
]
