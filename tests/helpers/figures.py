"""The figures that a picture is drawn from, to look into what is drawn."""

from matplotlib.figure import Figure


def kept_figures(monkeypatch) -> list[Figure]:
    """Fills with every figure that is saved from now on."""
    figures, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        figures.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
