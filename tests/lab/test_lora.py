import pytest
import torch

from symexplin.lab.build import build
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.lora import add_lora, merged
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import save_model

MODEL = ModelConfig(width=16, depth=2, heads=2, context=8)
TOKENS = torch.arange(16).view(2, 8)


def test_a_merged_model_is_plain_and_computes_the_same():
    model = Transformer(MODEL, torch.Generator().manual_seed(0)).double()
    names = list(model.state_dict())
    add_lora(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert "lora" in name
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    plain = merged(model)
    assert list(plain.state_dict()) == names
    torch.testing.assert_close(plain(TOKENS), model(TOKENS))
    change = (
        plain.blocks[0].attention.q.weight
        - Transformer(MODEL, torch.Generator().manual_seed(0)).double().blocks[0].attention.q.weight
    )
    assert torch.linalg.matrix_rank(change.detach()) == 3


@pytest.mark.parametrize("home", ["none", "optimizer"])
def test_only_the_updates_train(tmp_path, home):
    source = Transformer(MODEL, torch.Generator().manual_seed(0))
    save_model(source, tmp_path / "model.safetensors")
    train = TrainConfig(steps=4, lora_rank=2, weights=str(tmp_path / "model.safetensors"))
    config = RunConfig("data", MODEL, train, CurveConfig(home=home), ComputeConfig(device="cpu"))
    model, optimizer, _ = build(config)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in owned) == sum(2 * sum(w.shape) for w in source.blocks.parameters() if w.dim() == 2)
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    for name, value in merged(model).state_dict().items():
        changed = not torch.equal(value, source.state_dict()[name])
        assert changed <= (name.startswith("blocks") and "norm" not in name and name.endswith("weight")), name


def test_bad_input():
    with pytest.raises(ValueError, match="lora_rank must be 0 without weights to start from, got 2"):
        RunConfig("data", train=TrainConfig(lora_rank=2))
    with pytest.raises(ValueError, match="home must be 'optimizer' or 'none' for lora_rank"):
        RunConfig("data", train=TrainConfig(lora_rank=2, weights="x"), sel=CurveConfig(home="module"))
    with pytest.raises(ValueError, match="home must be 'optimizer' or 'none' for l1, sparsity and compress"):
        RunConfig("data", log=LogConfig(compress=True), sel=CurveConfig(home="module"))
