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
# Logits of a microbatch above this many bytes are not worth having at once (float32, and as much again for gradients).
_LOGITS_BYTES = 2**28


@dataclass(frozen=True)
class TrainConfig:
    """How long, on what and how fast to train; the defaults of AdamW are the paper's (section 5.1).

    Args:
        steps: optimizer steps.
        batch_size: sequences an optimizer step, in all.
        accumulation: parts that a batch is computed in, one after the other; divides batch_size.
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up, at most all; the linear decay follows. If not given, the paper's 250, in
            runs shorter than 2,500 steps a tenth of them.
        floor: fraction of lr that the decay ends at.
        optimizer: "adamw", or "muon": Muon for the matrices of the blocks, AdamW for the rest, at one learning rate.
        weight_decay: decoupled weight decay.
        decay_plain: let it act on embedding, head and norms, too, as AdamW over all parameters does; the paper is
            silent on it. Off: on the linears of the blocks alone, weights and biases.
        betas: decay rates of AdamW's moments.
        max_grad_norm: gradients are clipped to this global norm.
        weights: plain weights of a model of this shape to start from instead of drawing them: a run's folder, one of
            its checkpoints, or a model.safetensors. A map starts around them as it starts around drawn ones.
        eval_every: steps between evaluations; the start and the end are always evaluated.
        eval_batches: batches an evaluation.
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
    """The machine and how it computes; no key here changes what is computed, but for rounding.

    Args:
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", "mps".
        threads: threads of the CPU; as many as torch takes if not given.
        autocast: "on" (bfloat16), "off", or "auto": on where it pays, on GPUs that have bfloat16 and CPUs that
            multiply it (AMX, AVX512-BF16).
        compile: torch.compile the model; on a CPU it needs a C++ compiler.
        recompute: compute each block again in the backward pass instead of keeping its activations.
        loss_chunk: tokens whose logits are held at once in the loss, 0 for all; if not given, all unless they take
            more than 256 MiB.
        parallel: how the processes of torchrun share the work: "ddp" (each has the whole model) or "fsdp" (each has a
            part of every parameter: FSDP2); if not given, "ddp". One process alone leaves it be.

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
    """What a run writes while it trains; these keys may change when it resumes.

    Args:
        checkpoint_every: optimizer steps between checkpoints; SIGTERM, Ctrl-C and the end write one too.
        keep: newest checkpoints to keep.
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
        data: folder that `symexplin prepare` made.

    Raises:
        ValueError: a value out of range, a map that is not one.

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
            raise ValueError(f"start 'mismatched' is for mode 'mismatch' alone, got mode {curve.mode!r}")
        if self.sel.home == "module" and self.train.optimizer != "adamw":
            raise ValueError(
                f"optimizer must be 'adamw' for home 'module', whose layers it trains as they are, got "
                f"{self.train.optimizer!r}: use home 'optimizer', or 'none'"
            )


def resolve(config: RunConfig, vocab_size: int, processes: int = 1) -> RunConfig:
    """Return `config` with everything said: places of data and weights, map, device, threads, autocast, loss's chunk.

    Args:
        config: may leave values to the machine.
        vocab_size: of the data's tokenizer.
        processes: that the run trains in.

    Raises:
        ValueError: a device that is not there, a batch or a device that the processes cannot share out evenly.

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
            "device must be auto, cpu or cuda for several processes, each of which takes a GPU of its own, got "
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
    """Return a path that means the same wherever the user is, who may resume from another folder."""
    return None if path is None else str(Path(path).resolve())


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one that torch finds here, got {name!r}: {str(error).splitlines()[0]}"
        ) from None
    return device


def _bfloat16_pays(device: torch.device) -> bool:
    """Whether bfloat16 is faster: on CPUs that cannot multiply it (AMX, AVX512-BF16) it is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
