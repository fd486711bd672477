"""A script as users write it, without a word of holdfast: script.py KIND KILLS DIRECTORY. It prints its steps and how it ends.

KIND is `amp` (convolutions, BatchNorm, dropout, mixed precision with a GradScaler, a loader with workers and pinned memory),
`clip` (no mixed precision; weights are clipped through `.data` behind each step), `compile` (that model, compiled) or
`trainer` (transformers' Trainer). At each step that KILLS names it kills itself once; DIRECTORY has the marks.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND, KILLS, DIRECTORY = sys.argv[1], [int(word) for word in sys.argv[2].split(",") if word], Path(sys.argv[3])
EPOCHS, ROWS, BATCH = 3, 256, 32


def hurt(step: int) -> None:
    """Kills this process, once at each step that is named."""
    mark = DIRECTORY / f"hurt{step}"
    if step in KILLS and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def told(model: nn.Module) -> None:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print("script ends:", digest.hexdigest(), flush=True)


def network() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels in (1, 16, 16):
        blocks += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def plain() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    kind = accelerator.type
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    images, labels = torch.randn(ROWS, 1, 16, 16), torch.randint(0, 10, (ROWS,))
    is_pinned = kind == "cuda"
    train = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, num_workers=2, pin_memory=is_pinned)
    test = DataLoader(TensorDataset(images, labels), BATCH)
    model = network().to(kind)
    called = torch.compile(model) if KIND == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind == "cuda")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(train))
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0, enabled=KIND == "amp")
    for epoch in range(EPOCHS):
        model.train()
        for batch, (image, label) in enumerate(train):
            image, label = image.to(kind, non_blocking=True), label.to(kind, non_blocking=True)
            with torch.autocast(kind, torch.float16, enabled=KIND == "amp"):
                loss = nn.functional.cross_entropy(called(image), label)
            scaler.scale(loss).backward()
            step = epoch * len(train) + batch
            hurt(step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if KIND == "clip":
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.3, 0.3)
            print("script makes step", step, flush=True)
        model.eval()
        with torch.no_grad():
            right = sum(int((called(i.to(kind)).argmax(1).cpu() == label).sum()) for i, label in test)
        print(f"epoch {epoch}: {right} of {ROWS}", flush=True)
    told(model)


def trainer() -> None:
    from transformers import (  # noqa: PLC0415
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Hurt(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG002
            hurt(state.global_step)

        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG002
            print("script makes step", state.global_step - 1, flush=True)

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (ROWS, 32))]
    arguments = TrainingArguments(
        output_dir=str(DIRECTORY / "output"), num_train_epochs=EPOCHS, per_device_train_batch_size=16, bf16=torch.cuda.is_available(),
        gradient_accumulation_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_num_workers=2,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Hurt()]).train()
    told(model)


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    trainer() if KIND == "trainer" else plain()
