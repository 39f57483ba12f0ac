"""Small queries and keys under AdamW in small models with and without QK-norm, as a script for `symexplin compare`.

    for model in llama qwen3 gpt2; do
        symexplin compare --out runs/qk-$model --variants adamw init rates --lrs 2e-3 4e-3 8e-3 --seeds 0 1 2 --jobs 2 \
            --command "python benchmarks/qk_norm.py $model {variant} --lr {lr} --seed {seed} --out {out}"
    done

"init" starts queries and keys at 0.1 of their scale; "rates" starts them at 0.05, trains them at 0.05 of the rate, and
biases at 5 times the rate (:func:`symexplin.scale_qk_`). llama has neither QK-norm nor biases, qwen3 has QK-norm, gpt2
has biases and fused projections, for which there are no rates.
"""

import argparse
import json
import sysconfig
import warnings
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import symexplin as sel

STEPS, WARMUP, BATCH, CONTEXT = 300, 30, 16, 64
WIDTH, DEPTH, HEADS = 64, 3, 4
XAVIER = 0.125  # standard deviation of a square matrix of this width


def text() -> Tensor:
    """Return the bytes of some of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.long)


def batch(data: Tensor, seed: int, size: int = BATCH) -> Tensor:
    """Return windows of the data, the same for the same seed."""
    starts = torch.randint(len(data) - CONTEXT, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + CONTEXT] for start in starts.tolist()])


def build(kind: str) -> nn.Module:
    """Return a new model."""
    sizes = {"vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": 172, "num_hidden_layers": DEPTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}
    shared = {"max_position_embeddings": CONTEXT, "initializer_range": XAVIER}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **shared))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, **shared))
    sizes = {"vocab_size": 256, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": CONTEXT}
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, initializer_range=XAVIER))


def main() -> None:
    """Train one model and write its held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["llama", "qwen3", "gpt2"])
    parser.add_argument("variant", choices=["adamw", "init", "rates"])
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = text()
    training, held_out = data[: -(len(data) // 20)], data[-(len(data) // 20) :]
    torch.manual_seed(options.seed)
    model = build(options.model)
    rates = {"*": options.lr}
    if options.variant == "init":
        sel.scale_qk_(model, 0.1)
    elif options.variant == "rates":
        with warnings.catch_warnings(action="ignore"):  # that the model has no QK-norm
            rates = sel.scale_qk_(model, lr=options.lr)
    optimizer = torch.optim.AdamW(sel.param_groups(model, lr=rates, weight_decay=0.01, curved=False))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP), 1.0)
    )
    for step in range(STEPS):
        tokens = batch(training, options.seed * STEPS + step)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        tokens = batch(held_out, -1, 320)
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    result = options.out / "result.new"
    result.write_text(json.dumps({"loss": loss}))
    result.replace(options.out / "result.json")


if __name__ == "__main__":
    main()
