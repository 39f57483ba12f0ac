"""Hugging Face's Trainer: one line hands its optimizer, its clipping and its number of steps to SELAdamW."""

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
from symexplin.routes import routing

__all__ = ["OptimizerFactory", "SELCallback", "setup"]

_log = logging.getLogger(__name__)

_KEPT = "_sel_max_grad_norm"  # on the arguments while training runs: no field of theirs, but pickled with them
_DEFAULT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_FROM_ARGUMENTS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "total_steps": "max_steps or num_train_epochs",
}
_ADAM = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}


def setup(
    args: Any,
    config: SELConfig | None = None,
    *,
    optimizer: Callable[..., RawSpaceOptimizer] = SELAdamW,
    no_decay: Sequence[str] | None = None,
    callbacks: Sequence[Any] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Return what makes a `transformers.Trainer` train in curved weight space: its last arguments.

    The learning rate, weight decay and clipping norm are those of `args`, at the time that training starts; so are
    betas and eps where they are not `TrainingArguments`' defaults, and else they are the optimizer's own. The Trainer
    would clip gradients of effective weights before the optimizer sees them, so `args.max_grad_norm` is 0 while it
    trains, and the optimizer clips raw ones. The number of steps comes from the Trainer's state. Its logs get the norm
    in raw space as "grad_norm" and :func:`symexplin.stats` under "sel/".

    Args:
        args: the Trainer's own `TrainingArguments`.
        config: the map; None: the default one.
        optimizer: SELAdamW or another raw-space optimizer.
        no_decay: patterns of names of parameters without weight decay; None: those the Trainer would not decay,
            norms and biases (a Trainer with a `get_decay_parameter_names` of its own says them here).
        callbacks: the Trainer's other callbacks, which come first in the returned list.
        **kwargs: further arguments of the optimizer.

    Raises:
        ValueError: DeepSpeed or FSDP1, which flatten parameters; an `args.optim` that asks for another optimizer;
            an argument of the optimizer that `args` already holds. When training starts: those of
            :func:`symexplin.param_groups`.

    >>> import tempfile
    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to="none")
    >>> sorted(setup(args)), args.max_grad_norm
    (['callbacks', 'optimizer_cls_and_kwargs'], 1.0)
    """
    _check_arguments(args)
    for name in kwargs.keys() & _FROM_ARGUMENTS.keys():
        raise ValueError(f"{name} must be given as args.{_FROM_ARGUMENTS[name]}, got {name}={kwargs[name]!r} here")
    _adam(args, kwargs)
    _restore(args)
    details = {"args": args, "config": check_config(config), "optimizer": optimizer}
    return {
        "optimizer_cls_and_kwargs": (OptimizerFactory, {**details, "no_decay": no_decay, "options": kwargs}),
        "callbacks": [*callbacks, SELCallback()],
    }


class OptimizerFactory:
    """Builds the optimizer over the Trainer's model, once that is there: what Trainer calls a factory.

    Trainer makes one without arguments and calls it with its model and the keywords that :func:`setup` has left.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        args: Any,
        config: SELConfig,
        optimizer: Callable[..., RawSpaceOptimizer],
        no_decay: Sequence[str] | None,
        options: Mapping[str, Any],
    ) -> RawSpaceOptimizer:
        """Return the optimizer over the groups of `model`, its number of steps still open."""
        _check_launch()
        _restore(args)
        if no_decay is None:
            no_decay = _undecayed(model)
        groups = param_groups(
            model, lr=args.learning_rate, weight_decay=args.weight_decay, config=config, no_decay=no_decay
        )
        _log.info("routing of the parameters:\n%s", routing(model, config))
        adam = _adam(args, options)
        return optimizer(groups, total_steps="later", max_grad_norm=_norm(args), **adam, **options)


class SELCallback(TrainerCallback):
    """Tells the optimizer its steps and its clipping, and adds its figures to the Trainer's logs.

    Callbacks run in the order of their list, and a Trainer puts its reporters (TensorBoard and others) first. They
    see these figures if they come after: `trainer.add_callback(trainer.pop_callback(TensorBoardCallback))`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Set the total number of steps and the clipping norm of this run, and keep the Trainer from clipping."""
        _restore(args)
        optimizer = _raw_space(kwargs["optimizer"])
        optimizer.set_total_steps(state.max_steps, restart=state.global_step == 0)
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["max_grad_norm"] = _norm(args)
        setattr(args, _KEPT, args.max_grad_norm)
        args.max_grad_norm = 0.0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Give the arguments their clipping norm back."""
        _restore(args)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the gradients' norm in raw space and the figures of the scales to the log of a training step."""
        logs = kwargs["logs"]
        if "loss" not in logs or kwargs["optimizer"] is None:  # an evaluation's, a summary's, or one before training
            return
        optimizer = _raw_space(kwargs["optimizer"])
        figures = {f"sel/{name}": value for name, value in stats(kwargs["model"], optimizer).items()}
        if optimizer.grad_norm is not None:
            figures["grad_norm"] = float(optimizer.grad_norm)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # Trainer has put a copy there


def _check_arguments(args: Any) -> None:
    """Refuse arguments that the optimizer cannot follow."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        raise ValueError(_flattens("args.deepspeed", "DeepSpeed"))
    fsdp = getattr(args, "fsdp_plugin_args", None) or {}
    if fsdp.get("fsdp_version", 2) != 2:
        raise ValueError(_flattens("args.fsdp_config['version']", "FSDP1"))
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _DEFAULT_OPTIMIZERS:
        raise ValueError(
            f"args.optim must be left at its default, got {name!r}: the optimizer is the one that setup is given"
        )
    for argument in ("optim_args", "optim_target_modules"):
        if getattr(args, argument, None):
            raise ValueError(f"args.{argument} must be None, got {getattr(args, argument)!r}: nothing would read it")


def _check_launch() -> None:
    """Refuse what a launcher has switched on behind the arguments' back."""
    state = AcceleratorState._shared_state
    if state.get("deepspeed_plugins"):
        raise ValueError(_flattens("the launcher's configuration", "DeepSpeed"))
    plugin = state.get("fsdp_plugin")
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError(_flattens("the launcher's fsdp_version", "FSDP1"))


def _flattens(where: str, what: str) -> str:
    return f"{where} asks for {what}, which flattens weights to one dimension; use FSDP2 (fsdp_version 2) or DDP"


def _adam(args: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return betas and eps where the arguments say something, which `options` must not say too."""
    found: dict[str, Any] = {}
    for name, fields in _ADAM.items():
        values = [getattr(args, field) for field in fields]
        if values == [getattr(TrainingArguments, field) for field in fields]:
            continue
        if name in options:
            raise ValueError(
                f"{name} must be given once, got {name}={options[name]!r} and args.{' and '.join(fields)}={values}"
            )
        found[name] = tuple(values) if name == "betas" else values[0]
    return found


def _norm(args: Any) -> float | None:
    """Return the clipping norm as the optimizer takes it: None where the Trainer would not clip."""
    return args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0.0 else None


def _restore(args: Any) -> None:
    """Give the arguments back the clipping norm that a training has kept from them, or one that broke."""
    kept = vars(args).pop(_KEPT, None)
    if kept is not None and not args.max_grad_norm:
        args.max_grad_norm = kept


def _undecayed(model: nn.Module) -> list[str]:
    """Return the names, as patterns, of the parameters that Trainer gives no weight decay."""
    decayed = set(Trainer.get_decay_parameter_names(cast(Trainer, None), model))  # it reads nothing of itself
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
