"""A suite whose rows name sounds, from its lines to its report and bundle, on a tiny model that hears."""

from __future__ import annotations

from pathlib import Path

from mlxrun.cli.main import main
from mlxrun.evals.bundles.bundle import open_bundle
from tests.helpers.audio_files import make_audio
from tests.helpers.batch_fakes import read
from tests.helpers.model_fixtures import Zoo

SUITE = """
models: {{omni: {{set: {{model.path: {folder}, engine.load_check: false}}}}}}
tasks:
  memos:
    data: memos.csv
    audio: sound
    prompt: Which day is it?
    expected: said
    match: contains
    generation: {{max_tokens: 4}}
"""


def test_sounds_by_path(tmp_path: Path, zoo: Zoo) -> None:
    """Each line hears its own, the report plays it, and the bundle has its file. A changed one is heard
    again."""
    (tmp_path / "memos").mkdir()
    for name in ("a", "b"):
        (tmp_path / "memos" / f"{name}.wav").write_bytes(make_audio("wav", 0.4 if name == "a" else 0.7))
    rows = "id,sound,said\na,memos/a.wav,monday\nb,memos/b.wav,friday\nc,memos/no.wav,friday\n"
    (tmp_path / "memos.csv").write_text(rows)
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE.format(folder=zoo.omni("qwen3_omni_moe")))
    assert main(["eval", str(suite)]) == 2  # a file that is not there is found before anything runs
    (tmp_path / "memos.csv").write_text(rows.replace("memos/no.wav", "memos/a.wav"))
    assert main(["eval", str(suite)]) == 0
    folder, page = tmp_path / "suite.out", tmp_path / "report.html"
    (answers,) = folder.rglob("job.out.jsonl")
    records = {each["custom_id"]: each for each in read(answers)}
    tokens = {name: each["response"]["body"]["usage"]["prompt_tokens"] for name, each in records.items()}
    assert tokens["b"] > tokens["a"] == tokens["c"]
    assert main(["report", str(folder), "-o", str(page)]) == 0
    assert page.read_text().count("data:audio/wav;base64,") >= 2
    packed = tmp_path / "memos.tar.gz"
    assert main(["bundle", str(folder), "-o", str(packed)]) == 0
    with open_bundle(packed) as runs:
        top = next(each for each in runs[0].paths.out.parents if (each / "README.md").exists())
        assert {path.name for path in top.rglob("*.wav")} == {"a.wav", "b.wav"}
    (tmp_path / "memos/b.wav").write_bytes(make_audio("wav", 1.1))
    assert main(["eval", str(suite)]) == 0
    again = {each["custom_id"]: each for each in read(answers)}
    assert [name for name in again if again[name] != records[name]] == ["b"]
