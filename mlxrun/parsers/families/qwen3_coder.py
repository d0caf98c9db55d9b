"""Qwen3-Coder, Qwen 3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>` in tags.

Hermes' reader knows both formats, as models that were trained on one sometimes write the other.
"""

from __future__ import annotations

from mlxrun.parsers.families.hermes import END, START, read
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.xml_call import OPENER

FAMILY = ToolCallFamily(
    name="qwen3_coder",
    detect=lambda template, tokens: OPENER in template and START in template,
    openers=(START, OPENER),
    read=read,
    aliases=("qwen3_coder_xml", "qwen3_xml", "qwen3_5", "nemotron_v3"),
    markers=(START, END),
)
