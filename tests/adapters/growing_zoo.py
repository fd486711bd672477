"""Scripts whose lists, deques and dicts take up tensors and arrays in a loop. Cases as in `nested_zoo`; not tests themselves."""

from __future__ import annotations

from adapters.nested_zoo import Case, inline

KILLS = ("0,4", "1,0", "2,3", "2,6", "end")
OF_ALL = "[each.tolist() for each in seen]"
MAIN = """
{pre}
def main():
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            {body}
            die(epoch, i)
        {behind}
    return seen
main()
"""


def grows(body: str, pre: str = "seen = []", behind: str = "pass", **facts: object) -> Case:
    """Returns a loop in a function, over a list of the script's."""
    text = MAIN.replace("{pre}", pre).replace("{body}", body).replace("{behind}", behind)
    return Case(text, **{"shown": OF_ALL, "kills": ("0,4", "2,3"), **facts})  # type: ignore[arg-type]


GROWING = {
    "pictures of a generator": Case("""
net_d = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, 1), torch.nn.Sigmoid())
net_g = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
criterion = torch.nn.BCELoss()
fixed_noise = torch.randn(5, 2)
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.01)
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.01)
img_list = []
G_losses = []
D_losses = []
iters = 0
for epoch in range(3):
    for i, data in enumerate(loader, 0):
        made(epoch, i)
        net_d.zero_grad()
        real = data[0]
        label = torch.full((real.size(0),), 1.0)
        errD_real = criterion(net_d(real).view(-1), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), 2)
        fake = net_g(noise)
        label.fill_(0.0)
        errD_fake = criterion(net_d(fake.detach()).view(-1), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        errG = criterion(net_d(fake).view(-1), label)
        errG.backward()
        optimizer_g.step()
        G_losses.append(errG.item())
        D_losses.append(errD.item())
        if (iters % 4 == 0) or ((epoch == 2) and (i == len(loader) - 1)):
            with torch.no_grad():
                fake = net_g(fixed_noise).detach().cpu()
            img_list.append(fake.reshape(1, 5, 4).clone())
        iters += 1
        die(epoch, i)
""", shown="[each.tolist() for each in img_list], G_losses, [p.tolist() for p in net_g.parameters()]", kills=KILLS),
    "losses of all batches": grows(
        "seen.append(loss.detach())", scale="(1 + (torch.stack(seen).mean() if seen else 0))", kills=KILLS, shown=OF_ALL
    ),
    "history of tensors": grows(
        'history["loss"].append(loss.detach()); history["x"].append((i, x.mean(0)))', pre='history = {"loss": [], "x": [], "n": 0}; seen = history["n"]',
        behind='history["n"] += len(history["loss"])', shown='[[each.tolist() for each in history["loss"]], [(n, x.tolist()) for n, x in history["x"]], history["n"]]',
        scale='(1 + history["n"] + (history["x"][-1][1].sum() if history["x"] else 0))', kills=KILLS,
    ),
    "history of tensors, of any name": grows(
        'history["loss"].append(loss.detach()); history[f"epoch {epoch}"].append(x[0].clone())', pre="history = collections.defaultdict(list); seen = 0",
        shown="type(history), [(name, [each.tolist() for each in part]) for name, part in history.items()]", scale='(1 + len(history["loss"]))',
    ),
    "predictions of an epoch, put together": Case("""
every = []
for epoch in range(3):
    predictions, targets = [], []
    if every:
        model[0].bias.data.add_(every[-1].mean() * 0.01)
    for i, (x, y) in enumerate(loader):
        {step}
        predictions.append(model(x).detach())
        targets.append(y)
        die(epoch, i)
    every.append(torch.cat(predictions))
    print("EVAL", (every[-1].argmax(1) == torch.cat(targets)).sum().item())
    die(epoch, "eval")
""", shown="[each.tolist() for each in every]", kills=("0,4", "0,eval", "1,0", "2,3", "2,6", "end")),
    "arrays": grows(
        "seen.append(x.numpy().mean(0)); rows.append(np.float32(loss.item()))", pre="seen, rows = [], []", scale="(1 + float(np.stack(seen).sum() if seen else 0))",
        shown=f"{OF_ALL}, rows", kills=KILLS,
    ),
    "deque of arrays": grows(
        "seen.append(x.numpy().mean(0)); last.append(loss.detach())", pre="seen, last = collections.deque(maxlen=3), collections.deque([torch.zeros(())], 4)",
        scale="(1 + float(sum(each.sum() for each in seen)) + sum(last))", shown=f"{OF_ALL}, seen.maxlen, last",
    ),
    "transitions that are drawn from": grows(
        "seen.append((x.mean(0), y.clone(), loss.item(), None))\n"
        "            if len(seen) > 5: seen.pop(0)\n"
        "            extra = random.sample(seen, 1)[0][0]\n"
        "            model[0].weight.grad.add_(extra.sum()); optimizer.step()",
        shown="[(a.tolist(), b.tolist(), c) for a, b, c, _ in seen]",
    ),
    "rows of dicts": grows(
        'seen.append({"loss": loss.detach(), "step": (epoch, i), "parts": [x.sum(), [y.sum()]]})', scale='(1 + sum(each["parts"][1][0] for each in seen) / 100)',
        shown="seen",
    ),
    "bank that is filled in place": grows(
        "bank[i % 3].add_(x.mean(0)); bank.append(x.mean(1)); seen.append(len(bank))", pre="bank, seen = [torch.zeros(4) for _ in range(3)], []",
        scale="(1 + bank[1].sum() / 100)", shown="seen, [each.tolist() for each in bank]",
    ),
    "list of an attribute that comes to be": Case(inline(
        pre="class Log: pass\nlog = Log(); log.rows = None\ndef add(row):\n    log.rows = [] if log.rows is None else log.rows\n    log.rows.append(row)",
        body="add(loss.detach())",
    ), scale="(1 + len(log.rows or []))", shown="log.rows", kills=("0,4", "2,3")),
    "best weights of an attribute": Case(inline(
        pre="class Early:\n    def __init__(self): self.best, self.low = None, 9.0\n    def __call__(self, loss):\n"
        "        if loss < self.low: self.low, self.best = loss, copy.deepcopy(model.state_dict())\nearly = Early()",
        behind="early(loss.item()); model.load_state_dict(early.best)",
    ), shown="early.low, early.best, early.best._metadata", kills=("0,4", "1,3", "2,6")),
    "best weights of a dict": Case(inline(
        pre="best = {'loss': 9.0, 'model': None}",
        body="if loss.item() < best['loss']: best.update(loss=loss.item(), model={k: v.clone() for k, v in model.state_dict().items()})",
    ), shown="best", kills=("0,4", "1,3", "2,6")),
    "tensors of many sizes": grows(
        "seen.append(x[:i + 1].clone()); seen.append(y.clone()); seen.append(torch.zeros(0)); seen.append(x[0].bfloat16()); seen.append(x[0] > 0)"
    ),
    "list of lists of all epochs": Case("""
def main():
    rows = [[]]
    for epoch in range(3):
        rows = [*rows[-1:], []]
        torch.manual_seed(sum(map(len, rows)))
        for i, (x, y) in enumerate(loader):
            {step}
            rows[-1].append(loss.item())
            die(epoch, i)
    return rows
print("END", main())
""", kills=("0,4", "1,3", "2,6")),
    "what is drawn by how many numbers are there": grows(
        'history["loss"].append(loss.item()); history["n"].append(i)', pre='history = {"loss": [], "n": []}; seen = []',
        behind='torch.manual_seed(len(history["loss"]) + len(history["n"]))', shown="history",
    ),
    "what is drawn by how much is there": grows(
        'history["loss"].append(loss.detach()); history["n"].append(i)', pre='history = {"loss": [], "n": []}; seen = []',
        behind='torch.manual_seed(len(history["loss"]) + len(history["n"]))', shown="history",
    ),
    # Refused, by name.
    "views of a buffer that is written": grows(
        "buffer[i % 3] = x.mean(0); seen.append(buffer[i % 3])", "seen, buffer = [], torch.zeros(3, 4)", expected="'seen'"
    ),
    "tensor that is in a list twice": grows("last = loss.detach(); seen.extend([last, last])", expected="'seen'"),
    "tensors of a list that share memory": grows("seen.extend([x, x[:2]])", expected="'seen'"),
    "tensor of a list that has a name too": grows(
        "seen.append(loss.detach()); holder.last = seen[-1]; holder.last.add_(1)", "seen, holder = [], argparse.Namespace(last=None)",
        expected="'holder.last' is a part of it",
    ),
    "array of a tensor of a list": grows(
        "seen.append(x.mean(0)); holder.last = seen[-1].numpy(); holder.last += 1", "seen, holder = [], argparse.Namespace(last=None)", expected="'seen'"
    ),
    "parameters in a list": grows("seen.append(model[0].bias)", expected="'seen"),
    "losses with their graphs": grows("seen.append(loss)", expected="a tensor that requires a gradient"),
    "gradients in a list": grows("seen.append(model[0].bias.grad)", expected="'seen'"),
    "lists that grow without end": grows("seen.append(torch.full((6 << 20,), loss.item()))", expected="'seen'", shown="len(seen)"),
    "two lists that grow without end": grows(
        "seen.append(torch.full((2 << 20,), loss.item())); more.append(torch.full((2 << 20,), loss.item()))", "seen, more = [], []",
        expected="together", shown="len(seen)",
    ),
    "list of lists, one of which has a name": grows(
        "seen[0].append(loss.detach()); row.append(1)", "seen = [[], []]; row = seen[1]", expected="'row'", shown="seen, row"
    ),
}  # fmt: skip
