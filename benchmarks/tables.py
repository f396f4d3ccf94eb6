"""Rewrite the tables of measurements in the files PAGES.

The numbers come from benchmarks/results, docs/architecture.md and research/*.md.

    python benchmarks/tables.py

Each table follows a comment with the table's name, such as `<!-- table: models -->`. The files in benchmarks/results
are named after their GPU. All except h200_published.json contain results of `scan.py` or `throughput.py`.
h200_published.json compares the papers' own code with ours in one process, measured by a program that is not part of
this repository.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median

import timm
import torch

import vil  # noqa: F401  registers the models
from vil.fault_tolerance.files import write_atomically
from vil.published import published

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "vil/weights/README.md")
FAMILIES = {"ViL": "vil_{}", "ViM": "vim_{}", "DeiT": "deit_{}_patch16_224"}
DEIT_SMALL = "deit_small_patch16_224"
WEIGHTS = {"vil_tiny": "[Tiny ImageNet](vil/weights/README.md), full and pooled"}
PAPERS = {
    "vil": "[Liu et al.](https://arxiv.org/abs/2407.14207)",
    "vim": "[Zhu et al.](https://arxiv.org/abs/2401.09417)",
}


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def write_results(path: Path, rows: list[dict], **head: object) -> None:
    """Write results as a JSON file with one line per row, so that the file is easy to read and to diff."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{{\n{fields} "rows": [\n{lines}\n ]\n}}\n')


def measured_models() -> list[dict]:
    return results("h200_models")["rows"] + results("h200_base")["rows"]


def number(value: float | None) -> str:
    """Format a number with one decimal if it is below 1000 and the decimal is not 0, otherwise without decimals."""
    if value is None:
        return "-"
    return f"{int(value + 0.5)}" if value >= 1000 else f"{value:.1f}".removesuffix(".0")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def scan_beside() -> str:
    rows = []
    for scan in results("h200_published")["scans"]:
        pairs = list(zip(scan["published_us"], scan["ours_us"]))
        cells = [number(us) for pair in zip(*pairs) for us in pair]
        rows.append([", ".join(map(str, scan["shape"])), *cells, *(f"{theirs / ours:.1f}" for theirs, ours in pairs)])
    ratios = ["ratio forward", "ratio backward"]
    ours = ["this package, forward", "this package, backward"]
    return table(["B, D, L", "published, forward", "published, backward", *ours, *ratios], rows)


def scan() -> str:
    by_backend: dict = {}
    for row in results("h200_scan")["rows"]:
        by_backend.setdefault((row["recurrence"], *row["shape"]), {})[row["backend"]] = row
    rows = []
    for (recurrence, *shape), of in by_backend.items():
        if shape == [4, 768, 6085]:  # left out, because only the batch differs from (8, 768, 6085)
            continue
        floors = [f"{floor:.2f}" for floor in of["cuda"]["of_fp32_floor"]]
        us = {backend: [number(of[backend][f"{p}_us"]) for p in ("forward", "backward")] for backend in of}
        forward, backward = us["cuda"]
        cells = [forward, floors[0], backward, floors[1], *us["triton"]]
        rows.append([recurrence, ", ".join(map(str, shape)), *cells])
    head = ["CUDA forward, us", "lower bound / time"] + ["CUDA backward, us", "lower bound / time"]
    head += ["Triton forward, us", "Triton backward, us"]
    return table(["recurrence", "B, D, L", *head], rows)


def described(model: dict) -> str:
    return f"{model['task']}, {model['img_size']} pixels, batch {model['batch']}"


def models_beside() -> str:
    rows = []
    for m in results("h200_published")["models"]:
        speeds = [m["published_vim"], m["vil"], m["deit"], m["deit_compiled"]]
        theirs, ours, *others = map(number, speeds)
        rows.append([f"{m['size']}: {described(m)}", theirs, ours, f"{m['vil'] / m['published_vim']:.1f}", *others])
    return table(["case", "ViM, published code", "ViL", "ViL / ViM", "DeiT", "DeiT compiled"], rows)


