"""The texts of `symexplin --help` and of each command's."""

from typing import NamedTuple

__all__ = ["DESCRIPTION", "EPILOG", "PAGES", "Page"]


class Page(NamedTuple):
    """The help of one command: its line in the list, what stands before its flags, and what after them."""

    help: str
    description: str
    epilog: str


DESCRIPTION = """\
Train models in curved weight space (SymExpLin) and own ordinary weights.

A first walk, with a folder of your own text:
  symexplin prepare mytext/ --out data
  symexplin train --data data --out runs/first --no-bias
  symexplin sample runs/first --prompt "Once"
  symexplin export runs/first --out mymodel        # for transformers
"""
EPILOG = """\
exit status:
  0 success, 1 the reader of the output left, 2 an error in what was asked for (one line says what),
  130 interrupted, 143 terminated; a run that is interrupted or terminated writes a checkpoint first.

Shell completion: symexplin completion --help
"""


_RUN_FILES = """\
files in FOLDER:
  config.toml        the resolved settings; --resume goes on with them
  metrics.jsonl      every step and evaluation; the same bytes for the same run on a CPU
  timing.jsonl       seconds, tokens/s, memory        tensorboard/  events
  checkpoints/       to resume from                   model.safetensors  plain weights, at the end
"""

PAGES = {
    "prepare": Page(
        "turn text into token files",
        """\
Turn text into token files for training, with a tokenizer trained on it, or another one.

SOURCE is `stdlib` (the sources of the running Python), a file with documents separated by NUL bytes, a .jsonl
file, either compressed (.xz, .gz), a folder of such files and of plain text, or a Hugging Face data set:
hf:NAME[:CONFIG], `openwebtext`, `fineweb`. Several are joined. Text must be UTF-8: other files in a folder are left
out and named, other files given by name are refused. Repeated documents count once; a hash of its content
decides whether a document is for training or for validation. A preparation that was killed goes on where it was
when the same command runs again.
""",
        """\
examples:
  symexplin prepare mytext/ --out data
  symexplin prepare docs.txt.xz --valid docs.valid.txt.xz --out data --vocab-size 8192
  symexplin prepare openwebtext --tokenizer gpt2 --out owt --workers 16
""",
    ),
    "train": Page(
        "train a language model on prepared text",
        """\
Train a transformer on prepared text with SEL in either home, or with AdamW.

Settings come from CONFIG.toml and from flags; a flag --some-key is the file's key some_key in the table named
below. Flags go before the file, the file before the defaults. The resolved settings are printed and saved.
""",
        f"""\
{_RUN_FILES}
SIGTERM, Ctrl-C and a lost terminal finish the step, write a checkpoint and stop. A run killed at any moment goes on
with --resume and ends with the same bits (on a CPU, with the same number of threads).

Several processes train one run under torchrun, with --parallel ddp or fsdp: batch_size stays that of all together,
FOLDER must be one that all see, timing.jsonl has the tokens/s of all and the memory of the first. A run may be resumed
with another number of processes, or with one; threads and loss_chunk that were not given are then chosen anew.
torchrun gives a run that it stops 30 seconds to write its checkpoint; a run whose torchrun was killed does the same.

examples:
  symexplin train --data data --out runs/first
  symexplin train big.toml --out runs/big --resume
  symexplin train --data data --out runs/paper --preset paper --start mismatched --lr 1e-3 --map beta=5 e.k=[50,8]
  symexplin train --data data --out runs/adamw --home none
  symexplin train --data data --out runs/on --weights runs/adamw
  torchrun --standalone --nproc-per-node 8 -m symexplin train --data data --out runs/wide --parallel fsdp
""",
    ),
    "compare": Page(
        "compare ways to train over learning rates and seeds",
        """\
Train every arm at every learning rate with every seed, and compare: at the baseline's best learning rate, and each
arm at its own best. The learning rates of learned scales are the same at every learning rate of the weights.

Settings as for `symexplin train`, with the table [compare], and [arm.NAME] tables for arms of your own: each has the
keys of [sel], and may change keys of training and of the model for itself, in [arm.NAME.train] and [arm.NAME.model].
With --confirm-seeds a second stage follows: each arm at its own best learning rate and at the baseline's, with these
seeds. The tables are then over the seeds of both stages.
""",
        """\
The same command with --resume goes on with a comparison that was stopped, or adds arms, learning rates and seeds of
either stage.
Keys of [compute] may then be others, as for one run: runs that have not ended go on with other rounding.
Under torchrun every run is trained by all processes, one run after the other (--jobs 1).

examples:
  symexplin compare --data data --out runs/c --arms AdamW SEL --lrs 1e-3 2e-3 4e-3 --seeds 0 1 2
  symexplin compare --data data --out runs/c --arms AdamW mine --arm mine.preset=paper --arm mine.map.beta=5 --lrs 1e-3
  symexplin compare --data data --out runs/c --arms AdamW muon --arm muon.home=none --arm muon.train.optimizer=muon
  symexplin compare --data data --out runs/c --seeds 0 --confirm-seeds 1 2
""",
    ),
    "sample": Page(
        "write text with a trained model",
        "Write text with a trained model: the final weights of a run, or those of its newest checkpoint.\n",
        """\
example:
  symexplin sample runs/first --prompt "Once" --length 300 --temperature 0.7
""",
    ),
    "export": Page(
        "write a folder that transformers loads",
        """\
Write the plain weights of a trained model as a folder that transformers' AutoModelForCausalLM and AutoTokenizer load
as a stock architecture (Qwen3). The model must have been trained with --no-bias: stock ones have none.
""",
        """\
example:
  symexplin export runs/first --out mymodel
""",
    ),
    "report": Page(
        "write a page with curves, tables and maps",
        """\
Write report.html, one page without outside parts, into the folder of a run or of a comparison: curves, tables,
trajectories of the scales, histograms of weights, the shapes of the learned map. A run may still be going on.
""",
        """\
example:
  symexplin report runs/first
""",
    ),
    "inspect": Page(
        "show the heavy tails of any model's weights",
        """\
Show how far the weights of a safetensors model have moved beyond their initial range, matrix by matrix: growth of
the largest weight and of the standard deviation over Xavier's uniform, shares beyond thresholds, the automatic beta,
and how exactly the map can be inverted there. The map is the one that the model was trained with, if the file names it
(weights of a run and of `symexplin export` do), else the default one, unless --preset or --map give another.
""",
        """\
examples:
  symexplin inspect model.safetensors
  symexplin inspect llama/ --preset paper --map beta=15 --json tails.json --figures tails
""",
    ),
    "invert": Page(
        "turn plain weights into raw weights",
        """\
Write the raw weights and scales whose effective weights are those of a plain safetensors model, as the state_dict of
the model that symexplin.convert makes; the largest difference is reported.
""",
        """\
example:
  symexplin invert model.safetensors raw.safetensors --preset paper
""",
    ),
    "fold": Page(
        "turn raw weights into plain weights",
        """\
Write the plain weights of a safetensors file with raw weights and scales: of `symexplin invert`, or of a checkpoint of
a run with --home module. The largest difference between the weights written and the effective ones is reported.
""",
        """\
example:
  symexplin fold runs/module/checkpoints/step-00000300/model.safetensors plain.safetensors
""",
    ),
    "figure": Page(
        "draw a figure of the paper from your own runs and weights",
        """\
Draw one of the paper's figures and write it as NAME.svg and NAME.png: of functions, or of the runs, comparisons and
weights that SOURCE names. Without a NAME, list all figures and what each is drawn from.
""",
        """\
examples:
  symexplin figure
  symexplin figure symexp_controls --out figures
  symexplin figure transform_roles runs/first
  symexplin figure loss_curves runs/reproduce/main_grid-mini
""",
    ),
    "demo": Page(
        "compare AdamW and SEL on a small model, in minutes, without a download",
        """\
Prepare the sources of the running Python's standard library, train AdamW and SEL on them at three learning rates
each, and report. About four minutes on two cores. An earlier demo in FOLDER is replaced, unless it was
interrupted and had the same settings: then it goes on.
""",
        """\
examples:
  symexplin demo
  symexplin demo --seed 10 --arms AdamW SEL SEL-paper --out runs/other
""",
    ),
    "bench": Page(
        "measure what the map costs on this machine",
        """\
Time the map alone, the optimizer step and the whole training step with AdamW and with SEL in both homes, on random
tokens. All variants take turns in one process, in an order that rotates; the figures are medians with their 10th and
90th percentile, the ratios those of the same round. `adamw_master` is the stock recipe for bf16 parameters: upcast,
clip, fused AdamW on fp32 masters, copy back. Lists of widths, depths and microbatches are swept.
""",
        """\
files in FOLDER:
  results.csv        a row for each variant and size, with machine, versions and commit
  rounds.jsonl       every round          bench.svg, bench.png  the plot

examples:
  symexplin bench --out bench --parts optimizer step --widths 512 --depths 6 --tokens 8192
  symexplin bench --out sweep --parts step --widths 256 512 1024 --depths 2 6 12 --microbatches 1 2 4 8 16
  symexplin bench --out big --widths 3072 --depths 36 --dtypes bf16 --tokens 32768 --compile --recompute --fresh
""",
    ),
    "reproduce": Page(
        "run a table of the paper, or one beyond it, and hold it against the paper's figures",
        """\
Train every arm of a table at every learning rate, confirm the best with more seeds, and report: the paper's figure, the
measured one, the difference, and for each claim whether it held. Without NAME: list the tables. The scales are one code
path with other settings: mini (two CPU cores, at most an hour), paper (its protocol), h200 (one large GPU). The text is
the standard library's in miniature, OpenWebText at the paper's scale, else what --data says.
""",
        """\
The same command with --resume goes on after a kill, or adds arms, learning rates and seeds.

files in FOLDER:
  table.json         what it is                       data/  the tokens, unless --data has them
  panels/PANEL/      a comparison each                base/  the run that the others start from, if any
  report.html        what came out                    table.csv, figures/  the same as data and drawings

examples:
  symexplin reproduce frozen --plan --scale paper
  symexplin reproduce frozen
  symexplin prepare docs.txt.xz --valid docs.valid.txt.xz --tokenizer byte --out docs
  symexplin reproduce suite --data docs --out runs/suite --results results/mini.csv
  symexplin reproduce main_grid --panels 64x2 --lrs 2e-3 --steps 100 --set compare.confirm_seeds=[]
""",
    ),
    "completion": Page(
        "print a script that completes commands and flags in a shell",
        "Print a script that completes commands and flags.\n",
        """\
examples:
  symexplin completion bash > ~/.local/share/bash-completion/completions/symexplin
  symexplin completion zsh > "${fpath[1]}/_symexplin"
""",
    ),
}
