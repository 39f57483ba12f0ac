"""PEFT: train LoRA factors of a tiny Llama in curved weight space, save the adapter, merge it and save the model.

    python examples/peft_lora.py --out runs/lora            # again: resumes from the last checkpoint

The factors are linear layers, so SELAdamW curves them. The base is frozen and stays as it is. Replace the model and the
data by your own.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import symexplin as sel


def tiny_model() -> LlamaForCausalLM:
    """Return a Llama of two layers, the same in each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def batch(step: int) -> torch.Tensor:
    """Return sequences that count upwards from random numbers."""
    starts = torch.randint(0, 64, (16, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(16)) % 64


def main() -> None:
    """Train, save the adapter, merge, and load both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
    model = get_peft_model(tiny_model(), lora).to(options.device)
    # AdamW: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3), and clip_grad_norm_ below
    optimizer = sel.SELAdamW(model, lr=5e-3, weight_decay=0.0, max_grad_norm=1.0)
    print(optimizer)  # the map, and the trained parameters: factors curved, the head plain
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    first, last = 0, options.out / "last.pt"
    if last.exists():
        saved = torch.load(last, map_location=options.device, weights_only=True)
        first = saved["step"]
        set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    for step in range(first, options.steps):
        ids = batch(step).to(options.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} loss {loss.item():.4f}")
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"step": step + 1, "adapter": get_peft_model_state_dict(model)}  # not the frozen base
            state |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save(state, last.with_suffix(".new"))
            last.with_suffix(".new").replace(last)  # atomic

    model.eval().cpu()
    ids = batch(options.steps)
    expected = model(input_ids=ids).logits
    model.save_pretrained(options.out / "adapter")
    model.merge_and_unload().save_pretrained(options.out / "merged")
    adapted = PeftModel.from_pretrained(tiny_model(), options.out / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(options.out / "merged")
    for name, loaded in (("adapter", adapted), ("merged", merged)):
        print(f"{name}: logits differ by {(loaded(input_ids=ids).logits - expected).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
