"""The benchmarks behind research/README.md: their data, models and statistics."""

import hashlib
import json
import math
import re
import statistics

import pytest
import timm
import torch
from scipy.stats import chi2
from scipy.stats import t as student

from benchmarks import scan as published_scans
from research import recall as mqar
from research import seeds, transfer
from vil.published import PUBLISHED

SCAN, PASSES = ["batch, channels, tokens"], ["forward", "backward"]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


def test_the_best_learning_rate_is_the_one_that_ends_highest():
    run = dict(mixer="longhorn", length=16, width=16, lr=1e-3, pairs=2, parameters=5, accuracy=[10.0, 60.0])
    runs = [run, run | dict(lr=1e-2, accuracy=[90.0, 50.0])]
    runs += [run | dict(lr=1e-2, length=32, pairs=4, parameters=7, accuracy=[80.0])]
    runs += [run | dict(mixer="attention", accuracy=[99.0]), run | dict(width=32, accuracy=[7.0])]
    lines = mqar.markdown(runs).splitlines()
    assert lines[0] == "| width | mixer | parameters | T 16, 2 pairs | T 32, 4 pairs |"
    assert lines[2:] == [
        "| 16 | longhorn | 5 to 7 | 60.0 (0.001) | 80.0 (0.01) |",
        "| 16 | attention | 5 | 99.0 (0.001) | - |",
        "| 32 | longhorn | 5 | 7.0 (0.001) | - |",
    ]


def test_seeds_are_compared_in_pairs():
    top1 = {"vil_tiny": [90.0, 92.0, 94.0], "vim_tiny": [89.0, 92.0, 91.0], "deit_tiny_patch16_224": [80.0, 80.0, 80.0]}
    runs = [
        dict(model=m, seed=s, parameters=1000, top1=v, epoch_seconds=seconds)
        for m, values in top1.items()
        for s, (v, seconds) in enumerate(zip(values, (9.0, 2.0, 1.9)))  # the first while the machine was busy
    ]
    lines = seeds.report(runs).splitlines()
    assert lines[2].startswith("| vil_tiny | 1,000 | 92.00 ± 2.00 | 90.00 92.00 94.00 | 2.00 |")
    # differences 1, 0, 3: mean 4/3, standard error sqrt(7/3 / 3), t at 2 degrees of freedom 4.3027
    half = 4.3027 * math.sqrt(7 / 9)
    assert f"+1.33 ({4 / 3 - half:+.2f} to {4 / 3 + half:+.2f}), p = 0.27" in lines[3]


def test_the_published_results_are_those_of_the_files(request):
    """research/README.md quotes what research/results/*.json hold."""
    docs = request.config.rootpath / "docs"
    text, log = ((docs / name).read_text() for name in ("results.md", "log/2026-11-evidence.md"))
    assert mqar.markdown(json.loads((docs / "results" / "mqar.json").read_text())["runs"]) in text
    for name in ("digits", "digits_few", "cifar10", "rehearsal", "rehearsal2"):
        assert seeds.report(json.loads((docs / "results" / f"{name}.json").read_text())["runs"]) in text
    digest = hashlib.sha256((docs.parent / "weights" / "vil_tiny_fractals.safetensors").read_bytes()).hexdigest()
    for name, page in (("transfer", text), ("transfer_112", log)):
        transferred = json.loads((docs / "results" / f"{name}.json").read_text())
        assert transfer.report(transferred["runs"]) in page
        assert transferred["sha256 of the weights"] == digest


def test_the_published_predictions_are_those_of_the_runs(request):
    results = request.config.rootpath / "docs" / "results"
    text = (results.parent / "results.md").read_text()
    for name in ("cifar10", "rehearsal", "rehearsal2"):
        runs = json.loads((results / f"{name}.json").read_text())["runs"]
        judged = seeds.Judged.read(results / f"{name}.csv.gz")
        assert judged.runs == [f"{run['model']}-{run['seed']}" for run in runs]
        assert [run["top1"] for run in runs] == pytest.approx((100 * judged.right_NM.mean(0)).tolist())
        assert seeds.compare_images(runs, judged) in text


