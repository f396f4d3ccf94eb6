"""`make mutants`: mutation testing with mutmut, with tests chosen for each mutant.

mutmut writes into its working folder, so mutmut runs in a copy of the checkout, .mutants, and the tests run in
.mutants/mutants. First, every test runs once to record which functions it calls, in any process. Then every mutant of a
function runs with up to a minute of the tests that call the function, until one test fails. Both results are cached:
the next run repeats the mutants that survived and the changed test files, or all test files if another file has
changed. `rm -rf .mutants` clears the cache.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".mutants"
COPY = WORK / "mutants"  # mutmut requires a folder named "mutants"
NOT_NOTICED = (None, 0, 5, 33)  # exit codes of undetected mutants: not run, passed, no tests (5, 33)
NOTHING = "nothing.x_nothing__mutmut_"
BUDGET = 60  # seconds; maximum total duration of the tests chosen per mutant, unless one test takes longer
LISTED = Path(__file__).with_name("listed.txt")


def is_mutated(path: Path) -> bool:
    return path.suffix == ".py" and (path.parts[0] == "vil" or path.name == "train_imagenet.py")


def copy_repository() -> list[Path]:
    """Copy the checkout to .mutants, and files that mutmut does not mutate to .mutants/mutants. Return all paths."""
    shutil.rmtree(COPY / "tests", ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [path for path in map(Path, sorted(listed.stdout.splitlines())) if (ROOT / path).is_file()]
    for path in paths:
        for to in (WORK, COPY):
            if to == WORK or not is_mutated(path):
                (to / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, to / path)
    return paths


def what_tests_reach(files: list[str], paths: list[Path], jobs: int) -> dict[str, dict]:
    """Return the duration and the called functions of each test.

    Only changed test files are run again, or all test files if another file has changed.
    """
    cache = WORK / "reached.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    others = hashlib.sha256()
    for path in paths:
        if path.suffix != ".md" and not path.match("test_*.py") and not path.match("tools/mutants/*"):
            others.update((WORK / path).read_bytes())
    keys = {file: hashlib.sha256(others.digest() + (COPY / file).read_bytes()).hexdigest() for file in files}
    stale = [file for file in files if known.get(file, {}).get("key") != keys[file]]
    if stale:
        results = WORK / "reached"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        pytest = [sys.executable, "-m", "pytest", "-p", "reached", "-p", "no:randomly", "-p", "no:cacheprovider"]
        environment = dict(os.environ, MUTANT_UNDER_TEST="stats", REACHED=str(results))
        subprocess.run([*pytest, "-n", str(jobs), *stale], cwd=COPY, env=environment)
        tests = [json.loads(line) for file in results.glob("*.jsonl") for line in file.read_text().splitlines()]
        for file in stale:
            known[file] = dict(key=keys[file], tests=[t for t in tests if t["test"].split("::")[0] == file])
        cache.write_text(json.dumps(known))
    tests = {test["test"]: test for file in files for test in known[file]["tests"]}
    for name in [name for name in tests if tests[name]["failed"]]:
        print(f"fails in the copy without any mutant, and is left out: {name}")
        del tests[name]
    return tests


def chosen_tests(tests: list[dict]) -> tuple[list[str], float]:
    """Choose up to BUDGET seconds of tests, first the fastest case of each parametrized test, then other cases."""
    groups = defaultdict(list)
    for test in sorted(tests, key=lambda test: test["seconds"]):
        groups[test["test"].split("[")[0]].append(test)
    ranked = [(rank, test["seconds"], test["test"]) for group in groups.values() for rank, test in enumerate(group)]
    chosen, total = [], 0.0
    for _, seconds, name in sorted(ranked):
        if not chosen or total + seconds < BUDGET:
            chosen.append(name)
            total += seconds
    return chosen, total


def run_mutants(mutants, tests: dict[str, dict], jobs: int) -> None:
    from mutmut.__main__ import _register_mutant_result
    from mutmut.workers.isolation import get_mutant_runner

    reaching = defaultdict(list)
    for test in tests.values():
        for function in test["reached"]:
            reaching[function].append(test)
    plan = []
    for data, name, _ in mutants:
        chosen, seconds = chosen_tests(reaching[name.partition("__mutmut_")[0]])
        if chosen:
            plan.append((seconds, data, name, chosen))
        else:
            data.exit_code_by_key[name] = 33
            data.save()
    (WORK / "temporary").mkdir(exist_ok=True)
    plan.sort(key=lambda planned: planned[0])
    # As a control, some runs have no mutant, so their tests must pass.
    plan = [(*planned[:2], f"{NOTHING}{i}", planned[3]) for i, planned in enumerate(plan) if i % 20 == 0] + plan
    plan.sort(key=lambda planned: planned[0])
    data_of, results = {name: data for _, data, name, _ in plan}, []
    runner = get_mutant_runner(jobs)
    runner.startup()

    def wait_for_one():
        result = runner.wait_for_result()
        results.append(result)
        if not result.mutant_name.startswith(NOTHING):
            _register_mutant_result(result, data_of)
        shutil.rmtree(WORK / "temporary" / result.mutant_name, ignore_errors=True)
        if len(results) % 20 == 0 or len(results) == len(plan):
            print(f"{len(results)} of {len(plan)}", flush=True)

    try:
        for seconds, _, name, chosen in plan:
            while not runner.has_capacity():
                wait_for_one()
            # the third argument is a time limit; mutmut stops a test run after half of this limit in wall time
            runner.submit(name, chosen, math.ceil(2 * (2 * seconds + 15)), seconds)
        runner.signal_work_complete()
        while runner.pending_count():
            wait_for_one()
    except KeyboardInterrupt:
        runner.stop_all_workers()
    finally:
        runner.shutdown()
    failed = [result for result in results if result.mutant_name.startswith(NOTHING) and result.exit_code]
    if failed:
        print(f"without any mutant {len(failed)} runs failed: some of the mutants were not noticed, but such a failure")


def read_listed() -> list[tuple[str, str, set[str]]]:
    """Return the file, function and changed lines of each mutant in listed.txt."""
    blocks = []
    for block in LISTED.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            path, function, _ = lines[0].split(": ", 2)
            blocks.append((path, function, {line.strip() for line in lines[1:]}))
    return blocks


def functions_of(path: Path) -> dict[str, str]:
    """Return a dict from the name of each function of a file to its source. A method's name is CLASS.METHOD."""
    source = path.read_text()
    functions = {}
    for node in ast.parse(source).body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for part in node.body if prefix else [node]:
            if isinstance(part, ast.FunctionDef):
                functions[prefix + part.name] = ast.get_source_segment(source, part)
    return functions


