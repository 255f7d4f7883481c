"""Draws the pictures in ``docs/images`` from run folders.

python docs/make_figures.py default_run RUN
python docs/make_figures.py smollm2_sums DENSE_RUN MOE_RUN
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib.image
import numpy as np

from sat_jax.report.contents import PANELS
from sat_jax.report.figures import draw
from sat_jax.runs import read_run

FIGURES = {
    "default_run": ("Learning curve", "Mismatch", "Gate, clip and intercept rate"),
    "smollm2_sums": ("Learning curve", "Mismatch"),
}


def main(name: str, *run_dirs: str) -> None:
    """The panels of that name, of all runs, side by side."""
    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    pictures = []
    for panel in (panel for title in FIGURES[name] for panel in PANELS if panel.title == title):
        file = io.BytesIO()
        draw(panel, runs).savefig(file, facecolor="white", dpi=110, format="png")
        file.seek(0)
        pictures.append(matplotlib.image.imread(file, format="png")[..., :3])
    height = max(p.shape[0] for p in pictures)
    padded = [np.pad(p, ((0, height - p.shape[0]), (0, 0), (0, 0)), constant_values=1) for p in pictures]
    matplotlib.image.imsave(Path(__file__).parent / "images" / f"{name}.png", np.concatenate(padded, axis=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
