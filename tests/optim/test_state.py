"""The state: AdamW's own for the default map, and round trips of every map in every precision by every way."""

import copy
import io
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import symexplin as sel
from networks import SUMS, strong
from pairwise import every_pair
from training import PAPER, SELSGD, assert_same_bits, build, network, same, train

# Closed by kernels and by formulas, a raw weight alone, products with a residual, formulas with scales of every shape.
RUNS = {
    "default": (sel.SELConfig(), sel.SELAdamW),
    "identity": (sel.SELConfig(mode="linear"), sel.SELAdamW),
    "frozen": (strong("frozen"), sel.SELAdamW),
    "paper+offset": (strong("paper+offset"), sel.SELAdamW),
    "sums": (SUMS, sel.SELAdamW),
    "default, SGD": (sel.SELConfig(), SELSGD),
    "paper, SGD": (PAPER, SELSGD),
}


def by_state_first(model, optimizer, make):
    twin, other = make()
    other.load_state_dict(optimizer.state_dict())
    twin.load_state_dict(model.state_dict())
    return twin, other


def by_file(model, optimizer, make):
    torch.save((model.state_dict(), optimizer.state_dict()), file := io.BytesIO())
    file.seek(0)
    parts = make()
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    return parts


def by_checkpoint(model, optimizer, make):
    """torch.distributed.checkpoint's utilities, which create the state by a step with all rates at 0."""
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    twin, other = make()
    set_state_dict(twin, other, model_state_dict=weights, optim_state_dict=state)
    return twin, other


WAYS = {
    "state first": by_state_first,
    "deepcopy": lambda model, optimizer, _: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer, _: pickle.loads(pickle.dumps((model, optimizer))),
    "file": by_file,
    "distributed checkpoint": by_checkpoint,
}


@every_pair(dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64], name=list(RUNS), way=list(WAYS))
def test_a_run_goes_on_to_the_bit(dtype, name, way):
    config, kind = RUNS[name]

    def make(seed=9):
        model = network(dtype, seed)
        return model, build(model, config, kind=kind)

    model, optimizer = make(0)
    train(model, optimizer, 3)
    twin, other = WAYS[way](model, optimizer, make)
    assert_same_bits(twin, model)
    train(model, optimizer, 3, start=3)
    train(twin, other, 3, start=3)  # after the first: their states share no memory
    assert_same_bits(twin, model)
    assert same(other.state_dict(), optimizer.state_dict())
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter, state in other.state.items():
        stored = {key: value.dtype for key, value in state.items() if key != "step"}
        assert set(stored.values()) <= {precise}
        is_curved = parameter in set(other.param_groups[0]["params"])
        assert ("raw" in stored) == (is_curved and not config.closed)
        assert ("master" in stored) == (dtype.itemsize == 2 and "raw" not in stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_of_the_default_map_is_adamws(dtype):
    """Keys, dtypes, shapes, devices and bytes, parameter for parameter."""
    model = network(dtype)
    optimizer, reference = build(model, sel.SELConfig()), torch.optim.AdamW(model.parameters())
    for either in (optimizer, reference):
        train(model, either, 1)
    kinds = lambda state: [(key, v.dtype, v.shape, v.device, v.nbytes) for key, v in state.items()]  # noqa: E731
    for parameter in model.parameters():
        assert kinds(optimizer.state[parameter]) == kinds(reference.state[parameter])
    assert optimizer.state[torch.zeros(())] == {}  # as torch's, of a parameter without state


def test_names_of_the_state_are_those_of_the_module_form():
    model, converted = network(), sel.convert(network(), sel.preset("paper+offset"))
    optimizer = build(model, sel.preset("paper+offset"))
    optimizer.create_state()
    scales = {name for name, _ in converted[0].named_parameters() if not name.startswith(("raw", "bias"))}
    assert {"e_row", "e_column", "n_column", "delta_A"} < scales
    moments = {f"{stem}exp_avg{end}" for stem in ("", *(f"{scale}_" for scale in scales)) for end in ("", "_sq")}
    assert set(optimizer.state[model[0].weight]) == {"step", "raw"} | scales | moments
    for name in scales:
        assert torch.equal(optimizer.state[model[0].weight][name], getattr(converted[0], name).detach())


@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER])
def test_a_state_goes_to_another_precision(config):
    """To half precision and back: full-precision state gets master copies, which a float32 model does not need."""
    model, half = network(), network(torch.bfloat16)
    optimizer, other = build(model, config), build(half, config)
    train(model, optimizer, 2)
    half.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(half, other, 1, start=2)
    assert all(("master" in s) != ("raw" in s) for s in other.state.values())
    assert {v.dtype for s in other.state.values() for v in s.values()} == {torch.float32}
    model.load_state_dict(half.state_dict())
    optimizer.load_state_dict(other.state_dict())
    assert not any("master" in s for s in optimizer.state.values())
    train(model, optimizer, 1, start=3)
    assert not torch.equal(model[0].weight, half[0].weight.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER])