def models() -> str:
    rows: dict[str, list[str]] = {}
    for row in measured_models():
        size = row["model"].split("_")[1]
        cells = rows.setdefault(f"{size}: {described(row)}", [])
        cells += [number(row[mode]["images_per_second"]) for mode in ("eager", "graph")]
        cells.append(f"{row['graph']['peak_gib']:.2f}")
    head = [f"{family}{what}" for family in FAMILIES for what in (", eager", ", graph", ", GiB")]
    return table(["", *head], [[label, *cells] for label, cells in rows.items()])


def pooled() -> str:
    rows: dict[str, list[str]] = {}
    for row in results("h100_pooled")["rows"]:
        cells = rows.setdefault(f"{row['model'].split('_')[1]}: {described(row)}", [])
        modes = ["graph", "compiled+graph"] if row["model"].startswith("deit") else ["graph"]
        found = [row.get(mode) for mode in modes]
        cells += [f"{number(m['images_per_second'])} / {m['peak_gib']:.2f}" if m else "-" for m in found]
    return table(
        ["", "ViL", "ViL pooled", "DeiT", "DeiT compiled"], [[label, *cells] for label, cells in sorted(rows.items())]
    )


def speed() -> str:
    """Tabulate the throughput of the small models as CUDA graphs, with DeiT also compiled."""
    measured = {(row["model"], row["task"], row["img_size"]): row for row in results("h200_pooled")["rows"]}
    columns = [
        ("vil_small_pooled", "graph"),
        ("vil_small", "graph"),
        (DEIT_SMALL, "graph"),
        (DEIT_SMALL, "compiled+graph"),
    ]
    rows = []
    for task, img_size in (("train", 224), ("train", 1248), ("infer", 224), ("infer", 1248)):
        cells = [number(measured[model, task, img_size][mode]["images_per_second"]) for model, mode in columns]
        rows.append([described(measured[DEIT_SMALL, task, img_size]), *cells])
    return table(["images/s", "`vil_small_pooled`", "`vil_small`", "DeiT-small", "DeiT-small, compiled"], rows)


def throughput(*names: str) -> dict[tuple[str, str, str], float]:
    """Return images/s by model, case and mode, as medians over repeated measurements, from files of results."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in (row for name in names for row in results(name)["rows"]):
        for mode in ("graph", "compiled+graph"):
            if mode in row:
                found.setdefault((row["model"], described(row), mode), []).append(row[mode]["images_per_second"])
    return {key: median(rates) for key, rates in found.items()}


def beside_compiled() -> str:
    """Tabulate the throughput of pooled ViL and of compiled DeiT with CUDA graphs, and the ratios of both."""
    measured = throughput("h200_train_224", "h200_pooled_infer", "h200_pooled_base", "h200_pooled_1248")
    rows = []
    for (model, case, mode), pooled in measured.items():
        if not model.endswith("_pooled") or mode != "graph":
            continue
        size = model.split("_")[1]
        deit = measured[f"deit_{size}_patch16_224", case, "compiled+graph"]
        rows.append([f"{size}: {case}", number(pooled), number(deit), f"{pooled / deit:.2f}"])
    return table(["images/s", "pooled ViL", "DeiT, compiled", "pooled ViL / compiled DeiT"], rows)


def sizes() -> str:
    """Tabulate the size, training throughput, weights and published top-1 of the models of the package.

    A cell for GFLOPs or throughput lists the full model, and after a slash the pooled variant if its value is known.
    """
    full, pooled = throughput("h200_models", "h200_base"), throughput("h200_train_224", "h200_pooled_base")
    cases = full | {key: rate for key, rate in pooled.items() if key[0].endswith("_pooled")}
    measured = {
        model: number(rate)
        for (model, case, mode), rate in cases.items()
        if case.startswith("train, 224 pixels") and mode == "graph"
    }
    columns = gflops(), measured
    rows = []
    for name in ("vil_tiny", "vil_small", "vil_base", "vim_tiny", "vim_small", "vim_base"):
        with torch.device("meta"):
            parameters = sum(p.numel() for p in timm.create_model(name).parameters())
        both = (name, f"{name}_pooled")
        family, top1 = name[:3], published(name)[0]
        source = f"{top1}, {PAPERS[family]}" if top1 else "none"
        weights = WEIGHTS.get(name, "none" if family == "vil" else "the authors' files load")
        cells = [" / ".join(values[model] for model in both if model in values) for values in columns]
        rows.append([f"`{name}`", f"{parameters:,}", *cells, weights, source])
    head = ["full / pooled", "parameters", "GFLOPs", "training, images/s", "weights", "published ImageNet-1k top-1"]
    return table(head, rows)


def gflops() -> dict[str, str]:
    """Return each model's GFLOPs from the table in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return dict(re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", page, re.M))


