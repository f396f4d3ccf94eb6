# make demo    set up .venv, train a small ViL on handwritten digits and validate it
# make test [PATHS=research/tests]    set up .venv and run the tests of the package, or of PATHS, in parallel and in
#              random order
# make wheel-test    build the wheel, install it into a new environment and run the README's quick start
# make lint    check style and types
# make mutants [PATHS="vil/data vil/kernels"] [TESTS=tests/data] [SAMPLE=200] [JOBS=2]
#              mutation tests: change the code and print the changes that no test notices
# make cuda-mutants [WORDS="forward_mma Hopper"]    mutation tests of the CUDA sources, which run in an emulator
# make timm-tests    run timm's model tests on this package's models
# make slurm-test    run scripts/slurm.sh under a Slurm of two nodes; needs root and the packages slurm-wlm munge iproute2

PYTHON ?= python3
BIN := .venv/bin
# Each process has one thread, because the tensors of the demo and the tests are too small for two threads.
export OMP_NUM_THREADS := 1

# There is one more worker than cores, because many tests wait for processes. At most 8 workers run, because each worker
# imports all packages.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test wheel-test lint timm-tests slurm-test mutants cuda-mutants

# Python compiles the packages on all cores, because pip would use one core. Errors are ignored, because a few files of
# the packages are for other versions of Python.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "pip now installs PyTorch and the other packages into .venv, which downloads several GB."
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

data/digits: .venv/installed
	rm -rf $@.tmp
	$(BIN)/python -m vil.data.digits $@.tmp
	mv $@.tmp $@

demo: .venv/installed data/digits
	rm -rf output/digits
	@echo "Next, a small ViL is trained on handwritten digits for 16 epochs, after kernels are compiled for this CPU."
	$(BIN)/vil train -c digits
	@echo "Next, the best checkpoint is validated. Validation loads the image files again and prints an interval."
	$(BIN)/vil validate --checkpoint output/digits/best.pt --workers 0
	@echo "Training curve: $(CURDIR)/output/digits/curve.png"

test: .venv/installed
	$(PYTEST) $(PATHS)

wheel-test:
	$(PYTHON) tools/wheel_test.py

timm-tests: .venv/installed
	$(BIN)/python tools/timm_suite.py -k "not contract"  # the contract test takes minutes, because it prunes at every depth

slurm-test: .venv/installed
	unshare --mount --net --uts --pid --fork --kill-child --mount-proc \
		$(BIN)/python -m pytest -p no:randomly -p no:xdist -o timeout=1500 tools/slurm/on_slurm.py

mutants: .venv/installed
	$(BIN)/python tools/mutants/run.py $(PATHS) $(if $(TESTS),--tests $(TESTS)) $(if $(SAMPLE),--sample $(SAMPLE)) \
		$(if $(JOBS),--jobs $(JOBS))

cuda-mutants: .venv/installed
	$(BIN)/python tools/cuda_mutants.py $(if $(JOBS),--jobs $(JOBS)) $(WORDS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
