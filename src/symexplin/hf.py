"""SEL optimizers in Hugging Face's Trainer: learning rate, clipping and number of steps come from the Trainer."""

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from typing import Any, cast

import torch
from torch import nn

try:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "symexplin.hf needs transformers and accelerate: pip install 'symexplin[hf]'", name=error.name
    ) from error

from symexplin.config import SELConfig, check_config
from symexplin.optim import RawSpaceOptimizer, SELAdamW, param_groups, stats
from symexplin.optim.checks import argument_names, check_arguments
from symexplin.optim.optimizer import map_lines
from symexplin.routes import check_no_decay, routing
from symexplin.validation import check_not_negative

__all__ = ["OptimizerFactory", "SELCallback", "setup"]

_log = logging.getLogger(__name__)

_DEFAULT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_OF_TRAINER = {
    "max_grad_norm": "must be left to args: TrainingArguments(max_grad_norm=...)",
    "total_steps": "must be left out: the Trainer knows its steps",
}
_NEEDS_CLASS = "optimizer must be a subclass of symexplin.RawSpaceOptimizer, such as SELAdamW"


def setup(
    args: Any,
    config: SELConfig | None = None,
    *,
    optimizer: Callable[..., RawSpaceOptimizer] = SELAdamW,
    no_decay: Sequence[str] | str | None = None,
    callbacks: Sequence[Any] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the keyword arguments with which a `transformers.Trainer` trains in curved weight space.

    The keyword `args` is a copy of `args`, which stays as it is. The learning rate, weight decay and clipping norm are
    those of the copy, `trainer.args`, at the start of training. betas and eps count only if they differ from the
    defaults of `TrainingArguments`; else the optimizer's defaults hold. The optimizer clips raw gradients to
    `max_grad_norm`, and the Trainer does not clip. The number of steps comes from the Trainer's state. The Trainer's
    logs contain the norm in raw space as "grad_norm" and :func:`symexplin.stats` under "sel/", also in its reporters.

    Args:
        args: the `TrainingArguments`, of the class that the Trainer expects, such as `SFTConfig` for `SFTTrainer`.
        config: the map; None: the default map, `SELConfig()`.
        optimizer: SELAdamW or another raw-space optimizer: its class, or a function of groups and keyword arguments.
        no_decay: name patterns of the parameters without weight decay, "vectors" or "usual", as in
            :func:`symexplin.param_groups`. None: norms and biases, as in the Trainer; none if `weight_decay` is given
            by name pattern. A Trainer that overrides `get_decay_parameter_names` needs them here.
        callbacks: the Trainer's other callbacks.
        **kwargs: further arguments of the optimizer. `lr` and `weight_decay` (numbers, or numbers by name pattern),
            `betas` and `eps` replace those of `args`.

    Raises:
        TypeError: an argument that the class `optimizer` does not have.
        ValueError: an argument of another type or out of range, another optimizer in `args.optim`, or an argument that
            the Trainer decides, `max_grad_norm` or `total_steps`. At the start of training: a Trainer
            with other arguments; DeepSpeed or FSDP1, which flatten parameters; the errors of
            :func:`symexplin.param_groups`.

    >>> import tempfile
    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to="none")
    >>> sorted(setup(args))
    ['args', 'callbacks', 'optimizer_cls_and_kwargs']
    """
    if not isinstance(args, TrainingArguments):
        hint = ": the model goes to Trainer(model=...)" if isinstance(args, nn.Module) else ""
        raise ValueError(f"args must be TrainingArguments, got {type(args).__name__}{hint}")
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _DEFAULT_OPTIMIZERS:
        raise ValueError(
            f"args.optim must be left at its default, got {name!r}: remove optim: SEL replaces the optimizer"
        )
    if not isinstance(callbacks, list | tuple):
        raise ValueError(f"callbacks must be a list, got {type(callbacks).__name__}")
    _check_optimizer(optimizer, kwargs)
    no_decay = None if no_decay is None else check_no_decay(no_decay)
    args = copy.copy(args)
    details = {"args": args, "config": None if config is None else check_config(config), "optimizer": optimizer}
    options = {key: _own(value) for key, value in kwargs.items()}
    return {
        "args": args,
        "optimizer_cls_and_kwargs": (OptimizerFactory, {**details, "no_decay": no_decay, "options": options}),
        "callbacks": _FirstBeforeDefaults([SELCallback(args), *callbacks]),
    }


class OptimizerFactory:
    """The optimizer factory of the Trainer: it builds the optimizer over the Trainer's model.

    The Trainer creates it without arguments. It calls it with its model and the keywords from :func:`setup`.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        args: Any,
        config: SELConfig | None,
        optimizer: Callable[..., RawSpaceOptimizer],
        no_decay: Sequence[str] | str | None,
        options: Mapping[str, Any],
    ) -> RawSpaceOptimizer:
        """Return the optimizer over the groups of `model`; its number of steps is not set yet."""
        _check_launch()
        options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **_adam(args), **options}
        rates = {name: options.pop(name) for name in ("lr", "weight_decay")}
        if no_decay is None:  # decay by name is complete by itself
            no_decay = () if isinstance(rates["weight_decay"], Mapping) else _undecayed(model)
        rates["no_decay"] = no_decay
        groups = param_groups(model, config=config, **rates)
        _log.info("routing of the parameters:\n%s", routing(model, config, **rates))
        return optimizer(groups, total_steps="later", max_grad_norm=_norm(args), **options)


