# Two commands do everything on a machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
RUN := $(VENV)/bin/python
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-all lint fuzz faults bench figures wheel docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready  ## the memory of ResNet50 on an absent GPU, then a training with every lever on
	$(RUN) examples/resnet50/train.py --plan rtx-2080-ti
	@echo
	$(RUN) examples/resnet50/train.py --target rtx-2080-ti --checkpoints runs/demo

test: $(VENV)/.ready  ## the tests, without the heavy ones
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow" $(TESTS)

test-all: test  ## the heavy ones after them
	$(RUN) -m pytest -n 2 --dist worksteal -m slow $(TESTS)

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

fuzz: $(VENV)/.ready  ## many more random programs under random plans, with seeds of the day
	JAXMEM_FUZZ=20000 JAXMEM_DAY=$$(date +%Y%m%d) $(RUN) -m pytest -n 2 --dist worksteal \
		tests/test_fuzz.py tests/test_random_networks.py tests/test_aliasing.py \
		tests/test_metamorphic.py tests/peers

faults: $(VENV)/.ready  ## kills, full disks and damaged files, and what is left of them; an hour
	$(RUN) tests/faults.py

bench: $(VENV)/.ready  ## the benchmarks, into benchmarks/results; ONLY=planner runs a group, or several
	$(RUN) -m benchmarks $(ONLY)
	$(RUN) -m benchmarks.figures

figures: $(VENV)/.ready  ## fills the figures of README and docs in from benchmarks/results
	$(RUN) -m benchmarks.figures

# Tests that take about a minute together and need the wheel, its dependencies and pytest alone: not
# the repository, matplotlib, hypothesis or the packages of the examples. All but one of planning,
# which counts calls of a large program.
QUICK := accumulation bytes chain dots loss_scale offloading planning precision

wheel: $(VENV)/.ready  ## builds a wheel, installs it into an empty environment, runs the quick tests there
	rm -rf dist/wheel && mkdir -p dist/wheel
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist/wheel .
	$(PYTHON) -m venv dist/wheel/venv
	dist/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check dist/wheel/*.whl pytest
	dist/wheel/venv/bin/jaxmem install-compiler
	cp -r tests dist/wheel/tests
	cd dist/wheel && venv/bin/python -m pytest -q -c /dev/null -o markers=slow -p no:cacheprovider \
		$(QUICK:%=tests/test_%.py) -m "not slow" -k "not near_linearly"
	cd dist/wheel && venv/bin/jaxmem targets >/dev/null && \
		venv/bin/python -c 'import jaxmem; assert "site-packages" in jaxmem.__file__, jaxmem.__file__'

docs: $(VENV)/.ready  ## the documentation site, into site/
	$(RUN) -m benchmarks.page
	$(RUN) -m mkdocs build --strict

# What jaxmem itself needs comes first: then the compilers are fetched beside the rest. Python compiles
# a module when it is imported: all of them at once take longer than all else. Without the compiler
# for TPUs their tests are skipped.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile --editable
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(INSTALL) .
	$(RUN) -m jaxmem install-compiler --tpu & tpu=$$!; $(RUN) -m jaxmem install-compiler & gpu=$$!; \
		$(RUN) $(INSTALL) '.[test]' && wait $$gpu && { wait $$tpu || true; }
	touch $@

clean:
	rm -rf .venv-* dist runs site docs/results.md .pytest_cache .ruff_cache
