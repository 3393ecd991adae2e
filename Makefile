# Every target does all set-up itself: .venv has the newest JAX that a Python here can run,
# .venv-oldest the oldest one that jdp supports, both pinned. A second call starts at once.
# A fresh machine needs Python with venv and make; uv, from PyPI, fills the environments.

JOBS ?= 2
# An interpreter to try first, for one that is not found: make test PYTHON=/opt/python/bin/python3
PYTHON ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Without bytecode each process of a test compiles JAX anew: 4.8 s in place of 1.4 s.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's settings.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
FOR_NEWEST := $(PYTHON) python3.12 $(wildcard $(PYENV)/3.12.*/bin/python) python3.13 python3.14 \
	python3 $(wildcard $(PYENV)/3.13.*/bin/python $(PYENV)/3.14.*/bin/python)
FOR_OLDEST := $(PYTHON) python3.11 python3 $(wildcard $(PYENV)/3.11.*/bin/python)

# Prints the path of the first candidate that runs and has such a version, or nothing.
# It is asked itself: a name on the PATH may be a version manager's with no Python behind it.
find = for python in $(1); do \
	if "$$python" -c 'import ensurepip, sys, venv; assert $(2); print(sys.executable)' 2> /dev/null; \
	then break; fi; done
newest = $(call find,$(FOR_NEWEST),(3, 12) <= sys.version_info < (3, 15))
oldest = $(call find,$(FOR_OLDEST),(3, 11) <= sys.version_info < (3, 12))

UV := .venv-uv/bin/uv
# Environment, what is installed into it.
install = $(UV) pip install -q --python $(1)
# Compiles what is imported; the tests of other packages are not.
compiled = $(1)/bin/python -m compileall -q -j $(JOBS) -x '/tests/' \
	$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pytest = $(1)/bin/python -m pytest -n $(JOBS) --dist loadgroup --second-try

.PHONY: help demo test test-all test-oldest test-csrc test-gpu test-ray test-notebook test-schedules schedules wheel release-check fuzz lint docs bench compare clean

help:  ## this list
	sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' Makefile | expand -t 20

demo: .venv/ready  ## train on handwritten digits, on 4 ranks of this machine's CPU
	.venv/bin/python examples/digits.py

# What is tested anew only when it changes: its digest lies beside the tests when they have passed.
CSRC := jdp/csrc tests/csrc benchmarks/gpu
SCHEDULED := jdp/collectives jdp/tools jdp/reduction jdp/training examples tests/schedules requirements/newest.txt
# Folders, the file of the digest.
digest = find $(1) -name '*.py' -o -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name newest.txt | \
	LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16
# Target, folders, the file of the digest.
if_changed = if [ "$$($(call digest,$(2)))" = "$$(cat $(3) 2> /dev/null)" ]; then \
	echo "make $(1) passed with this code, says $(3)."; else $(MAKE) --no-print-directory $(1); fi

# conftest.py says what the daily tests are.
test: .venv/ready  ## the daily tests on the newest JAX, what depends on its version on the oldest, C++ and schedules if changed
	if [ "$$(< .venv/pins)" = oldest ]; then
		echo "No Python 3.12 to 3.14 was found: this tests the oldest JAX only."
		$(call pytest,.venv) --daily=newest --ignore=tests/csrc
	else
		$(call pytest,.venv) --daily=newest --ignore=tests/csrc
		$(call on_oldest,--daily=oldest)
	fi
	$(MAKE) --no-print-directory test-notebook
	$(call if_changed,test-csrc,$(CSRC),tests/csrc/passed.txt)
	$(call if_changed,test-schedules,$(SCHEDULED),tests/schedules/passed.txt)

