"""The README's table and the plot, made from recorded rows; needs the extra "examples" for matplotlib.

    python benchmarks/report.py            writes README.md between its markers, and results/end_to_end.png
    python benchmarks/report.py --check    fails where either differs from the rows

Both show one run: rows of one commit, day and kind of machine (rows.py), the latest that has our rows and a peer's.
The plot carries a digest of its rows, so that --check does not depend on how a version of matplotlib draws.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt
from matplotlib.ticker import LogFormatter, NullLocator
from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PLOT = RESULTS / "end_to_end.png"
BEGIN, END = "<!-- benchmark table: begin, written by benchmarks/report.py -->", "<!-- benchmark table: end -->"

RUN = ("commit", "date", "gpu", "torch", "triton")
CASE = ("impl", "precision", "system", "atoms")
REFERENCE_CASE = ("cu", 1000)  # the force errors and the memory of the table

PEERS = {
    "fairchem:general": "fairchem-core, general mode, float32",
    "fairchem:multigpu": "fairchem-core, multigpu",
    "fairchem:nitro": "fairchem-core, nitro (its check of the weights' file switched off)",
}
SYSTEMS = {"cu": "{} Cu", "water": "water, {}", "c60": "C60"}

Row = dict[str, Any]


def read_rows(bench: str) -> list[Row]:
    """All recorded rows of a benchmark, in the order of the files."""
    lines = [line for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row["bench"] == bench]


def latest_run(rows: list[Row]) -> list[Row]:
    """The rows of the latest run that has our rows and a peer's. Raises ValueError where it has a case twice."""
    runs: dict[tuple, list[Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in RUN)
        runs[key] = [*runs.pop(key, []), row]  # the run that was added to last comes last
    measured = {key: {r["impl"].partition(":")[0] for r in run if r["median_ms"]} for key, run in runs.items()}
    candidates = [key for key, families in measured.items() if {"fastuma", "fairchem"} <= families]
    if not candidates:
        raise ValueError(f"{RESULTS}: expected a run with rows of fastuma and of fairchem, found none")
    run = runs[sorted(candidates, key=lambda key: key[RUN.index("date")])[-1]]
    cases = [tuple(row[k] for k in CASE) for row in run]
    twice = sorted({case for case in cases if cases.count(case) > 1}, key=str)
    if twice:
        raise ValueError(f"{RESULTS}: expected one row a case in the run of {run[0]['commit']}, got several of {twice}")
    return run


def label(row: Row) -> str:
    """What ran, in words."""
    if row["impl"] == "fastuma":
        return f"ase-fastuma, `{row['precision']}`"
    return PEERS.get(row["impl"], row["impl"].replace("fairchem:", "fairchem-core, "))


def by_label(run: list[Row]) -> dict[str, list[Row]]:
    """Rows of each way to evaluate, ours first, in the order in which they were measured."""
    ordered = sorted(run, key=lambda row: row["impl"] != "fastuma")
    found: dict[str, list[Row]] = {}
    for row in ordered:
        found.setdefault(label(row), []).append(row)
    return found


def cell(row: Row | None, key: str, form: str) -> str:
    """One number of the table, or why there is none."""
    if row is None or row[key] is None:
        row = row or {}
        return "out of memory" if row.get("out_of_memory") else "failed" if row.get("error") else "-"
    return format(row[key], form).replace("e-0", "e-")


def table(run: list[Row]) -> str:
    """The README's part: what was measured, then ms for each structure, memory, first call and force error."""
    order = {name: i for i, name in enumerate(SYSTEMS)}
    systems = sorted({(row["system"], row["atoms"]) for row in run}, key=lambda s: (order[s[0]], s[1]))
    headers = [SYSTEMS[name].format(atoms) for name, atoms in systems]
    last = [("peak_gib", ".2f", "peak GiB"), ("force_rel_err", ".1e", "force error")]
    last = [column for column in last if any(row[column[0]] for row in run if _is_reference(row))]
    reference = SYSTEMS[REFERENCE_CASE[0]].format(REFERENCE_CASE[1])
    headers += [f"{name}, {reference}" for *_, name in last]
    lines = [f"| ms an evaluation | {' | '.join(headers)} |", "|---" * (len(headers) + 1) + "|"]
    for name, rows in by_label(run).items():
        found = {(row["system"], row["atoms"]): row for row in rows}
        cells = [cell(found.get(system), "median_ms", ".1f") for system in systems]
        cells += [cell(found.get(REFERENCE_CASE), key, form) for key, form, _ in last]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    about = run[0]
    intro = f"""\
Measured on an {about["gpu"]} with torch {about["torch"]} and triton {about["triton"]}: medians of energy, forces and
stress through ASE (`benchmarks/end_to_end.py`), rattled structures, random weights of UMA-S's shape. Force errors are
relative, against float64. Rows of one commit, day and kind of machine: {about["commit"]}, {about["date"]}; they are in
`benchmarks/results/`, each with its command."""
    return f"{intro}\n\n" + "\n".join(lines) + f"\n\n![Time and memory against atoms]({PLOT.relative_to(ROOT)})"


def _is_reference(row: Row) -> bool:
    return (row["system"], row["atoms"]) == REFERENCE_CASE


def digest(run: list[Row]) -> str:
    """A fingerprint of the rows that the plot shows."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def draw(run: list[Row]) -> None:
    """Plot time and memory of copper crystals against their atoms."""
    sizes = sorted({row["atoms"] for row in run if row["system"] == "cu"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), sharex=True, layout="constrained")
    for name, rows in by_label(run).items():
        crystals = sorted((row for row in rows if row["system"] == "cu"), key=lambda row: row["atoms"])
        style = {"marker": "o", "linestyle": "-" if name.startswith("ase-fastuma") else "--"}
        style["label"] = name.replace("`", "").split(" (")[0]
        for axis, key in zip(axes, ("median_ms", "peak_gib"), strict=True):
            points = [(row["atoms"], row[key]) for row in crystals if row[key] is not None]
            axis.plot(*zip(*points, strict=True) if points else ([], []), **style)
    for axis, title in zip(axes, ("ms an evaluation", "peak memory (GiB)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="Cu atoms", ylabel=title)
        axis.set_xticks(sizes, map(str, sizes), minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axis.grid(alpha=0.3, which="both")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{run[0]['gpu']}: energy, forces and stress through ASE, commit {run[0]['commit']}")
    figure.savefig(PLOT, dpi=120, metadata={"Description": digest(run)})


def readme_with(part: str) -> str:
    """The README with this part between its markers. Raises ValueError where they are missing."""
    text = README.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{README}: expected the lines {BEGIN!r} and {END!r}, each once")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{part}\n{END}{rest.split(END)[1]}"


def plotted_digest() -> str | None:
    """The digest that the plot carries; None without a plot."""
    if not PLOT.exists():
        return None
    with Image.open(PLOT) as image:
        return image.info.get("Description")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something is stale")
    options = parser.parse_args()
    run = latest_run(read_rows("end_to_end"))
    text = readme_with(table(run))
    if not options.check:
        README.write_text(text)
        draw(run)
        return
    stale = [README.name] if README.read_text() != text else []
    stale += [PLOT.name] if plotted_digest() != digest(run) else []
    if stale:
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/report.py")


if __name__ == "__main__":
    main()
