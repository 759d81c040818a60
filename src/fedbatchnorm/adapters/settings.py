"""What a wrapper for a Flower strategy can be set to; an error names the setting."""

from ..norm.moments import settings_problem
from .replies import MOST_EXAMPLES, MOST_STEPS, STATISTICS, attribute
from .share import GRADIENT


def check_settings(
    strategy: object,
    usual: tuple[float | None, float],
    steps: int | None,
    quorum: int,
    max_examples: float,
) -> None:
    """Numbers within their limits, and a strategy whose records do not get in the way."""
    problem = settings_problem(*usual)
    if problem:
        raise ValueError(problem)
    for name, value, least, most in (
        ("steps", 1 if steps is None else steps, 1, MOST_STEPS),
        ("quorum", quorum, 1, MOST_EXAMPLES),
    ):
        if not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is {value}; it must be a whole number from {least} to {most}")
    if not 0 < max_examples <= MOST_EXAMPLES:
        raise ValueError(f"max_examples is {max_examples}; it must be from 1 to {MOST_EXAMPLES}")
    for key in ("arrayrecord_key", "configrecord_key"):
        if attribute(strategy, key) in (STATISTICS, GRADIENT):
            taken = attribute(strategy, key)
            raise ValueError(f"the strategy's {key} is {taken!r}, which is taken: choose another")


def check_choices(population: object, on_divergence: object) -> None:
    """What can be a number or a word, or only some words."""
    number = isinstance(population, int) and not isinstance(population, bool) and population >= 1
    if not (number or population is None or population == "grid"):
        raise ValueError(f"population is {population!r}; it must be a number of clients, 'grid' or None")
    if on_divergence not in ("stop", "restore", "ignore"):
        raise ValueError(f"on_divergence is {on_divergence!r}; it must be 'stop', 'restore' or 'ignore'")
