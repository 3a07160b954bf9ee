"""
Where the demo ends by batch, learning rate and length of the run: `uv run python -m demo.stability`.

Each cell is a run of its own under `runs/stability/`, one after another, those that tell most first. A run that is
there already is only read, so a table that was cut short goes on. The figures are held-out accuracy at the end, one a
seed; the last column is a row's lowest over its best. With `--target-kl 0` nothing bounds a step; those runs stand
beside the others.

What is left out: which rate is best. The table asks whether a user who knows none of this ends far from it.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

import run_files

ROOT = Path(__file__).parent.parent
ROWS = [(300, 2, 4), (300, 4, 4), (60, 8, 8), (60, 4, 4), (60, 2, 4), (300, 8, 8), (60, 16, 8), (300, 16, 8)]
RATE = 0.004  # the recipe's
SHARES = (0.25, 1, 4)


def accuracy(steps: int, batch: int, groups: int, lr: float, target_kl: float, seed: int) -> float:
    """Held-out accuracy at the end of a run, which is made unless it is on record."""
    run = ROOT / "runs" / "stability" / f"{batch}x{groups}-{steps}-lr{lr:g}-kl{target_kl:g}-seed{seed}"
    settings = dict(
        task="demo", model="demo", steps=steps, batch=batch, groups=groups, learning_rate=lr, target_kl=target_kl
    )
    settings |= dict(seed=seed, eval_every=100, save_every=100)
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    if (run / "checkpoints").exists():
        flags = ["--resume", str(run)]
    else:
        shutil.rmtree(run, ignore_errors=True)  # it was cut short before its first checkpoint
        flags += ["--run-dir", str(run)]
    with (ROOT / "runs" / "stability.log").open("a") as log:
        subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, stdout=log, stderr=log, check=True)
    return float(run_files.JsonLines(run / "eval.jsonl").read()[-1]["eval/accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-kl", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    (ROOT / "runs" / "stability").mkdir(parents=True, exist_ok=True)
    print(f"| steps | batch | {' | '.join(f'lr {RATE * share:g}' for share in SHARES)} | lowest / best |")
    print("|---|---|" + "---|" * (len(SHARES) + 1))
    for steps, batch, groups in ROWS:
        cells = [
            [accuracy(steps, batch, groups, RATE * share, args.target_kl, seed) for seed in range(args.seeds)]
            for share in SHARES
        ]
        ends = [end for cell in cells for end in cell]
        shown = [", ".join(f"{100 * end:.0f}%" for end in cell) for cell in cells]
        print(f"| {steps} | {batch} x {groups} | {' | '.join(shown)} | {min(ends) / max(ends):.2f} |", flush=True)


if __name__ == "__main__":
    main()
