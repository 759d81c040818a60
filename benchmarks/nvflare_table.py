"""The tables of docs/nvflare.md, from the results of nvflare_accuracy.py."""

import statistics

WAYS = {
    "plain": "NVFlare's FedAvg, plain BatchNorm",
    "ours": "NVFlare, federated BatchNorm",
    "simulator": "the library's simulation",
}


def same_clients(result):
    """Accuracy of each way, and the bytes of a round."""
    seeds, machine = result["rows"], result["machine"]
    rows = [["", f"test accuracy (%) after {result['rounds']} rounds, {len(seeds)} seeds"], ["---", "---"]]
    for way, name in WAYS.items():
        values = [100 * row[way] for row in seeds]
        rows.append([name, f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"])
    text = _lines(rows) + "\nBytes of tensors and statistics to a client and back in a round:\n\n"
    rows = [["model", "NVFlare alone", "with federated BatchNorm", "ratio"], ["---"] * 4]
    for r in result["traffic"]:
        rows.append([r["model"], f"{r['nvflare']:,}", f"{r['fbn']:,}", f"{r['fbn'] / r['nvflare']:.4f}"])
    where = f"{machine['name']}, torch {machine['torch']}, commit {result['commit']}"
    return f"{text}{_lines(rows)}\n`python benchmarks/nvflare_accuracy.py`, {where}.\n"


def _lines(rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
