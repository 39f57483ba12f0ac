"""What a run is: its data, model, schedule, map and machine, as one checked configuration."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from symexplin.lab.maps import CurveConfig, map_of
from symexplin.lab.model import ModelConfig
from symexplin.lab.parallel import PARALLEL
from symexplin.validation import check_choice, check_flag, check_fraction, check_positive, check_whole

__all__ = ["OPTIMIZERS", "ComputeConfig", "LogConfig", "RunConfig", "TrainConfig", "absolute", "resolve"]

OPTIMIZERS = ("adamw", "muon")

_PAPER_WARMUP = 250  # section 5.1
_SWITCH = ("auto", "on", "off")
# Above this size the logits of a microbatch are computed in chunks (float32; their gradients take as much again).
_LOGITS_BYTES = 2**28


@dataclass(frozen=True)
class TrainConfig:
    """The training schedule. AdamW's defaults are the paper's (section 5.1).

    Args:
        steps: optimizer steps.
        batch_size: sequences per optimizer step, over all processes.
        accumulation: microbatches per optimizer step; must divide batch_size.
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up, before the linear decay. Default: the paper's 250, or a tenth of the
            steps in runs of fewer than 2,500.
        floor: fraction of lr at the end of the decay.
        optimizer: "adamw", or "muon": Muon for the matrices of the blocks and AdamW for the rest, at one learning rate.
        weight_decay: decoupled weight decay.
        decay_plain: decay the embedding, the head and the norms too, as AdamW over all parameters does. The paper does
            not say. Off: decay only the linear layers of the blocks, weights and biases.
        betas: decay rates of AdamW's moments.
        max_grad_norm: global norm to which gradients are clipped.
        weights: plain weights to start from, of a model of this shape: a run's folder, one of its checkpoints, or a
            model.safetensors. Default: weights are drawn.
        eval_every: steps between evaluations. The start and the end are always evaluated.
        eval_batches: batches per evaluation.
        seed: of the initial weights and of the order of the data.

    Raises:
        ValueError: a value out of range.

    >>> TrainConfig(batch_size=16, accumulation=3)
    Traceback (most recent call last):
    ValueError: accumulation must divide batch_size = 16, got 3
    """

    steps: int = 300
    batch_size: int = 16
    accumulation: int = 1
    lr: float = 3e-3
    warmup_steps: int | None = None
    floor: float = 0.0
    optimizer: str = field(default="adamw", metadata={"choices": OPTIMIZERS})
    weight_decay: float = 0.01
    decay_plain: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    weights: str | None = None
    eval_every: int = 25
    eval_batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("steps", "batch_size", "accumulation", "eval_every", "eval_batches"):
            check_whole(name, getattr(self, name))
        check_whole("seed", self.seed, minimum=0)
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", min(_PAPER_WARMUP, round(0.1 * self.steps)))
        if check_whole("warmup_steps", self.warmup_steps, minimum=0) > self.steps:
            raise ValueError(f"warmup_steps must be at most steps = {self.steps}, got {self.warmup_steps}")
        check_positive("lr", self.lr)
        check_positive("max_grad_norm", self.max_grad_norm)
        check_fraction("floor", self.floor)
        check_fraction("weight_decay", self.weight_decay)
        for beta in self.betas:
            check_fraction("betas", beta)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_flag("decay_plain", self.decay_plain)
        if self.weights is not None and not self.weights.strip():
            raise ValueError(f"weights must name a run's folder or a model.safetensors, got {self.weights!r}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation must divide batch_size = {self.batch_size}, got {self.accumulation}")


@dataclass(frozen=True)
class ComputeConfig:
    """The machine and how it computes. These keys change only the rounding of the result.

    Args:
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", "mps".
        threads: threads of the CPU. Default: torch's.
        autocast: "on" (bfloat16), "off", or "auto": on where bfloat16 is faster, which is on GPUs that support it and
            on CPUs with AMX or AVX512-BF16.
        compile: torch.compile the model. A CPU needs a C++ compiler for it.
        recompute: recompute each block's activations in the backward pass instead of storing them.
        loss_chunk: tokens whose logits the loss holds at a time; 0: all. Default: all, up to 256 MiB of logits.
        parallel: how the processes of torchrun share the work: "ddp" (each has the whole model) or "fsdp" (FSDP2: each
            has a part of every parameter). Default: "ddp". A single process ignores it.

    Raises:
        ValueError: a value out of range.
    """

    device: str = "auto"
    threads: int | None = None
    autocast: str = field(default="auto", metadata={"choices": _SWITCH})
    compile: bool = False
    recompute: bool = False
    loss_chunk: int | None = None
    parallel: str | None = field(default=None, metadata={"choices": PARALLEL})

    def __post_init__(self) -> None:
        """Check every field."""
        check_choice("autocast", self.autocast, _SWITCH)
        if self.parallel is not None:
            check_choice("parallel", self.parallel, PARALLEL)
        for name in ("compile", "recompute"):
            check_flag(name, getattr(self, name))
        if self.threads is not None:
            check_whole("threads", self.threads, maximum=1024)
        if self.loss_chunk is not None:
            check_whole("loss_chunk", self.loss_chunk, minimum=0)


@dataclass(frozen=True)
class LogConfig:
    """What a run writes while it trains. These keys may change when a run is resumed.

    Args:
        checkpoint_every: optimizer steps between checkpoints. SIGTERM, Ctrl-C and the end of the run write one too.
        keep: number of checkpoints to keep, the newest ones.
        tensorboard: write TensorBoard events beside metrics.jsonl.
        wandb: project of Weights & Biases to log to, if wandb is installed.

    Raises:
        ValueError: a value out of range.
    """

    checkpoint_every: int = 500
    keep: int = 2
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_whole("checkpoint_every", self.checkpoint_every)
        check_whole("keep", self.keep)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        data: folder written by `symexplin prepare`.

    Raises:
        ValueError: a value out of range, an invalid map.

    >>> RunConfig("data", ModelConfig(width=256)).model.width
    256
    """

    data: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sel: CurveConfig = field(default_factory=CurveConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Check what depends on several tables."""
        curve = map_of(self.sel, self.model.width)
        if curve is not None and self.sel.start == "mismatched" and curve.mode != "mismatch":
            raise ValueError(f"start 'mismatched' needs mode 'mismatch', got mode {curve.mode!r}")
        if self.sel.home == "module" and self.train.optimizer != "adamw":
            raise ValueError(
                f"optimizer must be 'adamw' for home 'module', got "
                f"{self.train.optimizer!r}: use home 'optimizer', or 'none'"
            )


def resolve(config: RunConfig, vocab_size: int, processes: int = 1) -> RunConfig:
    """Return `config` with every default filled in: absolute paths, map, device, threads, autocast, loss_chunk.

    Args:
        config: the configuration; values that are not given are chosen for the machine.
        vocab_size: of the data's tokenizer.
        processes: number of processes that train the run.

    Raises:
        ValueError: a device that does not exist, a batch that cannot be divided among the processes.

    >>> resolve(RunConfig("data"), vocab_size=300).model.vocab_size
    300
    """
    rows, rest = divmod(config.train.batch_size // config.train.accumulation, processes)
    if rest:
        raise ValueError(
            f"batch_size / accumulation must be a multiple of the {processes} processes, got "
            f"{config.train.batch_size} / {config.train.accumulation}"
        )
    if processes > 1 and config.compute.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            "device must be auto, cpu or cuda for several processes, since each takes its own GPU, got "
            f"{config.compute.device!r}"
        )
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    curve = map_of(config.sel, model.width)
    table = {} if curve is None else curve.to_dict()
    compute = config.compute
    device = _device(compute.device)
    autocast = compute.autocast
    if autocast == "auto":
        autocast = "on" if _bfloat16_pays(device) else "off"
    chunk = compute.loss_chunk
    if chunk is None:
        tokens = rows * model.context
        chunk = 0 if 4 * tokens * vocab_size <= _LOGITS_BYTES else max(1, _LOGITS_BYTES // (4 * vocab_size))
    return dataclasses.replace(
        config,
        data=str(absolute(config.data)),
        model=model,
        train=dataclasses.replace(config.train, weights=absolute(config.train.weights)),
        sel=dataclasses.replace(config.sel, map=table),
        compute=dataclasses.replace(
            compute,
            device=str(device),
            threads=compute.threads or torch.get_num_threads(),
            autocast=autocast,
            loss_chunk=chunk,
            parallel=compute.parallel or (PARALLEL[0] if processes > 1 else None),
        ),
    )


def absolute(path: str | None) -> str | None:
    """Return an absolute path: the run may be resumed from another working directory."""
    return None if path is None else str(Path(path).resolve())


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be available to torch, got {name!r}: {str(error).splitlines()[0]}") from None
    return device


def _bfloat16_pays(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32. On CPUs without AMX or AVX512-BF16 it is slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