def test_a_state_goes_to_another_device(there, config):
    """Counts stay on the CPU."""
    here = "cuda" if there == "cpu" else "cpu"
    model = network().to(there)
    optimizer = build(model, config)
    train(model, optimizer, 3)
    twin = copy.deepcopy(model).to(here)
    other = build(twin, config)
    other.load_state_dict(optimizer.state_dict())
    for state in other.state.values():
        assert {key: value.device.type for key, value in state.items()} == {
            key: "cpu" if key == "step" else here for key in state
        }
    train(model, optimizer, 3, start=3)
    train(twin, other, 3, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=1e-4, atol=1e-5)


def test_hooks_see_and_change_what_is_loaded_in_full_precision():
    model = network(torch.bfloat16)
    optimizer, other = build(model), build(model)
    train(model, optimizer, 2)

    def before(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["exp_avg"].fill_(0.123456789)
        return changed

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(lambda loaded: loaded.state[model[0].bias]["exp_avg"].fill_(0.987654321))
    other.load_state_dict(optimizer.state_dict())
    for parameter, value in ((model[0].weight, 0.123456789), (model[0].bias, 0.987654321)):
        loaded = other.state[parameter]["exp_avg"]
        assert torch.equal(loaded, torch.full_like(loaded, value, dtype=torch.float32))


def test_counts_may_be_saved_as_numbers_and_names_be_left_out():
    model, twin = network(), network()
    optimizer, reference = build(model), build(twin)
    train(model, optimizer, 2)
    train(twin, reference, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        values |= {"step": float(values["step"])}
    for group in saved["param_groups"]:
        del group["param_names"]  # as torchtitan saves it
    other = build(model)
    other.load_state_dict(saved)
    assert_same_bits(train(model, other, 2, start=2), twin)


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.DataParallel(torch.compile(model))])
def test_the_state_of_a_wrapped_model_goes_to_the_plain_one_and_back(wrap):
    model = network()
    optimizer = build(wrap(model))
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    other = build(twin)
    other.load_state_dict(optimizer.state_dict())
    assert_same_bits(train(twin, other, 1, start=2), train(model, optimizer, 1, start=2))
    optimizer.load_state_dict(other.state_dict())


def test_a_loaded_state_keeps_the_runs_own_settings_and_brings_the_rules():
    model = network()
    optimizer = build(model, betas=(0.8, 0.95), total_steps=50, max_grad_norm=0.3, lr=1e-3)
    train(model, optimizer, 2)
    other = build(model, total_steps=70, max_grad_norm=None)
    other.load_state_dict(optimizer.state_dict())
    for group in other.param_groups:
        assert (group["betas"], group["lr"]) == ((0.8, 0.95), 1e-3)
        assert (group["total_steps"], group["max_grad_norm"], group["steps"]) == (70, None, 2)


