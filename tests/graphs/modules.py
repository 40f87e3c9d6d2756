"""The modules behind the graphs in this folder, which a machine with PyTorch records anew, in this folder:

tilecast trace modules:transformer -o transformer.json
tilecast trace modules:llama -o llama.json
tilecast trace modules:resnet -o resnet.json
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


class GptBlock(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        parts = self.qkv(self.before(x)).split(hidden, -1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, tokens, hidden)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.between(x)))))


class Gpt(nn.Module):
    """GPT-2 in small, its head tied to its embedding."""

    def __init__(self, layers: int, hidden: int = 128, heads: int = 4, vocab: int = 512, positions: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GptBlock(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rms(nn.Module):
    """RMSNorm as model code writes it out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class LlamaBlock(nn.Module):
    """A layer of Llama with attention written out."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = Rms(hidden), Rms(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        y = self.before(x)
        q, k, v = (part(y).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        scores = q @ k.transpose(-2, -1) * (hidden // self.heads) ** -0.5 + mask
        y = (functional.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ v).transpose(1, 2)
        x = x + self.o(y.reshape(batch, tokens, hidden))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama in small."""

    def __init__(self, layers: int, hidden: int = 128, heads: int = 4, inner: int = 352, vocab: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, inner) for _ in range(layers))
        self.norm, self.head = Rms(hidden), nn.Linear(hidden, vocab, bias=False)
        self.width = hidden // heads

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        angles = torch.arange(tokens)[:, None] / 10000.0 ** (torch.arange(0, self.width, 2) / self.width)
        angles = torch.cat((angles, angles), -1)
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.is_plain = stride == 1 and inputs == outputs
        if self.is_plain:
            self.shortcut = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)), inplace=True)))
        return functional.relu(y + self.shortcut(x), inplace=True)


def _resnet18() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    body = [ResidualBlock(before, after, 1 if before == after else 2) for before, after in zip(widths, widths[1:])]  # noqa: B905, RUF007
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Gpt(2), (torch.zeros(2, 64, dtype=torch.long),)


def deep_transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Gpt(12), (torch.zeros(2, 64, dtype=torch.long),)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(2), (torch.zeros(2, 64, dtype=torch.long),)


def deep_llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(6), (torch.zeros(2, 64, dtype=torch.long),)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _resnet18(), (torch.zeros(2, 3, 224, 224),)


def sorting() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x) + torch.linalg.inv(x)

    return Unknown(), (torch.zeros(2, 4, 4),)


def copied() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Layers that are copies of one, with their buffers."""
    layer = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    return nn.Sequential(layer, copy.deepcopy(layer)), (torch.zeros(2, 3, 8, 8),)


def in_contexts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Parts that run without mixed precision and without gradients, one within the other."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.no_grad():
                z = y.exp()
                with torch.autocast("cuda", enabled=False):
                    z = z.sin()
            return self.second(y + z)

    return Parts(), (torch.zeros(2, 8),)


def values() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A width that a tensor's values decide."""
    width = int(torch.arange(1, 5).numpy().sum())
    return nn.Linear(8, width), (torch.zeros(2, 8),)


def grid() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Positions on a grid."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 12)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")
            return self.layer(x) + (rows + columns).flatten()

    return Grid(), (torch.zeros(2, 8),)


def resized() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Position embeddings of another size, as models that take images of any size have them."""

    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.positions = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 8, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            smooth = functional.interpolate(self.positions, y.shape[2:], mode="bicubic", antialias=True)
            return y + smooth + functional.interpolate(self.positions, y.shape[2:], mode="nearest-exact")

    return Resized(), (torch.zeros(2, 3, 16, 16),)


def branching() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What runs depends on the samples."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.exp, torch.tanh, (x,))

    return Branching(), (torch.zeros(2, 8),)
