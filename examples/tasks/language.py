"""Language: the next character of a text, by an LSTM or a small Transformer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class CharLSTM(nn.Module):
    """Characters to the logits of the next ones."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.embed(tokens))[0])
        return logits


class CharTransformer(nn.Module):
    """One block of causal attention and a layer at each position, both with a bypass."""

    def __init__(self, characters: int, width: int, longest: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.randn(longest, width) / 10)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.queries, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.out = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        x = x + self.mix(self.attend(self.norms[0](x)))
        x = x + self.feed(self.norms[1](x))
        logits: Tensor = self.out(self.norms[2](x))
        return logits

    def attend(self, x: Tensor) -> Tensor:
        split = self.queries(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = split.unbind()
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def lstm(classes: int, width: int = 32) -> nn.Module:
    """Return the LSTM."""
    return CharLSTM(classes, width)


def transformer(classes: int, width: int = 32) -> nn.Module:
    """Return the Transformer."""
    return CharTransformer(classes, width)
