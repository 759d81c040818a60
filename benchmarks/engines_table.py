"""Write the table of docs/engines.md: python benchmarks/engines_table.py [--check].

What stands between two marks comes from results/engines.json, which the conformance suite writes:
FEDBATCHNORM_CONFORMANCE=results/engines.json pytest tests/conformance.
"""

import json
import sys
from pathlib import Path

from table import table, write_or_check

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "engines.md", ROOT / "results" / "engines.json"
MARKS = "<!-- engines -->\n", "<!-- /engines -->\n"
sys.path.append(str(ROOT / "tests" / "conformance"))
from engines import ENGINES  # noqa: E402

PROPERTIES = (
    "exact statistics",
    "unequal clients",
    "local epochs",
    "cohorts",
    "NaN",
    "negative variance",
    "wrong shape",
    "missing key",
    "huge count",
    "stale round",
    "a client killed in mid-round",
    "a server killed and resumed",
    "quorum not met",
    "robust rule",
    "traffic",
)


def figures(result):
    """The table, what was not run and why, and where all that comes from."""
    found, notes = result["found"], {}
    unknown = found.keys() - set(PROPERTIES)
    if unknown:
        raise ValueError(f"{FILE} has properties that the table does not know: {', '.join(sorted(unknown))}")

    def cell(name, engine):
        passed = found.get(name, {}).get(engine.__name__)
        if passed is not None:
            return "passed" if passed else "**failed**"
        why = engine.cannot.get(name)
        if why is None:
            return "not run yet"
        number = notes.setdefault(why, len(notes) + 1)
        return f"not run ({number})"

    head = ["property", *(engine.title for engine in ENGINES)]
    rows = [[name, *(cell(name, engine) for engine in ENGINES)] for name in PROPERTIES]
    text = table(head, rows)
    text += "".join(f"\n({number}) {why[0].upper()}{why[1:]}.  " for why, number in notes.items()) + "\n"
    facts = {}
    for engine in ENGINES:
        about = result["engines"].get(engine.__name__)
        if about:
            versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            key = f"{about['machine']}, Python {about['python']}, {versions}, commit {about['commit'][:12]}"
            facts.setdefault(key, []).append(engine.title)
    return text + "".join(f"\n{'; '.join(titles)}: {key}.\n" for key, titles in facts.items())


def page(text):
    """The page, with what the results say between its marks."""
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"{PAGE} has no marks")
    return f"{head}{mark}{figures(json.loads(FILE.read_text()))}{end}{tail}"


if __name__ == "__main__":
    write_or_check({PAGE: page(PAGE.read_text(encoding="utf-8"))})
