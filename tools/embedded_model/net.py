"""Qwen3-VL in plain PyTorch, for packed rows: the training twin of the model that MLX runs.

Parameter names are those of a Qwen3-VL checkpoint. A batch is one row of many documents; the
attention is told where each begins and ends.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.embedded_model.pack import LARGEST, LONGEST

CONFIG: dict[str, dict[str, Any]] = {
    "text": {"hidden": 192, "layers": 6, "heads": 6, "head_dim": 32, "mlp": 448, "vocab": 2048,
             "theta": 10000.0, "sections": (6, 5, 5)},
    "vision": {"hidden": 96, "depth": 4, "heads": 3, "mlp": 288, "patch": 16, "side": 8, "deepstack": (1,)},
}  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention within each document of a packed row; q, k, v are [tokens, heads, head_dim]."""
    if not q.is_cuda:
        parts = []
        for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if b > a:
                one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
                parts.append(F.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
        return torch.cat(parts)
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" in inspect.signature(varlen_attn).parameters:
        kind: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    else:
        kind = {"is_causal": causal}
    return varlen_attn(q, k, v, borders, borders, longest, longest, **kind)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim], halves paired."""
    a, b = x.float().chunk(2, -1)
    turned = torch.cat((-b, a), -1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * self.weight).type_as(x)


class TextAttention(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        inner = c["heads"] * c["head_dim"]
        self.heads = c["heads"]
        self.q_proj = nn.Linear(c["hidden"], inner, bias=False)
        self.k_proj = nn.Linear(c["hidden"], inner, bias=False)
        self.v_proj = nn.Linear(c["hidden"], inner, bias=False)
        self.o_proj = nn.Linear(inner, c["hidden"], bias=False)
        self.q_norm, self.k_norm = RMSNorm(c["head_dim"]), RMSNorm(c["head_dim"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, borders: Tensor, longest: int) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(q, k, v, borders, longest, True).flatten(-2))


class TextMLP(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden"], c["mlp"], bias=False)
        self.up_proj = nn.Linear(c["hidden"], c["mlp"], bias=False)
        self.down_proj = nn.Linear(c["mlp"], c["hidden"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.self_attn, self.mlp = TextAttention(c), TextMLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c["hidden"]), RMSNorm(c["hidden"])

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *rest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab"], c["hidden"])
        self.layers = nn.ModuleList(TextLayer(c) for _ in range(c["layers"]))
        self.norm = RMSNorm(c["hidden"])
        half = c["head_dim"] // 2
        frequency = 1.0 / c["theta"] ** (torch.arange(half).float() / half)
        axis = torch.zeros(half, dtype=torch.long)  # time, height, width interleaved
        for dim in (1, 2):
            axis[dim : c["sections"][dim] * 3 : 3] = dim
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def angles(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions [3, tokens]."""
        angle = pos.float()[self.axis].T * self.frequency
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


class VisionMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, borders: Tensor, longest: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.proj(attend(q, k, v, borders, longest, False).flatten(-2))


class VisionBlock(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(c["hidden"], eps=1e-6) for _ in range(2))
        self.attn = VisionAttention(c["hidden"], c["heads"])
        self.mlp = VisionMLP(c["hidden"], c["mlp"])

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.attn(self.norm1(x), *rest)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Joins four patches into one token of the language model."""

    def __init__(self, hidden: int, out: int, after: bool) -> None:
        super().__init__()
        self.wide, self.after = 4 * hidden, after
        self.norm = nn.LayerNorm(self.wide if after else hidden, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(self.wide, self.wide), nn.Linear(self.wide, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.wide)) if self.after else self.norm(x).view(-1, self.wide)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, c["hidden"], (2, c["patch"], c["patch"]), (2, c["patch"], c["patch"]))

    def forward(self, patches: Tensor) -> Tensor:
        """A still image fills both frames alike, so the kernel's two frames add up."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


class Vision(nn.Module):
    def __init__(self, c: dict, out: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c["side"] ** 2, c["hidden"])
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c["depth"]))
        self.merger = Merger(c["hidden"], out, False)
        self.deepstack_merger_list = nn.ModuleList(Merger(c["hidden"], out, True) for _ in c["deepstack"])
        self.deepstack = c["deepstack"]
        quarter = c["hidden"] // c["heads"] // 4
        frequency = 1.0 / 10000.0 ** (torch.arange(quarter).float() / quarter)
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, b: dict[str, Tensor]) -> list[Tensor]:
        """Features for the embedding, then those for the first layers' outputs."""
        x = self.patch_embed(b["patches"].float() / 127.5 - 1.0)
        x = x + (self.pos_embed(b["vindex"]) * b["vweight"][..., None]).sum(0)
        angle = (b["vpos"].float()[..., None] * self.frequency).transpose(0, 1).flatten(1)
        angle = torch.cat((angle, angle), -1)
        deep: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, angle.cos(), angle.sin(), b["vcu"], LARGEST)
            if i in self.deepstack:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return [self.merger(x), *deep]


class Inner(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.language_model = Text(c["text"])
        self.visual = Vision(c["vision"], c["text"]["hidden"])


class Net(nn.Module):
    """The whole model; ``forward`` gives the logits at a batch's target positions."""

    def __init__(self, config: dict = CONFIG) -> None:
        super().__init__()
        self.model = Inner(config)
        self.apply(self._start)
        depth = 2 * config["text"]["layers"]
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.data /= depth**0.5

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, b: dict[str, Tensor], longest: int = LONGEST) -> Tensor:
        text = self.model.language_model
        features = self.model.visual(b)
        x = text.embed_tokens(b["ids"])
        seen, slot = (b["feature"] >= 0)[:, None], b["feature"].clamp(min=0)
        x = torch.where(seen, features[0][slot].type_as(x), x)
        cos, sin = text.angles(b["pos"])
        for i, layer in enumerate(text.layers):
            x = layer(x, cos, sin, b["cu"], longest)
            if i + 1 < len(features):
                x = x + torch.where(seen, features[i + 1][slot].type_as(x), 0.0)
        return F.linear(text.norm(x[b["target"]]), text.embed_tokens.weight)
