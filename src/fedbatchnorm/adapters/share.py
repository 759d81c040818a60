"""The share of BatchNorm's gradient that clients use: set by the server, sent with every request to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..aggregation.drift import FIRST_SHARE, MOST, next_gradient
from ..aggregation.statistics import MergeResult
from ..norm.gradient import Limit, check_limit, check_share
from ..norm.moments import Running


class Share:
    """The server's share of BatchNorm's gradient, and the limit.

    Example:
        >>> share = Share("auto", "auto")
        >>> share.gradient, share.settings()
        (0.8, {'gradient': 0.8, 'limit': 'auto'})
    """

    def __init__(self, gradient: float | Literal["auto"] | None, limit: Limit):
        """Check the user's settings; an error names the one that is wrong.

        Args:
            gradient: a fixed share, "auto" for one that follows the drift, None if clients decide themselves.
            limit: None if clients have their own.
        """
        self.follows = gradient == "auto"
        if not (self.follows or gradient is None):
            try:
                gradient = check_share(gradient)  # pyrefly: ignore
            except ValueError as error:
                raise ValueError(f"{error}, or 'auto', or None to send nothing") from error
        self._first = FIRST_SHARE if self.follows else gradient
        self.limit = check_limit(limit)
        self.gradient: float | None = None
        self.between: Mapping[str, float] = {}
        self.start()

    def start(self, saved: float | None = None, between: Mapping[str, float] | None = None) -> None:
        """Begin a run, with the saved state if there is one."""
        known = self.follows and saved is not None
        self.gradient = saved if known else self._first  # pyrefly: ignore
        self.between = dict(between or {}) if known else {}

    def follow(self, before: Mapping[str, Running], merged: MergeResult) -> None:
        """Set the next round's share by the drift of a merge, and by how far apart clients were in each
        layer, without frozen layers.
        """
        if self.follows and merged.updated:
            assert self.gradient is not None
            self.gradient = next_gradient(self.gradient, before, merged.statistics, steps=merged.steps)
            self.between = merged.between

    def hold(self) -> None:
        """Use the largest share, after the model has diverged."""
        self.gradient = MOST if self.follows else self.gradient
        self.between = {}

    def to_save(self) -> tuple[float | None, Mapping[str, float]]:
        """What a checkpoint needs; a share that the user fixed is not saved."""
        return (self.gradient if self.follows else None), self.between

    def settings(self) -> dict[str, float | str | list[str] | list[float]]:
        """What clients are sent; nothing if they decide themselves."""
        if self.gradient is None:
            return {}
        limit = {} if self.limit is None else {"limit": self.limit}
        apart = {"layers": [*self.between], "between": [*self.between.values()]} if self.between else {}
        return {"gradient": self.gradient, **limit, **apart}

    def __str__(self) -> str:
        """As text, for a summary."""
        if self.gradient is None:
            return "as clients have it"
        how = ", follows drift" if self.follows else ""
        return f"{self.gradient:.3g}{how}; limit {'of the clients' if self.limit is None else self.limit}"
