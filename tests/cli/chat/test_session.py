"""The conversation at the terminal, with a scripted server."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.chat.conversation import Conversation, read_attachment
from mlxrun.cli.chat.session import END, HELP, ChatSession
from mlxrun.cli.server_client import AnswerDelta, ClientError, ServerClient
from mlxrun.core.terminal import open_console


class ScriptedClient(ServerClient):
    """Answers with the parts of its script, one list for each question. An exception is raised."""

    def __init__(self, *script: Sequence[AnswerDelta | BaseException]) -> None:
        super().__init__("http://nowhere")
        self.script = list(script)
        self.received: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []

    def list_models(self, timeout: float = 1.0) -> list[str]:
        return ["small", "large"]

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        self.received.append((list(messages), dict(fields)))
        for part in self.script.pop(0):
            if isinstance(part, BaseException):
                raise part
            yield part


def type_lines(*lines: str | BaseException) -> Callable[[str], str]:
    """What reads these lines, and then the end of the input."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def talk(client: ServerClient, *lines: str | BaseException, **options: Any) -> tuple[str, ChatSession]:
    """What is shown, and the session, after these lines."""
    shown = io.StringIO()
    session = ChatSession(client, open_console(shown), Conversation(), **options)
    session.run(type_lines(*lines))
    return shown.getvalue(), session


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def test_answers_come_and_the_conversation_grows() -> None:
    client = ScriptedClient(
        [AnswerDelta("a"), AnswerDelta("b"), AnswerDelta(usage=USAGE)], [AnswerDelta("c")]
    )
    shown, session = talk(client, "one", "", "two", shows_stats=True)
    assert shown.startswith("ab\n9 prompt tokens (4 reused), first token after") and shown.endswith("c\n")
    said = [(m["role"], m["content"]) for m in client.received[1][0]]
    assert said == [("user", "one"), ("assistant", "ab"), ("user", "two")]
    assert session.conversation.turns[-1] == {"role": "assistant", "content": "c"}


def test_reasoning_is_shown_apart_and_is_no_part_of_the_answer() -> None:
    parts = [AnswerDelta("hm", reasoning=True), AnswerDelta("so"), AnswerDelta(" it is")]
    shown, session = talk(ScriptedClient(parts), "why")
    assert shown == "hm\n\nso it is\n"
    assert session.conversation.turns[-1]["content"] == "so it is"
    shown, _ = talk(ScriptedClient(parts), "/think off", "why")
    assert shown == "so it is\n"


def test_an_error_is_shown_and_its_question_forgotten() -> None:
    client = ScriptedClient([ClientError("too long")], [AnswerDelta("fine")])
    shown, _ = talk(client, "one", "two")
    assert shown == "too long\nfine\n"
    assert [m["content"] for m in client.received[1][0]] == ["two"]


def test_an_interrupt_keeps_what_has_come_and_the_session() -> None:
    client = ScriptedClient([AnswerDelta("half"), KeyboardInterrupt()], [AnswerDelta("whole")])
    shown, session = talk(client, "one", KeyboardInterrupt(), "two")
    assert shown == "half\nstopped\nwhole\n"
    assert [m["content"] for m in session.conversation.turns] == ["one", "half", "two", "whole"]


