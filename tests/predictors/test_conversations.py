"""What predictors read of a conversation: its parts and their tokens, the options of a request, and the same text on every
way from the request to the predictor."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import tailcast
from data_gen.importers.config import ImportLengthsConfig
from data_gen.importers.import_lengths import import_lengths
from predictors.client.messages import request_message as client_message
from predictors.modules.encoder import load_tokenizer, tokenize
from predictors.pretrained import artifact_folder
from predictors.runtime import open_runtime
from predictors.service.json_request import request_message
from predictors.service.messages import RequestReader
from predictors.tiny import TinyPredictor
from predictors.tokenizer import TRUNCATION_SIDES, PromptTokenizer, TokenizedPrompt
from scheduler_core.adapters.prediction_thread import PromptDecoder
from scheduler_core.adapters.vllm_requests import options_of
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.prediction.prompt_text import (
    LAST_TEXT,
    ConversationParts,
    Message,
    PartTokens,
    PromptForm,
    user_text,
)
from scheduler_core.prediction.requested_amount import with_amount
from tailcast.cli import main
from tests.predictors.fakes import read_manifest, write_artifact
from tests.predictors.proxy.fake_engine import running_engine, running_proxy
from tests.scheduler_core.adapters.test_parts import TEMPLATES, ChatTokenizer
from tests.training.tiny import tiny_bert
from training.fitting.samples import with_conversations

PARTS = PartTokens(format_size=True)
FORM = PromptForm(conversations=True, part_tokens=PARTS)
TEXTS = {
    "en": "Write a detailed essay about the history of railways, with five hundred words and three headings. The federal "
    "government decided on Wednesday to increase its support for families with small children. ",
    "de": "Die Bundesregierung hat am Mittwoch beschlossen, die Unterstützung für Familien mit kleinen Kindern zu erhöhen. "
    "Erkläre anschließend, warum Versicherungen ihre Beitragsbemessungsgrenzen jährlich überprüfen. ",
    "ja": "日本の鉄道の歴史について、五百字程度で説明してください。特に新幹線の開発とその社会的影響に重点を置いてください。",
    "code": Path(__file__).read_text(encoding="utf-8"),
}
OPTIONS = "[effort high] [size 40] [json name, age] [min tokens 64] [tools search: Search the web; calculate]"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(artifact_folder("pretrained") / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.mark.parametrize("language", TEXTS)
def test_each_part_has_its_share_of_256_tokens(language: str, tokenizer: Tokenizer) -> None:
    """By the tokenizer of all-MiniLM-L6-v2. The estimate errs by some tokens, which truncation in the middle takes from the
    earlier turns: the parts before and after them fit into one half each."""

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    rng = random.Random(0)
    words = TEXTS[language] * 20

    def text() -> str:
        start = rng.randrange(len(words) // 2)
        return words[start : start + rng.choice((20, 200, 4000))]

    for _ in range(50):
        roles = rng.sample(("options", "system", "user", "assistant", "user"), 4)
        assert num_tokens(PARTS.text([Message(role, text()) for role in (*roles, "user")])) <= 280
    options, system, turn, last = (text.split(": ", 1)[1] for text in _texts_of_full_parts(words))
    assert num_tokens(f"options: {options} system: {system}") < 127
    assert num_tokens(f"user: {last}") < 127
    for name, part in {"options": options, "system": system, "turns": turn, "last": last}.items():
        assert 0.6 < num_tokens(part) / getattr(PARTS, name) < 1.25


def _texts_of_full_parts(words: str) -> list[str]:
    """The texts of four parts that are all longer than their shares; the text has no empty lines."""
    words = words.replace("\n\n", "\n")
    return PARTS.text([Message(role, words) for role in ("options", "system", "user", "user")]).split("\n\n")


def test_unused_tokens_are_for_the_last_message() -> None:
    long = "word " * 400
    short = PARTS.text([Message("system", "Be brief."), Message("user", long)])
    full = PARTS.text(
        [Message("system", long), Message("user", "a"), Message("assistant", long), Message("user", long)]
    )
    last = [text.rpartition("user: ")[2].count("word") for text in (short, full)]
    assert last[0] > 1.5 * last[1] > 90
    assert short.startswith("system: Be brief.\n\nuser: word word")
    assert short.count(" … ") == 1


def test_parts_are_options_system_turns_and_the_last_text_with_what_follows() -> None:
    messages = (
        Message("options", "[n 2]"),
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes?"),
        Message("user", "Weather?"),
        Message("assistant", "look()"),
        Message("tool", "19"),
    )
    parts = ConversationParts.of(messages)
    assert [len(part) for part in parts] == [1, 1, 2, 3]
    assert PARTS.text(messages) == (
        "options: [n 2]\n\nsystem: Be brief.\n\nuser: Hi\n\nassistant: Yes?\n\n"
        "user: Weather?\n\nassistant: look()\n\ntool: 19"
    )
    image = (Message("user", "Describe it"), Message("user", "[image]"))
    assert [len(part) for part in ConversationParts.of(image)] == [0, 0, 0, 2]
    assert PARTS.text(()) == PARTS.text([Message("user", "")]) == ""


@pytest.mark.parametrize("prompt", ["name three rivers", " a \n b ", "user: hi", "word " * 2000])
def test_a_bare_prompt_is_its_own_text(prompt: str) -> None:
    for body in ({"messages": [{"role": "user", "content": prompt}]}, {"prompt": prompt}, {"input": prompt}):
        request = read_request(body)
        assert [request.text(form) for form in (LAST_TEXT, PromptForm(conversations=True), FORM)] == [
            prompt
        ] * 3
        parts = ConversationParts.of(request.conversation)
        assert parts.with_random_parts(np.random.default_rng(0), 1.0) == (Message("user", prompt),)


def test_parts_are_dropped_independently() -> None:
    messages = tuple(Message(role, role) for role in ("options", "system", "assistant", "user"))
    rng, parts = np.random.default_rng(0), ConversationParts.of(messages)
    drawn = [parts.with_random_parts(rng) for _ in range(800)]
    assert {len(each) for each in drawn} == {1, 2, 3, 4}
    assert all(each[-1] == messages[-1] for each in drawn)
    for message in messages[:-1]:
        assert sum(message in each for each in drawn) == pytest.approx(400, abs=60)
    assert parts.with_random_parts(rng, 0.0) == messages


def test_artifacts_without_part_tokens_read_what_they_did() -> None:
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "n": 3,
    }
    request = read_request(body)
    assert request.text() == "Hi"
    assert request.text(PromptForm(conversations=True)) == "system: Be brief.\n\nuser: Hi"
    assert user_text([Message("options", "[n 3]")]) == ""


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks at the weather of a city"}}
SCHEMA = {"type": "object", "properties": {"name": {}, "age": {}}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": 9, "temperature": 1.0, "stream": True, "n": 1, "response_format": {"type": "text"}}, ""),
        ({"reasoning_effort": "high"}, "[effort high]"),
        ({"reasoning": {"effort": "Low"}}, "[effort low]"),
        ({"reasoning_effort": "none"}, "[thinking off]"),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}}, "[effort medium]"),
        ({"output_config": {"effort": "max"}}, "[effort max]"),
        ({"think": "high"}, "[effort high]"),
        ({"think": False}, "[thinking off]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "[thinking 2048]"),
        ({"thinking": {"type": "adaptive"}}, "[thinking on]"),
        ({"thinking": {"type": "disabled"}}, "[thinking off]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[thinking off]"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "[thinking on]"),
        ({"reasoning": {"max_tokens": 512}}, "[thinking 512]"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, "[thinking off]"),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "low"}}}, "[effort low]"),
        ({"verbosity": "low"}, "[verbosity low]"),
        ({"text": {"verbosity": "high"}}, "[verbosity high]"),
        ({"response_format": {"type": "json_object"}}, "[json]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "[size 40] [json name, age]"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "[size 40] [json name, age]"),
        ({"format": "json"}, "[json]"),
        ({"format": SCHEMA}, "[size 40] [json name, age]"),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "[json]"),
        ({"generationConfig": {"responseSchema": SCHEMA}}, "[size 40] [json name, age]"),
        ({"guided_choice": ["a", "b", "c"]}, "[size 1] [choice 3]"),
        ({"structured_outputs": {"regex": "a+"}}, "[size 8] [regex]"),
        ({"structured_outputs": {"grammar": "root"}}, "[grammar]"),
        ({"format": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, "[size 6] [json]"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "[size 40] [json name, age]"),
        ({"min_tokens": 64}, "[min tokens 64]"),
        ({"sampling_params": {"min_new_tokens": 64}}, "[min tokens 64]"),
        ({"n": 3}, "[n 3]"),
        ({"stop": "END"}, '[stop "END"]'),
        ({"stop_sequences": ["\n", "END"]}, '[stop "\\n", "END"]'),
        ({"tools": [TOOL, {"type": "web_search"}]}, "[tools look: Looks at the weather of; web_search]"),
        ({"tools": [TOOL], "tool_choice": "none"}, ""),
        ({"tools": [TOOL], "tool_choice": "required"}, "[tool required] [tools look: Looks at the weather of]"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "look"}}, "[tool look] [tools look: Looks at the weather of]"),
        ({"tools": [{"functionDeclarations": [TOOL["function"]]}]}, "[tools look: Looks at the weather of]"),
    ],
)  # fmt: skip
def test_each_option_is_in_the_text(body: dict[str, Any], text: str) -> None:
    request = read_request({"messages": [{"role": "user", "content": "Hi"}], **body})
    assert request.options == text
    assert request.text(FORM) == (f"options: {text}\n\nuser: Hi" if text else "Hi")


def test_artifacts_without_format_size_read_options_without_it(tmp_path: Path) -> None:
    old = PromptForm(conversations=True, part_tokens=PartTokens())
    body = {"messages": [{"role": "user", "content": "Hi"}], "guided_json": SCHEMA, "min_tokens": 9}
    assert read_request(body).text(old) == "options: [json name, age] [min tokens 9]\n\nuser: Hi"
    for parts in (PARTS, old.part_tokens):
        folder = write_artifact(tmp_path / f"{parts}", conversations=True, part_tokens=parts)
        assert open_runtime(folder).artifact.manifest.form.part_tokens == parts
        written = read_manifest(folder)["part_tokens"]
        assert written.get("format_size", False) == (parts is PARTS)
        assert set(written) - {"format_size"} == {"options", "system", "turns", "last"}


@pytest.mark.parametrize(
    "value", [None, True, 7, -1.5, "", "x" * 1000, [], [None], {}, {"type": 3}, [[{}]], {"schema": 1}]
)
def test_malformed_options_are_left_to_the_engine(value: object) -> None:
    names = (
        *(
            "reasoning_effort",
            "reasoning",
            "thinking",
            "chat_template_kwargs",
            "thinking_budget",
            "verbosity",
            "text",
        ),
        *(
            "response_format",
            "format",
            "structured_outputs",
            "guided_json",
            "guided_choice",
            "stop",
            "tools",
            "functions",
        ),
        *("tool_choice", "generationConfig", "min_tokens", "n", "think", "output_config"),
    )
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for name in names:
        assert read_request({**body, name: value}).text(FORM).endswith("Hi")
    assert len(read_request({**body, **dict.fromkeys(names, value)}).text(FORM)) < 2000


BODY: dict[str, Any] = {
    "model": "tiny-llm",
    "messages": [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "name three rivers " * 100},
        {"role": "assistant", "content": "Elbe, Rhine, Danube"},
        {"role": "user", "content": "Describe the sea in 500 words."},
    ],
    "stop": ["END"],
    "min_tokens": 1,
    "reasoning_effort": "high",
}
EXPECTED = read_request(BODY).text(FORM)


async def test_every_way_to_the_predictor_gives_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EXPECTED.startswith(
        'options: [effort high] [stop "END"]\n\nsystem: Answer in one sentence.\n\nuser: name'
    )
    assert " … " in EXPECTED
    assert EXPECTED.endswith("Elbe, Rhine, Danube\n\nuser: Describe the sea in 500 words.")
    folder = write_artifact(tmp_path / "a", conversations=True, part_tokens=PARTS, served_models=())
    reader = RequestReader(open_runtime(folder), None)
    assert reader.read(request_message(BODY)).prompt == EXPECTED  # HTTP
    assert tailcast.load(folder).text(BODY) == EXPECTED
    log = tmp_path / "log.jsonl"
    response = {"usage": {"completion_tokens": 9}, "choices": [{"finish_reason": "stop"}]}
    log.write_text(json.dumps({"request": BODY, "response": response}) + "\n")
    assert _trained(log, "openai-log") == [EXPECTED]
    read: list[str] = []
    tokenize = PromptTokenizer.__call__

    def recorded(self: PromptTokenizer, prompts: Sequence[str]) -> list[TokenizedPrompt]:
        read.extend(prompts)
        return tokenize(self, prompts)

    options = {"predictor": str(folder), "feedback": str(tmp_path / "feedback"), "feedback_prompts": "stored"}
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", **options) as proxy:
        monkeypatch.setattr(PromptTokenizer, "__call__", recorded)
        assert (await proxy.post(BODY))[0] == 200
    assert read[0] == EXPECTED
    assert _trained(tmp_path / "feedback", "feedback") == [EXPECTED]


def test_a_body_brings_its_limits_and_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_artifact(tmp_path / "a", conversations=True, part_tokens=PARTS)
    body = BODY | {"max_tokens": 50, "min_tokens": 40}
    predictor = tailcast.load(folder)
    length = predictor.predict(body)
    assert (length.max_tokens, predictor.predict(body, max_tokens=60).max_tokens) == (50, 60)
    assert length.quantile(0.01) >= 40 > predictor.predict(BODY).quantile(0.01)
    assert length.prediction.mu != predictor.predict(BODY["messages"]).prediction.mu
    with pytest.raises(InputError, match="model: got 'other'"):
        predictor.predict(body | {"model": "other"})
    assert main(["predict", json.dumps(body), "--predictor", str(folder)]) == 0
    assert capsys.readouterr().out == f"{length}\n"
    text = '{"a": 1}'
    assert main(["predict", text, "--predictor", str(folder)]) == 0
    assert capsys.readouterr().out == f"{predictor.predict(text)}\n"


def _trained(log: Path, kind: str) -> list[str]:
    """The texts of the samples in a log, as training reads them."""
    out = log.with_suffix(".parquet")
    import_lengths(ImportLengthsConfig(file=str(log), out=str(out), kind=kind, schema="samples"))
    texts: list[str] = with_conversations(pq.read_table(out), out, FORM).column("prompt").to_pylist()
    return texts


def test_the_plugin_reads_the_same_but_for_options_outside_of_sampling() -> None:
    tokenizer = ChatTokenizer(TEMPLATES["chatml"])
    ids = list(map(ord, tokenizer.apply_chat_template(BODY["messages"])))
    sampling = SimpleNamespace(stop=["END"], min_tokens=0, n=1, structured_outputs=None, extra_args=None)
    messages = (*options_of(SimpleNamespace(sampling_params=sampling)), *PromptDecoder(tokenizer)(ids))
    body = {name: value for name, value in BODY.items() if name != "reasoning_effort"}
    assert FORM.text(messages) == read_request(body).text(FORM)


async def test_the_tiny_predictor_reads_conversations_and_amounts(tmp_path: Path) -> None:
    """As its manifest says."""
    folder = tmp_path / "tiny"
    shutil.copytree(artifact_folder("tiny"), folder)
    manifest = read_manifest(folder)
    manifest = {name: manifest[name] for name in manifest if name not in ("part_tokens", "amounts")}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"conversations": False}))
    plain, text = TinyPredictor(folder), with_amount(EXPECTED)
    assert text != EXPECTED
    manifest |= {"conversations": True, "part_tokens": asdict(PARTS), "amounts": True}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    body = read_request(BODY)
    query = PredictionRequest("r", body.text(), 9, messages=body.conversation)
    [prediction] = await TinyPredictor(folder).predict([query])
    assert prediction.length == plain.length(text)
    [last] = await plain.predict([query])
    assert last.length == plain.length("Describe the sea in 500 words.")
    assert last.prompt_chars == len("Describe the sea in 500 words.")


@pytest.mark.parametrize("side", TRUNCATION_SIDES)
def test_amounts_are_in_front_in_training_as_in_serving(tmp_path: Path, side: Any) -> None:
    path = artifact_folder("pretrained") / "tokenizer.json"
    texts = ["Describe the sea in 500 words.", "name three rivers", "word " * 50 + "in 500 words"]
    options = {"max_length": 24, "truncation_side": side}
    serving = [each.ids.tolist() for each in PromptTokenizer(path, **options, amounts=True)(texts)]
    plain = PromptTokenizer(path, **options)
    assert serving == [each.ids.tolist() for each in plain([with_amount(text) for text in texts])]
    assert serving[0] != plain(texts)[0].ids.tolist()
    training = tokenize(
        load_tokenizer(tiny_bert(tmp_path), truncation_side=side), texts, **options, amounts=True
    )
    tagged = tokenize(
        load_tokenizer(tiny_bert(tmp_path), truncation_side=side), list(map(with_amount, texts)), **options
    )
    assert [ids.tolist() for ids in training] == [ids.tolist() for ids in tagged]


def test_the_service_says_what_is_read_and_clients_send_little_more(tmp_path: Path) -> None:
    messages = tuple(Message("user", f"{number} {'x' * 20_000}") for number in range(200))
    query = PredictionRequest("r", messages[-1].text, 9, messages=messages)
    sent = client_message(query)
    assert sent.ByteSize() < 64 * 17_000
    read = [Message(each.role, each.content) for each in sent.messages.messages]
    assert FORM.text(read) == FORM.text(messages)
    with pytest.raises(InputError, match="part_tokens: .*unset, because conversations is false"):
        write_artifact(tmp_path / "a", part_tokens=PARTS) and open_runtime(tmp_path / "a")
