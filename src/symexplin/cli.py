"""The command line, `symexplin COMMAND`: what each command takes. The laboratory does the work."""

import dataclasses
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
from symexplin.lab.process import launch, under_torchrun
from symexplin.lab.settings import Pairs, from_table, load_toml, merge, with_flags

__all__ = ["COMMANDS", "main", "make_app"]

# Errors that all processes of a job share. One line is enough for them.
_OF_ALL = {"NonFiniteError", "Stopped", "ChildProcessError"}
_HEAD_START = 2.0  # seconds in which that line is printed before torchrun ends the job
# The words of torch's RuntimeErrors where the memory of a CPU ends.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Storage size calculation overflowed")

_ABOUT = """\
Train models in curved weight space (SymExpLin) and own ordinary weights.

A first walk, with a folder of your own text:
  symexplin prepare mytext/ --out data
  symexplin train --data data --out runs/first --no-bias
  symexplin sample runs/first --prompt "Once"
  symexplin export runs/first --out mymodel        # for transformers
"""
_STATUS = """\
Exit status: 0 success; 1 the reader of the output left; 2 an error that the
last line explains (--traceback shows where it arose); 130 interrupted; 143
terminated. A run that is interrupted or terminated writes a checkpoint.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for a user's error, 128 + its number for a signal.

    The arguments `argv` come without the program's name. None: those of the process.

    >>> main(["demo", "--steps", "0"])
    2
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        _recorded(_run)([word for word in given if word != "--traceback"])
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("symexplin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: the lab's are not imported for all commands
        message, status = _explain(error, kinds)
        teller = _teller(kinds)
        if message is None or (teller is not None and "--traceback" in given):
            raise
        if teller is not None:
            print(f"symexplin: {teller}{message}", file=sys.stderr)
        elif under_torchrun():
            time.sleep(_HEAD_START)
        return status
    return 0


def make_app(given: Sequence[str] | None = None) -> App:
    """Return the application. Of the commands, those among the arguments `given` get their flags; None: all do."""
    app = App(
        name="symexplin",
        help=_ABOUT,
        help_epilogue=_STATUS,
        help_format="plaintext",
        version=f"symexplin {__version__}",
        default_parameter=Parameter(allow_repeating=True, negative_iterable=()),  # the last of several flags wins
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place, (name, command) in enumerate(COMMANDS.items()):
        text, mark, examples = (inspect.getdoc(command) or "").partition("Examples:\n")
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)  # paragraphs, which are then wrapped to the terminal
        if name in _SCHEMAS and (given is None or name in given):
            command = with_flags(command, pkgutil.resolve_name(_SCHEMAS[name]), _NO_FLAGS.get(name, ()))
        app.command(command, name=name, sort_key=place, help=text, help_epilogue=mark + examples)
    return app


def _run(given: list[str]) -> None:
    name = next((word for word in given if word in COMMANDS), None)
    if launch()[1] > 1 and name is not None and name not in _PARALLEL:
        raise ValueError(f"torchrun is for {' and '.join(_PARALLEL)}, got {name!r}: run it without")
    make_app(given)(given, exit_on_error=False, print_error=False)


def _recorded(function: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Let the report of torchrun, if it started this process, show the error that `function` ends with."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return function
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)


def _teller(kinds: set[str]) -> str | None:
    """Return what names this process of its job before an error; None: another process prints it."""
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    if rank == "0":
        return None if "ElsewhereError" in kinds else ""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and not kinds & {*_OF_ALL, "ElsewhereError"}:
        return f"process {rank}: "
    return None


def _explain(error: Exception, kinds: set[str]) -> tuple[str | None, int]:
    """Return the line that tells a user what went wrong, and the status; None for a defect of the program."""
    text = " ".join(str(error).split())
    if "Stopped" in kinds:
        return text, 128 + int(error.signal)  # type: ignore[attr-defined]
    if isinstance(error, CycloptsError):
        text += f" (see {' '.join(['symexplin', *(error.command_chain or ())])} --help)"
    elif isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        text += "; install the extra 'lab': pip install 'symexplin[lab]'"
    elif "OutOfMemoryError" in kinds or any(words in text for words in _NO_MEMORY):
        less = "raise --accumulation, or try --recompute"
        text = f"out of memory: {less} ({text[:200]})"
    elif any(kind.__module__.startswith(("torch._dynamo", "torch._inductor")) for kind in type(error).__mro__):
        text = f"torch.compile failed: leave out --compile, or remove its cache ({text[:200]})"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, ValueError | OSError | ModuleNotFoundError) and "NonFiniteError" not in kinds:
        return None, 1
    return f"error: {text}", 2


def _log(line: str) -> None:
    """Print a line of a long job, which continues after its reader has left."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for good)