@pytest.fixture(scope="module")
def pages(request):
    root = request.config.rootpath
    readme = (root / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]
    return readme, (root / "docs" / "results.md").read_text(), (root / "docs" / "benchmarks.md").read_text()


@pytest.fixture(scope="module")
def studies(request):
    """The top-1 by seed: of each study's models, and of the ways of transfer by pixels and images a class."""
    results = request.config.rootpath / "docs" / "results"
    runs = {
        name: json.loads((results / f"{name}.json").read_text())["runs"]
        for name in ("digits", "digits_few", "cifar10", "rehearsal", "rehearsal2", "transfer", "transfer_112")
    }
    found = {
        name: {m: {r["seed"]: r["top1"] for r in runs[name] if r["model"] == m} for m in seeds.MODELS}
        for name in ("digits", "digits_few", "cifar10", "rehearsal", "rehearsal2")
    }
    return runs, found | {224: transfer.complete(runs["transfer"]), 112: transfer.complete(runs["transfer_112"])}


def compared(first, second):
    """Mean difference over the seeds that both have, its 95% interval, and p, by the paired t-test's formulas."""
    gaps = torch.tensor([first[seed] - second[seed] for seed in first if seed in second], dtype=torch.float64)
    mean, error = gaps.mean().item(), gaps.std().item() / math.sqrt(len(gaps))
    half = error * student.ppf(0.975, len(gaps) - 1)
    return mean, mean - half, mean + half, 2 * student.sf(abs(mean) / error, len(gaps) - 1)


def average(by_seed):
    return sum(by_seed.values()) / len(by_seed)


def deviation(by_seed):
    return torch.tensor(list(by_seed.values()), dtype=torch.float64).std().item()


def rounded_p(p):
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def numbers_of(text):
    return {n.strip(",") for n in NUMBER.findall(re.sub(r"\]\([^)]*\)|commit \w+|`[^`]*`", "", text))}


def row_of(text, claim):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {claim}")]
    return line


def test_the_claim_about_vim_says_what_the_rehearsals_say(pages, studies):
    _, found = studies
    ours, vim, deit = seeds.MODELS
    gaps = {name: compared(found[name][ours], found[name][vim]) for name in ("rehearsal", "rehearsal2")}
    p_values = [compared(found[name][ours], found[name][vim])[3] for name in ("digits", "digits_few", "cifar10", *gaps)]
    lowest, second = sorted(p_values)[:2]
    expected = {f"{average(found[name][model]):.2f}" for name in gaps for model in (ours, vim)}
    expected |= {f"{value:.2f}" for gap in gaps.values() for value in gap[:3]} | {rounded_p(p) for p in p_values}
    expected |= {rounded_p(5 * lowest), rounded_p(4 * second), f"{average(found['rehearsal2'][deit]):.2f}"}
    expected |= {f"{gaps['rehearsal2'][0] - gaps['rehearsal2'][1]:.1f}"}
    assert numbers_of(row_of(pages[1], "ViL trains as well as ViM")) == expected | {"224", "1,000", "768,000"}


def test_what_is_said_of_photographs_is_what_came_out(pages, studies):
    runs, found = studies
    ours, vim, deit = (found["cifar10"][model] for model in seeds.MODELS)
    *gap, p = compared(ours, vim)
    means = [f"{average(by_seed):.2f}" for by_seed in (ours, vim, deit)]
    (views,) = {f"{run['images']:,}" for run in runs["cifar10"]}
    expected = {*means, *(f"{value:.2f}" for value in gap), rounded_p(p), rounded_p(compared(ours, deit)[3])}
    row = numbers_of(row_of(pages[1], "... and small, on photographs"))
    assert {number.lstrip("-") for number in row} == {number.lstrip("-") for number in expected} | {views, "10"}
    assert (len(ours), len(vim), len(deit)) == (3, 3, 2)


