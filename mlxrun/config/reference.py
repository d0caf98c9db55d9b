"""docs/config.md, made from settings.py; a test fails when the file is stale."""

from __future__ import annotations

from mlxrun.config.annotate import default_text, describe_type
from mlxrun.config.setting_fields import FieldInfo, fields_of, sections_of

INTRO = """\
# Config reference

<!-- Made by `make generate` from mlxrun/config/settings.py. Do not edit. -->

A config is a YAML file; every key has a default, so an empty file is valid. It is found in this order:
`-c FILE`, `$MLXRUN_CONFIG`, `./mlxrun.yaml`, the built-in defaults. Values come from, later over earlier:

1. the defaults below;
2. the file, over the files that it names in `extends:` (one path or a list, relative to the file);
   mappings are merged key by key, lists are replaced;
3. variables `MLXRUN_SECTION__KEY` (`MLXRUN_SCHEDULER__MAX_RUNNING=8`);
4. `--set section.key=value` (the value is YAML; it may be given several times).

`mlxrun config show` prints every value and where it came from. `mlxrun config check` prints every mistake:

```
configs/prod.yaml:12:11: log.format: 'jsn' is not one of 'text', 'json' (did you mean 'json'?)
```

- Unknown keys are errors, and so are combinations that contradict each other or would do nothing.
- Scalars are read as YAML 1.2 does: only `true` and `false` are booleans, `1e-3` is a number.
- `${NAME}` in a string of a file or of `--set` is replaced by that variable; `$${NAME}` stays as `${NAME}`.
- Byte sizes are numbers or strings with a unit: `20MB` is 20,000,000, `20MiB` is 20,971,520.
- `model.path` (where it is a folder), `model.adapter` and `model.chat_template` are relative to the file that
  names them, or to the working directory in a variable or a flag.
- For completion in an editor, the first line of a file may be
  `# yaml-language-server: $schema=PATH`, with the schema that `mlxrun config schema` prints.
"""


def reference() -> str:
    """The whole page."""
    top = [info for info in fields_of().values() if not info.section]
    parts = [INTRO, "## Top level\n", _table(top)]
    for section in sections_of().values():
        infos = [info for info in fields_of().values() if info.section == section.name]
        parts += [f"## {section.name}\n", f"{section.doc}\n", _table(infos)]
    return "\n".join(parts)


def _table(infos: list[FieldInfo]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for info in infos:
        cells = (f"`{info.key}`", describe_type(info), f"`{default_text(info)}`", info.doc)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
