"""Scripts whose loaders have `persistent_workers=True`, each with one habit of real ones; as in `nested_zoo.py`. Not tests themselves."""

from __future__ import annotations

from adapters.nested_zoo import KEPT, Case

# Datasets that draw from all generators; one loader to train with, and one to evaluate, whose workers stay both.
SCRIPT = """
class Noisy(Dataset):
    def __init__(self, shift=0):
        self.shift, self.seen, self.rng = shift, 0, None
    def __len__(self):
        return 28
    def __getitem__(self, index):
        {item}
        x = dataset[index][0] + torch.rand(4) + random.random() + np.random.rand() + self.shift
        return x.float(), dataset[index][1]
{pre}
loader = DataLoader({data}, batch_size=4, {order}, num_workers={workers}, persistent_workers=True{more})
held = DataLoader(Noisy(1), batch_size=8, num_workers=1, persistent_workers=True)
def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in held:
            total += F.cross_entropy(model(x), y).item()
            {evaluated}
    model.train()
    return total
before = 0.0
{first}
for epoch in range(3):
    {turn}
    for {target} in {over}:
        {step}
        die(epoch, i)
        {inner}
    {behind}
    die(epoch, "eval")
"""
PLACES = {
    "item": "pass", "pre": "", "data": "Noisy()", "order": "shuffle=True", "workers": "2", "more": "", "evaluated": "pass",
    "first": "", "turn": "pass", "target": "i, (x, y)", "over": "enumerate(loader)", "inner": "pass",
    "behind": "before += evaluate()",
}  # fmt: skip
SOME = ("0,6", "1,0", "2,3")
ALL = ("0,4", "0,6", "0,eval", "1,0", "2,3", "2,6", "2,eval", "end")


def case(
    expected: str = KEPT, *, kills: tuple[str, ...] = SOME, again: dict[str, str] | None = None, **parts: str
) -> Case:
    text = SCRIPT
    for name, part in {**PLACES, **parts}.items():
        text = text.replace("{" + name + "}", part)
    return Case(text, expected, kills=kills, shown="before", again=tuple((again or {}).items()))


IN_A_CLASS = """
class Noisy(Dataset):
    def __init__(self, base, noise):
        self.base, self.noise = base, noise
    def __len__(self):
        return len(self.base)
    def __getitem__(self, index):
        x, y = self.base[index]
        return x + self.noise * torch.randn(4), y
class Trainer:
    def __init__(self):
        train, held = torch.utils.data.random_split(dataset, [24, 4], torch.Generator().manual_seed(1))
        stay = {"num_workers": 2, "persistent_workers": True}
        self.loaders = {
            "train": DataLoader(Noisy(train, 0.1), batch_size=4, shuffle=True, drop_last=True, **stay),
            "held": DataLoader(Noisy(held, 0.2), batch_size=2, **stay),
        }
        self.total = 0.0
    def train(self, epoch):
        for i, (x, y) in enumerate(self.loaders["train"]):
            {step}
            die(epoch, i)
    @torch.inference_mode()
    def test(self):
        model.eval()
        for x, y in self.loaders["held"]:
            self.total += F.cross_entropy(model(x), y).item()
        model.train()
    def fit(self):
        for epoch in range(3):
            self.train(epoch)
            self.test()
            die(epoch, "eval")
        return self.total
print("END", Trainer().fit())
"""
SHORT = """
class Noisy(Dataset):
    def __len__(self):
        return 28
    def __getitem__(self, index):
        return dataset[index][0] + torch.rand(4) + random.random(), dataset[index][1]
"""
MADE = "DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)"

