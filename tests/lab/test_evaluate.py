import pytest
import torch

from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.evaluate import evaluate, sample
from symexplin.lab.model import ModelConfig, Transformer

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
BYTES = Tokenizer.from_name("byte")


def build():
    return Transformer(TINY, torch.Generator().manual_seed(0))


class Replayed(torch.nn.Module):
    """A model that overwrites its last result, as one does that replays CUDA graphs."""

    def __init__(self):
        super().__init__()
        self.model, self.result = build(), torch.zeros(())

    def forward(self, *batch):
        return self.result.copy_(self.model(*batch))


@pytest.mark.parametrize("training", [False, True])
def test_evaluate_weighs_tokens_not_batches_and_leaves_no_trace(training):
    model = Replayed().train(training)
    tokens = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    uneven = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    losses = -torch.log_softmax(build()(inputs).detach().double(), -1).gather(-1, targets[..., None])
    assert evaluate(model, uneven) == pytest.approx(losses.mean().item(), rel=1e-6)
    assert model.training == training
    assert all(p.grad is None for p in model.parameters())


def text(prompt, length, **options):
    return sample(build(), BYTES, prompt, length, **options)


def test_sample_is_private_and_repeatable():
    model, state = build(), torch.get_rng_state()
    first = sample(model, BYTES, "ab", 30, temperature=2.0, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    assert first == text("ab", 30, temperature=2.0, seed=1)
    assert first != text("ab", 30, temperature=2.0, seed=2)
    assert first.startswith("ab")
    assert text("", 5, seed=3) == text("\0", 5, seed=3)[1:]  # an empty prompt begins a document


def test_greedy_sample_takes_the_largest_logit_of_the_last_window():
    model = build()
    expected = b"abcdefghij"
    for _ in range(3):
        logits = model(torch.tensor([list(expected[-8:])]))
        expected += bytes([int(logits[0, -1].argmax())])
    for options in ({"temperature": 0}, {"temperature": 1e-300}):
        assert text("abcdefghij", 3, seed=7, **options) == expected.decode("utf-8", errors="replace")


@pytest.mark.parametrize(("name", "value"), [("length", -1), ("temperature", -0.5), ("seed", -1), ("prompt", "\udcff")])
def test_sample_refuses_values_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        text(**{"prompt": "a", "length": 1, name: value})
