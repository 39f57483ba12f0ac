"""The command line, `symexplin COMMAND`: what each command takes. The laboratory does the work."""

import inspect
import os
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from symexplin import __version__
from symexplin.lab.files import write_json
from symexplin.lab.process import Stopped
from symexplin.lab.settings import FLAGS, Count, Whole, from_table, load_toml, merge, to_table, with_flags

__all__ = ["COMMANDS", "main", "make_app"]

_ABOUT = """\
Train models in curved weight space (SymExpLin) and get ordinary weights.

Getting started, with a folder of your own text:
  symexplin prepare mytext/ --out data
  symexplin train --data data --out runs/first --no-bias
  symexplin sample runs/first --prompt "Once"
  symexplin export runs/first --out mymodel        # for transformers
"""
_STATUS = """\
Exit status: 0 on success; 1 if the reader of a pipe closed it; 2 on an error,
which the last line explains (--traceback shows where it arose); 130 if
interrupted; 143 if terminated. An interrupted run writes a checkpoint.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for a user's error, 128 + its number for a signal.

    The arguments `argv` come without the program's name. None: those of the process.

    >>> main(["train", "--out", "runs/first"])
    2
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        words = [word for word in given if word != "--traceback"]
        make_app(words)(words, exit_on_error=False, print_error=False)
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("symexplin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        line = _explain(error)
        if line is None or "--traceback" in given:
            raise
        _tell(line)
        return 128 + error.signal if isinstance(error, Stopped) else 2
    return 0


def make_app(given: Sequence[str] | None = None) -> App:
    """Return the application. Of the commands, those among the arguments `given` get their flags; None: all do."""
    app = App(
        name="symexplin",
        help=_ABOUT,
        help_epilogue=_STATUS,
        help_format="plaintext",
        version=f"symexplin {__version__}",
        default_parameter=FLAGS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place, (name, command) in enumerate(COMMANDS.items()):
        text, mark, examples = (inspect.getdoc(command) or "").partition("Examples:\n")
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)  # paragraphs, which are then wrapped to the terminal
        if name in _SCHEMAS and (given is None or name in given):
            schema, *no_flags = _SCHEMAS[name]
            command = with_flags(command, pkgutil.resolve_name(schema), no_flags)
        app.command(command, name=name, sort_key=place, help=text, help_epilogue=mark + examples)
    return app


def _tell(line: str) -> None:
    """Print the line of an error: in the first process, as all raise an error of one of them."""
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":
        print(f"symexplin: {line}", file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun, which may end the others before they print
        write_json(file, {"message": line, "timestamp": int(time.time())})  # in one step: torchrun may end this process


def _explain(error: Exception) -> str | None:
    """Return the line that tells the user what is wrong; None for a defect of the program."""
    text = " ".join(str(error).split())
    if isinstance(error, Stopped):
        return text
    if isinstance(error, CycloptsError):
        text += f" (see {' '.join(['symexplin', *(error.command_chain or ())])} --help)"
    elif isinstance(error, ModuleNotFoundError):
        extra = "hf" if error.name == "transformers" else "lab"
        text += f"; install the extra {extra!r}: pip install '.[{extra}]' in a clone of symexplin"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, ValueError | OSError | ModuleNotFoundError | FloatingPointError):
        return None
    return f"error: {text}"


def _log(line: str) -> None:
    """Print a line of a long job, which continues after the reader of its pipe has closed it."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for good)


# --- The commands: the docstring of each is its help ------------------------------------------------------------------

Table = dict[str, Any]  # what flags say, which with_flags puts before the other arguments
_Switch = Parameter(negative=(), show_default=False)
_Config = Annotated[str | None, Parameter(help="settings in a TOML file; flags take precedence")]
_Folder = Annotated[str, Parameter(help="folder to write, new or to resume")]
_Command = Annotated[str | None, Parameter(help="command of your own to compare, see above", group="Settings")]
_Cwd = Annotated[
    str | None, Parameter(help="folder where the command runs; default: where it was begun", group="Settings")
]
_Resume = Annotated[bool, _Switch, Parameter(help="continue in the folder, or start there if it is new")]
_Submit = Annotated[bool, _Switch, Parameter(help="submit the jobs, with --cluster slurm")]
_MixCode = Annotated[bool, _Switch, Parameter(help="resume although code has changed since runs began")]
_Run = Annotated[str, Parameter(help="folder of a run, one of its checkpoints, or a model.safetensors")]
_Plan = Annotated[bool, _Switch, Parameter(help="print the runs, the hours here and the assumptions, and stop")]
_Path = str | None


def _file(config: str | None) -> Table:
    """Return the settings in a file."""
    return {} if config is None else load_toml(config)