def report_stale() -> None:
    """Print the mutants in listed.txt that change a line which no longer exists in the mutated function."""
    for path, function, changes in read_listed():
        file = ROOT / path
        source = functions_of(file).get(function, "") if file.is_file() else ""
        lines = {line.strip() for line in source.splitlines()}
        for missing in {change[2:] for change in changes if change.startswith("- ")} - lines:
            print(f"listed.txt: {path}: {function}: STALE: the function does not contain the line {missing!r}")


def report(mutants) -> None:
    """Print the share of detected mutants by file, and write survivors to .mutants/survivors.txt."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    listed, rows, survivors = read_listed(), defaultdict(Counter), []
    for data, name, _ in mutants:
        path, code = str(data.path), data.exit_code_by_key[name]
        rows[path]["mutants"] += 1
        if code not in NOT_NOTICED:
            rows[path]["noticed"] += 1
            continue
        function, owner = orig_function_and_class_names_from_key(name)
        function = f"{owner}.{function}" if owner else function
        diff = get_diff_for_mutant(name, path=data.path).splitlines()[2:]
        lines = [f"{line[0]} {line[1:].strip()}" for line in diff if line[0] in "+-"]
        if any((path, function) == block[:2] and block[2] <= set(lines) for block in listed):
            rows[path]["listed"] += 1
            continue
        rows[path] += Counter(left=1, untested=int(code in (5, 33)))
        reason = "no test reaches it" if code in (5, 33) else "survived"
        survivors.append("\n".join([f"{path}: {function}: {reason}", *lines]))
    (WORK / "survivors.txt").write_text("\n\n".join(sorted(survivors)) + "\n")
    rows["all"] = sum(rows.values(), Counter())
    print(f"{'':36}{'mutants':>8}{'noticed':>8}{'listed':>8}{'left':>8}{'no test':>8}{'score':>8}")
    for path, row in rows.items():
        counts = "".join(f"{row[name]:8}" for name in ("mutants", "noticed", "listed", "left", "untested"))
        print(f"{path:36}{counts}{row['noticed'] / max(1, row['mutants'] - row['listed']):8.1%}")
    if n := rows["all"]["mutants"] - rows["all"]["listed"]:  # the interval is Wilson's score interval
        share = rows["all"]["noticed"] / n
        middle = (share + 1.92 / n) / (1 + 3.84 / n)
        half = 1.96 / (1 + 3.84 / n) * math.sqrt(share * (1 - share) / n + 0.96 / n**2)
        print(f"as a sample: {share:.1%} noticed, 95% interval {middle - half:.1%} to {middle + half:.1%}")
    print(f"the others: {WORK / 'survivors.txt'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders to change (all)")
    parser.add_argument("--tests", nargs="*", help="files of tests (all)")
    parser.add_argument("--sample", type=int, help="number of randomly chosen mutants to test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    report_stale()
    WORK.mkdir(exist_ok=True)
    paths = copy_repository()
    os.chdir(WORK)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(COPY / "tools" / "mutants"), str(COPY)])
    sys.path[0] = str(COPY / "tools" / "mutants")

    from mutmut import __main__ as mutmut
    from mutmut.mutation.trampoline import set_mutant_under_test

    set_mutant_under_test("mutant_generation")
    with contextlib.redirect_stdout(io.StringIO()):
        mutmut.copy_src_dir()
        mutmut.setup_source_paths()
        mutmut.create_mutants(args.jobs)
    mutants, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    wanted = [Path(os.path.relpath((ROOT / path).resolve(), ROOT)) for path in args.paths]
    mutants = [m for m in mutants if not wanted or any(m[0].path == w or w in m[0].path.parents for w in wanted)]
    if args.sample and args.sample < len(mutants):
        mutants = random.Random(0).sample(mutants, args.sample)
    print(f"{len(mutants)} mutants")
    chosen = [COPY / path for path in args.tests or ["tests"]]
    found = [path for place in chosen for path in ([place] if place.is_file() else place.rglob("test_*.py"))]
    files = sorted({str(path.relative_to(COPY)) for path in found})
    tests = what_tests_reach(files, paths, args.jobs)
    run_mutants([m for m in mutants if m[2] in NOT_NOTICED], tests, args.jobs)
    report(mutants)


if __name__ == "__main__":
    main()
