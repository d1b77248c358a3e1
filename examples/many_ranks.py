"""One step over many ranks: rows and tokens shared out on a mesh, the model sharded by FSDP2.

    torchrun --nproc-per-node 4 examples/many_ranks.py
    torchrun --nproc-per-node 4 examples/many_ranks.py --tokens 4     # one forest on all four
    accelerate launch --multi_gpu --num_processes 4 examples/many_ranks.py
    python examples/many_ranks.py --ray 4                             # workers of Ray Train
    python examples/many_ranks.py --tokens 1                          # one process

Rows go to one dimension of the mesh (``treefx.scale.shard_rows``), the tokens of each share to the other
(``treefx.scale.context_parallel``). The losses are those of one process, whatever the mesh and whatever has started
the ranks. Runs on CPUs and on GPUs.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import treefx


def start() -> str:
    """Join the other ranks, unless the launcher has done that, or none where there is no launcher."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return device


def train(options: dict[str, Any]) -> None:
    """What every rank runs."""
    device, tokens = start(), options["tokens"]
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks // tokens, tokens), mesh_dim_names=("rows", "tokens"))

    torch.manual_seed(0)  # the same weights and the same rollouts on every rank
    with torch.device(device):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                use_cache=False,
            )
        )
    for block in [*model.model.layers, model]:
        fully_shard(block)
    model.compile(backend="treefx")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    prompts = torch.randint(512, (4, 60))
    rollouts = [
        torch.cat([prompt, torch.randint(512, (20 + 7 * answer,))]) for prompt in prompts for answer in range(4)
    ]
    forest = treefx.Forest.from_sequences(rollouts)
    share = treefx.scale.shard_rows(forest, mesh.size(0))[mesh.get_local_rank("rows")]
    row = treefx.scale.context_parallel(share.to(device), mesh.get_group("tokens"))
    print(f"rank {dist.get_rank()}: {len(share)} of {len(forest)} rows, {row.num_tokens} of {share.num_tokens} tokens")

    def loss(logp: torch.Tensor, part: treefx.Forest) -> torch.Tensor:
        """The mean over all tokens of all ranks; times the ranks, since FSDP2 divides by their number."""
        return ranks * treefx.losses.sft(logp, part, reduction="token_mean")

    for step in range(options["steps"]):
        value = treefx.backward(model, row, loss) / ranks
        dist.all_reduce(value)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {value.item():.6f}")


def train_with_ray(workers: int, options: dict[str, Any]) -> None:
    """The same function as the training loop of so many workers of Ray Train."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=options, scaling_config=scaling).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2, help="ranks that share the tokens of one forest")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ray", type=int, metavar="WORKERS", help="let Ray Train start so many ranks")
    options = vars(parser.parse_args())
    if workers := options.pop("ray"):
        train_with_ray(workers, options)
        return
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
