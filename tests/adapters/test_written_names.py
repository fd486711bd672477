"""Which names of a script may be written in place: every way that the text leaves open counts."""

from __future__ import annotations

import ast

import pytest

from holdfast.adapters.zero_lines.nested.written_names import written

HEAD = "import numpy as np, torch, torch.distributed as dist\nimport torch.nn as nn, torch.nn.functional as F\nfrom helper import bump\n"


@pytest.mark.parametrize(
    "text",
    [
        "a.add_(1)", "a[0] = 1", "a += 1", "a.data[0].mul_(2)", "a.view(-1)[0] = 1", "a.view(-1).add_(1)",
        "torch.add(b, 1, out=a)", "nn.init.constant_(a, 1)", "torch._foreach_add_([a], 1)", "F.relu(a, inplace=True)", "F.relu(a, True)",
        "np.copyto(a.numpy(), b)", "dist.all_reduce(a)", "torch.distributed.broadcast(a, 0)", "optimizer = torch.optim.SGD([a], lr=1)",
        "flat = a.view(-1)\nflat += 1", "row = a[0]\npart = row[1:]\npart.zero_()", "for t in (a, b): t.copy_(t + 1)", "[t.add_(1) for t in (a,)]",
        "(t := a).add_(1)", "with torch.no_grad(), held(a) as t: t.zero_()", "match a:\n    case t: t.zero_()", "held = {'a': a}\nheld['a'].add_(1)",
        "bump(a)", "(lambda t: t.add_(1))(a)", "self.bump(x=a)", "model(x, a)", "rows.append(a)", "self.a = a", "held['a'], n = a, 1",
        "F.embedding(b, a, max_norm=1.0)", "F.batch_norm(b, a, c, training=model.training)", "np.add(a.numpy(), 1, a.numpy())", "np.exp(a, a)",
        "np.random.shuffle(a.numpy())", "a.numpy().fill(0)", "np.nan_to_num(a, copy=False)", "a.__iadd__(1)", "torch.ops.mine.bump(a)",
        "torch.utils.checkpoint.checkpoint(bump, a)", "from torch.utils.checkpoint import checkpoint\ncheckpoint(bump, a)",
        "def f(t=a):\n    t.add_(1)", "def f():\n    return a\nf().add_(1)", "class S:\n    t = a\nS.t.add_(1)", "b = a\nglobals()['b'].add_(1)",
    ],
)  # fmt: skip
def test_a_name_that_may_be_written_is_told(text: str) -> None:
    assert "a" in written(ast.parse(HEAD + text))


@pytest.mark.parametrize(
    "text",
    [
        "b = a[0]\nloss = a.sum() + b.sum()", "b = torch.stack([a, a])", "print(a.tolist(), len(a))", "b = a * 2\nb.add_(1)", "n += a.sum().item()",
        "bump(a + 1)", "b = F.relu(a)", "a = torch.ones(4)", "a, b = b, a", "b = np.mean(a)", "b = torch.nn.functional.pad(a, (1, 1))",
    ],
)  # fmt: skip
def test_a_name_that_is_only_read_is_not(text: str) -> None:
    assert "a" not in written(ast.parse(HEAD + text))
