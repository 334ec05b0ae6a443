# megatron-wlb on NVIDIA's PyTorch image, with the Megatron-LM release that it is tested with.
#
#   docker build -t megatron-wlb .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 -it megatron-wlb
#   > wlb doctor
#   > torchrun --nproc-per-node 8 -m megatron_wlb.launch "$MEGATRON_LM_PATH/pretrain_gpt.py" …
#
# torch, TransformerEngine, flash-attn and Apex are those of the base image, built for each other; the
# build ends with an error where one is missing. This base is the one that Megatron-LM's own tests of
# core_v0.16.1 run on (its docker/.ngc_version.dev); its TransformerEngine is within Megatron's pin.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The base image pins its packages by PIP_CONSTRAINT, which pip also applies to the build tools that it
# fetches for a source tree. Each pip call here clears it: what they add has its own versions
# (constraints.txt), and --no-deps keeps all else. The finished image still has it, so that what is
# installed on top cannot replace torch.

# NVIDIA/Megatron-LM at tag core_v0.16.1.
ARG MEGATRON_LM_COMMIT=55ac7082517c3878ae653c07c09c534b8aed49f6
ENV MEGATRON_LM_PATH=/opt/Megatron-LM
RUN git init --quiet "$MEGATRON_LM_PATH" \
 && git -C "$MEGATRON_LM_PATH" fetch --quiet --depth 1 \
      https://github.com/NVIDIA/Megatron-LM "$MEGATRON_LM_COMMIT" \
 && git -C "$MEGATRON_LM_PATH" checkout --quiet FETCH_HEAD \
 && PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps --editable "$MEGATRON_LM_PATH"

# What the base image lacks, in the versions of constraints.txt; torch and numpy stay the image's own.
WORKDIR /opt/megatron-wlb
COPY constraints.txt ./
RUN grep -E '^(hypothesis|psutil|pytest|pytest-timeout|regex|rich|six|tokenizers)==' constraints.txt \
      > requirements.txt \
 && PIP_CONSTRAINT='' pip install --no-cache-dir -r requirements.txt \
 && rm requirements.txt

COPY . ./
RUN PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps .

# The optional patches must fit this Megatron; --build-arg APPLY_PATCHES=true leaves them applied.
ARG APPLY_PATCHES=false
RUN wlb patch apply "$MEGATRON_LM_PATH" \
 && wlb patch check "$MEGATRON_LM_PATH" \
 && { [ "$APPLY_PATCHES" = true ] || wlb patch revert "$MEGATRON_LM_PATH"; }

# Smoke test: all that GPU runs need is there, all hooks fit, and steps are planned and replayed. A
# build has no GPU: run `wlb doctor` again on the machine that trains, it tries the kernels there.
RUN python -c 'import apex, flash_attn, transformer_engine.pytorch' \
 && wlb doctor \
 && wlb recipe run configs/experiment/7b-128k.yaml --dry-run \
 && python -m pytest -q -o filterwarnings=default -p no:cacheprovider \
      tests/unit/test_plan.py tests/unit/planning/test_planner.py tests/unit/test_experiment_recipes.py \
      tests/unit/planning/packing tests/unit/runtime/compat/test_targets.py

CMD ["/bin/bash"]
