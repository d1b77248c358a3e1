# make demo and make test need python3 (3.10 or later) with venv, and a C++ compiler; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))
VENV := .venv
VERSIONS := .ci/constraints.txt
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VERSIONS)

# Without it the folders kernels/ and passes/ of the checkout would be importable by their bare names, and
# transformers looks for a package called kernels.
export PYTHONSAFEPATH := 1
# The tokenizers library warns when a process forks after it was used in parallel.
export TOKENIZERS_PARALLELISM := false

# One area after the other, end to end last; make test runs everything.
SMOKE := tests/test_oracle.py tests/forests tests/losses tests/passes/packing tests/kernels/tiles tests/kernels/cpu \
	tests/backend/calls/test_inputs.py tests/backend/test_wrong_variants.py tests/planning/test_execute_wrong.py

.PHONY: demo test smoke test-gpu-versions lint docs docs-serve screenshots bench clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_rollouts.py $(ARGS)

# One thread per worker: the tests are many small computations.
test smoke: export OMP_NUM_THREADS := 1
test smoke: export TORCHINDUCTOR_COMPILE_THREADS := 1
test smoke: $(VENV)/.test
	$(BIN)/pytest -n $(WORKERS) $(if $(filter smoke,$@),$(SMOKE)) $(ARGS)

# The oldest versions that the library supports, which GPU machines have; downloads some gigabytes. Not part of .ci/run.
test-gpu-versions:
	$(MAKE) test VENV=.venv-gpu VERSIONS=.ci/gpu-constraints.txt

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m treefx.tools.words
	$(BIN)/mypy
	$(BIN)/mypy --strict --allow-untyped-calls --no-warn-unused-ignores examples

# Pages made from tables of the code, then the site in out/site: a warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m treefx.tools.troubleshooting docs/troubleshooting.md
	$(BIN)/python -m treefx.tools.bench.zoo.page docs/models.md examples/results/zoo-cpu-2026-11-29.json examples/results/zoo-inductor-cpu-2026-11-28.json
	$(BIN)/python -m treefx.tools.reference_pages docs
	$(BIN)/python -m treefx.tools.rows_picture docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f .ci/mkdocs.yml

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -f .ci/mkdocs.yml

# Pictures of the report's page; needs Chromium.
screenshots: $(VENV)/.examples
	$(BIN)/python -m treefx.tools.screenshots docs

bench: $(VENV)/.examples
	$(BIN)/python -m treefx bench forest
	$(BIN)/python -m treefx bench attention
	$(BIN)/python -m treefx bench step

clean:
	rm -rf .venv .venv-gpu build dist out *.egg-info

# torch first and alone: its wheel depends on the machine, and nothing after it may choose another one.
$(VENV)/.torch: $(VERSIONS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch triton
	touch $@

$(VENV)/.examples: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[examples,test,trainers]'
	touch $@

$(VENV)/.lint: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[examples,test,lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[examples,docs]'
	touch $@
