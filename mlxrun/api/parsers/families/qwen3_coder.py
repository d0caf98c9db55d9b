"""Qwen3-Coder, Qwen 3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>` in tags.

Hermes' reader knows both formats, as models that were trained on one sometimes write the other.
"""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.families import hermes
from mlxrun.api.parsers.readers.tagged_arguments import OPENER

FAMILY = dataclasses.replace(
    hermes.FAMILY,
    name="qwen3_coder",
    detect=lambda template, tokens: OPENER in template and hermes.START in template,
    openers=(hermes.START, OPENER),
    aliases=("qwen3_coder_xml", "qwen3_xml", "qwen3_5", "nemotron_v3"),
    prefix_suffix=None,
)