def test_the_claim_about_weights_and_the_guide_say_what_the_study_says(pages, studies, request):
    _, found = studies
    ways = (transfer.FINE_TUNED, transfer.SCRATCH, *list(transfer.SETTINGS)[2:])
    expected = {f"{average(found[224][size][way]):.1f}" for size in (20, 5) for way in ways}
    many, few = (compared(*(found[224][size][way] for way in ways[:2])) for size in (20, 5))
    gaps = [found[224][5][ways[0]][seed] - found[224][5][ways[1]][seed] for seed in range(5)]
    assert transfer.report(studies[0]["transfer"]).count("| 0.11 |\n") == 1  # few's, corrected
    expected |= {f"{value:.1f}" for value in (*many[1:3], *few[1:3])} | {rounded_p(few[3]), "0.11"}
    expected |= {f"{edge(gaps):.0f}" for edge in (min, max)} | {f"{average(found['digits_few']['vil_tiny']):.1f}"}
    assert many[3] * 6 < 0.001
    row = row_of(pages[1], "Pre-training on generated images")
    assert numbers_of(row) == expected | {"224", "20", "5", "256", "0.001"}
    guide = (request.config.rootpath / "docs" / "guide.md").read_text()
    assert f"ends {many[0]:.0f} points above training it from scratch in the same 256 updates" in guide


def test_what_a_reader_should_know_of_the_easier_images_follows_from_the_runs(pages, studies):
    runs, found = studies
    ours, vim, _ = ([run for run in runs["rehearsal2"] if run["model"] == model] for model in seeds.MODELS)
    first, second, third = (found["rehearsal2"][model] for model in seeds.MODELS)
    *_, p_of_three = compared({seed: first[seed] for seed in range(3)}, second)
    _, low, high, _ = compared(first, second)
    spread = deviation({seed: first[seed] - second[seed] for seed in first})
    twelve, ten = (
        epochs * statistics.median(run["epoch_seconds"] for run in own) for epochs, own in ((12, ours), (10, vim))
    )
    assert ten < twelve < ten * 11 / 10
    at_ten, at_twelve, end = (
        [run["curves"]["eval_top1"][epoch - 1] for run in own] for epoch, own in ((10, vim), (12, vim), (12, ours))
    )
    expected = {rounded_p(p_of_three), f"{first[2] - second[2]:.2f}", f"{first[3] - second[3]:.2f}"}
    expected |= {f"{high - low:.1f}", f"{spread:.1f}", f"{2 * student.ppf(0.975, 6) * spread / math.sqrt(7):.1f}"}
    expected |= {f"{spread * math.sqrt(3 / chi2.ppf(q, 3)):.1f}" for q in (0.025, 0.975)} | {f"{twelve:.0f}"}
    expected |= {f"{edge(values):.0f}" for values in (at_ten, end) for edge in (min, max)}
    expected |= {f"{(sum(end) - sum(values)) / 4:.1f}" for values in (at_ten, at_twelve)}
    expected |= {f"{first[0] - third[0]:.1f}"}
    text = pages[1].split("\n### Easier images\n")[1].split("What a reader should know:")[1].split("\n## ")[0]
    elsewhere = {"0.11", "99.6", "98.6", "81.8", "73.4", "1.15", "1.18", "84.06", "79.51"}  # in the log, and in 6568b81
    settings = {"0", "1", "2", "4", "10", "12", "60", "128", "300", "0.1", "0.2", "0.25", "104", "250", "25,000", "5"}
    assert numbers_of(text) - elsewhere - settings == expected


def test_the_card_of_the_weights_says_what_the_study_says(studies, request):
    _, found = studies
    scratch, tuned, features, random, pixels = transfer.SETTINGS
    lines = (request.config.rootpath / "weights" / "README.md").read_text().splitlines()
    for size in (20, 5):
        _, low, high, p = compared(found[224][size][tuned], found[224][size][scratch])
        gaps = [found[224][size][tuned][seed] - top1 for seed, top1 in found[224][size][scratch].items()]
        expected = {f"{of(found[224][size][way]):.1f}" for of in (average, deviation) for way in (tuned, scratch)}
        expected |= {f"{average(found[112][size][way]):.1f}" for way in (tuned, scratch)}
        if size == 20:
            small = average(found["digits_few"]["vil_tiny"])
            expected |= {f"{low:.1f}", f"{high:.1f}", "0.001", "0.16", f"{small:.1f}"}
        else:
            expected |= {f"{min(gaps):.0f}", f"{max(gaps):.0f}", rounded_p(p), "0.11"}
        (line,) = [line for line in lines if line.startswith(f"- with {size} fine-tuned")]
        assert numbers_of(line) == expected | {str(size), "112"}
    (line,) = [line for line in lines if line.startswith("- as features")]
    ways = [found[224][size][way] for size in (20, 5) for way in (features, random, pixels)]
    assert numbers_of(line) == {f"{of(way):.1f}" for of in (average, deviation) for way in ways} | {"20", "5"}


