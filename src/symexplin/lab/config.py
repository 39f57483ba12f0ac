"""What a run is: its data, model, schedule, map and machine, as one checked configuration; and how data are prepared.

The classes need no torch, so that the help of a command comes at once.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from symexplin.checks import check_choice, check_positive, check_whole
from symexplin.lab.maps import CurveConfig, map_of
from symexplin.lab.settings import Count, Fraction, NotNegative, Pairs, Positive, Schema, Whole

if TYPE_CHECKING:
    import torch

__all__ = [
    "ComputeConfig",
    "LogConfig",
    "ModelConfig",
    "PrepareConfig",
    "RunConfig",
    "TrainConfig",
    "absolute",
    "resolve",
]

_PAPER_WARMUP = 250  # section 5.1
# Above this size the logits of a microbatch are computed in chunks (float32; their gradients take as much again).
_LOGITS_BYTES = 2**28
_MOST_THREADS = 1024  # torch crashes with tens of thousands
_MINIMUM_VOCAB = 257  # all bytes, and the end of a document

# The defaults that depend on the harness. The author's: transformer.py and train_gpt.py of
# github.com/ethansmith2000/SAMVariants (73f1681, 2026-06-05, five weeks before the paper).
_HARNESSES: dict[str, dict[str, Any]] = {
    "own": {
        "input_projection": False,
        "qkv_bias": True,
        "head_bias": False,
        "embedding_std": 0.02,
        "hidden_rounding": "nearest",
        "norm_eps": 1e-6,  # that of the dtype is 2^-7 in bfloat16
    },
    "author": {
        "input_projection": True,
        "qkv_bias": False,
        "head_bias": True,
        "embedding_std": "width^-0.5",
        "hidden_rounding": "up",
        "norm_eps": "dtype",
    },
}
_HEADS, _AUTHOR_HEAD_DIM = 4, 128
Decay = Literal["all", "linears", "matrices"]
_OF_HARNESS: Any = None  # the default of these keys


@dataclass(frozen=True)
class ModelConfig(Schema):
    """The shape of a :class:`symexplin.lab.model.Transformer`.

    Args:
        width: size of the residual stream.
        depth: number of blocks.
        harness: the defaults of keys on which the paper is silent: "own", or "author" for those of the public harness
            of the paper's author.
        heads: attention heads. Default: 4; the author's: heads of size 128.
        head_dim: size of a head, instead of heads; even, since RoPE turns pairs.
        vocab_size: number of tokens.
        context: longest sequence, in tokens.
        tie_head: share the output head's weight with the embedding.
        bias: biases on the blocks' linear layers. A model with biases cannot be exported.
        qkv_bias: with biases, have them on queries, keys and values too. Default: true; the author's: false.
        input_projection: between embeddings and blocks an RMSNorm and a linear layer with a bias, which stays
            uncurved. Default: false; the author's: true.
        head_bias: a bias on the output head. Default: false; the author's: true.
        init: initialization of the blocks' matrices: "xavier_uniform" or "xavier_normal", of the same standard
            deviation.
        qk_gain: factor on the initial weights of queries and keys.
        norm: normalization of the residual stream: "rms", or "layer", which subtracts the mean (nn.LayerNorm without a
            bias). Queries and keys always have RMSNorm.
        norm_eps: what norms add to the mean square, or "dtype": the rounding of the dtype, torch's default. Default:
            1e-6; the author's: "dtype".
        embedding_std: standard deviation of the initial embeddings, or "width^-0.5", which is the author's. Default:
            0.02. The head has 0.02, unless it is tied.
        hidden_rounding: how the inner size of GeGLU, 8/3 of the width, becomes a multiple of 64: "nearest" (section
            5.1), or "up", which is the author's. Default: "nearest".
        fused_gate_up: one projection, `gate_up`, for the two halves of GeGLU, instead of `gate` and `up`. It starts
            smaller, as Xavier's bound is that of its own shape.

    >>> ModelConfig(width=128).hidden
    320
    >>> ModelConfig(width=512, harness="author").heads
    4
    """

    width: Count = 128
    depth: Count = 4
    heads: Count = _OF_HARNESS
    vocab_size: Count = field(default=256, metadata={"derived": True})  # the data say it
    context: Count = 128
    tie_head: bool = False
    bias: bool = True
    qkv_bias: bool = _OF_HARNESS
    input_projection: bool = _OF_HARNESS
    head_bias: bool = _OF_HARNESS
    init: Literal["xavier_uniform", "xavier_normal"] = "xavier_uniform"
    qk_gain: Positive = 1.0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Positive | Literal["dtype"] = _OF_HARNESS
    embedding_std: Positive | Literal["width^-0.5"] = _OF_HARNESS
    hidden_rounding: Literal["nearest", "up"] = _OF_HARNESS
    fused_gate_up: bool = False
    head_dim: Count = _OF_HARNESS
    harness: Literal["own", "author"] = "own"

    def __post_init__(self) -> None:
        """Fill in what the harness says, and check every field."""
        for name, value in _HARNESSES[check_choice("harness", self.harness, _HARNESSES)].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        given = {name: getattr(self, name) for name in ("heads", "head_dim") if getattr(self, name) is not None}
        given = given or ({"head_dim": _AUTHOR_HEAD_DIM} if self.harness == "author" else {"heads": _HEADS})
        for name, value in given.items():
            other = "head_dim" if name == "heads" else "heads"
            object.__setattr__(self, name, check_whole(name, value))
            object.__setattr__(self, other, given.get(other, max(1, self.width // value)))
        super().__post_init__()
        if self.heads * self.head_dim != self.width or self.head_dim % 2:
            got = f"{self.width} with {self.heads} of size {self.head_dim}"
            raise ValueError(f"width must be heads of an even size, got {got}")

    @property
    def hidden(self) -> int:
        """Inner size of GeGLU: 8/3 of the width, to a multiple of 64."""
        if self.hidden_rounding == "up":
            return 64 * -(-self.width * 8 // (3 * 64))
        return 64 * max(1, math.floor(self.width * 8 / 3 / 64 + 0.5))

    @property
    def embedding_deviation(self) -> float:
        """Standard deviation of the initial embeddings."""
        return float(self.width**-0.5) if isinstance(self.embedding_std, str) else self.embedding_std


@dataclass(frozen=True)
class TrainConfig(Schema):
    """The training schedule. AdamW's defaults are the paper's (section 5.1).

    Args:
        steps: optimizer steps.
        batch_size: sequences per optimizer step, over all processes.
        accumulation: microbatches per optimizer step; must divide batch_size.
        lr: peak learning rate.
        lr_factors: factors on lr, by patterns of parameter names, such as '"*.bias"=0.5'; the first match counts.
        warmup_steps: steps of linear warm-up, before the decay. Default: the paper's 250, or a tenth of the
            steps in runs of fewer than 2,500.
        lr_decay_steps: steps of the whole schedule, if the run is to stop earlier. Default: steps.
        floor: fraction of lr at the end of the decay.
        weight_decay: decoupled weight decay.
        decay: what decays: "all" parameters, as AdamW over all does; "linears", the blocks' linear layers, weights and
            biases; or "matrices", all but the embedding and what has one dimension, biases and norms. The paper does
            not say. Default: "all"; "matrices" with the author's harness.
        frozen: patterns of parameters that keep their first values, such as "blocks.*.bias". They are not curved.
        betas: decay rates of AdamW's moments.
        max_grad_norm: global norm to which gradients are clipped.
        eval_every: steps between evaluations. The start and the end are always evaluated.
        eval_batches: batches per evaluation.
        seed: seed of the initial weights and of the data order.
    """

    steps: Count = 300
    batch_size: Count = 16
    accumulation: Count = 1
    lr: Positive = 3e-3
    lr_factors: Pairs = field(default_factory=dict)
    warmup_steps: Whole | None = None
    lr_decay_steps: Count | None = None
    floor: Fraction = 0.0
    weight_decay: NotNegative = 0.01
    decay: Decay | None = None
    frozen: tuple[str, ...] = ()
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    max_grad_norm: Positive = 1.0
    eval_every: Count = 25
    eval_batches: Count = 8
    seed: Whole = 0

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        for pattern, factor in self.lr_factors.items():
            check_positive(f"lr_factors {pattern!r}", factor)
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", min(_PAPER_WARMUP, round(0.1 * self.schedule_steps)))
        elif self.warmup_steps > self.schedule_steps:
            name = "steps" if self.lr_decay_steps is None else "lr_decay_steps"
            raise ValueError(f"warmup_steps must be at most {name} = {self.schedule_steps}, got {self.warmup_steps}")
        if self.schedule_steps < self.steps:
            raise ValueError(f"lr_decay_steps must be at least steps = {self.steps}, got {self.lr_decay_steps}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation must divide batch_size = {self.batch_size}, got {self.accumulation}")

    @property
    def schedule_steps(self) -> int:
        """Steps of the whole schedule."""
        return self.lr_decay_steps or self.steps


@dataclass(frozen=True)
class ComputeConfig(Schema):
    """The machine and how it computes. These keys change only the rounding of the result.

    Args:
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", "mps".
        threads: threads of the CPU. Default: torch's.
        autocast: "on" (bfloat16), "off", or "auto": on where bfloat16 is faster, that is on GPUs that support it and on
            CPUs with AMX or AVX512-BF16.
        compile: torch.compile the model. A CPU needs a C++ compiler for it.
        compile_mode: mode of torch.compile: "default", "reduce-overhead" (the paper's: CUDA graphs), "max-autotune" or
            "max-autotune-no-cudagraphs".
        recompute: recompute each block's activations in the backward pass instead of storing them.
        loss_chunk: tokens whose logits are in memory at a time; 0: all. Default: all, up to 256 MiB of logits.
        parallel: how the processes of torchrun share the work: "ddp" (each holds the whole model) or "fsdp" (FSDP2:
            each holds a part of every parameter). Default: "ddp". A single process ignores it.
    """

    device: str = "auto"
    threads: Annotated[Count, functools.partial(check_whole, maximum=_MOST_THREADS)] | None = None
    autocast: Literal["auto", "on", "off"] = "auto"
    compile: bool = False
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    recompute: bool = False
    loss_chunk: Whole | None = None
    parallel: Literal["ddp", "fsdp"] | None = None

    @property
    def cuda_graphs(self) -> bool:
        """Whether the compiled model replays CUDA graphs, which reuse the memory of their results."""
        return self.compile and self.compile_mode in ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class LogConfig(Schema):
    """What a run writes while it trains. These keys may change when a run is resumed.

    Args:
        checkpoint_every: optimizer steps between checkpoints. SIGTERM, Ctrl-C and the end of the run write one too.
        keep: number of checkpoints to keep, the newest ones.
        tensorboard: write TensorBoard events beside metrics.jsonl.
    """

    checkpoint_every: Count = 500
    keep: Count = 2
    tensorboard: bool = True


@dataclass(frozen=True)
class RunConfig(Schema):
    """One training run.

    Args:
        data: a folder made by `symexplin prepare`.
    """

    data: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sel: CurveConfig = field(default_factory=CurveConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Check what depends on several tables."""
        super().__post_init__()
        map_of(self.sel, self.model.width)

    @property
    def decays(self) -> Decay:
        """What decays: as given, else by the harness."""
        return self.train.decay or ("matrices" if self.model.harness == "author" else "all")


@dataclass(frozen=True)
class PrepareConfig(Schema):
    """What `symexplin prepare` makes tokens of, and how.

    Args:
        sources: where the text comes from: "stdlib" (the sources of the running Python), files, folders,
            parquet files, "hf:NAME[:CONFIG][@REVISION]", "openwebtext".
        tokenizer: "bpe" to train one on the text, "byte", "gpt2", "hf:NAME" (of a model on the hub), or the path of a
            `tokenizers` JSON file.
        vocab_size: size of the vocabulary of a BPE trained here.
        end_token: token that ends documents, of a tokenizer file. Default: the first usual name in its vocabulary.
        valid: sources of the documents to hold out, instead of a split of `sources`.
        valid_fraction: share of the documents to hold out, at least one; a single document is cut in two.
        split: split of Hugging Face datasets.
        text_key: key of JSON lines and column of datasets that holds the text.
        seed: seed of the split.
    """

    sources: tuple[str, ...]
    tokenizer: str = "bpe"
    vocab_size: Annotated[Count, functools.partial(check_whole, minimum=_MINIMUM_VOCAB)] = 8192
    end_token: str | None = None
    valid: tuple[str, ...] = ()
    valid_fraction: Fraction = 0.05
    split: str = "train"
    text_key: str = "text"
    seed: Whole = 0

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        if not self.sources:
            raise ValueError("sources must name at least one source of text, got none")
        for name in ("sources", "valid"):  # "text/" and "text" are one folder
            object.__setattr__(self, name, tuple(source.rstrip("/") or source for source in getattr(self, name)))
        if self.end_token is not None and self.tokenizer in ("bpe", "byte", "gpt2"):
            raise ValueError(f"end_token is for a tokenizer file, got {self.end_token!r} with {self.tokenizer!r}")


def resolve(config: RunConfig, vocab_size: int, processes: int = 1) -> RunConfig:
    """Return `config` with all that was left to the machine, to the data's `vocab_size` and to the map's preset."""
    import torch

    train, compute, curve = config.train, config.compute, map_of(config.sel, config.model.width)
    rows, rest = divmod(train.batch_size // train.accumulation, processes)
    if rest:
        got = f"{train.batch_size} / {train.accumulation}"
        raise ValueError(f"batch_size / accumulation must be a multiple of the {processes} processes, got {got}")
    device, autocast, chunk = _device(compute.device), compute.autocast, compute.loss_chunk
    if autocast == "auto":
        autocast = "on" if _bfloat16_pays(device) else "off"
    if chunk is None:
        most = max(1, _LOGITS_BYTES // (4 * vocab_size))
        chunk = 0 if rows * config.model.context <= most else most
    return dataclasses.replace(
        config,
        data=absolute(config.data),
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        train=dataclasses.replace(train, decay=config.decays),
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
            parallel=compute.parallel or ("ddp" if processes > 1 else None),
        ),
    )


def absolute(path: str) -> str:
    """Return an absolute path: the run may be resumed from another working directory."""
    return str(Path(path).resolve())


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, dtype=torch.float32, device=name)
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
