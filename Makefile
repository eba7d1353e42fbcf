# make help lists the targets. Targets chain commands; what they train is in configs/.
PYTHON ?= python3.11
SEED ?= 0
RUN ?= runs/demo$(if $(filter-out 0,$(SEED)),-$(SEED))
BIN = .venv/bin
DEMO = data/demo/_info.json

.DEFAULT_GOAL := help
.PHONY: help setup demo ranks test lint
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: .venv/.ready ## a virtual environment in .venv with the project and its tools

.venv/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(BIN)/pip install --quiet --no-compile -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1
	touch $@

test: setup ## the test suite
	$(BIN)/python -m pytest

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ---- demo: pretrain, then probe, k-NN and Binary-AUC of the same backbone untrained and pretrained ----------------
BASE = -c configs/base.yaml
VIM = -c configs/backbone/vim_demo.yaml --seed_everything $(SEED) --trainer.logger.init_args.save_dir $(RUN)
WEIGHTS = --model.init_args.backbone_weights $(RUN)/pretrain/checkpoints/last.ckpt
PRETRAINED = $(RUN)/pretrain/.done
EVALUATIONS = $(foreach m,untrained pretrained,$(foreach e,probe knn auc,$(RUN)/$(m)-$(e)/.done))

demo: $(PRETRAINED) ## the main job on embedded data, on a CPU in minutes (SEED=1 for another seed)
	@$(MAKE) --no-print-directory -j2 $(RUN)/report.html
	@$(BIN)/python -m analysis.report $(RUN)

$(DEMO): .venv/.ready datamodules/demo.py
	$(BIN)/python -m datamodules.prepare demo --out $(@D) --overwrite true

$(PRETRAINED): $(DEMO)
	$(call pretrain,vim,pretrain)

define pretrain
$(BIN)/dinomamba fit $(BASE) -c configs/task/dino.yaml -c configs/data/demo.yaml -c configs/backbone/$(1)_demo.yaml \
	-c configs/task/dino_demo.yaml --seed_everything $(SEED) --trainer.logger.init_args.save_dir $(RUN) \
	--trainer.logger.init_args.name $(2)
touch $@
endef

# The evaluations run two at a time, one thread each, and write what they say into the run folder.
$(RUN)/untrained-%/.done: $(DEMO)
	@$(call evaluate,$(call how,$*) $(VIM) --trainer.logger.init_args.name untrained-$*)

$(RUN)/pretrained-%/.done: $(PRETRAINED)
	@$(call evaluate,$(call how,$*) $(VIM) --trainer.logger.init_args.name pretrained-$* $(WEIGHTS))

define evaluate
echo "$(@D)/log.txt: dinomamba $(1)"; mkdir -p $(@D); \
OMP_NUM_THREADS=1 $(BIN)/dinomamba $(1) > $(@D)/log.txt 2>&1 || { tail -n 30 $(@D)/log.txt; exit 1; }; touch $@
endef

how = $(how-$(1))
how-probe = fit $(BASE) -c configs/task/linear_probe.yaml -c configs/data/demo.yaml -c configs/task/linear_probe_demo.yaml
how-knn = validate $(BASE) -c configs/task/knn.yaml -c configs/data/demo.yaml -c configs/task/knn_demo.yaml
how-auc = validate $(BASE) -c configs/task/binary_auc.yaml -c configs/data/demo_s.yaml -c configs/task/binary_auc_demo.yaml

$(RUN)/report.html: $(PRETRAINED) $(EVALUATIONS)
	$(BIN)/python -m analysis.report $(RUN) > /dev/null

# ---- ranks of token-mixing matrices: three mixers of equal size, pretrained alike on the demo's data ---------------
MIXERS = vim vit linear_vit

ranks: $(MIXERS:%=$(RUN)/ranks-%/.done) ## ranks of the mixers' matrices beside their bounds, on embedded data
	$(BIN)/python -m analysis.rank $(MIXERS:%=$(RUN)/ranks-%)

.PRECIOUS: $(RUN)/pretrain-%/.done
$(RUN)/pretrain-%/.done: $(DEMO)
	$(call pretrain,$*,pretrain-$*)

$(RUN)/ranks-vim/.done: $(PRETRAINED)
	$(call rank,vim,$(RUN)/pretrain)

$(RUN)/ranks-%/.done: $(RUN)/pretrain-%/.done
	$(call rank,$*,$(RUN)/pretrain-$*)

define rank
$(BIN)/dinomamba validate $(BASE) -c configs/task/ranks.yaml -c configs/data/demo.yaml -c configs/backbone/$(1)_demo.yaml \
	-c configs/task/ranks_demo.yaml --seed_everything $(SEED) --trainer.logger.init_args.save_dir $(RUN) \
	--trainer.logger.init_args.name ranks-$(1) --model.init_args.backbone_weights $(2)/checkpoints/last.ckpt
touch $@
endef
