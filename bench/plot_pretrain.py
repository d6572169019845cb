"""Draw the losses of several runs of examples/pretrain.py that differ in their seed: the mean over the seeds, and each seed lightly.

python bench/plot_pretrain.py bench/records/h200_pretrain_small.json docs/pretrain_small_h200.png --recipes bf16,fp8,mxfp8,mxfp4
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SPAN = 25  # steps of the running mean
LAST = 100  # steps whose mean is the final loss in records without a loss on files held out


def smooth(losses: list[float]) -> list[float]:
    return [sum(losses[max(0, i - SPAN + 1) : i + 1]) / min(SPAN, i + 1) for i in range(len(losses))]


def final(run: dict, recipe: str) -> float:
    if "held_out" in run:
        return run["held_out"][recipe]
    return sum(run["losses"][recipe][-LAST:]) / LAST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--recipes", help="of those of the record; default all")
    args = parser.parse_args()
    runs = json.loads(args.record.read_text())["runs"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.2))
    for number, recipe in enumerate(args.recipes.split(",") if args.recipes else runs[0]["losses"]):
        curves = [run["losses"][recipe] for run in runs]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        for part, first in zip(axes, (0, len(mean) // 2), strict=True):
            steps = range(first, len(mean))
            for losses in curves:
                part.plot(steps, smooth(losses)[first:], color=f"C{number}", linewidth=0.5, alpha=0.35)
            label = f"{recipe}  {sum(final(run, recipe) for run in runs) / len(runs):.4f}"
            part.plot(steps, smooth(mean)[first:], color=f"C{number}", linewidth=1.2, label=label)
    axes[0].set(xlabel="step", ylabel=f"nats per byte, mean of {SPAN} steps")
    axes[1].set(xlabel="step", title="second half")
    what = "loss on files held out" if "held_out" in runs[0] else f"mean of the last {LAST}"
    axes[1].legend(title=f"recipe, {what}")
    kind = runs[0]["arguments"]["size"]
    figure.suptitle(f"{kind} byte model, {len(mean)} steps, {len(runs)} seeds, {runs[0]['device']}")
    figure.savefig(args.image, dpi=110)


if __name__ == "__main__":
    main()
