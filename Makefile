# Each target builds .venv when it is missing. EXTRA_PIP adds options, e.g. a constraints file.
PYTHON ?= python3
EXTRA_PIP ?=
BIN := .venv/bin
RUN := $(BIN)/python -m dspark_exp
# without a GPU three jobs share the cores: steps this small gain little from a second thread, and three of the four
# drafters at once leave no core idle while the last one trains
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
SHARED := hydra/launcher=joblib hydra.launcher.n_jobs=3 trainer.num_threads=$(shell echo $$(( $(CORES) < 6 ? 1 : $(CORES) / 3 )))
JOBS ?= $(if $(shell command -v nvidia-smi),,$(if $(filter 1,$(CORES)),,$(SHARED)))

.PHONY: table1 test lint interop ray mlflow-ui clean

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# without a GPU, prefer a CPU build of torch where the package index offers one: it saves gigabytes
	@command -v nvidia-smi >/dev/null || $(BIN)/python -m pip install -q -r .ci/constraints.txt 2>/dev/null || true
	$(BIN)/python -m pip install -q $(EXTRA_PIP) -e ".[dev]"
	touch $@

table1: .venv/installed   ## four drafters, nine benchmarks, one report in reports/table1/tiny
	$(RUN) +experiment=table1 $(JOBS) $(ARGS)

test: .venv/installed     ## the whole test suite, under 15 minutes on 2 cores, two processes of one thread
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/installed     ## format, lint, types, import rules
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

interop:                  ## exports read by the speculators package, in an environment of its own
	test -x .venv-interop/bin/python || $(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install -q $(EXTRA_PIP) -e ".[dev,interop]"
	@# its torchvision and torchaudio wheels do not match a CPU build of torch, and nothing here needs them
	.venv-interop/bin/python -m pip uninstall -q -y torchvision torchaudio
	.venv-interop/bin/python -m pytest tests/interop $(ARGS)

ray:                      ## a sweep on Ray, in an environment of its own: its launcher pins an old cloudpickle
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -q $(EXTRA_PIP) -e ".[dev,ray]"
	.venv-ray/bin/python -m pytest tests/integration -k ray $(ARGS)

mlflow-ui: .venv/installed ## compare runs at http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1 --port 5000

clean:
	rm -rf .venv outputs dist build
