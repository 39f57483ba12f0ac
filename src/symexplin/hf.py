"""SEL optimizers in Hugging Face's Trainer: learning rate, clipping and number of steps come from the Trainer."""

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
from symexplin.optim.optimizer import map_lines
from symexplin.routes import routing

__all__ = ["OptimizerFactory", "SELCallback", "setup"]

_log = logging.getLogger(__name__)

_KEPT = "_sel_max_grad_norm"  # attribute of the arguments during training; not a field, but pickled with them
_DEFAULT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def setup(
    args: Any,
    config: SELConfig | None = None,
    *,
    optimizer: Callable[..., RawSpaceOptimizer] = SELAdamW,
    no_decay: Sequence[str] | None = None,
    callbacks: Sequence[Any] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the keyword arguments with which a `transformers.Trainer` trains in curved weight space.

    The learning rate, weight decay and clipping norm are those of `args` at the start of training. betas and eps of
    `args` count only if they differ from the defaults of `TrainingArguments`; else the optimizer's defaults hold. The
    Trainer would clip gradients of effective weights. Therefore `args.max_grad_norm` is 0 during training, and the
    optimizer clips raw gradients. The number of steps comes from the Trainer's state. The Trainer's logs contain the
    norm in raw space as "grad_norm" and :func:`symexplin.stats` under "sel/".

    Args:
        args: the Trainer's `TrainingArguments`.
        config: the map; None: the default map, `SELConfig()`.
        optimizer: SELAdamW or another raw-space optimizer.
        no_decay: name patterns of the parameters without weight decay. None: norms and biases, as in the Trainer. A
            Trainer that overrides `get_decay_parameter_names` needs them here.
        callbacks: the Trainer's other callbacks; they come first in the returned list.
        **kwargs: further arguments of the optimizer. `lr` and `weight_decay` (numbers, or numbers by name pattern),
            `betas` and `eps` replace those of `args`.

    Raises:
        ValueError: another optimizer in `args.optim`. At the start of training: DeepSpeed or FSDP1, which flatten
            parameters; the errors of :func:`symexplin.param_groups`.

    >>> import tempfile
    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to="none")
    >>> sorted(setup(args)), args.max_grad_norm
    (['callbacks', 'optimizer_cls_and_kwargs'], 1.0)
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _DEFAULT_OPTIMIZERS:
        raise ValueError(
            f"args.optim must be left at its default, got {name!r}: pass the optimizer to setup(optimizer=...)"
        )
    _restore(args)
    details = {"args": args, "config": check_config(config), "optimizer": optimizer}
    return {
        "optimizer_cls_and_kwargs": (OptimizerFactory, {**details, "no_decay": no_decay, "options": kwargs}),
        "callbacks": [*callbacks, SELCallback()],
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
        config: SELConfig,
        optimizer: Callable[..., RawSpaceOptimizer],
        no_decay: Sequence[str] | None,
        options: Mapping[str, Any],
    ) -> RawSpaceOptimizer:
        """Return the optimizer over the groups of `model`; its number of steps is not set yet."""
        _check_launch()
        _restore(args)
        options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **_adam(args), **options}
        rates = {name: options.pop(name) for name in ("lr", "weight_decay")}
        rates["no_decay"] = _undecayed(model) if no_decay is None else no_decay
        groups = param_groups(model, config=config, **rates)
        _log.info("routing of the parameters:\n%s", routing(model, config, **rates))
        return optimizer(groups, total_steps="later", max_grad_norm=_norm(args), **options)


class SELCallback(TrainerCallback):
    """Set the optimizer's number of steps and clipping norm, and add its statistics to the Trainer's logs.

    Callbacks run in the order of their list. The Trainer puts its reporters (TensorBoard and others) first, so they
    miss these statistics. Move a reporter to the end to include them:
    `trainer.add_callback(trainer.pop_callback(TensorBoardCallback))`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Set this run's number of steps and clipping norm, switch the Trainer's clipping off, and print the map."""
        _restore(args)
        optimizer = _raw_space(kwargs["optimizer"])
        optimizer.set_total_steps(state.max_steps, restart=state.global_step == 0)
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["max_grad_norm"] = _norm(args)
        setattr(args, _KEPT, args.max_grad_norm)
        args.max_grad_norm = 0.0
        if state.is_world_process_zero:
            print("\n".join(map_lines(optimizer.param_groups)))  # noqa: T201, as the Trainer prints its logs

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Restore the clipping norm of the arguments."""
        _restore(args)

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
    return args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0.0 else None


def _restore(args: Any) -> None:
    """Restore the clipping norm of the arguments after training, also after a training that failed."""
    kept = vars(args).pop(_KEPT, None)
    if kept is not None and not args.max_grad_norm:
        args.max_grad_norm = kept


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
