"""Read, tabulate, test and plot the results of the associative recall study (research/recall.py)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from research.recall_model import MIXERS
from vil.evaluation.markdown import markdown_table
from vil.fault_tolerance.files import write_atomically

LEARNED = 90.0  # a run has learned the task if more than this percentage of its queries is correct


@dataclass
class Run:
    """One training run: the settings that identify the run, and the results after each epoch.

    `accuracy` is the percentage of correct queries in the test sequences. `loss` is the mean and `gradient_norm` the
    maximum over the epoch's training steps; each of the two is None if not finite.
    """

    mixer: str
    length: int
    width: int
    lr: float
    seed: int
    pairs: int
    batch: int
    epochs: int
    train_examples: int
    test_examples: int
    weight_decay: float
    stop_at: float
    precision: str = "bf16"
    parameters: int = 0
    accuracy: list[float] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    gradient_norm: list[float | None] = field(default_factory=list)
    # Each call of the program adds an entry with commit, device, torch version, epochs and seconds.
    sittings: list[dict] = field(default_factory=list)

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in SETTINGS)

    @property
    def finite(self) -> bool:
        return None not in self.loss + self.gradient_norm

    @property
    def ended(self) -> bool:
        if not self.accuracy:
            return False
        return len(self.accuracy) == self.epochs or self.accuracy[-1] > self.stop_at or not self.finite

    @property
    def cost(self) -> float:
        """Relative cost of the run: number of training tokens times width. Scheduling uses the cost."""
        return self.train_examples * self.epochs * self.length * self.width

    def __str__(self) -> str:
        return f"{self.mixer}, T {self.length}, width {self.width}, lr {self.lr:g}, seed {self.seed}"


SETTINGS = [f.name for f in fields(Run)][: [f.name for f in fields(Run)].index("parameters")]


def merged(files: Iterable[Path]) -> list[Run]:
    """Read and merge the runs of several files. If a run is in several files, the first file's run is kept."""
    runs: dict[tuple, Run] = {}
    for path in files:
        for run in (Run(**run) for run in json.loads(path.read_text())["runs"]):
            runs.setdefault(run.key, run)
    return list(runs.values())


def write(runs: list[Run], path: Path) -> None:
    write_atomically(path, json.dumps({"runs": [asdict(run) for run in runs]}, allow_nan=False) + "\n")


def experiments(runs: list[Run]) -> dict[str, list[Run]]:
    """Group the runs by all settings except mixer, learning rate and seed.

    The keys name the length, the width, and other settings that differ between groups.
    """
    free = ("mixer", "lr", "seed")
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(replace(run, mixer="", lr=0.0, seed=0).key, []).append(run)
    differ = [i for i, name in enumerate(SETTINGS) if name not in free and len({key[i] for key in groups}) > 1]
    shown = sorted({*differ, SETTINGS.index("length"), SETTINGS.index("width")})
    return {", ".join(f"{SETTINGS[i]} {key[i]}" for i in shown): group for key, group in groups.items()}


def learned(runs: list[Run]) -> int:
    return sum(run.accuracy[-1] > LEARNED for run in runs)


def shares(runs: list[Run]) -> str:
    """Return a Markdown table of the runs' accuracy, and of how many learned the task, by mixer and learning rate."""
    from scipy.stats import binomtest

    head = ["mixer", "learning rate", "runs", "median %", "best %", f"above {LEARNED:g}% (95% interval of the share)",
            "finite", "epochs"]  # fmt: skip
    table = [head]
    for mixer in MIXERS:
        of_mixer = [run for run in runs if run.mixer == mixer]
        rates = sorted({run.lr for run in of_mixer})
        for rate in [*rates, None] if rates else []:
            some = [run for run in of_mixer if rate in (None, run.lr)]
            ends, n = [run.accuracy[-1] for run in some], len(some)
            low, high = binomtest(learned(some), n).proportion_ci(method="wilson")
            epochs = sorted({min(counts := [len(run.accuracy) for run in some]), max(counts)})
            cells = [mixer, "all" if rate is None else f"{rate:g}", str(n), f"{statistics.median(ends):.1f}",
                     f"{max(ends):.1f}", f"{learned(some)} ({100 * low:.0f} to {100 * high:.0f}%)",
                     str(sum(run.finite for run in some)), " to ".join(map(str, epochs))]  # fmt: skip
            table.append(cells)
    return markdown_table(table)


