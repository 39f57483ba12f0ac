"""What a run is: its data, model, schedule, map and machine, as one checked configuration.

The classes need no torch, so that the help of a command comes at once.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from symexplin.lab.maps import CurveConfig, map_of
from symexplin.validation import (
    check_choice,
    check_flag,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    *("COMPILE_MODES", "OPTIMIZERS", "ComputeConfig", "LogConfig", "ModelConfig", "RunConfig", "TrainConfig"),
    *("absolute", "resolve"),
]

OPTIMIZERS, PARALLEL = ("adamw", "muon"), ("ddp", "fsdp")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch's
# How the matrices of the blocks may be drawn (section 4.3, "Xavier uniform over normal").
INITS = ("xavier_uniform", "xavier_normal")

_PAPER_WARMUP = 250  # section 5.1
_SWITCH = ("auto", "on", "off")
# Above this size the logits of a microbatch are computed in chunks (float32; their gradients take as much again).
_LOGITS_BYTES = 2**28


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a :class:`symexplin.lab.model.Transformer`.

    Args:
        width: size of the residual stream.
        depth: number of blocks.
        heads: attention heads; width / heads must be even, since RoPE turns pairs.
        vocab_size: number of tokens.
        context: longest sequence, in tokens.
        tie_head: share the output head's weight with the embedding.
        bias: biases on the linears of the blocks.
        fused_gate: one linear layer for the two input projections of GeGLU, gate and up, instead of two. Its matrix is
            drawn as one, and has learned scales as one.
        init: how the matrices of the blocks are drawn: "xavier_uniform" or "xavier_normal", of one deviation.

    >>> ModelConfig(width=128).hidden
    320
    """

    width: int = 128
    depth: int = 4
    heads: int = 4
    vocab_size: int = field(default=256, metadata={"derived": True})  # the data say it
    context: int = 128
    tie_head: bool = False
    bias: bool = True
    fused_gate: bool = False
    init: str = field(default="xavier_uniform", metadata={"choices": INITS})

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("width", "depth", "heads", "vocab_size", "context"):
            check_whole(name, getattr(self, name))
        for name in ("tie_head", "bias", "fused_gate"):
            check_flag(name, getattr(self, name))
        check_choice("init", self.init, INITS)
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Inner size of GeGLU: 8/3 of the width, to the nearest multiple of 64 (section 5.1)."""
        return 64 * max(1, math.floor(self.width * 8 / 3 / 64 + 0.5))


@dataclass(frozen=True)
class TrainConfig:
    """The training schedule. AdamW's defaults are the paper's (section 5.1).

    Args:
        steps: optimizer steps.
        batch_size: sequences per optimizer step, over all processes.
        accumulation: microbatches per optimizer step; must divide batch_size.
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up, before the decay. Default: the paper's 250, or a tenth of the
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
        check_not_negative("weight_decay", self.weight_decay)
        for beta in self.betas:
            check_fraction("betas", beta)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_flag("decay_plain", self.decay_plain)
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
        compile_mode: mode of torch.compile: "default", "reduce-overhead" (the paper's: CUDA graphs), "max-autotune" or
            "max-autotune-no-cudagraphs".
        recompute: recompute each block's activations in the backward pass instead of storing them.
        loss_chunk: tokens whose logits the loss holds at a time; 0: all. Default: all, up to 256 MiB of logits.
        parallel: how the processes of torchrun share the work: "ddp" (each has the whole model) or "fsdp" (FSDP2: each
            has a part of every parameter). Default: "ddp". A single process ignores it.
    """

    device: str = "auto"
    threads: int | None = None
    autocast: str = field(default="auto", metadata={"choices": _SWITCH})
    compile: bool = False
    compile_mode: str = field(default="default", metadata={"choices": COMPILE_MODES})
    recompute: bool = False
    loss_chunk: int | None = None
    parallel: str | None = field(default=None, metadata={"choices": PARALLEL})

    def __post_init__(self) -> None:
        """Check every field."""
        check_choice("autocast", self.autocast, _SWITCH)
        check_choice("compile_mode", self.compile_mode, COMPILE_MODES)
        if self.parallel is not None:
            check_choice("parallel", self.parallel, PARALLEL)
        for name in ("compile", "recompute"):
            check_flag(name, getattr(self, name))
        if self.threads is not None:
            check_whole("threads", self.threads, maximum=1024)
        if self.loss_chunk is not None:
            check_whole("loss_chunk", self.loss_chunk, minimum=0)

    @property
    def cuda_graphs(self) -> bool:
        """Whether the compiled model replays CUDA graphs, which reuse the memory of their results."""
        return self.compile and self.compile_mode in ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class LogConfig:
    """What a run writes while it trains. These keys may change when a run is resumed.

    Args:
        checkpoint_every: optimizer steps between checkpoints. SIGTERM, Ctrl-C and the end of the run write one too.
        keep: number of checkpoints to keep, the newest ones.
        tensorboard: write TensorBoard events beside metrics.jsonl.
    """

    checkpoint_every: int = 500
    keep: int = 2
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        check_whole("checkpoint_every", self.checkpoint_every)
        check_whole("keep", self.keep)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        data: folder that `symexplin prepare` made.
    """

    data: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sel: CurveConfig = field(default_factory=CurveConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Check what depends on several tables."""
        map_of(self.sel, self.model.width)
        if self.sel.home == "module" and self.train.optimizer != "adamw":
            raise ValueError(f"optimizer must be 'adamw' for home 'module', got {self.train.optimizer!r}")
        untold = self.sel.home != "none" and self.sel.start is None and self.sel.starts_as == "mismatched"
        if untold and self.train.weights is not None:
            raise ValueError(
                f"start must be given with weights and preset {self.sel.preset!r}: 'matched' keeps them as they are"
            )


def resolve(config: RunConfig, vocab_size: int, processes: int = 1) -> RunConfig:
    """Return `config` with all that was left to the machine, to the data's `vocab_size` and to the map's preset."""
    import torch

    train, compute, curve = config.train, config.compute, map_of(config.sel, config.model.width)
    rows, rest = divmod(train.batch_size // train.accumulation, processes)
    if rest:
        got = f"{train.batch_size} / {train.accumulation}"
        raise ValueError(f"batch_size / accumulation must be a multiple of the {processes} processes, got {got}")
    if processes > 1 and compute.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda for several processes, got {compute.device!r}")
    device, autocast, chunk = _device(compute.device), compute.autocast, compute.loss_chunk
    if autocast == "auto":
        autocast = "on" if _bfloat16_pays(device) else "off"
    if chunk is None:
        most = max(1, _LOGITS_BYTES // (4 * vocab_size))
        chunk = 0 if rows * config.model.context <= most else most
    return dataclasses.replace(
        config,
        data=str(absolute(config.data)),
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        train=dataclasses.replace(train, weights=absolute(train.weights)),
        sel=dataclasses.replace(
            config.sel,
            start=None if curve is None else config.sel.starts_as,
            map={} if curve is None else curve.to_dict(),
        ),
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


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device must be one that torch finds here, got {name!r}: {first}") from None
    return torch.device(name)


def _bfloat16_pays(device: "torch.device") -> bool:
    """Whether bfloat16 is faster: on CPUs that cannot multiply it (AMX, AVX512-BF16) it is slower than float32."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
