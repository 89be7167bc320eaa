PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TEST := $(PY) -m pytest
# What libraries keep in a home stays here where it cannot be written.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export HOME := $(CURDIR)/$(VENV)/home
endif

.PHONY: train test test-compiled test-cuda-build test-latest test-oldest test-hosts test-gpu package docs lint clean

train: $(VENV)/.installed-train
	$(VENV)/bin/grpo-fast train quickstart output_dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.installed-test
	$(TEST) -n 2 --dist worksteal

test-compiled: $(VENV)/.installed-test  # every kernel test on the PTX of these architectures, without a GPU
	set -e; for each in sm_80 sm_89 sm_90; do EMULATE=$$each $(TEST) -n 2 --dist worksteal tests/kernels; done

test-cuda-build: CUDA := $(VENV)-cuda
test-cuda-build: $(VENV)/.installed-test  # with the torch that a package index gives on Linux, and no GPU
	$(PYTHON) -m venv --clear $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet $$(sed -n 's/^torch==/torch===/p' .ci/requirements/base.txt)
	$(PY) -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(CUDA)/bin/python -c "import site; print(site.getsitepackages()[0])")/locked.pth
	$(CUDA)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

test-latest: LATEST := $(VENV)-latest
test-latest:  # with what pip takes today beside the newest vLLM, whose sources are read but not run
	$(PYTHON) -m venv --clear $(LATEST)
	$(LATEST)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
		--platform manylinux_2_28_x86_64 --dest $(LATEST)/vllm vllm
	$(LATEST)/bin/python -c "import glob, zipfile; wheel = zipfile.ZipFile(*glob.glob('$(LATEST)/vllm/*.whl')); \
		wheel.extractall('$(LATEST)/vllm', [n for n in wheel.namelist() if n.endswith(('.py', 'METADATA'))])"
	sed -n 's/^Requires-Dist: \([^;[]*\)$$/\1/p' $(LATEST)/vllm/*/METADATA > $(LATEST)/vllm/constraints.txt
	$(LATEST)/bin/python -m pip install --quiet --constraint $(LATEST)/vllm/constraints.txt \
		--editable ".[test,triton,liger,trl,quickstart,bitsandbytes,torchao]"
	$(LATEST)/bin/python -m pip install --quiet --no-deps -r .ci/requirements/no-deps.txt
	$(LATEST)/bin/python -m pip list
	VLLM_SOURCES=$(LATEST)/vllm $(LATEST)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

test-oldest: OLDEST := $(VENV)-oldest
test-oldest: $(VENV)/.installed-test  # with the oldest transformers of the range, beside the locked set
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet \
		$$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/transformers==\1.*/p' pyproject.toml)
	$(OLDEST)/bin/python -m pip uninstall --quiet --yes numpy
	$(PY) -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(OLDEST)/bin/python -c "import site; print(site.getsitepackages()[0])")/locked.pth
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

test-hosts: TOOLS := $(VENV)-tools
test-hosts:  # what pip would install beside the newest release of each trainer that takes our head
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet uv
	$(TOOLS)/bin/python .ci/hosts

package: TOOLS := $(VENV)-tools
package:  # the sdist, and the wheel without csrc/, which an index takes
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet build twine
	rm -rf dist
	GRPO_FAST_CUDA=0 $(TOOLS)/bin/python -m build
	$(TOOLS)/bin/python -m twine check --strict dist/*-py3-none-any.whl dist/*.tar.gz

docs: DOCS := $(VENV)-docs
docs:  # the site in site/: links, headings and the reference are checked
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps -r .ci/requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

test-gpu: $(VENV)/.installed-test
	$(TEST) -m gpu

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

$(VENV)/.installed-train: pyproject.toml setup.py .ci/requirements/base.txt .ci/requirements/no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r .ci/requirements/base.txt
	$(PY) -m pip install --quiet --no-deps -r .ci/requirements/no-deps.txt
	$(PY) -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-train .ci/requirements/test.txt .ci/requirements/test-no-deps.txt
	$(PY) -m pip install --quiet -r .ci/requirements/test.txt
	$(PY) -m pip install --quiet --no-deps -r .ci/requirements/test-no-deps.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-cuda $(VENV)-latest $(VENV)-oldest $(VENV)-tools $(VENV)-docs site build dist *.egg-info
