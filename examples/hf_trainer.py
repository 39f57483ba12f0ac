"""Hugging Face Trainer: train a tiny Llama in curved weight space, resume it and load it as an ordinary checkpoint.

    python examples/hf_trainer.py --steps 40 --output runs/llama
    python examples/hf_trainer.py --steps 40 --output runs/llama --resume

What differs from a script for AdamW: `max_grad_norm=0.0`, `optimizer_cls_and_kwargs` and, for maps with learned scales,
the callback. Replace the model and the data by your own.
"""

import argparse
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import symexplin as sel


def tiny_model() -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def counting(samples: int = 256, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count upwards from a random number."""
    starts = torch.randint(0, 64, (samples, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(length)) % 64]


class Steps(TrainerCallback):
    """Tell the optimizer the number of steps of the run, over which the rates of learned scales change."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Set it; the Trainer has wrapped the optimizer."""
        kwargs["optimizer"].optimizer.set_total_steps(state.max_steps, restart=state.global_step == 0)


def main() -> None:
    """Train, save and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/hf_trainer")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = tiny_model()
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.01,
        max_grad_norm=0.0,  # the optimizer clips, not the Trainer
        warmup_steps=max(options.steps // 10, 1),
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=max(options.steps // 4, 1),
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.cpu,
    )

    def optimizer(model: torch.nn.Module) -> sel.SELAdamW:
        rates = {"lr": trainer.args.learning_rate, "weight_decay": trainer.args.weight_decay, "no_decay": "vectors"}
        return sel.SELAdamW(model, **rates, config=sel.preset("paper"), max_grad_norm=1.0, total_steps="later")

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=counting(),
        optimizer_cls_and_kwargs=(lambda: optimizer, {}),  # a function without arguments that returns the builder
        callbacks=[Steps()],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()

    if trainer.is_world_process_zero():
        report(trainer, options.output)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # gloo may abort if a process exits before the others
        torch.distributed.destroy_process_group()


def report(trainer: Trainer, output: str) -> None:
    """Print the losses, and load the saved model as an ordinary one."""
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']} loss {record['loss']:.6f}")
    AutoModelForCausalLM.from_pretrained(output)
    print(f"saved and loaded: {output}")


if __name__ == "__main__":
    main()
