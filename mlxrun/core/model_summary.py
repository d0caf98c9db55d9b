"""What lists of models say of one, beside its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's files in numbers.

    `format`: safetensors or gguf. `family`: the architecture, such as qwen3. `quantization`: such as 4bit or
    BF16. `weight_bytes`: of the files. `num_parameters`: as before quantization. `modified`: seconds since
    1970. `sizes`: such as `hidden_size`, as the model's config names them. What is not known is empty or 0.
    """

    format: str = ""
    family: str = ""
    quantization: str = ""
    weight_bytes: int = 0
    num_parameters: int = 0
    modified: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=dict)