def _prepare(given: Table, *sources: str, out: str) -> None:
    """Turn text into token files.

    Text comes from `stdlib` (the sources of the running Python), files with documents separated by NUL bytes, .jsonl
    files, which may be compressed (.xz, .gz), parquet files, folders of such files and of plain text, or Hugging Face
    datasets: `hf:NAME[:CONFIG][@REVISION]`, `openwebtext`. Text must be UTF-8; other files in a folder are skipped and
    listed.
    Duplicate documents are dropped. If the command is killed, run it again: it starts over.

    Args:
        sources: stdlib, files, folders, parquet, or hf:NAME[:CONFIG][@REVISION]; several are joined
        out: folder for the tokens

    Examples:
      symexplin prepare mytext/ --out data
      symexplin prepare docs.txt.xz --valid docs.valid.txt.xz --out data
      symexplin prepare openwebtext --tokenizer gpt2 --out owt
    """
    from symexplin.lab.config import PrepareConfig
    from symexplin.lab.data.prepare import prepare

    prepare(from_table(PrepareConfig, {"sources": sources, **given}), out, echo=_log)


def _train(
    given: Table, config: _Config = None, *, out: _Folder, resume: _Resume = False, mix_code: _MixCode = False
) -> None:
    r"""Train a language model on prepared text.

    The model is a transformer. SEL trains it in the optimizer or in the model's layers, or AdamW trains ordinary
    weights (--home). A flag --some-key is the key some_key of the TOML file, in the table named below.

    Files in the folder:
      config.toml        the resolved settings, with which --resume continues
      metrics.jsonl      steps and evaluations, the same bytes on the same CPU
      timing.jsonl       seconds, tokens/s, memory
      tensorboard/       events
      checkpoints/       to resume from
      model.safetensors  plain weights, at the end

    After SIGTERM, Ctrl-C or a lost terminal the run finishes its step, writes a checkpoint and stops. A run killed at
    any moment continues with --resume and ends with the same bits (on a CPU, with the same number of threads). Under
    torchrun, batch_size counts all processes together, and all must see the folder. A run may be resumed with another
    number of processes.

    Examples:
      symexplin train --data data --out runs/first
      symexplin train big.toml --out runs/big --resume
      symexplin train --data data --out runs/paper --preset paper --map beta=5
      torchrun --standalone --nproc-per-node 8 -m symexplin train big.toml \
        --out runs/wide --parallel fsdp
    """
    from symexplin.lab.config import RunConfig
    from symexplin.lab.folders import CONFIG, saved_config
    from symexplin.lab.run import train

    saved, table = Path(out, CONFIG), merge(_file(config), given)
    if resume and saved.exists():
        table = merge(to_table(saved_config(RunConfig, saved)), table)
    train(from_table(RunConfig, table), out, resume=resume, mix_code=mix_code, echo=_log)


def _compare(
    given: Table,
    config: _Config = None,
    *,
    command: _Command = None,
    cwd: _Cwd = None,
    out: _Folder,
    resume: _Resume = False,
    mix_code: _MixCode = False,
    submit: _Submit = False,
) -> None:
    r"""Compare ways to train over learning rates and seeds.

    Every variant is trained at every learning rate with every seed. Variants are compared at the baseline's best
    learning rate, and each at its own best. With --confirm-seeds a second stage follows at these learning rates.

    Settings are those of `symexplin train`, with the table [compare], and [variant.NAME] tables for variants of your
    own. Such a table has the keys of [sel]. It may also change keys of training and of the model, in
    [variant.NAME.train] and [variant.NAME.model].

    With --command the runs are those of your own program, which gets a variant, a learning rate, a seed and a folder,
    and writes the loss into {out}/result.json: {"loss": 2.31}, and optionally "curve": [[step, loss], ...]. A run
    counts once it has ended with status 0.

    With --resume the same command continues a comparison that was stopped, or adds variants, learning rates and seeds.
    With --cluster slurm it writes and submits a script, and ends: --resume tells what the jobs do, and goes on.

    Examples:
      symexplin compare --data data --out runs/c --lrs 1e-3 2e-3 4e-3 \
        --confirm-seeds 1 2 3
      symexplin compare --data data --out runs/c --lrs 1e-3 --seeds 0 1 2 \
        --variants AdamW mine flat --variant mine.preset=paper mine.map.beta=5 \
        --variant flat.home=none flat.train.weight_decay=0.1
      symexplin compare --out runs/mine --variants adamw sel --lrs 1e-3 3e-3 \
        --confirm-seeds 1 2 3 \
        --command "python train.py {variant} --lr {lr} --seed {seed} --out {out}"
    """
    from symexplin.lab.compare.kinds import configured, kind_of
    from symexplin.lab.compare.sweep import compare

    program = {key: value for key, value in (("command", command), ("cwd", cwd)) if value is not None}
    settings = configured(out, _file(config), program, given, resume=resume)
    compare(kind_of(settings), out, resume=resume, mix_code=mix_code, submit=submit, echo=_log)