STAYING = {
    "workers that stay and draw": case(kills=ALL),
    "workers that stay, of tensors": case(data="dataset"),
    "workers that stay, left in their epoch": case(inner="if i == 4: break", kills=("0,4", "1,0", "2,4", "end")),
    "workers that stay, left in an evaluation": case(evaluated="break"),
    "workers that stay, a batch taken before": case(first="x, y = next(iter(loader))", kills=ALL),
    "workers that stay, gone over before": case(first="for x, y in loader: before += x.sum().item()"),
    "workers that stay, evaluated before the batches": case(turn="for x, y in held: before += x.sum().item()"),
    "workers that stay, not used in each epoch": case(behind="before += evaluate() if epoch % 2 == 0 else 0"),
    "workers that stay, with a generator of the order": case(more=", generator=torch.Generator().manual_seed(3)"),
    "workers that stay, of other samplers": case(
        pre="from torch.utils.data.distributed import DistributedSampler\nsampler = DistributedSampler(range(28), 1, 0)",
        order="sampler=sampler",
        turn="sampler.set_epoch(epoch)",
    ),
    "workers that stay, drawn with weights": case(
        pre="sampler = torch.utils.data.WeightedRandomSampler(torch.ones(28), 28)", order="sampler=sampler"
    ),
    "workers that stay, with much in advance": case(more=", prefetch_factor=5, pin_memory=True"),
    "workers that stay, of two loaders": case(
        pre="other = DataLoader(Noisy(), batch_size=3, num_workers=1, persistent_workers=True)",
        target="i, ((x, y), (more, _))",
        over="enumerate(zip(loader, other))",
    ),
    "workers that stay, seeded by the script": case(
        pre="def seed(number):\n"
        "    np.random.seed(torch.initial_seed() % 2**32), random.seed(number)\n"
        "    torch.utils.data.get_worker_info().dataset.shift = number",
        more=", worker_init_fn=seed",
    ),
    "workers that stay, with a generator of their own": case(
        pre="rng = np.random.default_rng(5)", item="self.seen += int(rng.integers(3)); self.shift = self.seen / 100"
    ),
    "workers that stay, with numbers that they keep": case(
        pre="cache, counts = {}, torch.zeros(3)",
        item="cache.setdefault(index, torch.rand(4).tolist()); counts[index % 3] += 1; self.shift = cache[index][0] + counts.sum().item()",
    ),
    "workers that stay, of a dataset over one with the same names": case(
        pre="class Base(TensorDataset): pass\ndataset = Base(*dataset.tensors)\ndataset.shift, dataset.seen = 0, 0",
        item="self.seen += 1; self.shift = random.random() * self.seen; dataset.shift += 1",
    ),
    "workers that stay, with what they make at first use": case(
        pre="import functools, time\nclass Late(Noisy):\n    made = time.time()\n"
        "    @functools.cached_property\n    def base(self): return torch.rand(1).item()",
        data="Late()",
        item="self.shift = getattr(self, 'base', 0)",
    ),
    "workers that stay, in a class": Case(IN_A_CLASS, kills=("0,5", "0,eval", "1,0", "2,3", "end")),
    "workers that stay, in one loop": Case(
        f"{SHORT}\nloader = {MADE}\nfor i, (x, y) in enumerate(loader):\n    {{step}}\n    die(i)\nafter = sum(x.sum().item() for x, y in loader)",
        at="i",
        kills=("3", "6", "end"),
        shown="after",
    ),
    "workers that stay, evaluated in some of the steps": case(
        inner="if i == 3: before += evaluate()", behind="pass", kills=("0,4", "1,2", "1,6")
    ),
    "workers that stay, asked for one batch in each step": case(
        inner="before += next(iter(held))[0].sum().item()", behind="pass", kills=("0,5", "1,3")
    ),
    "workers that stay, evaluated in the steps of one loop": Case(
        f"{SHORT}\nloader = {MADE}\nheld, before = {MADE}, 0.0\nfor i, (x, y) in enumerate(loader):\n    {{step}}\n    die(i)\n"
        "    if i % 2 == 1:\n        for x, y in held: before += x.sum().item()",
        at="i",
        kills=("2", "5", "end"),
        shown="before",
    ),
    "workers that stay, with steps in a loop of their own": Case(
        f"{SHORT}\nloader = {MADE}\nfor epoch in range(3):\n    for i, (x, y) in enumerate(loader):\n        for k in range(2):\n"
        "            {step}\n            die(epoch, i, k)",
        at="epoch, i, k",
        kills=("0,4,1", "1,0,0", "2,3,0", "2,6,1"),
    ),
    "workers that stay, made for each fold": Case(
        f"{SHORT}\ndef fold(k):\n    loader = {MADE}\n    for epoch in range(2):\n        for i, (x, y) in enumerate(loader):\n"
        "            {step}\n            die(k, epoch, i)\nfor k in range(2):\n    fold(k)",
        at="k, epoch, i",
        kills=("0,0,4", "0,1,3", "1,0,0", "1,1,3", "end"),
    ),
    # What workers keep cannot be taken up, or this process goes on otherwise than they do.
    "workers that stay, with a cache of tensors": case(
        "a worker of 'loader' stays, and 'cache[",
        pre="cache = {}",
        item="cache.setdefault(index, torch.rand(4)); self.shift = cache[index][0].item()",
    ),
    "workers that stay, with a generator that they make": case(
        "'its dataset.rng' came to be in it",
        item="self.rng = self.rng or np.random.default_rng(5); self.shift = self.rng.random()",
    ),
    "workers that stay, with a cache of functools": case(
        "stays, and 'the cache of ",
        pre="import functools\nclass Cached(Noisy):\n    @functools.lru_cache\n    def drawn(self, index): return torch.rand(1).item()",
        data="Cached()",
        item="self.shift = self.drawn(index) if hasattr(self, 'drawn') else 0",
    ),
    "workers that stay, with a count in shared memory": case(
        "'another process' has a part of it",
        pre="counts = torch.zeros(3).share_memory_()",
        item="counts.add_(1); self.shift = counts[0].item()",
        workers="1",
    ),
    "workers that stay, with a count in shared memory of an attribute": case(
        "other processes may write to its memory",
        pre="Noisy.counts = torch.zeros(3).share_memory_()",
        item="self.counts.add_(1); self.shift = self.counts[0].item()",
        workers="1",
    ),
    "workers that do not stay, with a count in shared memory of an array": Case(
        "import multiprocessing\ndef shared(): return np.frombuffer(multiprocessing.Array('f', 3).get_obj(), dtype='f')\n"
        "class Counted(Dataset):\n    count = torch.from_numpy(shared())\n    def __len__(self): return 28\n"
        "    def __getitem__(self, index):\n        self.count += 1\n"
        "        return dataset[index][0] * self.count[0].item(), dataset[index][1]\n"
        "loader = DataLoader(Counted(), batch_size=4, num_workers=1)\n"
        "for epoch in range(2):\n    for i, (x, y) in enumerate(loader):\n        {step}\n        die(epoch, i)",
        "other processes may write to its memory",
        kills=("0,4", "1,3"),
    ),
    "workers that stay, of a dataset that is told its epoch": case(
        "workers of a DataLoader that stay do not see it", turn="loader.dataset.shift = epoch"
    ),
    "workers that stay, of a dataset that is told otherwise between its epochs": case(
        "workers of a DataLoader that stay do not see it",
        turn="loader.dataset.shift = 1",
        behind="loader.dataset.shift = 0",
    ),
    "workers that stay, with a generator that spawns": case(
        "'what was spawned of rng' came to be in the loop",
        pre="rng = np.random.default_rng(5)",
        item="self.shift = rng.spawn(1)[0].random()",
    ),
    "workers that stay, with an object made of C": case(
        "'running', a HASH, keeps",
        pre="import hashlib\nrunning = hashlib.sha256()",
        item="running.update(b'x'); self.shift = running.digest()[0] / 100",
    ),
    "workers that stay, of a dataset that reads the epoch": case(
        "'epoch' changes in this process", item="index = (index + epoch) % 28"
    ),
    "workers that stay, under a generator of the script": case(
        "goes over an iterator of the script",
        pre="def batches():\n    for pair in loader: yield pair",
        over="enumerate(batches())",
    ),
    "workers that stay, made in the loop": case(
        "is made in the loop",
        turn=f"loader = {MADE}",
    ),
    "workers that stay, of a stream": case(
        "each keeps its place in a stream",
        pre="class Stream(IterableDataset):\n    def __iter__(self): return iter(dataset)",
        data="Stream()",
        order="shuffle=False",
    ),
    "workers that stay, in no order": case(
        "hand out batches in no order", data="dataset", more=", in_order=False", workers="1"
    ),
    "workers that stay, more of them at the second time": case(
        "'loader.num_workers' was 2", workers="int(os.environ.get('N', 2))", again={"N": "3"}, kills=("2,3",)
    ),
    "workers that stay, with less in advance at the second time": case(
        "'loader.prefetch_factor' was 3",
        more=", prefetch_factor=int(os.environ.get('N', 3))",
        again={"N": "2"},
        kills=("2,3",),
    ),
    "workers that stay, told otherwise at the second time": case(
        "what a worker of 'loader' keeps is not what it was",
        pre="def told(number): torch.utils.data.get_worker_info().dataset.shift = int(os.environ.get('N', 2))",
        more=", worker_init_fn=told",
        again={"N": "3"},
        kills=("2,3",),
    ),
    "workers that stay, not forked": Case(
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context='spawn')\n"
        "    for epoch in range(2):\n        for i, (x, y) in enumerate(loader):\n            {step}\n            die(epoch, i)",
        "and are not forked",
        kills=("1,3",),
    ),
}
