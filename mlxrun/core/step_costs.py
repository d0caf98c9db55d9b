"""What the parts of a step cost on a device, and how many prompt tokens are computed together."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.core.request import Request

DEFAULT_CHUNK = 512  # tokens, if neither the config nor the device sets it
MIN_CHUNK = 64  # tokens; neither short memory nor slow steps make chunks smaller than this
SINGLE_TOKEN_CHUNK = 512  # tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a step cost on this device.

    `max_sampling_chunk`: after a hit, up to this many tokens are computed by one forward that also samples,
    if a forward costs more than its tokens. `waiting_weight`: how much a waiting prompt counts beside a
    decoding row; more if each forward is expensive. `deep_prompt`: beside decoding rows, chunks shrink once
    this many tokens of a prompt are computed, because attention is then most of the cost; 0: never.
    `few_lengths`: a chunk that is shortened gets one of few lengths, if the device prepares for each new one.
    `min_chunk`: tokens that take no longer than fewer would, because a forward is bound by its launches;
    `least_fitting`: a chunk is halved if a step has time for less than this share of it.
    """

    max_sampling_chunk: int = 0
    waiting_weight: int = 1
    deep_prompt: int = 0
    few_lengths: bool = False
    min_chunk: int = MIN_CHUNK
    least_fitting: float = 1.0

    def limit_chunk(self, remaining: int, budget: int) -> int:
        """The most tokens of a step's first chunk, where `remaining` are left of its prompt."""
        if not self.few_lengths or remaining <= budget:
            return budget
        return 1 << (budget.bit_length() - 1)

    def get_max_sampling_chunk(self, request: Request) -> int:
        """The most tokens after a hit that are computed by one forward that also samples. A scored prompt
        with one token of output would join the decode batch, with a copy of all its keys, for one step."""
        params = request.params
        is_single = params.max_tokens == 1 and params.prompt_logprobs is not None
        return max(self.max_sampling_chunk, SINGLE_TOKEN_CHUNK) if is_single else self.max_sampling_chunk