class SELCallback(TrainerCallback):
    """Set the optimizer's number of steps and clipping norm, and add its statistics to the Trainer's logs.

    Callbacks run in the order of their list. This one must come before the reporters.

    Args:
        args: the copy of the training arguments from :func:`setup`.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Set this run's number of steps and clipping norm, and print the map."""
        if args is not self._args:
            raise ValueError(
                f"the Trainer's args must be the copy that symexplin.hf.setup returned, got other {type(args).__name__}"
                ': pass setup(args)["args"], with args of the class that this Trainer expects'
            )
        optimizer = _raw_space(kwargs["optimizer"])
        optimizer.set_total_steps(state.max_steps, restart=state.global_step == 0)
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["max_grad_norm"] = _norm(args)
        if state.is_world_process_zero:
            print("\n".join(map_lines(optimizer.param_groups)))  # noqa: T201, as the Trainer prints its logs

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Switch the Trainer's clipping off, which follows the backward pass."""
        if args.max_grad_norm:
            args.max_grad_norm = _NotForTrainer(args.max_grad_norm)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Make the clipping norm a plain number again, for what else reads the arguments."""
        if args.max_grad_norm:
            args.max_grad_norm = float(args.max_grad_norm)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the gradient norm in raw space and the statistics of the map to the log of a training step."""
        logs = kwargs["logs"]
        if "loss" not in logs or kwargs["optimizer"] is None:  # the log of an evaluation, a summary, or before training
            return
        optimizer = _raw_space(kwargs["optimizer"])
        figures = {f"sel/{name}": value for name, value in stats(kwargs["model"], optimizer).items()}
        if optimizer.grad_norm is not None:
            figures["grad_norm"] = float(optimizer.grad_norm)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # the Trainer keeps a copy here


class _NotForTrainer(float):
    """A clipping norm that is not above 0, so that the Trainer only measures; else, and saved, the same number.

    If a step fails, the arguments keep it.
    """

    def __gt__(self, other: float) -> bool:
        return False

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


class _FirstBeforeDefaults(list[Any]):
    """Callbacks of which the first comes before the Trainer's default ones, to which the Trainer adds this list."""

    def __radd__(self, defaults: list[Any]) -> list[Any]:
        return [self[0], *defaults, *self[1:]]