def test_what_is_said_of_smaller_images_is_what_came_out(pages, studies):
    _, found = studies
    scratch, tuned, *_, pixels = transfer.SETTINGS
    text = pages[1].split("\n## Weights that help\n")[1].split("\n## ")[0]
    (badly, smaller) = (
        re.search(rf"^- {words}.*$", text, re.MULTILINE)[0] for words in ("A good part", "At 112 pixels")
    )
    behind = average(found[224][20][pixels]) - average(found[224][20][scratch])
    small = average(found["digits_few"]["vil_tiny"])
    less = average(found[224][20][tuned]) - small
    assert numbers_of(badly) == {f"{value:.1f}" for value in (behind, small, less)} | {"20", "0.16"}
    expected = {"0.0012", "112", "224", "20", "5", "0.064"}  # corrected for twelve; and after three draws
    for size in (20, 5):
        expected |= {f"{average(found[112][size][way]):.1f}" for way in (tuned, scratch)}
        for trained_at in (112, 224):
            *gap, p = compared(found[trained_at][size][tuned], found[112][size][scratch])
            expected |= {f"{value:.1f}" for value in gap} | {f"{p:.2g}"}
    assert {number.lstrip("-") for number in numbers_of(smaller)} == {number.lstrip("-") for number in expected}


def test_the_published_repetition_differs_in_time_alone(request):
    results = request.config.rootpath / "docs" / "results"
    runs, again = (
        json.loads((results / f"{name}.json").read_text())["runs"] for name in ("rehearsal2", "rehearsal2_again")
    )
    found = {(run["model"], run["seed"]): run for run in runs}
    assert len(again) == 5
    for one in again:
        other = found[one["model"], one["seed"]]
        assert all(one[name] == other[name] for name in ("parameters", "epochs", "images", "updates", "loss"))
        assert one["training_seconds"] != other["training_seconds"]
        for name, values in one["curves"].items():
            assert len(values) == 12
            assert (values == other["curves"][name]) == (not name.endswith("images_per_second"))


def read_tables(text):
    """Every table of a page as rows of cells, without the line under its head."""
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    tables = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines] for lines in blocks]
    return [[head, *body] for head, _, *body in tables]


def table(text, *head):
    """{first cell: other cells} of the table with these columns."""
    (found,) = [body for columns, *body in read_tables(text) if columns == list(head)]
    return {label: cells for label, *cells in found}


WHOLE_MODELS = ("", "ViL", "ViM here", "ViM, published code", "DeiT")
# of docs/benchmarks.md: the scan and models beside the published code in one process, and all of ours in another
SCAN_BESIDE = ["B, D, L", "published forward", "backward", "ours, forward", "backward"] + [
    f"{p}, times" for p in PASSES
]
MODELS_BESIDE = ["", "ViM, published code", "ViL", "times", "DeiT", "DeiT compiled"]
SCANS = ["recurrence", "B, D, L", "backend"]
MEASURED = ["", "model", "eager", "graph"]


def test_sizes_and_published_numbers_of_the_readme_are_those_of_the_models(pages):
    for row in next(body for head, *body in read_tables(pages[0]) if "baseline" in head):
        for model, quoted in (row[0:2], row[2:4]):
            with torch.device("meta"):
                built = timm.create_model(model.strip("`"))
            assert quoted == f"{sum(p.numel() for p in built.parameters()):,}"
        size = row[0].strip("`").removeprefix("vil_")
        numbers = {name.removesuffix(f"-{size}"): top1 for name, (top1, _) in PUBLISHED[size].items()}
        assert row[4] == ", ".join(f"{family} {top1}" for family, top1 in numbers.items())


