"""Gradients that a step left behind and that the next optimizer step will read: part of the version of that step.

A script that reports every micro-batch reports within an accumulation. What was added up until then lives in the gradients of the
parameters, and nowhere else. Most scripts report behind an optimizer's step. There the gradients have been used, the next turn
clears them, and nothing of them is saved.

The two are told apart by a look behind each optimizer step: which tensor the gradient of each parameter is, and how often torch has
counted a write to it. A gradient of which both are still so when a step is reported was used up. Any other lives.

One that was used up and is the same tensor from step to step is cleared in place. Of it a version has the name: it comes back as
zero. So does one that was cleared in place already, and is zero when the step is reported. A parameter with a gradient of zero is
stepped by decay and momentum, and one with none is not.

Of many parameters a sample is looked at, as long as every optimizer made a step since the last report, nothing of the sample lives, and
the last looks at all of them found nothing either. Where that does not hold, all that is not known to be used counts as living: too much
is saved then. What a backward pass behind the step gives to parameters outside of the sample alone is found at the next look at all.

Where the text of the script's loop says that its next turn, which begins right behind the report, reads a gradient before it clears it,
that one lives though it was used, as long as it can be carried: too many live rather than too few. Where the text seems to clear it first,
nothing is told of what may be lost; that may be wrong, so the version has no less for it. What follows is for all others.

A script may also never clear what was used, or not at each step, or not all of it. A gradient that is the same tensor at two optimizer steps
is looked at behind this step and behind the next, when a backward pass begins to add to it: if it is not zero by then, it lives
from there on. So does one in host memory that the next step reads, not zero, though no backward pass has come to it meanwhile, if one
came to it before, or none can: others a script may write by hand. So does one that was written to once, and is not zero, when a report
comes without a step of its optimizer: clipping reads it. Of one on a device no number is looked at: it lives if nobody has written to it.

One that is another tensor at its second step was made by a backward pass if nobody has written to it, and is not zero. Else it is looked
at in the same manner: zeros that the script has put in its place come back as zero.

MUST NOT hold a gradient: its memory is the script's to free. MUST NOT refer to a tensor weakly either: torch then swaps no other one into
its place, as a conversion of a model may do. So a gradient is known by a number that is an attribute of it.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries import fsdp1, living_gradients
from holdfast.checkpoint.entries.entries import Collector, Loading, TransientPart
from holdfast.checkpoint.entries.sharding import Layouts, local_of
from holdfast.checkpoint.entries.zeroed_gradients import ZeroedGradients

logger = logging.getLogger(__name__)

# An object of a class that has this, and it is true, saves gradients in its own state.
SAVES_THEM = "holdfast_saves_gradients"
_LOST = "lost"
_ELSEWHERE = "another thread saves than the one that trains"
# Of an optimizer with more parameters so many are looked at; all of them at every 64th report, and until three found nothing.
SAMPLE = 512
FULL_EVERY = 64
FULL_FIRST = 3
# Behind so many steps it is looked whether the script clears what a parameter used: who clears at every second does behind the other.
LOOKS = 2
_Seen = tuple[int, object]
Judged = Callable[[Set[int]], tuple[frozenset[int], frozenset[int]]]


class GradientsPart(TransientPart):
    """The living gradients of one rank, which are its own.

    Args:
        name: what their entries begin with.
        optimizers: returns those that make steps.
        modules: returns the models.

    Attributes:
        off: an object saves them itself.
    """

    def __init__(
        self,
        name: str,
        optimizers: Callable[[], Iterable[Optimizer]],
        modules: Callable[[], Iterable[nn.Module]],
        *,
        off: bool = False,
    ) -> None:
        super().__init__(name)
        self.off = off
        self._optimizers, self._modules = optimizers, modules
        self._units: Sequence[Any] = ()  # that `fully_shard` was called with
        self._used: dict[int, _Seen] = {}  # by a parameter's id: its gradient as its last step left it
        # By a parameter's id, as long as its gradient is not known to be made anew for each step: of how many steps that has to be seen.
        self._stays: dict[int, float] = {}
        # Parameters of the models that no optimizer steps: which module has them, and as what.
        self._others: list[tuple[weakref.ref[nn.Module], str]] = []
        # The names of gradients that were used up and are there, as they were reported; True: all but these.
        self._zero: tuple[bool, list[str]] | tuple[()] = ()
        self._zeroed = ZeroedGradients()
        self._living: dict[
            str, tuple[torch.Tensor, _Seen]
        ] = {}  # by number: a parameter, its gradient as it was reported
        self._names: dict[int, str] = {}  # of parameters, by id
        self._looks: dict[int, int] = {}  # by a parameter's id: at whether the script clears what it used
        self._uncleared: set[int] = set()  # those of which it does not
        self._clears = frozenset[int]()  # those of which the text of the script seems to say that it does
        # Those that a backward pass has come to; and of them those that none has come to since an optimizer's step.
        self._reached: set[int] = set()
        self._asked: set[int] = set()
        self._is_back = self._is_told = False  # a version was restored; it was told that it lacks such a gradient
        self._brought: set[int] = set()  # ids of parameters whose gradient it had, and that lacked nothing itself
        self._sample: dict[int, torch.Tensor] = {}  # by id: those looked at since the last report
        self._stepped: set[int] = set()  # optimizers since the last report, by id
        self._reports = self._plain = 0
        self._unreduced = False
        self._left = ""
        self._thread = 0  # that of the last step of an optimizer
        self._is_unread = False  # it was told that another thread saves

    def build(self, out: Collector) -> None:
        """Nothing lasts; only looks at how the models are wrapped, and what their parameters are called."""
        self._units = [
            each for module in self._modules() for each in module.modules() if living_gradients.is_sharded(each)
        ]
        self._names = {key: owner.entry for key, owner in out.owners.items()}
        stepped = {
            id(p) for optimizer in self._optimizers() for group in optimizer.param_groups for p in group["params"]
        }
        parts = {id(each): each for module in self._modules() for each in module.modules()}
        self._others = [
            (weakref.ref(each), name)
            for each in parts.values()
            for name, parameter in each._parameters.items()
            if parameter is not None and id(parameter) not in stepped
        ]

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer made a step: what it read is used up."""
        # A backward pass that steps runs in a thread of torch on a device.
        if not isinstance(threading.current_thread(), threading._DummyThread):
            self._thread = threading.get_ident()
        if self.off:  # nor may a parameter get a hook: zero lines would take it for one that the script came to have
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._is_quick:
            parameters = parameters[:: -(-len(parameters) // SAMPLE)]
        grads = [(id(p), p, grad) for p in parameters if (grad := p.grad) is not None]
        used = {key: _seen(grad) for key, _, grad in grads}
        self._zeroed.used((key, parameter, grad, used[key][0]) for key, parameter, grad in grads)
        for key, parameter, _ in grads:
            before = self._used.get(key)
            stayed = before is not None and before[0] == used[key][0]
            if before is None or stayed:
                self._stays[key] = max(self._stays.get(key, 0), 2 if stayed else 1)
            if before is None or key in self._uncleared:
                continue
            # No backward pass has come to it since the step and the report before, or none can.
            may_be_left = key in self._reached or not parameter.requires_grad
            is_unreached = key in self._asked or (may_be_left and before == used[key])
            if stayed and is_unreached and key not in self._sample:
                self._look_again(parameter)
            if key not in self._uncleared and self._looks.get(key, 0) < LOOKS:
                is_made = not stayed and self._is_made(parameter, used[key])
                self._ask(parameter, wanted=not is_made)
            if not stayed and self._stays.get(key, 0) > 0:
                self._stays[key] -= 1
        self._used.update(used)
        self._sample.update((id(p), p) for p in parameters)
        self._stepped.add(id(optimizer))

    def note(self, judged: Judged = lambda _: (frozenset(), frozenset())) -> None:
        """A step is reported now: finds what lives.

        Args:
            judged: returns, of the `id` of each parameter, of which the next turn seems to clear the gradient before it reads it, and of
                which it may read it as it is now.
        """
        all_stepped = self._stepped.issuperset(map(id, self._optimizers()))
        stepped, sample, quick = self._stepped, self._sample, self._is_quick
        self._stepped, self._sample, self._living, self._zero = set(), {}, {}, ()
        self._reports += 1
        if self.off:
            return
        if self.is_elsewhere:
            self._unreduced, self._plain = False, 0
            if not self._is_unread:
                logger.warning(
                    "another thread saves than the one that trains: of a step that is not reported there (`step`), no gradient can be read, "
                    "so its version has none that lives on"
                )
            self._is_unread = True
            return
        self._unreduced = any(map(living_gradients.has_unreduced, self._units))
        if quick and all_stepped and self._is_used_up(sample):
            return
        zero: list[str] = []
        absent: list[str] = []
        held = any(map(fsdp1.units_of, self._modules()))  # it loses what is put back, zeros too: that is told
        parameters = self._parameters()
        grads = {key: grad for key, p in parameters.items() if (grad := p.grad) is not None}
        self._clears, read = judged(parameters.keys())
        looks = {key: (living_gradients.number_of(grad), _count(grad)) for key, grad in grads.items()}
        lives = {key for key, look in looks.items() if key in self._uncleared or self._used.get(key) != look}
        named = () if held else lives & self._names.keys()
        cleared = self._zeroed.found(
            [
                (key, p, grads[key], looks[key][0], self._is_next(key, looks[key]))
                for key, p in parameters.items()
                if key in named
            ]
        )
        self._look_at_left({key: parameters[key] for key in lives - cleared if self._is_next(key, looks[key])}, stepped)
        for number, (key, parameter) in enumerate(parameters.items()):
            grad, name = grads.get(key), self._names.get(key)
            if key in cleared and name is not None:
                zero.append(name)
            elif grad is not None and key in lives:
                self._living[str(number)] = parameter, _seen(grad)
            elif name is not None:
                stays = grad is not None and living_gradients.may_be_zero(parameter, grad)
                # In place by a write that torch does not count, as `fully_shard`'s are not; and not known yet to be cleared so.
                stays = stays and (self._stays.get(key, 0) > 0 or living_gradients.is_zero(parameter))
                (zero if stays else absent).append(name)
        self._take(read & grads.keys() - lives, parameters)
        if zero and not held:
            self._zero = (True, absent) if len(absent) < len(zero) else (False, zero)
        self._plain = self._plain + 1 if all_stepped and not self._living and not self._zero else 0

    def _is_used_up(self, sample: Mapping[int, torch.Tensor]) -> bool:
        """Tell whether nothing of a sample lives or stays, nor of one of those that no optimizer steps."""
        others = _there(self._others[:: -(-len(self._others) // SAMPLE) or 1])
        stay = (self._stays.get(key, 0) > 0 and p.grad is not None for key, p in sample.items())
        return (
            not any(map(self._lives, sample, sample.values())) and all(p.grad is None for p in others) and not any(stay)
        )

    def _take(self, read: Collection[int], parameters: Mapping[int, torch.Tensor]) -> None:
        """Counts gradients as living that were used, and that the next turn may read, if all of them can be carried."""
        before = self._living
        if not read:
            return
        numbered = ((str(number), *pair) for number, pair in enumerate(parameters.items()))
        self._living = before | {
            number: (p, _seen(p.grad)) for number, key, p in numbered if key in read and p.grad is not None
        }
        if self.why_lost:
            self._living = before

    @property
    def is_elsewhere(self) -> bool:
        """Return whether another thread makes the steps: a backward pass there may write gradients, and torch bears no read meanwhile."""
        return self._thread not in (0, threading.get_ident())

    @property
    def _is_quick(self) -> bool:
        return self._plain >= FULL_FIRST and self._reports % FULL_EVERY != 0

    def _lives(self, key: int, parameter: torch.Tensor) -> bool:
        """Return whether the next step reads the gradient of a parameter."""
        return (grad := parameter.grad) is not None and (key in self._uncleared or not _is(grad, self._used.get(key)))

    def _is_next(self, key: int, look: _Seen) -> bool:
        """Return whether torch counts one write to a gradient since the step that used it."""
        number, count = self._used.get(key, (0, None))
        return number == look[0] != 0 and isinstance(count, int) and look[1] == count + 1

    def fits(self, most: int) -> bool:
        """Return whether a note can have what lives: at most so many bytes, in host memory, and not lost."""
        return not self.why_lost and all(grad.is_cpu for grad in self._grads()) and self.num_bytes <= most

    @property
    def num_bytes(self) -> int:
        return sum(grad.nbytes for grad in self._grads())

    def _grads(self) -> list[torch.Tensor]:
        return [local_of(parameter.grad) for parameter, _ in self._living.values() if parameter.grad is not None]

    @property
    def why_lost(self) -> str:
        """Return why the step that was reported last left gradients that no version can have; empty if it did not."""
        if self._unreduced:
            return "no rank has reduced them yet"
        if not self._living:
            return ""
        if self.is_elsewhere:
            return _ELSEWHERE
        if not all(p.grad is not None and _is(p.grad, seen) for p, seen in self._living.values()):
            return "they were written or cleared after the step was reported"
        if any(map(fsdp1.units_of, self._modules())):
            return "the first FSDP holds them"
        parts = (each for module in self._modules() for each in module.modules())
        in_buckets = any(isinstance(each, DistributedDataParallel) and each.gradient_as_bucket_view for each in parts)
        return living_gradients.why_not([parameter for parameter, _ in self._living.values()], in_buckets=in_buckets)

    @property
    def why_told(self) -> str:
        """Return why gradients are lost that the text of the script does not seem to clear; empty if none are."""
        return "" if self._seem_cleared else self.why_lost

    @property
    def _seem_cleared(self) -> bool:
        return bool(self._living) and all(id(parameter) in self._clears for parameter, _ in self._living.values())

    def _lacking(self, living: Mapping[str, torch.Tensor]) -> list[str]:
        """Returns the numbers of those that a restored version lacked, as long as nobody knows whether the script clears them.

        What a step had used may be missing in what was added up since. Whoever restores that, and finds it out, has to tell.
        """
        if not self._is_back or self._is_told:
            return []
        return [number for number, parameter in living.items() if id(parameter) not in self._brought]

    @property
    def _are_apart(self) -> bool:
        """Return whether the last backward pass was one of `no_sync`, and DDP notes which parameters have been used since the last reduction."""
        parts = (each for module in self._modules() for each in module.modules())
        found = [each for each in parts if isinstance(each, DistributedDataParallel) and each.find_unused_parameters]
        return any(not each.require_forward_param_sync for each in found)

    def report(self, out: Collector) -> None:
        """Adds what lives, each rank its own; or why that is lost."""
        elsewhere = self.is_elsewhere  # then no gradient is read, also if the thread that trains reports meanwhile
        living = {} if elsewhere else {number: parameter for number, (parameter, _) in self._living.items()}
        if why := self.why_lost or (_ELSEWHERE if elsewhere and self._uncleared else ""):
            if not self._seem_cleared:
                out.value(self.name, {_LOST: why})
        elif living or self._zero or self._uncleared:
            of = {number: self._place(parameter, out.layouts) for number, parameter in living.items()}
            # All of them without a name each, as older releases had it.
            uncleared = self._uncleared >= self._parameters().keys() or sorted(
                self._names[key] for key in self._uncleared & self._names.keys()
            )
            kept = {"uncleared": uncleared, "zero": self._zero, "apart": bool(living) and self._are_apart}
            kept["lacking"] = self._lacking(living)
            out.transient(self.name, {"of": of, "gradients": living_gradients.as_saved(living), **kept})

    def plan(self, loading: Loading) -> None:
        """Claims it if it is there. What another rank, or this one in another layout, had of other parts is left."""
        self._left = ""
        if (offered := self.offered(loading)) is None:
            return
        places = {str(number): self._place(p, loading.layouts) for number, p in enumerate(self._parameters().values())}
        if all(places.get(number) == place for number, place in offered.get("of", {}).items()):
            loading.claim_value(self.name, kind=dict)
        else:
            self._left = "they were added up in another layout"

    def apply(self, loading: Loading) -> None:
        """Puts back what lived; what is here is of another step, and goes."""
        saved = loading.value(self.name) if loading.has(self.name) else {}
        if why := self._left or saved.get(_LOST, ""):
            logger.warning("gradients were being added up when this version was saved, and are lost: %s", why)
        if saved.get("apart"):
            logger.warning(
                "gradients were being added up without a reduction (`no_sync`) when this version was saved, and what DDP with "
                "`find_unused_parameters` has noted is lost: a parameter that no later backward pass of this accumulation comes to is "
                "stepped by the gradient of its own rank alone, and its ranks differ from then on"
            )
        if self.off:
            return
        self._is_back = True
        if (uncleared := saved.get("uncleared")) is not None:
            self._uncleared = {
                key for key in self._parameters() if uncleared is True or self._names.get(key) in set(uncleared or ())
            }
        # Those that were used up too: the next backward pass would add to them.
        for parameter in self._parameters().values():
            living_gradients.clear(parameter)
        living = saved.get("gradients", {})
        living_gradients.put(list(self._parameters().values()), living)
        whole = living.keys() - set(saved.get("lacking", ()))
        self._brought = {key for number, key in enumerate(self._parameters()) if str(number) in whole}
        all_but, names = saved.get("zero") or (False, [])
        named = set(names)
        for key, parameter in self._parameters().items():
            if parameter.grad is None and key in self._names and (self._names[key] in named) != all_but:
                living_gradients.put_zero(parameter)
        self.note()

    def _look_at_left(self, written: Mapping[int, torch.Tensor], stepped: set[int]) -> None:
        """Looks at gradients that were written to once since a step used them: of those that no optimizer steps now that is still in them."""
        for key in written.keys() - self._uncleared:
            steps = any(id(optimizer) in stepped for optimizer in self._optimizers() if _steps(optimizer, key))
            if not steps and not living_gradients.is_zero(written[key]):
                self._found_uncleared(key)

    def _is_made(self, parameter: torch.Tensor, seen: _Seen) -> bool:
        """Tell whether a backward pass has made a gradient that another step has not used: it wrote to none that was there.

        One that is zero, and that no pass has come to, the script may have put there.
        """
        is_put = living_gradients.is_zero(parameter)
        if is_put:
            self._stays[id(parameter)] = math.inf
        return is_put or seen[1] == 0

    def _ask(self, parameter: torch.Tensor, *, wanted: bool) -> None:
        """Looks, when the next backward pass comes to a parameter, what is there of the gradient that its optimizer's step has used."""
        looks = self._looks.get(key := id(parameter), 0)
        if not (wanted or looks) or not parameter.requires_grad:
            return
        self._looks[key] = looks + 1
        if key in self._reached:
            self._asked.add(key)

        part = weakref.ref(self)  # whom nothing may hold as long as a parameter lives that no pass comes to

        def look(_: torch.Tensor) -> None:
            handle.remove()
            if (found := part()) is not None:
                found._begins(key, parameter)

        if "torch._dynamo" in sys.modules:  # else no backward pass is compiled, and it is slow to import
            look = torch.compiler.disable(look)  # type: ignore[no-untyped-call]
        # Whoever pickles the parameter meanwhile is not warned that it goes without the hook.
        handle = self._leaf(parameter).register_hook(unserializable_hook(look))  # type: ignore[no-untyped-call]

    def _begins(self, key: int, parameter: torch.Tensor) -> None:
        """A backward pass begins to add to the gradient of a parameter that was asked for."""
        self._reached.add(key)
        self._asked.discard(key)
        if self._is_uncleared(parameter):
            self._found_uncleared(key)
        elif (grad := parameter.grad) is not None and living_gradients.number_of(grad) != self._used[key][0]:
            self._stays[key] = math.inf  # zeros, which the script has put in its place

    def _leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns what a backward pass comes to: of a parameter that `fully_shard` cut, what stands for it meanwhile."""
        wholes = (living_gradients.unsharded(unit) for unit in self._units if isinstance(parameter, DTensor))
        return next((found[id(parameter)] for found in wholes if id(parameter) in found), parameter)

    def _look_again(self, parameter: torch.Tensor) -> None:
        """Looks at a gradient that a second step has read: it is zero if the script clears in place.

        None on a device: a graph of it may have written that. Of one that is zero it is looked no more until a backward pass comes to it.
        """
        key, grad = id(parameter), parameter.grad
        is_host = grad is not None and local_of(grad).is_cpu and living_gradients.may_be_zero(parameter, grad)
        if is_host and not living_gradients.is_zero(parameter):
            self._found_uncleared(key)
        else:
            self._reached.discard(key)
            self._asked.discard(key)

    def _is_uncleared(self, parameter: torch.Tensor) -> bool:
        """Tell whether what a step used is there when the next backward pass adds to it. On a device no number is looked at."""
        if (grad := parameter.grad) is None:
            return False
        if local_of(grad).is_cpu and living_gradients.may_be_zero(parameter, grad):
            return not living_gradients.is_zero(parameter)
        return _is(grad, self._used.get(id(parameter)))

    def _found_uncleared(self, key: int) -> None:
        if self._is_back and not self._is_told and key not in self._brought and key not in self._clears:
            logger.warning(
                "this script does not clear the gradient of %s that an optimizer's step has used, and the version that was restored lacks "
                "it: that was not known yet when it was saved. Training may go on otherwise than the run that saved would have",
                self._names.get(key, "a parameter"),
            )
            self._is_told = True
        elif not self._uncleared:
            logger.info("this script does not clear gradients that an optimizer's step has used: versions have them")
        self._uncleared.add(key)

    def _place(self, parameter: torch.Tensor, layouts: Layouts) -> list[Any]:
        """Returns what a gradient is of: a parameter, or a part of it, on a rank of a job of so many."""
        cut: list[Any] = []
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            cut = [str(parameter.placements), mesh.mesh.flatten().tolist(), list(mesh.mesh.shape)]
        shape = list(parameter.shape)
        return [self._names.get(id(parameter), ""), shape, cut, layouts.rank, len(layouts.everyone)]

    def _parameters(self) -> dict[int, torch.Tensor]:
        """Returns the parameters that are stepped, and behind them those of the models that are not, by id."""
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        found = {id(parameter): parameter for group in groups for parameter in group["params"]}
        found.update({id(parameter): parameter for parameter in _there(self._others)})
        return found


def _seen(grad: torch.Tensor) -> _Seen:
    """Returns what is of a gradient as long as it is the same tensor and nobody writes to it, as far as torch counts."""
    return living_gradients.numbered(grad), _count(grad)


def _is(grad: torch.Tensor, seen: _Seen | None) -> bool:
    """Tell whether a gradient is still as it was seen."""
    return seen is not None and seen[0] == living_gradients.number_of(grad) and seen[1] == _count(grad)


def _steps(optimizer: Optimizer, key: int) -> bool:
    """Tell whether an optimizer steps the parameter of this id."""
    return any(id(parameter) == key for group in optimizer.param_groups for parameter in group["params"])


def _there(others: Iterable[tuple[weakref.ref[nn.Module], str]]) -> Iterator[torch.Tensor]:
    """Gives those of these parameters that are still there."""
    for part, name in others:
        module = part()
        parameter = module._parameters.get(name) if module is not None else None
        if parameter is not None:
            yield parameter


def _count(grad: torch.Tensor) -> object:
    """Returns torch's count of writes; of what it counts none of, nothing that is ever equal."""
    try:
        return grad._version if type(grad) is torch.Tensor else local_of(grad)._version
    except RuntimeError as error:  # made in inference mode
        pass_on(error)
        return object()
