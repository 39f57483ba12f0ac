"""Parameters that are alike, and how they take a step together: here with PyTorch's operations, for every map."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.optim.entry import Entry, Leaf, Moments, clipped
from symexplin.routes import rate_of
from symexplin.spec import CurvedWeight

__all__ = ["ADAMW", "Batch", "FormulaBatch", "Pack", "Rule"]

ADAMW = ("exp_avg", "exp_avg_sq")  # its moments
_CHUNK = {"cpu": 2**18}  # numbers whose raw gradients exist at a time, at least one tensor's: a core's cache
_CHUNK_OF_DEVICE = 2**25  # with raw weights 256 MB
_MOST_BATCHES = 16  # of a pack


class Rule(NamedTuple):
    """What a batch needs to know of an optimizer's rule."""

    moments: Moments
    is_adamw: bool


class Pack:
    """Parameters of one group that are alike. Their step counts are one tensor; each state's "step" is a view of it."""

    def __init__(self, entries: Sequence[Entry], rule: Rule) -> None:
        self.entries, self.rule = list(entries), rule
        self.batches: dict[tuple[int, ...], Batch] = {}  # by the places of their parameters
        self._steps = [float(entry.state["step"]) for entry in entries]
        self._counts = torch.tensor(self._steps, dtype=torch.float32, device="cpu")
        self._version = self._counts._version
        for i, entry in enumerate(entries):
            entry.state["step"] = self._counts[i]

    def steps(self) -> list[float]:
        """Return the number of steps of each parameter; views share the version of the tensor."""
        if self._version != self._counts._version:
            self._steps, self._version = self._counts.tolist(), self._counts._version
        return self._steps

    def advance(self, places: tuple[int, ...]) -> float:
        """Add 1 to the numbers of steps of the parameters at these places, which are equal, and return them."""
        steps = self.steps()
        if len(places) == len(steps):
            self._counts.add_(1.0)
            self._steps = [step + 1.0 for step in steps]
        else:
            self._counts[list(places)] += 1.0
            for place in places:
                steps[place] += 1.0
        self._version = self._counts._version
        return self._steps[places[0]]

    def of(self, active: set[int] | None) -> Iterator["Batch"]:
        """Yield batches of the active parameters (their ids; None: all), one for each step count."""
        steps, places = self.steps(), range(len(self.entries))
        alike: dict[float, list[int]] = {}
        for i in places if active is None else [i for i in places if id(self.entries[i]) in active]:
            alike.setdefault(steps[i], []).append(i)
        for chosen in map(tuple, alike.values()):
            if chosen not in self.batches:
                if len(self.batches) == _MOST_BATCHES:  # other parameters have gradients in every step
                    self.batches.clear()
                self.batches[chosen] = self.batch(chosen)
            yield self.batches[chosen]

    def batch(self, places: tuple[int, ...]) -> "Batch":
        """Return a batch of the parameters at these places."""
        return FormulaBatch(self, places)


