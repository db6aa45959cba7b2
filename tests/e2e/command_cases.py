"""Test settings of commands in the documentation, and the commands of the guides and reference pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.registry import BENCHMARKS
from tests.readme import ROOT


@dataclass(frozen=True)
class Case:
    """Test settings of a command.

    add: arguments that shorten it; where: replacements of placeholders; needs: required keys of READY; says: pattern
    of the expected output.
    """

    add: str = ""
    where: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    codes: frozenset[int] = frozenset({0})
    says: str = ""
    on_demand: bool = False


class Need(StrEnum):
    """Marker of a command that cannot run in the tests. The test of such a command checks its syntax only."""

    GPUS = "needs GPUs"
    CLUSTER = "needs a cluster"
    DOCKER = "needs Docker"
    INSTALLATION = "installs packages"
    MINUTES = "takes minutes"
    NETWORK = "needs an account on a server"
    RUN = "needs a run in progress"
    ROOT = "needs root"
    SGLANG = "needs SGLang"
    SUITE = "runs this suite"
    WEIGHTS = "needs a published checkpoint"


@dataclass(frozen=True)
class NotRun:
    """A command that is not run. `instead`: file with a test of the same feature, or a program of CI that runs it."""

    need: Need
    instead: str = ""


HOSTS_TEST = "tests/e2e/test_hosts.py"
IMAGES_TEST = "tests/unit/scripts/test_images.py"
NODES_TEST = "tests/unit/slurm/test_fabric_node.py"
RL = {"(?:CONFIG|config|my)\\.yaml": "configs/gsm8k_cpu.yaml"}
STARTS = "data.train=train.jsonl --dry-run"
STAGED = r"(?s)^(?=.*--nodes=64\n)(?=.*--partition=gpu\n)"

# With --dry-run, `train` checks and plans everything and starts nothing.
GUIDE_CASES = {
    "mcore-rl train CONFIG.yaml trainer.steps=10 --dry-run": Case(
        add="data.train=train.jsonl", where=RL, says="driver", on_demand=True
    ),
    "mcore-rl debug rollout CONFIG.yaml trainer.prompts_per_step=2 trainer.prompts_per_update=2": Case(
        add="data.train=train.jsonl model.hf_path=mine model.random_init=false run.dir=runs/debugged",
        where=RL,
        needs=("mine",),
        says="reward",
        on_demand=True,
    ),
    "mcore-rl train my.yaml cluster.placement=disaggregated rollout.max_staleness=2 "
    "algorithm.policy_loss.name=decoupled_ppo": Case(add=STARTS, where=RL, says="driver", on_demand=True),
    "mcore-rl train CONFIG.yaml data.train=train.jsonl data.val=test.parquet": Case(
        add="--dry-run", where={**RL, "test.parquet": "test.jsonl"}, says="driver", on_demand=True
    ),
    "mcore-rl train CONFIG.yaml rollout.draft=ngram rollout.draft_tokens=4 rollout.draft_below=16": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl train CONFIG.yaml rollout.quantization=int4 model.dtype=bfloat16 actor.quantization_aware=128": Case(
        add=STARTS,
        where=RL,
        codes=frozenset({2}),
        says="needs whole groups of 128 elements on every rank",  # the tiny model's experts have 32 columns
        on_demand=True,
    ),
    "mcore-rl train CONFIG.yaml rollout.quantization=fp8 model.dtype=bfloat16": Case(
        add=STARTS,
        where=RL,
        codes=frozenset({2}),
        says="needs whole blocks of 128 x 128 on every rank",  # the tiny model's key-value heads have 64 rows
        on_demand=True,
    ),
    "mcore-rl train CONFIG.yaml model.dtype=float16 actor.optimizer.loss_scale.initial=65536": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl train CONFIG.yaml model.dtype=bfloat16 model.float32_head=true model.float32_router=true": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl train CONFIG.yaml rollout.engine=vllm rollout.num_engines=2 rollout.tp=2": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl train CONFIG.yaml actor.lora.rank=32 actor.lora.alpha=64 actor.optimizer.lr=1e-5 "
    "trainer.export_adapter=DIR": Case(
        add=f"model.hf_path=mine model.random_init=false {STARTS}",
        where={**RL, "DIR": "runs/adapter"},
        needs=("mine",),
        says="driver",
        on_demand=True,
    ),
    # Tools need a chat template that shows them.
    "mcore-rl train my.yaml rollout.tools=my_tools.py:add": Case(
        add="--dry-run",
        where={"my.yaml": "configs/demo_tool_cpu.yaml"},
        needs=("tool",),
        says="driver",
        on_demand=True,
    ),
    "mcore-rl train config.yaml observe.trackers=[tensorboard,wandb] observe.trackers_offline=true": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl train config.yaml observe.prometheus_port=9400": Case(
        add=STARTS, where=RL, says="driver", on_demand=True
    ),
    "mcore-rl plan CONFIG.yaml cluster.nodes=4": Case(where=RL, says="fits", on_demand=True),
    "mcore-rl plan CONFIG.yaml cluster.nodes=2 weights.delta=true": Case(where=RL, says="fits", on_demand=True),
    "mcore-rl plan CONFIG.yaml --suggest": Case(
        where={"CONFIG.yaml": "configs/qwen3_30b_a3b.yaml"}, says=r"actor\.parallel\.\w+=", on_demand=True
    ),
    "mcore-rl slurm configs/my.yaml cluster.nodes=64 slurm.partition=gpu > job.sbatch": Case(
        add="&& cat job.sbatch", needs=("mine",), says=STAGED, on_demand=True
    ),
    "sbatch job.sbatch": Case(needs=("job",), says=STAGED, on_demand=True),
    "python scripts/benchmarks_page.py": Case(says="docs/benchmarks.md"),
    "export HF_TOKEN=...": Case(),
    "mcore-rl slurm configs/my.yaml 'slurm.pass_environment=[HF_TOKEN]' > job.sbatch && sbatch job.sbatch": Case(
        needs=("mine",), says="HF_TOKEN", on_demand=True
    ),
    "python -m model_converters families": Case(says="qwen3_moe", on_demand=True),
    "python -m model_converters families --into docs/families.md": Case(on_demand=True),
    "python -m model_converters show --config DIR": Case(
        where={"DIR": "mine"}, needs=("mine",), says="linear_qkv", on_demand=True
    ),
}
"""Those that run on demand have options and keys that tests/unit/test_readme.py checks always."""

# docs/models/: the plan of every recipe, and the jobs of the first recipe of every model and of those with SGLang.
SGLANG_RECIPES = tuple(
    f"configs/{path.name} configs/sglang/{path.name}" for path in sorted((ROOT / "configs" / "sglang").glob("*.yaml"))
)
MODEL_CASES = {
    f"mcore-rl plan configs/{path.name}": Case(says="fits", on_demand=True)
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if not path.name.endswith("_cpu.yaml")
} | {f"mcore-rl plan {files}": Case(says="fits", on_demand=True) for files in SGLANG_RECIPES}
STARTED_RECIPES = (
    "configs/dapo_deepseek_v3_671b.yaml",
    "configs/dapo_qwen2_5_32b.yaml",
    "configs/glm_4_5.yaml",
    "configs/glm_4_7.yaml",
    "configs/gpt_oss_20b.yaml",
    "configs/kimi_k2.yaml",
    "configs/qwen3_235b_a22b.yaml",
    "configs/qwen3_30b_a3b.yaml",
    "configs/qwen3_5_35b_a3b.yaml",
    "configs/qwen3_5_397b_a17b.yaml",
    *SGLANG_RECIPES,
)

_BENCHMARKS_PAGE = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
_COMPARE_LOSSES = "python scripts/compare_staleness.py --losses --task think2 --seeds 3"
GUIDE_NOT_RUN = (
    {
        "make test ARGS='tests/unit/converters -k mixtral'": NotRun(Need.SUITE),
        "make test ARGS='tests/unit/converters tests/distributed/test_model_parity.py -k mixtral'": NotRun(Need.SUITE),
        "make test ARGS='tests/contract/test_families.py -k glm4_moe'": NotRun(Need.SUITE),
        "kill -USR2 PID": NotRun(Need.RUN, "tests/unit/runtime/test_stack_dumps.py"),
        "curl http://127.0.0.1:9400/metrics": NotRun(Need.RUN, "tests/unit/observe/test_endpoint.py"),
        "python scripts/compare_staleness.py --task think2": NotRun(Need.MINUTES),
        "python scripts/compare_staleness.py --task work3": NotRun(Need.MINUTES),
        "make demo TASK=agent": NotRun(Need.MINUTES, "tests/e2e/test_gateway_run.py"),
        "make demo TASK=distill": NotRun(Need.MINUTES, "tests/e2e/test_distillation_run.py"),
        "make demo TASK=dpo": NotRun(Need.MINUTES, "tests/e2e/test_preference_run.py"),
        "make demo TASK=see": NotRun(Need.MINUTES, "tests/e2e/test_images_run.py"),
        "docker build -f docker/gpu.Dockerfile -t mcore-rl:gpu .": NotRun(Need.DOCKER, IMAGES_TEST),
        "docker run --gpus all --ipc=host -it mcore-rl:gpu": NotRun(Need.DOCKER, IMAGES_TEST),
        "docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --cap-add=IPC_LOCK "
        "--device=/dev/infiniband -it mcore-rl:gpu": NotRun(Need.DOCKER, IMAGES_TEST),
        "docker build -f docker/cpu.Dockerfile -t mcore-rl:cpu .": NotRun(Need.DOCKER, IMAGES_TEST),
        "docker run --shm-size=4g -it mcore-rl:cpu": NotRun(Need.DOCKER, IMAGES_TEST),
        "make sglang": NotRun(Need.INSTALLATION, ".ci/run"),
        "make sandbox": NotRun(Need.INSTALLATION, ".ci/run"),
        'pip install "wandb>=0.31"': NotRun(Need.INSTALLATION),
        "wandb sync RUN_DIR/trackers/wandb/offline-run-*": NotRun(Need.NETWORK),
        "make demo ENGINE=sglang": NotRun(Need.SGLANG, "tests/unit/scripts/test_demo.py"),
        "mcore-rl train CONFIG.yaml rollout.engine=sglang rollout.expert_parallel=true "
        "rollout.data_parallel_attention=true": NotRun(Need.GPUS, "tests/contract/test_sglang_attention_dp.py"),
        "make demo TASK=latent": NotRun(Need.SGLANG, "tests/unit/scripts/test_demo.py"),
        "pip install --no-build-isolation --no-deps flash-attn==2.8.3": NotRun(Need.GPUS),
        "CPLUS_INCLUDE_PATH=/usr/local/cuda/include/cccl TORCH_CUDA_ARCH_LIST=9.0 pip install --no-build-isolation "
        "--no-deps git+https://github.com/deepseek-ai/DeepEP.git@9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee": NotRun(
            Need.GPUS
        ),
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps "
        "git+https://github.com/NVIDIA/apex.git@26.09": NotRun(Need.GPUS),
        "mcore-rl train CONFIG.yaml cluster.nodes=2 cluster.gpus_per_node=8 cluster.address=HOST:6379": NotRun(
            Need.CLUSTER, HOSTS_TEST
        ),
        "make demo HOSTS=2": NotRun(Need.ROOT, HOSTS_TEST),
        "scripts/two_hosts.sh up": NotRun(Need.ROOT, HOSTS_TEST),
        "scripts/two_hosts.sh ray 6": NotRun(Need.ROOT, HOSTS_TEST),
        "scripts/two_hosts.sh A .venv/bin/mcore-rl train CONFIG.yaml cluster.nodes=2 "
        "cluster.address=10.213.7.1:6379": NotRun(Need.ROOT, HOSTS_TEST),
        "scripts/two_hosts.sh down": NotRun(Need.ROOT, HOSTS_TEST),
        "srun --ntasks-per-node=1 mcore-rl doctor --node": NotRun(Need.CLUSTER, NODES_TEST),
        "mcore-rl doctor --node --rendezvous HOST:PORT --nodes 2 --node-rank 0": NotRun(Need.CLUSTER, NODES_TEST),
    }
    | {
        f"make bench ARGS={name}": NotRun(Need.MINUTES, "tests/distributed/test_benchmarks.py")
        for name, benchmark in BENCHMARKS.items()
        # A benchmark without recorded results has no section with its command.
        if not benchmark.gpu and f"## {name}: " in _BENCHMARKS_PAGE
    }
    # Without recorded results, this comparison has no section either.
    | {command: NotRun(Need.MINUTES) for command in (_COMPARE_LOSSES,) if command in _BENCHMARKS_PAGE}
    | {
        f"mcore-rl slurm {recipe} model.hf_path=DIR data.train=train.jsonl data.val=test.jsonl "
        "slurm.partition=gpu > job.sbatch && sbatch job.sbatch": NotRun(Need.WEIGHTS, "tests/unit/slurm/test_script.py")
        for recipe in STARTED_RECIPES
    }
)
