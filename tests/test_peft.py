"""LoRA under PEFT: on a model trained in curved weight space, and with its own factors curved."""

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402
from networks import strong  # noqa: E402

CONFIG = strong("paper")
IDS = (torch.arange(4)[:, None] * 7 + torch.arange(12)) % 32
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def base():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config).eval()


def adapted(model=None, **changes):
    torch.manual_seed(1)
    return peft.get_peft_model(model or base(), peft.LoraConfig(**{**LORA, **changes})).eval()


def curved(model, weight_decay=0.01):
    return sel.SELAdamW(model, lr=1e-2, weight_decay=weight_decay, config=CONFIG, total_steps=10, max_grad_norm=1.0)


def train(model, optimizer, steps=10):
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def table(model):
    return {r.name.removeprefix("base_model.model."): r for r in sel.routing(model, CONFIG) if r.reason != "frozen"}


def test_adapters_on_a_model_trained_in_curved_space_leave_it_alone():
    model = base()
    optimizer = curved(model)
    train(model, optimizer)
    start, adapters = logits(model), adapted(model)
    losses = train(adapters, curved(adapters))
    assert losses[-1] < losses[0]
    optimizer.step()  # the first optimizer, still about: nothing of its own has a gradient
    with adapters.disable_adapter():
        assert torch.equal(logits(adapters), start)
    merged = adapters.merge_and_unload()
    train(merged.requires_grad_(True), curved(merged))  # and on in curved space from the merged weights


def test_all_linear_passes_over_the_layers_of_a_converted_model():
    """Only what stayed plain is adapted; once the model is folded, all linear layers are."""
    everything = {"target_modules": "all-linear"}
    model = sel.convert(base(), strong("paper", exclude=("*.q_proj.weight",)))
    start = logits(model)
    model = adapted(model, **everything)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert wrapped == {"base_model.model.model.layers.0.self_attn.q_proj"}
    torch.testing.assert_close(logits(model), start)
    folded = adapted(sel.fold(sel.convert(base(), CONFIG)), **everything)
    assert sum(isinstance(module, peft.tuners.lora.Linear) for module in folded.modules()) == 7


def test_quantization_and_transformers_initialization_pass_over_curved_layers():
    torchao = pytest.importorskip("torchao")
    model = sel.convert(base(), CONFIG)
    before = {name: parameter.detach().clone() for name, parameter in model.model.layers.named_parameters()}
    model.apply(model._init_weights)
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    assert type(model.lm_head.weight) is not torch.nn.Parameter  # the head was plain
    after = dict(model.model.layers.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, {}),
        ({"use_dora": True}, {"lora_magnitude_vector": "DoraLinearLayer"}),
        ({"target_modules": ["q_proj", "embed_tokens"]}, {"lora_embedding_": "ParameterDict"}),
        ({"modules_to_save": ["lm_head"]}, {"lm_head.modules_to_save": "output head"}),
        ({"target_modules": ["q_proj", "lm_head"]}, {"lm_head.lora_": "output head"}),
        ({"modules_to_save": ["norm"]}, {"norm.modules_to_save": "LlamaRMSNorm"}),
    ],
)
def test_factors_are_curved_and_what_else_peft_adds_is_plain(changes, plain, tmp_path):
    model = adapted(**changes)
    for name, route in table(model).items():
        reason = next((reason for part, reason in plain.items() if part in name), None)
        assert (route.curved, route.reason) == ((True, "linear weight") if reason is None else (False, reason)), name
    losses = train(model, curved(model))
    assert losses[-1] < losses[0]
    assert all(bool((p != 0).any()) for name, p in model.named_parameters() if "lora_B" in name)  # it started at 0
    model.save_pretrained(tmp_path)
    loaded = logits(peft.PeftModel.from_pretrained(base(), tmp_path))
    assert torch.equal(loaded, logits(model))
    torch.testing.assert_close(logits(model.merge_and_unload()), loaded)


def test_a_classifier_is_a_head_when_peft_wraps_it():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3))
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2))
    saved = {n: r.reason for n, r in table(model).items() if not r.curved}
    assert saved == {f"classifier.modules_to_save.default.{part}": "output head" for part in ("weight", "bias")}