test-all: .venv/ready  ## all tests, the daily ones on the oldest JAX, all versions of the schedules, Ray, and what is released
	SECONDS=0
	$(call pytest,.venv)
	$(call on_oldest,--daily=newest)
	$(MAKE) --no-print-directory test-notebook test-ray schedules .venv-wheel/pins
	if [ -e .venv-wheel/why ]; then cat .venv-wheel/why; else $(MAKE) --no-print-directory release-check; fi
	echo "make test-all took $$((SECONDS / 60)) minutes and $$((SECONDS % 60)) seconds."

on_oldest = if [ -z "$$($(oldest))" ]; then \
	echo "No Python 3.11 was found: this tests the newest JAX only."; else \
	$(MAKE) --no-print-directory test-oldest SELECTION=$(1); fi

SELECTION ?= --daily=oldest
test-oldest: .venv-oldest/ready
	$(call pytest,.venv-oldest) $(SELECTION)

test-gpu:  ## on a machine with a GPU, in an environment with jdp, its tests' packages and JAX's CUDA plugin
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -q -m gpu tests/gpu

with = if [ -e .venv-$(1)/why ]; then cat .venv-$(1)/why; else \
	.venv-$(1)/bin/python -m pytest -q tests/repository/test_$(1).py; fi

test-ray: .venv-ray/ready  ## train in processes that Ray starts on two nodes of this machine, and kill some
	$(call with,ray)

test-csrc: .venv/ready  ## the C++ tests, the schedule fuzzer and the kernels' model, under ThreadSanitizer
	$(call pytest,.venv) --daily=newest tests/csrc
	$(call digest,$(CSRC)) > tests/csrc/passed.txt

test-notebook: .venv-notebook/ready  ## run examples/notebook.ipynb, and press stop in the middle
	$(call with,notebook)

# Each environment has the plugin for GPUs and nothing else of its own, and needs no GPU.
schedules = if [ -e $(1)/why ]; then cat $(1)/why; else \
	JDP_TARGET_CONFIG=$(CURDIR)/.venv-gpu/h200.txtpb $(call pytest,$(1)) -q tests/schedules; fi

test-schedules: .venv-gpu/ready .venv-tpu/ready  ## compile steps for 8 x H200 and for 8 TPUs
	$(call schedules,.venv-gpu)
	if [ -e .venv-tpu/why ]; then cat .venv-tpu/why; else \
		.venv-tpu/bin/python -m pytest -q tests/schedules/test_tpu.py tests/schedules/test_explained_targets.py; fi
	if [ ! -e .venv-gpu/why ] && [ ! -e .venv-tpu/why ]; then $(call digest,$(SCHEDULED)) > tests/schedules/passed.txt; fi

schedules: test-schedules .venv-gpu-0.11/ready  ## the same, on JAX 0.11.2 and the oldest too
	$(call schedules,.venv-gpu-0.11)
	if [ -e .venv-oldest/ready ]; then
		$(MAKE) --no-print-directory .venv-gpu-oldest/ready
		$(call schedules,.venv-gpu-oldest)
	fi