def test_commands(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    client = ScriptedClient(*([AnswerDelta(text)] for text in "abcd"))
    shown, session = talk(
        client,
        *(
            "/system be brief",
            "/set temperature=0.5",
            "one",
            "/retry",
            "/undo",
            "two",
            f"/save {path}",
            "/new",
        ),
        *(f"/load {path}", "three", "/model large", "/set", "/set temperature=null", "/sve x", "/model x"),
        *("/set temperature=[", "/load none.json", "/bye", "never"),
    )
    sent = [[m["content"] for m in messages] for messages, _ in client.received]
    assert sent[0] == sent[1] == ["be brief", "one"]
    assert sent[2] == ["be brief", "two"] and sent[3] == ["be brief", "two", "c", "three"]
    assert client.received[0][1] == {"temperature": 0.5} and session.fields == {"model": "large"}
    assert "did you mean 'save'?" in shown and "the server has no model x" in shown
    assert "temperature=0.5, model=large" in shown and "this is not YAML" in shown
    assert "none.json cannot be read" in shown


def test_the_help_lists_what_is_understood() -> None:
    session = ChatSession(ScriptedClient(), open_console(io.StringIO()), Conversation())
    listed = set(re.findall(r"(?<!\w)/(\w+)", HELP))
    assert listed == {*session._list_commands(), *END}


def test_an_answer_that_was_cut_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Apart from the answer, with what sets the limit."""
    parts = [AnswerDelta("one two"), AnswerDelta(cut=True), AnswerDelta(usage=USAGE)]
    shown, _ = talk(ScriptedClient(parts), "count")
    assert shown == "one two\n"
    said = capsys.readouterr().err
    assert said == "the answer was cut at its maximum number of tokens (3); /set max_tokens=N sets it\n"
    talk(ScriptedClient([AnswerDelta("one")]), "count")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("typed", ["temperature", "stream=false", "messages=[]", "n=2"])
def test_what_cannot_be_set_ends_no_conversation(typed: str) -> None:
    client = ScriptedClient([AnswerDelta("five")], [AnswerDelta("six")])
    shown, session = talk(client, "2 + 3?", f"/set {typed}", "and one?")
    assert session.fields == {} and "six" in shown
    assert [each["role"] for each in client.received[1][0]] == ["user", "assistant", "user"]


def test_an_answer_that_breaks_off_ends_its_line() -> None:
    shown, session = talk(ScriptedClient([AnswerDelta("fi"), ClientError("it broke off")]), "2 + 3?")
    assert shown.splitlines() == ["fi", "it broke off"] and session.conversation.turns == []


def test_a_field_that_no_request_has_is_not_set() -> None:
    shown, session = talk(ScriptedClient(), "/set temprature=2", "/set temperature=9", "/set top_k=2")
    assert "temprature: unknown parameter (did you mean 'temperature'?)" in shown
    assert "temperature: 9 is greater" in shown and session.fields == {"top_k": 2}
    _, session = talk(ScriptedClient(), "/set top_k=2", "/set seed=1", "/set top_k=")
    assert session.fields == {"seed": 1}


def test_a_command_with_the_path_of_an_image_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"JPG")
    client = ScriptedClient([AnswerDelta("a")])
    shown, _ = talk(client, f"/load {path}", f"{path} /load", f"/save {path}")
    assert f"{path} is not a conversation" in shown and len(client.received) == 1
    assert f"{path} is not replaced" in shown and path.read_bytes() == b"JPG"


def test_several_lines_in_quotation_marks() -> None:
    client = ScriptedClient([AnswerDelta("a")])
    talk(client, '"""one', "", 'two"""')
    assert client.received[0][0][0]["content"] == "one\n\ntwo"


def test_files_in_a_question_are_attached(tmp_path: Path) -> None:
    (tmp_path / "my photo.png").write_bytes(b"PNG")
    (tmp_path / "b.pdf").write_bytes(b"PDF")
    client = ScriptedClient([AnswerDelta("a")], [AnswerDelta("b")])
    shown, _ = talk(
        client, f"What is '{tmp_path}/my photo.png' (not {tmp_path}/b.pdf)?", f"{tmp_path}/b.pdf it's"
    )
    parts = client.received[0][0][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "file", "text"]
    assert parts[0]["image_url"]["url"] == "data:image/png;base64,UE5H"
    file = client.received[1][0][-1]["content"][0]["file"]
    assert file == {"file_data": "data:application/pdf;base64,UERG", "filename": "b.pdf"}
    assert "with my photo.png, b.pdf\n" in shown


def test_a_file_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The question is sent without it. Other words, and files that exist, are not named."""
    (tmp_path / "a.png").write_bytes(b"PNG")
    client = ScriptedClient([AnswerDelta("a")])
    text = f"~5 of .png: what is in (nothere.PNG), {tmp_path}/a.png, it's b.wav and nothere.PNG? See c.txt."
    shown, _ = talk(client, text)
    ends = ": no such file, so nothing is attached\n"
    assert capsys.readouterr().err == f"nothere.PNG{ends}b.wav{ends}"
    assert shown == "with a.png\na\n"
    assert client.received[0][0][0]["content"][-1] == {"type": "text", "text": text}
    talk(ScriptedClient([AnswerDelta("a")]), "/nothere/a.png what is it?", "/sve b.png")
    assert capsys.readouterr().err == f"/nothere/a.png{ends}"


def test_the_error_of_a_file_has_its_name(tmp_path: Path) -> None:
    """Only that of the question that was asked; others keep their places."""
    for name in ("a.png", "broken.pdf"):
        (tmp_path / name).write_bytes(b"?")
    errors = [
        "messages[3].content[1].file.file_data: not a PDF",
        "messages[3].content[0].image_url.url: not a readable image",
        "messages[1].content[0].image_url.url: no",
        "messages[3].content[2].text: no",
    ]
    client = ScriptedClient([AnswerDelta("a")], *([ClientError(error)] for error in errors))
    question = f"{tmp_path}/a.png {tmp_path}/broken.pdf"
    shown, _ = talk(client, "/system be brief", "one", *(question for _ in errors))
    expected = ["broken.pdf: not a PDF", "a.png: not a readable image", *errors[2:]]
    assert [line for line in shown.splitlines() if ": n" in line] == expected


@pytest.mark.parametrize(
    ("name", "part"),
    [("a.wav", "audio_url"), ("a.opus", "audio_url"), ("a.mp4", "video_url"), ("a.HEIC", "image_url")],
)
def test_sounds_and_videos_are_attached(tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / name).write_bytes(b"A")
    client = ScriptedClient([AnswerDelta("a")])
    talk(client, f"What is in {tmp_path / name}")
    assert client.received[0][0][0]["content"][0][part]["url"].endswith(";base64,QQ==")


def test_a_machine_knows_no_types_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python knows those of few, and the server refuses what is said to be no sound."""
    monkeypatch.setattr("mimetypes.guess_type", lambda name: (None, None))
    for name, start in (("a.M4A", "audio/m4a"), ("a.mkv", "video/mkv"), ("a.webp", "image/webp")):
        (tmp_path / name).write_bytes(b"A")
        part = read_attachment(tmp_path / name)
        assert part[part["type"]]["url"] == f"data:{start};base64,QQ=="
    (tmp_path / "a.pdf").write_bytes(b"A")
    assert read_attachment(tmp_path / "a.pdf")["file"]["file_data"] == "data:application/pdf;base64,QQ=="


@pytest.mark.parametrize("text", ["3", "[]", "[1]", '[{"role": 1, "content": ""}]', "{", '{"a": 1}'])
def test_what_is_no_conversation_is_not_loaded(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text)
    shown, session = talk(ScriptedClient(), f"/load {tmp_path}/a")
    assert "is not a conversation" in shown
    assert session.conversation.turns == []