def _warn(line: str) -> None:
    """Print a warning to standard error."""
    print(f"symexplin: {line}", file=sys.stderr, flush=True)


def _in_file(config: str | None) -> dict[str, Any]:
    """Return the settings in a TOML file, none without one."""
    return {} if config is None else load_toml(config)


# --- The commands: the docstring of each is its help ------------------------------------------------------------------

_Switch = Parameter(negative=(), show_default=False)
_Config = Annotated[str | None, Parameter(help="settings in TOML; flags take precedence")]
_Folder = Annotated[str, Parameter(help="the folder of the run, new or to resume")]
_Command = Annotated[str | None, Parameter(help="a command of your own to compare: see above", group="Settings")]
_Resume = Annotated[bool, _Switch, Parameter(help="continue in the folder, or start there")]
_Run = Annotated[str, Parameter(help="the folder of a run, one of its checkpoints, or a model.safetensors")]
_Weights = Annotated[str, Parameter(help="a safetensors file, or a folder of them")]
_Plan = Annotated[bool, _Switch, Parameter(help="print the runs and the assumptions, and stop")]
_Path = str | None


def _prepare(*sources: str, out: str, **given: Any) -> None:
    """Turn text into token files.

    Text comes from `stdlib` (the sources of the running Python), files with documents separated by NUL bytes, .jsonl
    files, either compressed (.xz, .gz), folders of such files and of plain text, or Hugging Face data sets:
    hf:NAME[:CONFIG], `openwebtext`, `fineweb`. It must be UTF-8: other files in a folder are left out and named.
    Repeated documents count once. After a kill the same command starts again.

    Args:
        sources: stdlib, files, folders, or hf:NAME[:CONFIG]; several are joined
        out: the folder for the tokens

    Examples:
      symexplin prepare mytext/ --out data
      symexplin prepare docs.txt.xz --valid docs.valid.txt.xz --out data
      symexplin prepare openwebtext --tokenizer gpt2 --out owt
    """
    from symexplin.lab.data.prepare import PrepareConfig, prepare

    prepare(from_table(PrepareConfig, {"sources": sources, **given}), out, echo=_log)


def _train(config: _Config = None, *, out: _Folder, resume: _Resume = False, **given: Any) -> None:
    r"""Train a language model on prepared text.

    The model is a transformer, trained with SEL in either home or with AdamW. A flag --some-key is the key some_key of
    the TOML file, in the table named below.

    Files in the folder:
      config.toml        the resolved settings, with which --resume continues
      metrics.jsonl      steps and evaluations, the same bytes on the same CPU
      timing.jsonl       seconds, tokens/s, memory
      tensorboard/       events
      checkpoints/       to resume from
      model.safetensors  plain weights, at the end

    SIGTERM, Ctrl-C and a lost terminal finish the step, write a checkpoint and stop. A run killed at any moment
    continues with --resume and ends with the same bits (on a CPU, with the same number of threads). Under torchrun,
    batch_size is that of all processes together, and all must see the folder. Another number may resume a run.

    Examples:
      symexplin train --data data --out runs/first
      symexplin train big.toml --out runs/big --resume
      symexplin train --data data --out runs/paper --preset paper --map beta=5
      torchrun --standalone --nproc-per-node 8 -m symexplin train big.toml \
        --out runs/wide --parallel fsdp
    """
    from symexplin.lab.config import RunConfig
    from symexplin.lab.folders import CONFIG, saved_config
    from symexplin.lab.run import MODEL, train

    saved, table = Path(out, CONFIG), merge(_in_file(config), given)
    if resume and saved.exists():
        saved_config(RunConfig, saved)  # its errors name the file
        table = merge(load_toml(saved), table)
    result = train(from_table(RunConfig, table), out, resume=resume, echo=_log)
    if launch()[0] == 0:
        _log(f"{result['final_loss']:.4f} nats per token; plain weights: {Path(out, MODEL)}")