class Batch:
    """Parameters of a pack that step together.

    :meth:`norm` and :meth:`advance` come first. If its kernels have the rule, :meth:`update` takes the step. Else the
    rule updates :meth:`scale_leaves`, then part by part what :meth:`pull` returns, and :meth:`push` writes the new
    weights into the model. :meth:`finish` is last.
    """

    is_fused = False  # whether its kernels have the rule

    def __init__(self, pack: Pack, places: tuple[int, ...]) -> None:
        self.pack, self.places, self.rule = pack, places, pack.rule
        self.entries = [pack.entries[place] for place in places]
        self.group = self.entries[0].group
        self.step = 0.0  # the number of this step

    def norm(self) -> Tensor:
        """Find the raw gradients and those of the scales; return their norm, without scales that are partial sums."""
        raise NotImplementedError

    def advance(self) -> None:
        """Count the step."""
        self.step = self.pack.advance(self.places)

    def update(self, clip: Tensor | None) -> None:
        """Apply the rule to learned scales and weights."""
        raise NotImplementedError

    def pull(self, part: slice, clip: Tensor | None) -> list[Leaf]:
        """Return the leaves of the weights of some parameters."""
        raise NotImplementedError

    def push(self, part: slice) -> None:
        """Write the new values of these leaves into the model."""
        raise NotImplementedError

    def finish(self) -> None:
        """Forget gradients, whose memory belongs to the user."""
        raise NotImplementedError

    @property
    def lr(self) -> float:
        """The learning rate of the weights."""
        return rate_of(self.group)

    def parts(self) -> Iterator[slice]:
        """Yield runs of parameters whose raw gradients may exist at a time: one's, or a limited number."""
        device = self.entries[0].value.device.type
        room = _CHUNK[device] * torch.get_num_threads() if device in _CHUNK else _CHUNK_OF_DEVICE
        start, total = 0, 0
        for i, entry in enumerate(self.entries):
            size = entry.value.numel()
            if i > start and total + size > room:
                yield slice(start, i)
                start, total = i, 0
            total += size
        yield slice(start, len(self.entries))

    def scale_leaves(self, clip: Tensor | None) -> list[Leaf]:
        """Return the leaves of the learned scales of all parameters."""
        return [leaf for entry in self.entries for leaf in entry.scale_leaves(self.rule.moments, clip, self.step)]


class FormulaBatch(Batch):
    """Parameters of any kind, by PyTorch's operations on whole tensors."""

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._old: list[CurvedWeight | None] = []  # the maps with their old scales
        grads: list[Tensor] = []
        for entry in self.entries:
            gradient, curved = entry.gradient().to(entry.dtype), None
            if entry.is_stored:
                curved = entry.curved_weight()
                gradient, entry.grads = curved.vjp()[1](gradient)
                curved = curved._replace(tensors={name: scale.clone() for name, scale in curved.tensors.items()})
                grads += [] if entry.shard.process_groups else entry.grads.values()
            elif entry.closed is not None:
                gradient = gradient * entry.closed.slope(entry.weight())
            self._old.append(curved)
            grads.append(torch.linalg.vector_norm(gradient))
        return torch.nn.utils.get_total_norm(grads)

    def pull(self, part: slice, clip: Tensor | None) -> list[Leaf]:
        """See :meth:`Batch.pull`."""
        if clip is not None:  # once, not for each tensor
            clip = clip.to(self.entries[0].value.device, self.entries[0].dtype)
        self._leaves = [self._leaf(*pair, clip) for pair in zip(self.entries[part], self._old[part], strict=True)]
        return self._leaves

    def _leaf(self, entry: Entry, old: CurvedWeight | None, clip: Tensor | None) -> Leaf:
        grad = entry.gradient().to(entry.dtype)
        if old is not None:
            grad, value = grad * old.slope(), entry.local_state("raw")
        else:
            value = entry.weight()
            if entry.closed is not None:
                grad, value = grad * entry.closed.slope(value), entry.closed.raw(value)
        value = value.clone() if self.lr == 0.0 else value  # a rate of 0 changes moments alone
        return entry.weight_leaf(self.rule.moments, value, clipped(grad, clip), self.step)

    def push(self, part: slice) -> None:
        """See :meth:`Batch.push`."""
        if self.lr != 0.0:
            for entry, leaf in zip(self.entries[part], self._leaves, strict=True):
                _write(entry, leaf.value)
        del self._leaves

    def finish(self) -> None:
        """See :meth:`Batch.finish`."""
        for entry in self.entries:
            entry.grads = {}
        del self._old


def _write(entry: Entry, value: Tensor) -> None:
    """Write the weight of a new raw value, or of a new plain one, into the model."""
    if entry.is_stored:
        entry.value.copy_(entry.curved_weight().effective(entry.value.dtype))
        return
    if entry.closed is not None:
        weight = entry.weight()
        value = entry.closed.move(weight, value - entry.closed.raw(weight))
    if "master" in entry.state:
        entry.local_state("master").copy_(value)
    entry.value.copy_(value)
