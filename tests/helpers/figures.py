"""Access to the Matplotlib figures that the tested code saves."""

import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def kept_figures(monkeypatch) -> list[Figure]:
    """Return a list that collects every figure saved from now on, with the file name in the attribute `saved_to`."""
    figures, save = [], Figure.savefig

    def savefig(figure, file, *args, **kwargs):
        figure.saved_to = re.sub(r"^\.|\.\w+\.vil\.tmp$", "", Path(getattr(file, "name", "")).name)
        figures.append(figure)
        return save(figure, file, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def drawn(figure: Figure) -> list:
    """Return a figure's titles and labels, and the values of its images and curves."""
    return [
        (
            [axis.get_title(), axis.get_xlabel(), axis.get_ylabel(), *(line.get_label() for line in axis.get_lines())],
            [np.asarray(t) for image in axis.get_images() for t in (image.get_array(), image.get_clim())],
            [line.get_xydata() for line in axis.get_lines()],
        )
        for axis in figure.axes
    ]
