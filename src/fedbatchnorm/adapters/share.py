"""How much of BatchNorm's gradient clients take: decided by the server, sent with every request to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..aggregation.drift import FIRST_SHARE, MOST, next_gradient
from ..aggregation.statistics import MergeResult
from ..norm.gradient import Limit, check_limit, check_share
from ..norm.moments import Running


class Share:
    """The share of BatchNorm's gradient and the limit, as the server has them.

    Example:
        >>> share = Share("auto", "auto")
        >>> share.gradient, share.settings()
        (0.8, {'gradient': 0.8, 'limit': 'auto'})
    """

    def __init__(self, gradient: float | Literal["auto"] | None, limit: Limit):
        """Take what the user set; an error names the setting.

        Args:
            gradient: a share that stays, "auto" for one that follows drift, None if clients have their own.
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
        """Begin a run, with what was saved of it if anything was."""
        known = self.follows and saved is not None
        self.gradient = saved if known else self._first  # pyrefly: ignore
        self.between = dict(between or {}) if known else {}

    def follow(self, before: Mapping[str, Running], merged: MergeResult) -> None:
        """Set the next round's share by what a merge has moved, and by how far clients were apart in each
        layer; frozen layers tell nothing."""
        if self.follows and merged.updated:
            assert self.gradient is not None
            self.gradient = next_gradient(self.gradient, before, merged.statistics, steps=merged.steps)
            self.between = merged.between

    def hold(self) -> None:
        """Hold as much as can be: what was let through made the model diverge."""
        self.gradient = MOST if self.follows else self.gradient
        self.between = {}

    def to_save(self) -> tuple[float | None, Mapping[str, float]]:
        """What a checkpoint needs: a share that was set is not the run's, but the user's."""
        return (self.gradient if self.follows else None), self.between

    def settings(self) -> dict[str, float | str | list[str] | list[float]]:
        """What clients are sent; nothing if the share is theirs."""
        if self.gradient is None:
            return {}
        limit = {} if self.limit is None else {"limit": self.limit}
        apart = {"layers": [*self.between], "between": [*self.between.values()]} if self.between else {}
        return {"gradient": self.gradient, **limit, **apart}

    def __str__(self) -> str:
        """In words, for a summary."""
        if self.gradient is None:
            return "as clients have it"
        how = ", follows drift" if self.follows else ""
        return f"{self.gradient:.3g}{how}; limit {'of the clients' if self.limit is None else self.limit}"