def _check_optimizer(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Refuse anything but a raw-space optimizer, and keyword arguments that it does not take."""
    is_partial = isinstance(optimizer, functools.partial)
    kind, bound = (optimizer.func, optimizer.keywords) if is_partial else (optimizer, {})
    if isinstance(kind, type):
        _check_class(kind, bound)
    elif not callable(kind):
        hint = ": pass the class" if isinstance(kind, RawSpaceOptimizer) else ""
        raise ValueError(f"{_NEEDS_CLASS}, got an instance of {type(kind).__name__}{hint}")
    options = {**bound, **options}
    for name, right in _OF_TRAINER.items():
        if name in options:
            raise ValueError(f"{name} {right}")
    if isinstance(kind, type):
        parameters = inspect.signature(kind).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if issubclass(kind, SELAdamW) or not takes_any:
            known = argument_names(kind) if takes_any else parameters.keys()
            check_arguments(kind, {name: value for name, value in options.items() if name not in known})
    _check_values(kind, options)


def _check_values(kind: Any, options: Mapping[str, Any]) -> None:
    """Refuse values that are wrong for every model. Those of another class or function are its own to check."""
    own = dict(options)
    for name in ("lr", "weight_decay"):
        rate = own.pop(name, 0.0)
        for one in rate.values() if isinstance(rate, Mapping) else (rate,):
            check_not_negative(name, one)
    if kind is SELAdamW:
        SELAdamW(param_groups(nn.Linear(1, 1, device="meta", dtype=torch.float32)), **own)


def _check_class(kind: type, bound: Mapping[str, Any]) -> None:
    """Refuse the class of another optimizer, and arguments bound to it which the groups of `setup` replace."""
    if not issubclass(kind, RawSpaceOptimizer):
        raise ValueError(f"{_NEEDS_CLASS}, got {kind.__name__}")
    for name in ("lr", "weight_decay", "config", "no_decay"):
        if name in bound:
            raise ValueError(f"{name} must be an argument of setup, got it in optimizer: setup(args, {name}=...)")


def _own(value: Any) -> Any:
    """Return a copy of a list or dictionary, which its owner may change before the Trainer builds the optimizer."""
    return copy.copy(value) if isinstance(value, list | dict) else value


def _check_launch() -> None:
    """Refuse what flattens weights; the state contains what the arguments say and what the launcher says."""
    state = AcceleratorState._shared_state
    plugin = state.get("fsdp_plugin")
    if state.get("deepspeed_plugins") or (plugin is not None and plugin.fsdp_version != 2):
        raise ValueError(
            "the arguments or the launcher's configuration ask for DeepSpeed or FSDP1, which flatten weights to one "
            "dimension; use FSDP2 (fsdp_version 2) or DDP"
        )


def _adam(args: Any) -> dict[str, Any]:
    """Return betas and eps of the arguments where they are not the defaults of their class."""
    given, usual = (
        {"betas": (source.adam_beta1, source.adam_beta2), "eps": source.adam_epsilon}
        for source in (args, TrainingArguments)
    )
    return {name: value for name, value in given.items() if value != usual[name]}


def _norm(args: Any) -> float | None:
    """Return the optimizer's clipping norm: None where the Trainer would not clip."""
    norm = float(args.max_grad_norm or 0.0)
    return norm if norm > 0.0 else None


def _undecayed(model: nn.Module) -> list[str]:
    """Return name patterns of the parameters without weight decay in the Trainer."""
    decayed = set(Trainer.get_decay_parameter_names(cast(Trainer, None), model))  # it does not use self
    return [escape(name) for name, _ in model.named_parameters() if name not in decayed]


def _raw_space(optimizer: torch.optim.Optimizer) -> RawSpaceOptimizer:
    """Return the optimizer inside accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, RawSpaceOptimizer):
        raise TypeError(
            f"the Trainer's optimizer must be a raw-space optimizer, got {type(inner).__name__}: pass "
            "optimizer_cls_and_kwargs of symexplin.hf.setup to the Trainer too"
        )
    return inner