def _sample(
    model: _Run,
    /,
    *,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    length: Count = 200,
    temperature: float = 0.8,
    seed: Whole = 0,
) -> None:
    """Generate text with a trained model: the final weights of a run, or those of its newest checkpoint.

    Args:
        prompt: beginning of the text; if empty, a new document
        length: number of tokens to generate
        temperature: sampling temperature; 0 takes the most likely token
        seed: seed of the sampling

    Examples:
      symexplin sample runs/first --prompt "Once" --length 300 --temperature 0.7
    """
    from symexplin.lab.evaluate import sample
    from symexplin.lab.weights import load_trained

    trained, tokenizer = load_trained(model)
    print(sample(trained, tokenizer, prompt, length, temperature=temperature, seed=seed))


def _export(model: _Run, /, *, out: str) -> None:
    """Write a folder that transformers loads as a stock architecture (Qwen3).

    The model must have been trained with --no-bias: stock models have no biases.

    Args:
        out: new folder

    Examples:
      symexplin export runs/first --out mymodel
    """
    from symexplin.lab.export import export_transformers
    from symexplin.lab.weights import load_trained

    trained, tokenizer = load_trained(model)
    export_transformers(trained, out, tokenizer)


def _reproduce(
    given: Table,
    name: _Path = None,
    /,
    *,
    out: _Path = None,
    resume: _Resume = False,
    mix_code: _MixCode = False,
    submit: _Submit = False,
    plan: _Plan = False,
    results: _Path = None,
) -> None:
    r"""Run a table of the paper, or one beyond it, and compare the results with the paper's numbers.

    Every variant is trained at every learning rate with every seed. A panel is one size of the model. report.html in
    the folder has the paper's number, the measured one, the difference, and for each claim whether it holds. Without
    NAME the tables are listed. The text is the standard library's at the scale mini, OpenWebText at the scale paper,
    otherwise what --data names. With --resume the same command continues, or adds variants, learning rates and seeds.
    `reproduce profile` prints the time of the parts of a training step instead, which is table 11.

    Args:
        name: name of a table, or a TOML file of one
        out: folder to write, new or to resume (default: runs/reproduce/NAME-SCALE)
        results: CSV file to which a row per run is appended

    Examples:
      symexplin reproduce frozen --plan --scale paper
      symexplin reproduce widths --data docs --out runs/widths --results mini.csv
      symexplin reproduce main_grid --panels 64x2 --lrs 2e-3 --steps 100 --seeds 0
    """
    from symexplin.experiments.reproduce import ReproduceConfig, chosen, plan_lines, reproduce
    from symexplin.experiments.tables import names

    if name is None:
        print("\n".join(f"{table:22} {title}" for table, title in names().items()))
        return
    config = from_table(ReproduceConfig, given)
    folder = Path("runs", "reproduce", f"{Path(name).stem}-{config.scale}") if out is None else out
    if name == "profile":
        from symexplin.experiments.profile import profile

        for panel in chosen(config.table("main_grid", folder), config.panels):
            print("\n".join(profile(panel)))
    elif plan:
        for line in plan_lines(config.table(name, folder), config.panels):
            _log(line)
    else:
        switches = {"resume": resume, "mix_code": mix_code, "submit": submit}
        reproduce(name, folder, config, results=results, echo=_log, **switches)


def _figure(name: _Path = None, /, *sources: str, out: str = "figures") -> None:
    """Draw a figure of the paper from your own runs and weights, as NAME.svg and NAME.png.

    Args:
        name: name of the figure; without it all are listed, with what each is drawn from
        sources: runs, comparisons or weights, as the list says
        out: folder for both files

    Examples:
      symexplin figure symexp_controls --out figures
      symexplin figure loss_curves runs/reproduce/main_grid-mini
    """
    from symexplin.experiments.figures import draw, format_figures, save_figure

    if name is None:
        print(format_figures())
    else:
        print("\n".join(map(str, save_figure(draw(name, sources), out, name))))


def _demo(*, out: str = "runs/demo") -> None:
    """Compare AdamW and SEL on a small model, in minutes, without a download.

    The data are the sources of the running Python's standard library. AdamW, SEL's default and the paper's method are
    trained on them at two learning rates each, and three further seeds judge them at the best ones. Some steps are
    timed first, and the runs have as many as take about four minutes. After an interruption the same command continues.

    Args:
        out: folder for data/ and comparison/, which has the report

    Examples:
      symexplin demo --out runs/other
    """
    from symexplin.lab.demo import run_demo

    run_demo(out, echo=_log)


_LISTED = (_demo, _prepare, _train, _sample, _compare, _reproduce, _export, _figure)
COMMANDS: dict[str, Callable[..., None]] = {command.__name__[1:]: command for command in _LISTED}
# The configuration whose keys are flags of a command, which is imported for this command alone; then the keys that have
# no flag.
_SCHEMAS = {
    "prepare": ("symexplin.lab.config:PrepareConfig", "sources"),
    "train": ("symexplin.lab.config:RunConfig",),
    "compare": ("symexplin.lab.compare.grid:CompareConfig", "lr", "seed", "home", "preset", "start", "map"),
    "reproduce": ("symexplin.experiments.reproduce:ReproduceConfig",),
}
