"""Tells, from the text of a script, which calls the training feels though nothing takes their value.

These draw random numbers, call the model, set its mode, or go over a loader. Whether they are made may not hang on a clock.
`print`, logging and `torch.save` are none.

    calls = DrawingCalls(trees)
    calls.is_felt(node, "torch.randn")      of a call, with its whole name
    calls.draws(loop.iter)                  of what a loop goes over

A name is a model's, or a loader's, by what the text does with it anywhere: `net.parameters()`, `x = DataLoader(...)`, `f(net)` of `def f(m)`.
Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from holdfast.checkpoint.usage.name_flow import Function, last_name

# Names of functions and methods that draw, of torch, numpy, `random`, and of their generators and distributions.
_DRAWS = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson", "random_split",
    "dropout", "random_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "trunc_normal_", "xavier_uniform_",
    "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "random", "randrange", "choice", "choices", "shuffle", "sample", "rsample",
    "uniform", "gauss", "standard_normal", "integers", "permutation", "triangular", "betavariate", "normalvariate", "getrandbits", "randbytes",
}  # fmt: skip
_MODES = {"train", "eval", "requires_grad_"}
# Methods that only a model has.
_OF_MODELS = {"parameters", "named_parameters", "train", "eval", "named_modules", "modules", "buffers", "named_buffers"}
# Methods of models that change nothing, and draw nothing.
_HARMLESS = {
    *_OF_MODELS, "state_dict", "children", "named_children", "zero_grad", "extra_repr", "numel", "dim", "size", "get_num_params", "num_parameters",
    "get_memory_footprint", "estimate_mfu", "consolidate_state_dict",
}  # fmt: skip
_SAVES = ("save", "push", "log", "write", "get_", "count", "print", "summary", "num_")
# Words in the name of an unknown function that calls the model which it is given.
_CALLS_MODELS = ("eval", "valid", "test", "sample", "generate", "infer", "predict")


class DrawingCalls:
    """Knows the names of models and of loaders of a script.

    Args:
        trees: the texts of the script.
    """

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        functions: dict[str, list[tuple[Function, bool]]] = {}
        modules: set[str] = {"Sequential"}
        for node in nodes:
            if isinstance(node, Function):
                functions.setdefault(node.name, []).append((node, False))
            elif isinstance(node, ast.ClassDef):
                functions.setdefault(node.name, []).extend(
                    (part, True) for part in node.body if isinstance(part, Function) and part.name == "__init__"
                )
                if any(last_name(base).endswith("Module") for base in node.bases):
                    modules.add(node.name)
        models = {
            last_name(call.func.value)
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_MODELS and call.func.attr not in functions
        }
        given = [node for node in nodes if isinstance(node, ast.Assign)]
        made = [(last_name(node.targets[0]), node.value) for node in given]
        models |= {name for name, value in made if isinstance(value, ast.Call) and last_name(value.func) in modules}
        loaders = {
            name for name, value in made if isinstance(value, ast.Call) and last_name(value.func).endswith("Loader")
        }
        loaders |= {
            name
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute) and "loader" in (name := last_name(node)).lower()
        }
        passes = [(name, last_name(value)) for name, value in made if isinstance(value, ast.Name | ast.Attribute)]
        passes += [row for call in calls for row in _handed(call, functions.get(last_name(call.func), ()))]
        self._models = _spread(models - {"self", ""}, passes)
        self._loaders = _spread(loaders - {"self", ""}, passes)
        self._known = functions.keys()

    def is_felt(self, node: ast.Call, whole: str) -> bool:
        """Tell whether the training feels that a call was made."""
        name = last_name(node.func)
        of = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name in self._models or (isinstance(node.func, ast.Name) and name == "self"):
            return True
        if isinstance(node.func, ast.Name) and not whole and name in ("iter", "next"):
            return any(isinstance(each, ast.Name | ast.Attribute) or self.draws(each) for each in node.args[:1])
        if name in self._known:
            return False  # what it does is gone through
        if name in _DRAWS and (whole or isinstance(node.func, ast.Attribute)):
            return True
        if isinstance(node.func, ast.Attribute) and (name in _MODES or of in self._models):
            return not whole and (name in _MODES or not (name in _HARMLESS or name.startswith(_SAVES)))
        if whole.startswith("torch.nn.") and name[:1].isupper() and "Loss" not in name:
            return True  # its weights are drawn
        words = any(word in name.lower() for word in _CALLS_MODELS) and not name.startswith(_SAVES)
        return words and any(last_name(each) in self._models | self._loaders for each in node.args)

    def draws(self, over: ast.AST) -> bool:
        """Tell whether a loop that goes over this draws: it goes over a loader."""
        held = {id(node.value) for node in ast.walk(over) if isinstance(node, ast.Attribute)}
        sized = {
            id(part)
            for node in ast.walk(over)
            if isinstance(node, ast.Call) and last_name(node.func) == "len"
            for part in ast.walk(node)
        }
        return any(
            last_name(node) in self._loaders
            for node in ast.walk(over)
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in held | sized
        )


def _handed(call: ast.Call, functions: Iterable[tuple[Function, bool]]) -> Iterator[tuple[str, str]]:
    """Yields (parameter, name that it is given) of a call."""
    for function, is_init in functions:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        own = is_init or (isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]))
        rows = [*zip(names[own:], call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
        yield from ((name, last_name(value)) for name, value in rows if name and not isinstance(value, ast.Call))


def _spread(names: set[str], passes: Sequence[tuple[str, str]]) -> set[str]:
    """Returns these names with all that they are handed to."""
    while more := {name for name, of in passes if of in names} - names - {"self", ""}:
        names = names | more
    return names