def test_ratios_are_those_of_the_times_beside_them(pages):
    scans, models = table(pages[2], *SCAN_BESIDE), table(pages[2], *MODELS_BESIDE)
    assert len(scans) == 4
    assert len(models) == 7
    for row in scans.values():
        for published, ours, times in zip(row[:2], row[2:4], row[4:], strict=True):
            assert times == f"{float(published) / float(ours):.1f}"
    for published, ours, times, *_ in models.values():
        assert times == f"{float(ours) / float(published):.1f}"
    (every,) = [body for head, *body in read_tables(pages[2]) if head[:3] == SCANS]
    for recurrence, shape, _, *cells in every:
        theirs = published_scans.PUBLISHED[recurrence].get(tuple(map(int, shape.split(", "))))
        if recurrence == "longhorn" and theirs:
            assert [float(cell) for cell in scans[shape][:2]] == list(theirs)
        for i, us in enumerate(cells[::4]):
            exact = [float(us) + rounded for rounded in (-0.05, 0, 0.05)]
            assert cells[4 * i + 1] in ({f"{theirs[i] / each:.1f}" for each in exact} if theirs else {"-"})


def test_speeds_are_quoted_from_the_row_that_was_measured(pages):
    readme, results, benchmarks = pages
    scans = table(benchmarks, *SCAN_BESIDE)
    for shape, *quoted in (
        *((shape, *cells) for shape, cells in table(readme, *SCAN, "CUDA", "against the published kernels").items()),
        *((shape, *cells) for shape, cells in table(results, *SCAN, *PASSES, *(f"{p}, times" for p in PASSES)).items()),
    ):
        expected = [float(number) for number in scans[shape][2:]]
        assert [float(number) for cell in quoted for number in NUMBER.findall(cell.replace(" x", ""))] == expected
    words = re.search(
        r"([\d.]+) to ([\d.]+) times forward, ([\d.]+) to ([\d.]+) times backward, ([\d.]+) and ([\d.]+)", results
    )
    of_one = scans.pop("1, 768, 197")
    forward, backward = ([row[column] for row in scans.values()] for column in (4, 5))
    expected = [end(times, key=float) for times in (forward, backward) for end in (min, max)]
    assert [*words.groups()] == expected + of_one[4:]
    beside = table(benchmarks, *MODELS_BESIDE)
    (measured,) = [body for head, *body in read_tables(benchmarks) if head == MEASURED]
    models = {(stage, model): graph.split(" / ")[0] for stage, model, _, graph in measured}
    for page in (readme, results):
        assert table(page, *WHOLE_MODELS).keys() == beside.keys()
        for label, quoted in table(page, *WHOLE_MODELS).items():
            stage, size, pixels, batch = re.fullmatch(r"(\w+) (\w+), (\d+) pixels, batch (\d+)", label).groups()
            row = f"{stage}, {pixels}, B {batch}"
            vil, vim, deit = (models[row, f"{family}_{size}"] for family in ("vil", "vim", "deit"))
            assert quoted == [vil, vim, beside[label][0], deit]
    latency = ("", "ViL", "ViM", "DeiT (timm)")
    assert table(readme, *latency) == table(results, *latency)


def p_of_shares(first, of_first, second, of_second):
    """Fisher's exact test, two-sided, to one digit: tables with the same sums that are no likelier."""
    total, of = first + second, of_first + of_second

    def likelihood(k):
        return math.comb(of_first, k) * math.comb(of_second, total - k) / math.comb(of, total)

    found = likelihood(first) * (1 + 1e-9)
    return float(f"{sum(p for k in range(of_first + 1) if (p := likelihood(k)) <= found):.1g}")


