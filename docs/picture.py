"""
Draws `docs/demo.svg`, held-out accuracy over steps and over seconds, one line per run:
`uv run --with matplotlib python -m docs.picture runs/A runs/B runs/C`.

Seconds are those of training steps; evaluations and checkpoints are left out.
"""

import argparse
import json
from pathlib import Path

PICTURE = Path(__file__).with_name("demo.svg")
COLORS = ["#3b82f6", "#f97316", "#10b981", "#a855f7", "#ec4899"]  # readable on white and on black
INK = "#808080"


def curve(run: Path) -> tuple[list[int], list[float], list[float]]:
    """Steps, seconds and accuracy (per cent) of each evaluation of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in evaluations]
    seconds = [sum(record["step/s"] for record in records if record["step"] <= step) for step in steps]
    return steps, seconds, [100 * record["eval/accuracy"] for record in evaluations]


def draw(runs: list[Path]) -> None:
    """Writes the picture."""
    import matplotlib  # here, because it is no dependency of the project

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "gwen",
        "font.family": "sans-serif",
        "font.size": 11,
    }
    matplotlib.rcParams |= dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for run, color in zip(runs, COLORS, strict=False):
        steps, seconds, accuracy = curve(run)
        for panel, across in zip(panels, (steps, seconds), strict=True):
            panel.plot(across, accuracy, color=color, linewidth=2, marker="o", markersize=4)
    for panel, label in zip(panels, ("steps", "seconds of training"), strict=True):
        panel.set(xlabel=label, ylim=(0, 100))
        panel.set_xlim(left=0)
        panel.grid(color=INK, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(INK)
    panels[0].set_ylabel("right answers, %")
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    draw(parser.parse_args().runs)
