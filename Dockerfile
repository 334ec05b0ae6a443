# megatron-wlb on NVIDIA's PyTorch image, with the megatron-core that it is tested with.
#
#   docker build -t megatron-wlb .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 -it megatron-wlb
#   > wlb doctor
#   > torchrun --nproc-per-node 8 -m megatron_wlb.launch …
#
# torch, TransformerEngine and flash-attn are those of the base image, built for each other; the build
# ends with an error where TransformerEngine is missing. Megatron-LM's own tests of core_v0.19.0 run on
# this image (its docker/.ngc_version.dev); --build-arg BASE=… takes another month's.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The base image pins its packages by PIP_CONSTRAINT, which pip also applies to the build tools that it
# fetches for a source tree. Each pip call here clears it: what they add has its own versions
# (constraints.txt), and --no-deps keeps all else. The finished image still has it, so that what is
# installed on top cannot replace torch.

# What the base image lacks, in the versions of constraints.txt; torch and numpy stay the image's own.
WORKDIR /opt/megatron-wlb
COPY constraints.txt ./
RUN grep -E '^(hypothesis|psutil|pytest|pytest-timeout|rich|tokenizers)==' constraints.txt \
      > requirements.txt \
 && PIP_CONSTRAINT='' pip install --no-cache-dir -r requirements.txt \
 && rm requirements.txt

COPY . ./
RUN PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps "$(grep ^megatron-core== constraints.txt)" .

# Smoke test: what GPU runs need is there, all hooks fit, and steps are planned and replayed. A build
# has no GPU: run `wlb doctor` again on the machine that trains, it tries the kernels there.
RUN python -c 'import transformer_engine.pytorch' \
 && wlb doctor \
 && wlb recipe run configs/experiment/7b-128k.yaml --dry-run \
 && python -m pytest -q -o filterwarnings=default -p no:cacheprovider \
      tests/unit/test_plan.py tests/unit/planning/test_planner.py tests/unit/test_experiment_recipes.py \
      tests/unit/planning/packing tests/unit/runtime/compat/test_hooks.py

CMD ["/bin/bash"]
