# A machine with NVIDIA GPUs, set up from locks/gpu.txt and locks/sglang_gpu.txt. From the root of a checkout:
#
#   docker build -f docker/gpu.Dockerfile -t mcore-rl:gpu .
#   docker run --gpus all --ipc=host -it mcore-rl:gpu
#
# Between nodes, NCCL needs InfiniBand and memory that it can lock, else it uses sockets or fails:
#
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --cap-add=IPC_LOCK \
#     --device=/dev/infiniband -it mcore-rl:gpu
#
# A package index of your own: `--secret id=pip,src=$HOME/.config/pip/pip.conf`, which stays in no layer.
#
# CUDA as torch of the lock was built with: TransformerEngine, flash-attn, DeepEP and apex compile against both. `devel`
# has nvcc, `cudnn` its headers. tests/unit/scripts/test_gpu_lock.py holds the two, and Python, together.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04@sha256:ae7f650405a3964972dacfa889273bf8e3fbe9709899afd187da01c4cdff3105

# Without versions: Ubuntu's mirrors delete a version when the next one appears.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      bubblewrap build-essential git libibverbs-dev libnuma1 make python3.12 python3.12-dev python3.12-venv rdma-core \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mcore-rl
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 EXTRA=gpu PYTHON=python3.12 scripts/setup.sh
# A layer of its own, because each environment has about 9 GB.
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 EXTRA=gpu PYTHON=python3.12 scripts/setup_sglang.sh

ENV PATH=/opt/mcore-rl/.venv/bin:$PATH