def verdict(runs: list[Run]) -> str:
    """Return the text of Fisher's exact test of whether Longhorn and Mamba learn the task equally often.

    The test uses the learning rates and seeds that both mixers have, and pools runs over learning rates. Because the
    design is balanced, differences between learning rates make the test more conservative. The best accuracy over
    learning rates is also listed for each seed.
    """
    from scipy.stats import fisher_exact

    by_place = {mixer: {(r.lr, r.seed): r for r in runs if r.mixer == mixer} for mixer in ("longhorn", "mamba")}
    both = by_place["longhorn"].keys() & by_place["mamba"].keys()
    if not both:
        return ""
    n, counts = len(both), [learned([of[place] for place in both]) for of in by_place.values()]
    p = fisher_exact([[count, n - count] for count in counts]).pvalue
    first, second = counts
    lines = [
        f"Above {LEARNED:g}%: Longhorn {first} of {n} runs, Mamba {second} of {n}; "
        f"Fisher's exact test, two-sided: p = {p:.2g}."
    ]
    rates = {lr for lr, _ in both}
    seeds = sorted({seed for _, seed in both if all((lr, seed) in both for lr in rates)})
    for mixer, of in by_place.items():
        best = [max(of[lr, seed].accuracy[-1] for lr in rates) for seed in seeds]
        lines.append(
            f"Best of {len(rates)} learning rates, {mixer} by seed: {', '.join(f'{end:.1f}' for end in best)}; "
            f"{sum(end > LEARNED for end in best)} of {len(best)} above {LEARNED:g}%."
        )
    return "\n".join(lines) + "\n"


def report(runs: list[Run]) -> str:
    parts = [f"{label}\n\n{shares(group)}\n{verdict(group)}" for label, group in experiments(runs).items()]
    return "\n".join(parts)


def plot(runs: list[Run], path: Path) -> None:
    """Plot, for each experiment, the final accuracies by learning rate and the accuracy curves by epoch."""
    from matplotlib.figure import Figure

    groups = experiments(runs)
    colors = {mixer: f"C{i}" for i, mixer in enumerate(MIXERS)}
    figure = Figure(figsize=(9, 0.6 + 3.2 * len(groups)), layout="constrained")
    for (label, group), (ends, curves) in zip(groups.items(), figure.subplots(len(groups), 2, squeeze=False)):
        rates = sorted({run.lr for run in group})
        mixers = [mixer for mixer in MIXERS if any(run.mixer == mixer for run in group)]
        seeds = max(run.seed for run in group) + 1
        for run in group:
            # Shift the points horizontally by mixer and seed, so that points of one learning rate do not overlap.
            offset = 0.8 * ((mixers.index(run.mixer) + (run.seed + 0.5) / seeds) / len(mixers) - 0.5)
            ends.plot(rates.index(run.lr) + offset, run.accuracy[-1], "o", color=colors[run.mixer], markersize=4)
            curves.plot(range(1, len(run.accuracy) + 1), run.accuracy, color=colors[run.mixer], linewidth=0.7)
        ends.set(title=label, xlabel="learning rate", ylabel="accuracy of recall (%)", ylim=(-3, 103))
        ends.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        ends.axhline(LEARNED, color="grey", linewidth=0.5)
        ends.legend(handles=[ends.plot([], [], "o", color=colors[m], label=m)[0] for m in mixers])
        curves.set(xlabel="epoch", ylim=(-3, 103))
    figure.savefig(path, dpi=150)
