"""GEMM sizes of dense LLMs: four weights of seven models at three microbatch sizes, 81 forward products.

Per model: qkv [heads * head_dim + 2 * kv_heads * head_dim, hidden], attn_out [hidden, heads * head_dim],
gate_up [2 * intermediate, hidden], down [hidden, intermediate]; M is the microbatch size times the sequence length the
model was trained with. Two models share one of these products (Llama-2-7B and Mistral-7B, attn_out): it counts once.
Source: the models' published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class _Model(NamedTuple):
    name: str
    sequence: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128


_MODELS = (
    _Model("Llama-2-7B", 4096, 4096, 11008, 32, 32),
    _Model("Llama-2-70B", 4096, 8192, 28672, 64, 8),
    _Model("Llama-3.1-8B", 8192, 4096, 14336, 32, 8),
    _Model("Llama-3.1-405B", 8192, 16384, 53248, 128, 8),
    _Model("Qwen2.5-7B", 8192, 3584, 18944, 28, 4),
    _Model("Qwen2.5-72B", 8192, 8192, 29568, 64, 8),
    _Model("Mistral-7B", 4096, 4096, 14336, 32, 8),
)
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class LayerShape:
    """One weight w[out_features, in_features] at `tokens` rows."""

    model: str
    layer: str
    microbatch: int
    tokens: int
    out_features: int
    in_features: int

    def gemm(self, layout: str) -> tuple[int, int, int]:
        """(M, N, K) of the forward product ("TN"), the input's gradient ("NN") or the weight's ("NT")."""
        sizes = {
            "TN": (self.tokens, self.out_features, self.in_features),
            "NN": (self.tokens, self.in_features, self.out_features),
            "NT": (self.out_features, self.in_features, self.tokens),
        }
        if layout not in sizes:
            raise ValueError(f"layout {layout!r}: the layouts are {', '.join(sizes)}")
        return sizes[layout]

    def __str__(self) -> str:
        return f"{self.model} {self.layer} x{self.microbatch}"


def _weights(model: _Model) -> dict[str, tuple[int, int]]:
    return {
        "qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden),
        "attn_out": (model.hidden, model.heads * model.head_dim),
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
    }


def llm81() -> tuple[LayerShape, ...]:
    """The 81 rows."""
    rows: dict[tuple[int, int, int, int], LayerShape] = {}
    for model in _MODELS:
        for layer, (out_features, in_features) in _weights(model).items():
            for microbatch in MICROBATCHES:
                row = LayerShape(model.name, layer, microbatch, microbatch * model.sequence, out_features, in_features)
                rows.setdefault((model.sequence, microbatch, out_features, in_features), row)
    return tuple(rows.values())
