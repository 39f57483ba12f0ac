"""Accelerate with FSDP2: train a tiny Llama in curved weight space on sharded weights, save, resume and export it.

    accelerate launch --num_processes 2 examples/accelerate_fsdp2.py --steps 40 --output runs/fsdp2
    accelerate launch --num_processes 2 examples/accelerate_fsdp2.py --steps 80 --output runs/fsdp2 --resume

Build the optimizer from the whole model, before `prepare` shards it. The optimizer clips, because
`accelerator.clip_grad_norm_` would clip gradients of effective weights. Accelerate shards only on accelerators. On CPUs
(`--cpu`) its launcher starts one process. torchrun starts several, which train by DDP:

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --steps 40 --output runs/ddp --cpu
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

import symexplin as sel

EVERY = 20  # steps between checkpoints


def tiny_model() -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return sequences that count upwards from random numbers, different in each process and step."""
    starts = torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return ((starts + torch.arange(16)) % 64).to(device)


def main() -> None:
    """Train, save the state and the model, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="stop after this step")
    parser.add_argument("--total-steps", type=int, default=80, help="length of the schedules")
    parser.add_argument("--output", default="runs/accelerate_fsdp2")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=options.cpu)
    set_seed(0)
    model = tiny_model()
    optimizer = sel.SELAdamW(model, lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Not prepared: accelerate would step the schedule once per process.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, options.total_steps)
    accelerator.register_for_checkpointing(schedule)
    state = f"{options.output}/state"
    if options.resume:
        accelerator.load_state(state)

    for step in range(optimizer.param_groups[0]["steps"], options.steps):
        ids = batch(step, accelerator.process_index, accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        norm = float(optimizer.optimizer.grad_norm)
        accelerator.print(f"step {step + 1} loss {mean:.6f} raw gradient norm {norm:.4f}")
        if (step + 1) % EVERY == 0 or step + 1 == options.steps:
            accelerator.save_state(state)

    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output, state_dict=whole)
        LlamaForCausalLM.from_pretrained(options.output)
        print(f"{accelerator.distributed_type.value}: saved and loaded {options.output}")
    accelerator.wait_for_everyone()  # gloo may abort if a process exits before the others
    accelerator.end_training()


if __name__ == "__main__":
    main()