# The GNU libc that jaxlib's wheels ask for: an older one could not run jaxlib.
GLIBC := 2.27
ARCH ?= $(shell uname -m)
CUDA ?= off
wheel: .venv-wheel/pins  ## one wheel for all Pythons, and the sdist it is made of (CUDA=on, ARCH=aarch64)
	if [ -e .venv-wheel/why ]; then cat .venv-wheel/why >&2; exit 1; fi
	rm -rf out/dist && mkdir -p out/dist
	export JDP_CUDA=$(CUDA) _PYTHON_HOST_PLATFORM=linux-$(ARCH) PATH="$(CURDIR)/.venv-wheel/bin:$$PATH"
	export CXX="'$(CURDIR)/.venv-wheel/bin/python' -m ziglang c++ -target $(ARCH)-linux-gnu.$(GLIBC) -s"
	# nvcc does not take this compiler: the libc of this machine is the oldest that a wheel with CUDA runs on.
	export NVCC_APPEND_FLAGS="-Xcompiler -static-libstdc++,-static-libgcc"
	python -m build --outdir out/dist/built . > out/wheel.log 2>&1 || { tail -n 40 out/wheel.log; exit 1; }
	mv out/dist/built/*.tar.gz out/dist
	auditwheel repair --only-plat -w out/dist out/dist/built/*.whl > out/wheel.log 2>&1 || { tail out/wheel.log; exit 1; }
	rm -r out/dist/built
	auditwheel show out/dist/*.whl
	ls -sh out/dist

release-check: .venv/ready wheel  ## install wheel and sdist into environments without a compiler, and with one
	.venv-wheel/bin/twine check --strict out/dist/*
	export JDP_DIST=$(CURDIR)/out/dist
	export JDP_AARCH64_CXX="'$(CURDIR)/.venv-wheel/bin/python' -m ziglang c++ -target aarch64-linux-musl"
	.venv/bin/python -m pytest -q tests/release

FUZZ_SECONDS ?= 3600
fuzz: .venv/ready  ## random training steps against plain JAX, for an hour (FUZZ_SECONDS)
	PYTHONPATH=tests .venv/bin/python -m fuzz --seconds $(FUZZ_SECONDS)

lint: .venv/ready  ## ruff, pyrefly and clang-format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check --python-interpreter-path .venv/bin/python
	find jdp/csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | \
		xargs .venv/bin/clang-format --dry-run --Werror

docs: .venv-docs/pins  ## the pages and the reference, in out/docs; a link to nothing is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	echo "out/docs/index.html"

bench: .venv/ready  ## the step's overhead against hand-written JAX
	.venv/bin/python -m benchmarks.step.overhead

# PyTorch takes part where JDP_TORCH_PYTHON or the folder .venv-torch has it.
compare: .venv/ready  ## jdp beside jit, shard_map, PyTorch's DDP and FSDP2 ...: a quarter of an hour
	.venv/bin/python -m benchmarks.compare.side_by_side

clean:  ## remove the environments and what was built
	rm -rf .venv .venv-* jdp/lib build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(UV): requirements/uv.txt
	python=$$($(newest)); python=$${python:-$$($(oldest))}
	if [ -z "$$python" ]; then
		echo "jdp needs Python 3.11 to 3.14 with venv: apt-get install python3 python3-venv" >&2
		exit 1
	fi
	echo ".venv-uv: install uv, which fills the environments."
	"$$python" -m venv --clear .venv-uv
	.venv-uv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-input -r $<
	touch $@

# Environment, interpreter, pins. Writes the name of the pins when all are installed.
define environment
	echo "$(1): install requirements/$(3).txt."
	$(UV) venv -q --clear --python $(2) $(1)
	$(UV) pip sync -q --python $(1) requirements/$(3).txt
	echo "$(1): compile Python to bytecode."
	$(call compiled,$(1))
	echo $(3) > $@
endef

.venv/pins: requirements/newest.txt requirements/oldest.txt | $(UV)
	newest=$$($(newest))
	if [ -n "$$newest" ]; then
		$(call environment,.venv,"$$newest",newest)
	else
		oldest=$$($(oldest))
		$(call environment,.venv,"$$oldest",oldest)
	fi

.venv-oldest/pins: requirements/oldest.txt | $(UV)
	oldest=$$($(oldest))
	[ -n "$$oldest" ] || { echo "The oldest JAX needs Python 3.11 with venv." >&2; exit 1; }
	$(call environment,.venv-oldest,"$$oldest",oldest)

# Reads the sources, and imports neither JAX nor jdp.
.venv-docs/pins: requirements/docs.txt | $(UV)
	python=$$($(newest)); python=$${python:-$$($(oldest))}
	$(call environment,.venv-docs,"$$python",docs)

.venv-wheel/pins: requirements/wheel.txt | $(UV)
	python=$$($(newest)); python=$${python:-$$($(oldest))}
	$(UV) venv -q --clear --python "$$python" .venv-wheel
	if $(call install,.venv-wheel) -r requirements/wheel.txt; then
		$(call compiled,.venv-wheel)
	else
		echo "No wheel was built: requirements/wheel.txt cannot be installed." > .venv-wheel/why
	fi
	touch $@

# jdp itself, editable; only what has changed is compiled. The newest JAX builds it as users do, in
# an environment of its own, with the headers of the oldest, so that one library serves both.
NATIVE := setup.py $(wildcard jdp/csrc/* jdp/csrc/*/*)
%/ready: %/pins pyproject.toml $(NATIVE)
	echo "$*: compile jdp's C++; where nvcc and an NVIDIA GPU are, CUDA for a minute or two more."
	if [ "$$(< $*/pins)" = oldest ]; then isolation=--no-build-isolation; else isolation=; fi
	$(call install,$*) --no-deps $$isolation --reinstall-package jdp -e .
	touch $@

