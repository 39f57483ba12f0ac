"""README and the documentation: their Python runs, and their commands exist."""

import functools
import re
import shlex
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import symexplin as sel
from fenced import blocks
from scripts import load
from symexplin.cli import COMMANDS, make_app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
# test_recipes.py runs the recipes, and looks at what they do.
PYTHON = [page for page in PAGES if blocks(page, "python") and page.stem != "lightning-and-timm"]


def prelude():
    """What a reader of a fragment has: a model, its inputs, a loop's names."""
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(8, 16), act=nn.GELU(), decoder=nn.Linear(16, 4)))
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    adamw.step()
    saved = {"model": model.state_dict(), "optimizer": adamw.state_dict()}
    model.encoder.requires_grad_(False)
    names = {"optimizer": sel.SELAdamW(model, lr=1e-3)}  # of a model with a frozen part
    model.encoder.requires_grad_(True)
    return names | {"torch": torch, "sel": sel, "model": model, "inputs": torch.randn(2, 8), "saved": saved}


def trainers(folder):
    """What the fragments of trainers have besides."""
    accelerate, transformers = (pytest.importorskip(name) for name in ("accelerate", "transformers"))
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
    return {
        "model": network,
        "args": args,
        "data": [{"input_ids": torch.zeros(4, dtype=torch.long)}],
        "config": sel.SELConfig(),
        "accelerator": accelerate.Accelerator(cpu=True),
        "tokenizer": None,
        "Trainer": transformers.Trainer,
        "TrainerCallback": transformers.TrainerCallback,
        "TrainingArguments": functools.partial(transformers.TrainingArguments, use_cpu=True, report_to="none"),
        "SFTTrainer": transformers.Trainer,  # whose keywords are the same; examples/trl_sft.py runs the real one
    }


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = prelude()
    if "qk_bias_groups(" in page.read_text(encoding="utf-8"):
        monkeypatch.syspath_prepend(ROOT / "examples")
        names["model"] = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    if "Trainer(" in page.read_text(encoding="utf-8"):
        names |= trainers(tmp_path)
    for text in blocks(page, "python"):
        if re.search(r"from_pretrained|runs/", text):  # of folders that the commands of the page make, in an hour
            compile(text, str(page), "exec")
            continue
        exec(compile(text, str(page), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    if page.parent.name == "tutorials":
        for line in shown(page):
            assert any(agrees(line, other) for other in printed), line


def shown(page):
    """Return the lines that a page shows as the output of its Python."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n.*?^```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL | re.MULTILINE)
    return [line.strip() for block in found for line in block.splitlines() if line.strip() != "..."]


def agrees(line, other):
    """Whether two lines are alike, with losses that differ by at most 5%."""
    loss = re.compile(r"(?<=loss: )[\d.]+")
    numbers = [float(number) for text in (line, other) for number in loss.findall(text)]
    return loss.sub("", line) == loss.sub("", other.strip()) and numbers[:1] == pytest.approx(numbers[1:], rel=0.05)


def commands(page):
    """Return the words of each line that calls the command line, continued lines included."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    |)(symexplin \w.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_every_command_in_the_documents_parses():
    """Their flags and types; what they do is tested with the laboratory."""
    app, seen = make_app(), []
    for page in PAGES:
        for words in commands(page):
            if words[0] in COMMANDS and not {"...", "NAME", "TEXT", "FOLDER"} & set(words):
                app.parse_args(words, exit_on_error=False, print_error=False)
                seen.append(words[0])
    assert {"prepare", "train", "compare", "reproduce", "figure", "export"} <= set(seen)


@pytest.fixture(scope="module")
def hooks():
    """docs/hooks.py, which needs the extra "docs"."""
    for name in ("latex2mathml", "mkdocs", "nbconvert"):
        pytest.importorskip(name)
    return load(ROOT / "docs/hooks.py")


def test_every_formula_of_a_page_becomes_mathml(hooks):
    markdown = pytest.importorskip("markdown")
    pages = 0
    for page in PAGES:
        html = markdown.markdown(
            page.read_text(encoding="utf-8"),
            extensions=["tables", "pymdownx.superfences", "pymdownx.arithmatex"],
            extension_configs={"pymdownx.arithmatex": {"generic": True}},
        )
        formulas = html.count('class="arithmatex"')
        html = hooks.on_page_content(html)
        assert html.count("<math ") == html.count('class="formula"') == formulas
        for formula in re.findall("<math .*?</math>", html):
            assert not re.search(r"\\|&amp;|merror", formula), f"{page.name}: {formula}"
        pages += formulas > 0
    assert pages >= 2
