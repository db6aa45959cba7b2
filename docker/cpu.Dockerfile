# A machine without GPUs, set up from locks/cpu.txt (x86_64). From the root of a checkout:
#
#   docker build -f docker/cpu.Dockerfile -t mcore-rl:cpu .
#   docker run --shm-size=4g -it mcore-rl:cpu
#
# A package index of your own: `--secret id=pip,src=$HOME/.config/pip/pip.conf`, which stays in no layer. PyTorch's own
# index has the build without CUDA; if yours has it too, `--build-arg TORCH_INDEX_URL=`.
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# Without versions: Debian's mirrors delete a version when the next one appears.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      bubblewrap build-essential git libnuma1 make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mcore-rl
COPY . .
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 EXTRA=cpu LOCKED=1 PYTHON=python3.12 scripts/setup.sh

ENV PATH=/opt/mcore-rl/.venv/bin:$PATH
