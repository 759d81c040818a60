"""The tables of docs/recipes.md on which models convert, from the results of scan.py."""


def which_convert(result):
    """A line for each package, one for each class of BatchNorm, and what did not work by name."""
    packages = result["packages"]
    rows = [
        [
            f"{name} {p['version']}",
            f"{p['models']:,}",
            f"{p['batch_norm']:,}",
            f"{p['converted']:,} ({100 * p['converted'] / p['batch_norm']:.1f}%)",
            f"{len(p['not_built'])}",
        ]
        for name, p in packages.items()
    ]
    text = _table(["", "models", "with BatchNorm", "of these convert", "not built"], rows)
    rows = [
        [name, f"`{kind}`", f"{counts['models']:,}", f"{counts['layers']:,}", f"{_refused(p, kind):,}"]
        for name, p in packages.items()
        for kind, counts in sorted(p["layers"].items(), key=lambda item: -item[1]["models"])
    ]
    text += "\n" + _table(["", "class", "models that have it", "layers", "models refused for it"], rows)
    for name, p in packages.items():
        text += _listed(f"{name}, refused", p["refused"]) + _listed(f"{name}, not built", p["not_built"])
        text += _listed(f"{name}, statistics that are no BatchNorm's and stay", p["others"])
    return text + f"\n`python benchmarks/scan.py`, torch {result['torch']}, commit {result['commit']}.\n"


def _refused(package, kind):
    return sum(row["type"] == kind for row in package["refused"])


def _listed(title, rows):
    """A line for each cause with the models that have it; nothing if there is none."""
    causes = {}
    for row in rows:
        cause = f"`{row['type']}`: {row['why']}" if "type" in row else row["why"]
        causes.setdefault(cause, []).append(row["model"])
    return "".join(f"\n{title}: {', '.join(names)}. {cause}\n" for cause, names in causes.items())


def _table(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]) + "\n"