# Environment, the one that it stands on.
define stand_on
	echo "$(1): install its own packages, on top of $(2)."
	$(UV) venv -q --clear --python $(2) $(1)
	site='import sysconfig; print(sysconfig.get_path("purelib"))'
	$(2)/bin/python -c "$$site" > "$$($(1)/bin/python -c "$$site")/below.pth"
endef

# The same, with Ray, or a kernel for notebooks. Apart from .venv, so that the tests do not depend on their requirements.
.venv-ray/ready .venv-notebook/ready: .venv-%/ready: requirements/%.txt .venv/pins
	$(MAKE) --no-print-directory .venv/ready
	$(call stand_on,.venv-$*,.venv)
	if $(call install,.venv-$*) --no-deps -r requirements/$*.txt; then
		$(call compiled,.venv-$*)
	else
		echo "tests/repository/test_$*.py did not run: requirements/$*.txt cannot be installed." > .venv-$*/why
	fi
	touch $@

# The same, and further packages of its own. `why` says what is missing.
define install_gpu
	$(call stand_on,$(1),$(2))
	version=$(or $(3),$$($(2)/bin/python -c 'import jax; print(jax.__version__)'))
	if $(call install,$(1)) --no-deps $(addsuffix =="$$version",$(if $(3),jax jaxlib) jax-cuda13-plugin jax-cuda13-pjrt); then
		$(call compiled,$(1))
	else
		echo "Steps were not compiled for 8 x H200: JAX's plugin $$version for CUDA cannot be installed." > $(1)/why
	fi
	if [ $(1) = .venv-gpu ] && [ ! -e $(1)/why ]; then
		$(1)/bin/python -c 'from benchmarks.gpu import topology; print(topology.target_config())' \
			> $(1)/h200.txtpb
	fi
	touch $@
endef

.venv-gpu/ready: .venv/pins
	$(MAKE) --no-print-directory .venv/ready
	$(call install_gpu,.venv-gpu,.venv)

.venv-gpu-oldest/ready: .venv-oldest/pins .venv-gpu/ready
	$(MAKE) --no-print-directory .venv-oldest/ready
	$(call install_gpu,.venv-gpu-oldest,.venv-oldest)

.venv-gpu-0.11/ready: .venv-gpu/ready
	$(call install_gpu,.venv-gpu-0.11,.venv,0.11.2)

# Only the newest JAX: libtpu takes 650 MB of disk.
.venv-tpu/ready: .venv/pins
	$(MAKE) --no-print-directory .venv/ready
	$(call stand_on,.venv-tpu,.venv)
	wanted=$$(.venv/bin/python -c 'from importlib.metadata import requires; \
		print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))')
	if $(call install,.venv-tpu) --no-deps "$$wanted"; then
		$(call compiled,.venv-tpu)
	else
		echo "Steps were not compiled for TPUs: $$wanted cannot be installed." > .venv-tpu/why
	fi
	touch $@
