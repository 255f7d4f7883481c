"""Draws the README's figure from a run folder: ``python docs/make_figures.py RUN``."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib.image
import numpy as np

from sat_jax import plots
from sat_jax.run_folder import read_run


def main(run_dir: str) -> None:
    """Learning curve, mismatch and rates of one run, side by side."""
    run = read_run(Path(run_dir))
    pictures = []
    for plot in (plots.learning_curve, plots.mismatch, plots.rates):
        file = io.BytesIO()
        plot([run]).savefig(file, facecolor="white", dpi=110, format="png")
        file.seek(0)
        pictures.append(matplotlib.image.imread(file, format="png")[..., :3])
    height = max(p.shape[0] for p in pictures)
    padded = [np.pad(p, ((0, height - p.shape[0]), (0, 0), (0, 0)), constant_values=1) for p in pictures]
    matplotlib.image.imsave(Path(__file__).parent / "images" / "default_run.png", np.concatenate(padded, axis=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