OTHER = sel.preset("paper", beta=3).resolve(20).to_json()
PARTITIONS = [  # arguments that make other groups of the same parameters
    ({"no_decay": ["*.bias"]}, r"groups of \[4, 2\] parameters, got \[2, 2, 1, 1\]"),
    ({"lr": {"3.*": 1e-3, "*": 1e-2}}, r"groups of \[4, 2\] parameters, got \[2, 2, 2\]"),
    ({"config": strong("paper", exclude=("3.*",))}, r"groups of \[4, 2\] parameters, got \[2, 4\]"),
]
SPOILED = [
    (lambda s: s["state"][0].pop("exp_avg_sq"), r"exp_avg_sq.*0\.weight, got none"),
    # what torch makes of a flattened state that lacks a parameter
    (lambda s: s["state"].update({0: {key: {} for key in s["state"][0]}}), r"step.*0\.weight, got none"),
    (lambda s: s["state"][0].update(e_row=torch.zeros(3)), r"e_row.*\(20,\).*\(3,\)"),
    (lambda s: s["param_groups"][0]["param_names"].reverse(), r"0\.weight here, got 3\.bias"),
    (lambda s: s["param_groups"][0].pop("role"), "groups without the key 'role'"),
    (lambda s: s["param_groups"][0].update(role="plain"), "'curved' .* 'plain'"),
    (lambda s: s["param_groups"][0].update(config=strong("frozen").to_json()), "the optimizer's map, with e "),
    (lambda s: s["param_groups"][0].update(config=OTHER), r"the optimizer's map, with beta 7\.5, got 3\.0"),
    (lambda s: s["param_groups"][0]["axes"].__setitem__(0, "io"), "axes .*'io'"),
    (lambda s: s["param_groups"].pop(), r"groups of \[4, 2\] parameters, got \[4\]"),
    *((lambda s, kw=kw: s.update(build(network(), **kw).state_dict()), message) for kw, message in PARTITIONS),
    (lambda s: s.update(build(network()[:2]).state_dict()), r"groups of \[4, 2\] parameters, got \[2, 2\]"),
    (lambda s: s.pop("param_groups"), r"the keys 'state' and 'param_groups', got \['state'\]"),
    (lambda s: s.update(torch.optim.AdamW(network().parameters()).state_dict()), "groups without the key 'role'"),
    (lambda s: s.update(build(network(), sel.SELConfig()).state_dict()), "map"),
]


@pytest.mark.parametrize(("change", "message"), SPOILED)
def test_a_state_that_does_not_fit_is_refused_whole(change, message):
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, 1)
    assert math.isfinite(float(optimizer.grad_norm))


@pytest.mark.parametrize("kinds", [(sel.SELAdamW, SELSGD), (SELSGD, sel.SELAdamW)])
def test_states_of_another_rule_are_refused(kinds):
    model = network()
    ours, theirs = (build(model, sel.SELConfig(), kind=kind) for kind in kinds)
    train(model, theirs, 1)
    with pytest.raises(
        ValueError, match=r"'(exp_avg|momentum_buffer)' of shape .* in the state of 0\.weight, got none"
    ):
        ours.load_state_dict(theirs.state_dict())


def test_a_saved_state_has_each_number_once(tmp_path):
    """Of many scales: 12 tensors that lie in one."""
    model = nn.Sequential(nn.Linear(12, 40), *[nn.Linear(40, 40) for _ in range(3)])
    optimizer = build(model)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    size = sum(t.numel() * t.element_size() for s in state["state"].values() for t in s.values())
    torch.save(state, tmp_path / "state")
    one = next(iter(state["state"].values()))
    assert (tmp_path / "state").stat().st_size < 1.5 * size + 60_000
    assert same(torch.load(tmp_path / "state", weights_only=True), state)
    tensors = {f"{i} {key}": value for i, own in state["state"].items() for key, value in own.items()}
    save_file(tensors, tmp_path / "tensors")  # refuses tensors that share memory
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "tensors").items())
    assert len(pickle.dumps(state)) < 1.5 * size + 60_000
    assert len(pickle.dumps(optimizer)) < 2.0 * size + 60_000  # with the parameters
    assert len(pickle.dumps(one)) < 1.5 * sum(t.numel() * t.element_size() for t in one.values()) + 10_000
