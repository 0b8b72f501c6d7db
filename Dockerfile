# One image for the command and the rollout workers of a Ray cluster (docs/scale.md).
#   docker build -t turntree .                                          for CPUs
#   docker build -t turntree --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .      for CUDA
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# bubblewrap and libseccomp enclose code that models write; wget is what KubeRay's probes of a pod call
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 wget && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/turntree
# torch comes first and by exact version, so that no other package brings another build
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url $TORCH_INDEX torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[train,ray,lora]' 'ray[default]'

ENV OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
RUN useradd --create-home trainer && mkdir /runs && chown trainer /runs
USER trainer
WORKDIR /runs
CMD ["turntree", "--help"]
