"""SEL through timm's optimizer factory: names, decay and layers as timm has them, and what a call without them says."""

import doctest
import functools
import importlib
import sys

import pytest
import torch

import symexplin as sel
from vision import import_timm

timm = import_timm()

create = timm.optim.create_optimizer_v2


@pytest.fixture(autouse=True)
def _registered():
    sel.timm.register()


def vit():
    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **shape)


def build(model, name="seladamw", *, weight_decay=0.05, settings=(), **groups):
    fn = functools.partial(sel.timm.param_groups, **groups)
    return create(model, name, lr=1e-3, weight_decay=weight_decay, param_group_fn=fn, **dict(settings))


def of_each(model, optimizer, key):
    """Return the key of the group of each parameter by the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group.get(key) for group in optimizer.param_groups for p in group["params"]}


def train(model, optimizer, steps):
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(images), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "kind"), [("seladamw", sel.SELAdamW), ("selmuon", sel.SELMuon)])
def test_the_registry_builds_it_over_named_groups(name, kind, caplog):
    sel.timm.register()
    assert timm.optim.list_optimizers("sel*") == ["seladamw", "selmuon"]
    assert not caplog.records  # timm would warn of a name that is registered twice
    model = vit()
    optimizer = build(model, name, settings={"max_grad_norm": 1.0, "betas": [0.9, 0.95], "eps": 1e-6})
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["max_grad_norm"]) == (1e-3, [0.9, 0.95], 1e-6, 1.0)
        assert group.get("momentum") == (0.9 if name == "selmuon" else None)  # timm's default
    assert of_each(model, optimizer, "role") == {
        name: "curved" if name.startswith(("blocks", "patch_embed")) and "norm" not in name else "plain"
        for name, _ in model.named_parameters()
    }
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.8 * losses[0]
    if name == "selmuon":
        assert build(model, name, settings={"momentum": 0.97}).param_groups[0]["momentum"] == 0.97
    assert type(create(sel.param_groups(model), name, lr=1e-3)) is kind  # groups instead of the model


@pytest.mark.parametrize("options", [{}, {"filter_bias_and_bn": False}])
@pytest.mark.parametrize("decay", [0.05, 0.0])
def test_the_same_parameters_decay_as_under_timms_adamw(options, decay):
    model = vit()
    model.patch_embed.requires_grad_(False)
    expected = of_each(model, create(model, "adamw", weight_decay=decay, **options), "weight_decay")
    assert of_each(model, build(model, weight_decay=decay, **options), "weight_decay") == expected
    if decay and not options:
        matrices = {name for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
        assert {name for name, value in expected.items() if value} == matrices


def test_layers_have_the_rates_of_timms_adamw_under_timms_schedulers():
    model, found = vit(), []
    config = sel.preset("paper")
    groups = {"layer_decay": 0.5, "config": config, "lr": 1e-3}
    for optimizer in (
        create(model, "adamw", lr=1e-3, layer_decay=0.5),
        build(model, layer_decay=0.5),
        curved := build(model, settings={"total_steps": 10}, **groups),
    ):
        scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=10, warmup_epochs=0)
        scheduler.step(3)
        found.append(of_each(model, optimizer, "lr"))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 4  # embedding, two blocks, head
    whole = sel.param_groups(model, config=config, lr=1e-3)
    position = {id(p): group["position"][i] for group in whole for i, (_, p) in enumerate(group["params"])}
    for group in curved.param_groups:
        assert group["position"] == [position[id(p)] for p in group["params"]]
        if group["role"] == "curved":
            assert group["k_e"] == whole[0]["k_e"]
            assert [len(axes) for axes in group["axes"]] == [p.dim() for p in group["params"]]
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, curved, 1)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.05}, {"layer_decay": 0.75}])
def test_a_call_without_param_group_fn_says_what_is_missing(options):
    line = r"create_optimizer_v2\(model, 'seladamw', \.\.\., param_group_fn=symexplin\.timm\.param_groups\)"
    for model in (vit(), vit().parameters()):
        with pytest.raises(ValueError, match=f"param_group_fn must be given, got parameters without names.*{line}"):
            create(model, "seladamw", lr=1e-3, **(options if isinstance(model, torch.nn.Module) else {}))


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "symexplin.timm")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match=r"symexplin\.timm needs timm: pip install 'symexplin\[timm\]'"):
        importlib.import_module("symexplin.timm")


def test_its_examples_run():  # pytest does not collect them: they need timm
    found = doctest.testmod(sel.timm)
    assert (found.failed, found.attempted) == (0, 5)