def test_what_the_readme_says_of_runs_is_what_came_out(pages, studies, request):
    """Every number of its prose is tied to where it comes from; what is left over are settings."""
    readme, results, benchmarks = pages
    text = re.sub(r"^\|.*\n", "", readme, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|commit \w+|\(\w{7}\)", "", text)

    def quoted(pattern):
        nonlocal text
        found = re.search(pattern, text)
        text = text[: found.start()] + text[found.end() :]
        return found.groups()

    runs = {
        name: json.loads((request.config.rootpath / "docs" / "results" / f"{name}.json").read_text())["runs"]
        for name in ("mqar", "digits", "rehearsal", "rehearsal2")
    }
    best = {(r["mixer"], r["length"]): 0.0 for r in runs["mqar"]}
    for run in runs["mqar"]:
        key = run["mixer"], run["length"]
        best[key] = max(best[key], run["accuracy"][-1])
    (rerun,) = [rows for head, *rows in read_tables(results) if head == ["", "1e-3", "2.2e-3", "4.6e-3", "1e-2"]]
    ends = [[int(value) for cell in cells for value in cell.split(", ")] for _, *cells in rerun]
    level, *shares = map(int, quoted(r"above (\d+)% were (\d+) of (\d+) runs and (\d+) of (\d+),"))
    assert shares == [number for accuracies in ends for number in (sum(a > level for a in accuracies), 16)]
    assert p_of_shares(*shares) == float(re.search(r"16 runs \(Fisher's exact test, p = ([\d.]+);", results)[1])
    assert quoted(r"the best at (\d+)% and (\d+)%") == tuple(str(max(accuracies)) for accuracies in ends)
    quoted(r"at (512) tokens Longhorn learns it with most")
    longest, least = map(int, quoted(r"[Uu]p to (\d+) tokens all three of Longhorn, Mamba and attention reach (\d+)%"))
    assert all((value >= least) == (length <= longest) for (mixer, length), value in best.items() if mixer == "mamba")
    assert all(value >= least for (_, length), value in best.items() if length <= longest)

    _, found = studies
    (images,) = quoted(r"([\d,]+) images a run on one H200")
    assert {images} == {f"{run['images']:,}" for name in ("rehearsal", "rehearsal2") for run in runs[name]}
    for name, number in (("rehearsal", "three"), ("rehearsal2", "four")):
        vil, vim, *of_gap = quoted(
            number + r" seeds: ViL ([\d.]+)%, ViM ([\d.]+)%, a difference of ([\d.]+) points "
            r"\(([\d.]+) to ([\d.]+), p = ([\d.]+)\)"
        )
        ours, theirs = (found[name][model] for model in ("vil_tiny", "vim_tiny"))
        assert len(ours) == len(theirs) == {"three": 3, "four": 4}[number]
        assert [vil, vim] == [f"{average(by_seed):.2f}" for by_seed in (ours, theirs)]
        *gap, p = compared(ours, theirs)
        assert of_gap == [*(f"{value:.2f}" for value in gap), f"{p:.3f}"]
    (deit,) = quoted(r"and DeiT with one seed ([\d.]+)%")
    assert [deit] == [f"{run['top1']:.2f}" for run in runs["rehearsal2"] if run["model"] == "deit_tiny_patch16_224"]
    _, epochs, *millions, our_top1, vim_top1, p, deit_top1 = quoted(
        r"CIFAR-(10) in (\d) epochs on a CPU, models of ([\d.]+) to ([\d.]+) M parameters, three seeds: ViL ([\d.]+)%, "
        r"ViM ([\d.]+)%, which is no significant difference \(p = ([\d.]+)\); DeiT, two seeds, ([\d.]+)%"
    )
    assert {int(epochs)} == {run["epochs"] for run in studies[0]["cifar10"]}
    sizes = [run["parameters"] / 1e6 for run in studies[0]["cifar10"]]
    assert millions == [f"{min(sizes):.2f}", f"{max(sizes):.2f}"]
    ours, vim, deit = (found["cifar10"][model] for model in seeds.MODELS)
    assert [our_top1, vim_top1, deit_top1] == [f"{average(by_seed):.2f}" for by_seed in (ours, vim, deit)]
    assert p == rounded_p(compared(ours, vim)[3])
    (classes,) = quoted(r"images of ([\d,]+) classes")
    assert classes == "1,000"

    top1 = {model: [run["top1"] for run in runs["digits"] if run["model"] == model] for model in seeds.MODELS}
    vil, vim, p, deit = quoted(r"ViL ([\d.]+)%, ViM ([\d.]+)%, [\w ]*\(p = ([\d.]+)\), and DeiT ([\d.]+)%")
    assert [vil, vim, deit] == [f"{sum(values) / len(values):.2f}" for values in top1.values()]
    differences = torch.tensor(top1["vil_tiny"], dtype=torch.float64) - torch.tensor(top1["vim_tiny"])
    t = differences.mean() / differences.std() * math.sqrt(len(differences))
    assert p == f"{2 * float(student.sf(abs(t), len(differences) - 1)):.2f}"

    millions, share, right, of, minutes, seconds, torch_version, timm_version = quoted(
        r"ViL of ([\d.]+) M parameters reaches ([\d.]+)% top-1 \((\d+) of (\d+) held-out digits\) in (\d+) min (\d+) s"
        r"[^(]*\([^,]*, torch ([\d.]+), timm ([\d.]+)"
    )
    assert millions == f"{runs['digits'][0]['parameters'] / 1e6:.2f}"
    assert share == f"{100 * int(right) / int(of):.1f}"
    demo = f"{share}% ({right} of {of}) in {minutes} min {seconds} s, training and validation together, on two cores "
    assert demo + f"(AMD EPYC virtual machine, torch {torch_version}, timm {timm_version}, commit d15eb1c)" in results

    ours, deits = quoted(r"`vil_tiny` trained at (\d+) images/s where DeiT-tiny had (\d+)")
    assert re.search(rf"`vil_tiny` at batch 128 {ours} \([\d to]+\), DeiT-tiny {deits} ", benchmarks)

    ends = {
        (name, gpus): cells
        for head, *body in read_tables(benchmarks)
        if head[0] == "config"
        for name, gpus, *cells in body
    }
    use = (request.config.rootpath / "README.md").read_text()
    rates = re.search(r"trains `vil_tiny` from files at (\d+) images/s on one H200 and at (\d+) on two", use)
    assert [*rates.groups()] == [ends["vil_tiny", gpus][0] for gpus in "12"]
    for page in (readme, results):
        rows = table(page, "", "images/s", "evaluation of 50,000 images, model and EMA", "300 ImageNet epochs")
        for gpus, cells in zip("12", rows.values(), strict=True):
            rate, *_, evaluated, hours = ends["vil_tiny", gpus]
            assert cells == [rate, f"{50_000 / float(evaluated):.1f} s", f"{float(hours):.1f} h"]
            assert float(hours) == pytest.approx(
                300 / 3600 * (1_281_167 / float(rate) + 50_000 / float(evaluated)), abs=0.01
            )

    beside = table(benchmarks, *MODELS_BESIDE)
    train, infer = (
        [f"{stage} {size}, 224 pixels, batch {batch}" for size in ("small", "tiny")]
        for stage, batch in (("train", 128), ("infer", 256))
    )
    times = quoted(r"trains ([\d.]+) \(small\) and ([\d.]+) times \(tiny\)[^.]* and infers ([\d.]+) and ([\d.]+) times")
    assert [*times] == [beside[label][2] for label in (*train, *infer)]
    compiled = quoted(r"DeiT trains at (\d+) \(small\) and (\d+) \(tiny\) images/s")
    assert [*compiled] == [beside[label][4] for label in train]
    level, faster = quoted(r"At (\d+) pixels `vil_small` trains as fast as DeiT, from (\d+) on faster")
    speeds = re.search(r"vil_small trains at\s+([\d., and]+) images/s and deit_small at ([\d., and]+)\.", benchmarks)
    sizes = re.search(r"--resolutions ([\d ]+) --modes graph`, where vil_small", benchmarks)[1].split()
    ours, theirs = (dict(zip(sizes, NUMBER.findall(numbers), strict=True)) for numbers in speeds.groups())
    assert ours[level] == theirs[level]
    measured = table(results, *WHOLE_MODELS)
    assert all(float(cells[0]) > float(cells[-1]) for label, cells in measured.items() if f"{faster} pixels" in label)
    left = {number.strip(",") for number in NUMBER.findall(text)}
    assert left == {"64", "224", "2"}  # the width of recall, pixels, threads
