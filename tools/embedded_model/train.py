"""The training run, in two stages, each one command; README.md of the model has them.

MODEL_DIR holds the tokenizer (see vocab.py). Muon for the matrices, AdamW for the rest, warm-up,
plateau and linear decay, bfloat16 autocast, loss on the assistant's tokens only. Every token of a
turn weighs 1/sqrt(length of the turn), so that a short answer is not drowned by a long one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.embedded_model import pack
from tools.embedded_model.mix import SCORED
from tools.embedded_model.net import Net


class Stream(torch.utils.data.IterableDataset):
    """The run's batches, in an order that does not depend on timing."""

    def __init__(self, folder: Path, seed: int, steps: int, stage: int) -> None:
        self.args = folder, seed, steps, stage

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        folder, seed, steps, stage = self.args
        info = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        for batch in pack.batches(folder, seed, info.id, info.num_workers, steps, stage):
            yield {k: torch.from_numpy(v) for k, v in batch.items()}


class Muon:
    """Momentum whose update is made orthogonal, for all matrices of one shape at once."""

    def __init__(self, params: list[nn.Parameter], decay: float) -> None:
        shapes: dict[tuple, list[nn.Parameter]] = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *s, device=ps[0].device)) for s, ps in shapes.items()]
        self.decay = decay
        self.update = torch.compile(self._update) if params[0].is_cuda else self._update

    @staticmethod
    def _update(grad: Tensor, momentum: Tensor) -> Tensor:
        momentum.lerp_(grad, 0.05)
        x = grad.lerp(momentum, 0.95).bfloat16()
        tall = x.size(-2) > x.size(-1)
        x = x.mT if tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        x = x.mT if tall else x
        return x.float() * max(1.0, x.size(-2) / x.size(-1)) ** 0.5

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for params, momentum in self.groups:
            step = self.update(torch.stack([p.grad for p in params]), momentum)
            torch._foreach_mul_(params, 1 - rate * self.decay)
            torch._foreach_add_(params, list(step.unbind(0)), alpha=-rate)


def split_parameters(net: nn.Module) -> tuple[list, list, list]:
    """Matrices for Muon; embeddings and the patch kernel; vectors."""
    matrices, tables, vectors = [], [], []
    for name, p in net.named_parameters():
        if p.ndim < 2:
            vectors.append(p)
        elif p.ndim == 2 and "embed" not in name:
            matrices.append(p)
        else:
            tables.append(p)
    return matrices, tables, vectors


def loss_of(net: nn.Module, b: dict[str, Tensor]) -> Tensor:
    """Weighted cross entropy of the assistant's tokens."""
    device = b["ids"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = net(b)
    loss = F.cross_entropy(logits.float(), b["label"].long(), reduction="none")
    return (loss * b["weight"]).sum() / b["weight"].sum()


@torch.no_grad()
def exact(net: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Share of held-out answers (the last turn) that greedy decoding would give exactly."""
    names = list(SCORED)
    right: dict[str, int] = {}
    total: dict[str, int] = {}
    for b in batches:
        with torch.autocast(b["ids"].device.type, torch.bfloat16, enabled=b["ids"].is_cuda):
            wrong = net(b).argmax(-1) != b["label"]
        wrong = torch.bincount(b["doc"][wrong & b["last"]], minlength=len(b["skill"])) > 0
        for label, bad in zip(b["skill"].tolist(), wrong.tolist(), strict=True):
            if label >= 0:
                total[names[label]] = total.get(names[label], 0) + 1
                right[names[label]] = right.get(names[label], 0) + (not bad)
    return {k: right[k] / total[k] for k in total}


def to_device(batch: dict, device: str) -> dict[str, Tensor]:
    """Copy a batch to the device without waiting."""
    return {k: torch.as_tensor(v).to(device, non_blocking=True) for k, v in batch.items()}


def rate_at(step: int, steps: int, warm: int = 200) -> float:
    """Warm-up, a plateau for the first 40 %, then a straight line down."""
    return min(1.0, (step + 1) / warm, max(0.0, (steps - step) / (0.6 * steps)))


def save(net: Net, out: Path, step: int) -> None:
    """Write the weights and nothing else."""
    temporary = out / "net.tmp"
    torch.save({k: v.cpu() for k, v in net.state_dict().items()}, temporary)
    temporary.rename(out / "net.pt")
    (out / "step").write_text(str(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--stop", type=int, default=0, help="stop early, with the schedule of --steps")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2))
    parser.add_argument("--start", type=Path, help="weights to go on from (stage 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--muon", type=float, default=0.02)
    parser.add_argument("--adam", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=1000, help="steps between scores")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    net = Net().to(args.device)
    if args.start:
        net.load_state_dict(torch.load(args.start, weights_only=True))
    print("parameters", sum(p.numel() for p in net.parameters()), flush=True)
    matrices, tables, vectors = split_parameters(net)
    cuda = args.device == "cuda"
    muon = Muon(matrices, decay=0.02)
    groups = [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=args.adam, betas=(0.9, 0.98), fused=cuda)
    step_loss = torch.compile(loss_of, fullgraph=True) if cuda else loss_of
    judge = [to_device(b, args.device) for b in pack.held_out(args.model, args.seed, 200)]
    stream = Stream(args.model, args.seed, args.steps, args.stage)
    loader = torch.utils.data.DataLoader(
        stream, batch_size=None, num_workers=args.workers, pin_memory=cuda, prefetch_factor=4)  # fmt: skip

    begun, total, waited, at = time.time(), 0.0, 0.0, time.time()
    for step, batch in enumerate(loader):
        b = to_device(batch, args.device)
        waited += time.time() - at
        rate = rate_at(step, args.steps)
        loss = step_loss(net, b)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tables + vectors, 1.0, foreach=True)
        for group in adam.param_groups:
            group["lr"] = args.adam * rate
        adam.step()
        muon.step(args.muon * rate)
        net.zero_grad(set_to_none=False)
        total = total + loss.detach()
        last = step + 1 in (args.steps, args.stop)
        if (step + 1) % 250 == 0 or step == 20 or last:
            seconds = time.time() - begun
            mean = float(total) / (250 if step > 250 else step + 1)
            print(f"{step + 1} loss {mean:.4f} {seconds:.0f}s waited {waited:.0f}s", flush=True)
            total = 0.0
        if (step + 1) % args.every == 0 or last:
            scores = {k: round(v, 3) for k, v in exact(net, judge).items()}
            print(json.dumps({"step": step + 1, "seconds": round(time.time() - begun), **scores}), flush=True)
            save(net, args.out, step + 1)
        if last:
            break
        at = time.time()


if __name__ == "__main__":
    main()