def _compare(
    config: _Config = None, *, command: _Command = None, out: _Folder, resume: _Resume = False, **given: Any
) -> None:
    r"""Compare ways to train over learning rates and seeds.

    Every variant is trained at every learning rate with every seed. Variants are compared at the baseline's best
    learning rate, and each at its own best. With --confirm-seeds a second stage follows at these learning rates, with
    these seeds.

    Settings are those of `symexplin train`, with the table [compare], and [variant.NAME] tables for variants of your
    own. Such a table has the keys of [sel]. It may also change keys of training and of the model, in
    [variant.NAME.train] and [variant.NAME.model].

    With --command the runs are those of your own program, which gets a variant, a learning rate, a seed and a folder,
    and writes the loss into {out}/result.json: {"loss": 2.31}, and optionally "curve": [[step, loss], ...].

    With --resume the same command continues a comparison that was stopped, or adds variants, learning rates and seeds.

    Examples:
      symexplin compare --data data --out runs/c --lrs 1e-3 2e-3 4e-3 --seeds 0 1 2
      symexplin compare --data data --out runs/c --lrs 1e-3 \
        --variants AdamW mine muon --variant mine.preset=paper mine.map.beta=5 \
        --variant muon.home=none muon.train.optimizer=muon
      symexplin compare --out runs/mine --variants adamw sel --lrs 1e-3 3e-3 \
        --command "python train.py {variant} --lr {lr} --seed {seed} --out {out}"
    """
    from symexplin.lab.compare.command import CommandConfig, compare_commands, configured
    from symexplin.lab.compare.sweep import compare_runs

    program = {} if command is None else {"command": command}
    settings = configured(out, _in_file(config), program, given, resume=resume)
    if isinstance(settings, CommandConfig):
        compare_commands(settings, out, resume=resume, echo=_log)
    else:
        compare_runs(settings, out, resume=resume, echo=_log)