def research_rows(page: str, name: str) -> list[list[str]]:
    """Return the cells of a generated table in a page of research/, row by row, without the header row."""
    text = (ROOT / "research" / page).read_text()
    lines = text.split(f"<!-- table: {name} -->\n")[1].split("<!-- end -->")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def research_top1(model: str, page: str, study: str, column: int) -> str:
    """Return a model's mean top-1 from a table of a page of research/, or "-" if the table does not have the model."""
    rows = {cells[0]: cells for cells in research_rows(page, study)}
    return rows[model][column].split(" ± ")[0] if model in rows else "-"


def results_from_scratch() -> str:
    """Tabulate the test top-1 on Imagenette and Tiny ImageNet of models that were trained from scratch."""
    studies = (
        ("imagenette.md", "imagenette", 3),
        ("photographs.md", "photographs", 4),
        ("photographs.md", "literature", 2),
    )
    rows = [
        [label, *(research_top1(name, *study) for study in studies)]
        for label, name in (
            ("`vil_tiny_pooled`", "vil_tiny_pooled"),
            ("`vil_tiny`", "vil_tiny"),
            ("`vim_tiny`", "vim_tiny"),
            ("DeiT-tiny (5.7 M parameters)", "deit_tiny_patch16_224"),
            ("`vil_small_pooled`", "vil_small_pooled"),
            ("DeiT-small (22.1 M parameters)", DEIT_SMALL),
            ("ResNet-50 (25.6 M parameters)", "resnet50"),
        )
    ]
    published_vit = mean(float(cells[2]) for cells in research_rows("published_vit.md", "published-vit-init"))
    rows.append(["plain ViT (2.8 M parameters with 200 classes)", "-", "-", f"{published_vit:.2f}"])
    head = ["Imagenette, 200 epochs", "Tiny ImageNet, 30 epochs", "Tiny ImageNet, 300 epochs"]
    return table(["test top-1 in %", *head], rows)


def clothing() -> str:
    """Tabulate test top-1 on photographs of clothing for fine-tuning and for training from scratch."""
    head, found = ["test top-1 in %", "20 epochs", "100 epochs"], research_rows("clothing_fair.md", "clothing-fair")
    top1 = {tuple(cells[:3]): cells[5].split(" ± ")[0] for cells in found}
    rows = [
        [f"`{model}`, {start}", *(top1[model, start, epochs] for epochs in ("20", "100"))]
        for model in ("vil_tiny_pooled", "vil_tiny", "deit_tiny_patch16_224")
        for start in ("fine-tuned", "from scratch")
    ]
    return table(head, rows)


TABLES = {
    "results": results_from_scratch, "sizes": sizes,
    "speed": speed, "scan beside": scan_beside, "scan": scan, "models beside": models_beside,
    "models": models, "pooled": pooled, "beside compiled": beside_compiled, "clothing": clothing,
}  # fmt: skip


def renewed(page: str) -> str:
    """Return a Markdown page in which all tables that follow a comment `<!-- table: NAME -->` are regenerated."""
    pattern = r"(<!-- table: ([\w ]+) -->\n)(?:\|.*\n)*"
    return re.sub(pattern, lambda found: found[1] + TABLES[found[2]](), page)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