def _sample(
    model: _Run,
    /,
    *,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    length: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Write text with a trained model: the final weights of a run, or those of its newest checkpoint.

    Args:
        prompt: the beginning; if empty, a new document
        length: tokens to write
        temperature: 0 takes the likeliest token
        top_k: draw from this many likeliest tokens alone
        seed: of the draws

    Examples:
      symexplin sample runs/first --prompt "Once" --length 300 --temperature 0.7
    """
    from symexplin.lab.evaluate import sample
    from symexplin.lab.load import load_trained

    trained, tokenizer, _ = load_trained(model, echo=_warn)
    print(sample(trained, tokenizer, prompt, length, temperature=temperature, top_k=top_k, seed=seed))


def _export(model: _Run, /, *, out: str) -> None:
    """Write a folder that transformers loads as a stock architecture (Qwen3).

    The model must have been trained with --no-bias: stock models have no biases.

    Args:
        out: a new folder

    Examples:
      symexplin export runs/first --out mymodel
    """
    from symexplin.lab.export import export_transformers
    from symexplin.lab.load import load_trained

    trained, tokenizer, curve = load_trained(model, echo=_warn)
    export_transformers(trained, out, tokenizer, curve, echo=print)


def _inspect(source: _Weights, /, *, preset: _Path = None, map: Pairs = None, json: _Path = None) -> None:
    """Show the heavy tails of any model's weights.

    For each matrix: how far the largest weight and the standard deviation have grown over Xavier's uniform, the shares
    beyond thresholds, the automatic beta, and how exactly the map can be inverted there. The map is that in the file,
    if the model was trained with one, else the default one.

    Args:
        preset: another map: default (beta by the width), or one of the paper's, such as paper
        json: the file to write all figures to

    Examples:
      symexplin inspect model.safetensors
      symexplin inspect llama/ --preset paper --map beta=15 --json tails.json
    """
    from symexplin.lab.files import check_new, write_json
    from symexplin.lab.inspect import format_inspection, inspect_file
    from symexplin.lab.maps import named_map

    if json is not None:
        check_new("json", json)
    config = named_map(preset or "default", map or {}) if preset or map else None
    found = inspect_file(source, config=config)
    print(format_inspection(found))
    if json is not None:
        write_json(json, dataclasses.asdict(found))


def _reproduce(
    name: _Path = None,
    /,
    *,
    out: _Path = None,
    resume: _Resume = False,
    plan: _Plan = False,
    results: _Path = None,
    **given: Any,
) -> None:
    r"""Run a table of the paper, or one beyond it, and compare the results with the paper's figures.

    Every variant is trained at every learning rate, and the best are confirmed with more seeds. report.html and
    table.csv in the folder have the paper's figure, the measured one, the difference, and for each claim whether it
    held. Without NAME the tables are listed. The text is the standard library's at the scale mini, OpenWebText at the
    scale paper, else what --data names. With --resume the same command continues, or adds variants, learning rates and
    seeds.

    Args:
        name: of a table, or a TOML file of one
        out: new or to resume (default: runs/reproduce/NAME-SCALE)
        results: a CSV file to which a row per run is appended

    Examples:
      symexplin reproduce frozen --plan --scale paper
      symexplin reproduce widths --data docs --out runs/widths --results mini.csv
      symexplin reproduce main_grid --panels 64x2 --lrs 2e-3 --steps 100 --seeds 0
    """
    from symexplin.experiments.reproduce import ReproduceConfig, plan_lines, reproduce
    from symexplin.experiments.tables import names

    if name is None:
        print("\n".join(f"{table:22} {title}" for table, title in names().items()))
        return
    config = from_table(ReproduceConfig, given)
    folder = Path("runs", "reproduce", f"{Path(name).stem}-{config.scale}") if out is None else out
    if plan:
        print("\n".join(plan_lines(config.table(name, folder), config.panels)))
    else:
        reproduce(name, folder, config, resume=resume, results=results, echo=_log)


def _figure(name: _Path = None, /, *sources: str, out: str = "figures") -> None:
    """Draw a figure of the paper from your own runs and weights, as NAME.svg and NAME.png.

    Args:
        name: which figure; without a name all are listed, with what each is drawn from
        sources: runs, comparisons or weights, as the list says
        out: the folder for both files

    Examples:
      symexplin figure symexp_controls --out figures
      symexplin figure loss_curves runs/reproduce/main_grid-mini
    """
    from symexplin.experiments.figures import draw, format_figures, save_figure

    if name is None:
        print(format_figures())
    else:
        print("\n".join(map(str, save_figure(draw(name, sources), out, name))))


def _demo(*, out: str = "runs/demo", **given: Any) -> None:
    """Compare AdamW and SEL on a small model, in minutes, without a download.

    The data are the sources of the running Python's standard library. AdamW, SEL's default and the paper's method are
    trained on them at three learning rates each, in about four minutes on two idle cores. An interrupted demo is
    continued.

    Args:
        out: the folder for the results

    Examples:
      symexplin demo --seed 10 --variants AdamW SEL SEL-frozen --out runs/other
    """
    from symexplin.lab.demo import DemoConfig, run_demo

    run_demo(out, from_table(DemoConfig, given), echo=_log)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__[1:]: command
    for command in (*(_demo, _prepare, _train, _sample, _compare, _reproduce, _export, _inspect, _figure),)
}
# The configurations whose keys are flags of a command. They are imported for this command alone.
_SCHEMAS = {
    "prepare": "symexplin.lab.data.prepare:PrepareConfig",
    "train": "symexplin.lab.config:RunConfig",
    "compare": "symexplin.lab.compare.grid:CompareConfig",
    "reproduce": "symexplin.experiments.reproduce:ReproduceConfig",
    "demo": "symexplin.lab.demo:DemoConfig",
}
# Keys that the command says otherwise.
_NO_FLAGS = {"prepare": ("sources",), "compare": ("lr", "seed", "home", "preset", "start", "map")}
_PARALLEL = ("train",)  # what torchrun may start
