"""Creating models: from a file, a blob, another model, a Modelfile; what cannot be is refused before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.api.options import OPTIONS
from localrun.errors import BadRequest, DownloadFailed, LocalrunError, ModelFileRejected, Unsupported
from localrun.models.gguf import open_gguf
from localrun.store import CreateSpec, PullProgress, Store, modelfile_for, spec_from_modelfile
from localrun.store.catalogue import Entry
from localrun.store.modelfile import ModelfileError, decode
from localrun.store.parameters import DEPRECATED, KINDS, checked, from_text, to_texts
from tests.models.build import Builder, Tensor
from tests.store.conftest import Index, tiny_gguf


def made(store: Store, name: str, spec: CreateSpec) -> list[str]:
    lines: list[PullProgress] = []
    store.create(name, spec, lines.append)
    return [line.status for line in lines]


def refused(store: Store, spec: CreateSpec, kind: type[LocalrunError], line: str) -> None:
    before = set(store.blobs.digests())
    with pytest.raises(kind, match=line) as caught:
        made(store, "x", spec)
    assert "\n" not in str(caught.value)
    assert store.list() == [] and set(store.blobs.digests()) == before


def test_from_a_file(store: Store, gguf: Path) -> None:
    digest = f"sha256:{hashlib.sha256(gguf.read_bytes()).hexdigest()}"
    words = made(store, "mine", CreateSpec(path=gguf, system="Be kind.", parameters={"temperature": 1, "stop": "x", "num_ctx": 64.0},
                                           messages=[{"role": "user", "content": "hi"}], license=["one", "two", "one"]))  # fmt: skip
    assert words[0] == "parsing GGUF" and words[-2:] == ["writing manifest", "success"] and f"using existing layer {digest}" in words
    model = store.get("mine")
    assert model.model_digest == digest and model.system == "Be kind." and model.license == ["one", "two"]
    assert model.params == {"temperature": 1.0, "stop": ["x"], "num_ctx": 64}
    assert isinstance(model.params["temperature"], float) and isinstance(model.params["num_ctx"], int)
    assert model.messages == [{"role": "user", "content": "hi"}]
    about: dict[str, Any] = {"model_format": "gguf", "model_family": "llama", "model_type": "32", "file_type": "F32"}
    about |= {"context_length": 2048, "embedding_length": 32}
    assert {key: model.config[key] for key in about} == about


def test_from_a_blob(store: Store, gguf: Path) -> None:
    digest = store.blobs.put(gguf.read_bytes())
    made(store, "mine", CreateSpec(files={"a.gguf": digest.replace(":", "-")}))
    assert store.get("mine").model_digest == digest
    missing = f"sha256:{'0' * 64}"
    with pytest.raises(BadRequest, match=f"blob {missing} is not in the store; send it first"):
        made(store, "other", CreateSpec(files={"a.gguf": missing}))
    with pytest.raises(BadRequest, match="invalid digest format"):
        made(store, "other", CreateSpec(files={"a.gguf": "sha256:../../x"}))


def test_from_a_model_overrides_and_merges(store: Store, gguf: Path) -> None:
    made(store, "base", CreateSpec(path=gguf, system="Base.", template="{{ messages }}", parameters={"seed": 1, "top_k": 2, "stop": ["a"]},
                                   messages=[{"role": "user", "content": "old"}], license=["L"]))  # fmt: skip
    made(store, "plain", CreateSpec(from_name="BASE"))
    assert store.get("plain").digest == store.get("base").digest
    made(store, "derived", CreateSpec(from_name="base", system="Mine.", parameters={"top_k": 3, "stop": ["b"]},
                                      messages=[{"role": "user", "content": "new"}], license=["M"]))  # fmt: skip
    model = store.get("derived")
    assert model.system == "Mine." and model.template == "{{ messages }}"
    assert model.params == {"seed": 1, "top_k": 3, "stop": ["b"]}
    assert [message["content"] for message in model.messages] == ["new"] and model.license == ["L", "M"]
    assert model.model_digest == store.get("base").model_digest
    assert store.get("base").system == "Base."
    made(store, "derived", CreateSpec(from_name="derived", system="Again."))
    assert store.get("derived").system == "Again." and store.get("derived").params["top_k"] == 3


def test_from_a_model_of_the_catalogue_pulls_it(store: Store, index: Index, published: Callable[..., Entry]) -> None:
    entry = published()
    words = made(store, "mine", CreateSpec(from_name="tiny", system="S"))
    assert "pulling manifest" in words and words.count("success") == 1
    assert store.get("mine").model_digest == store.get("tiny").model_digest == entry.digest


def test_from_an_unknown_model(store: Store) -> None:
    """Port 1 answers nobody: a registry that is not there."""
    with pytest.raises(DownloadFailed, match=r"^model 'http://127.0.0.1:1/a/nowhere' is not here, and cannot be had: pull model mani"):
        made(store, "x", CreateSpec(from_name="http://127.0.0.1:1/a/nowhere", insecure=True))


def test_replaced_in_one_step(store: Store, gguf: Path) -> None:
    """Whoever reads while a model is made again sees the old one or the new one."""
    made(store, "a", CreateSpec(path=gguf, system="old"))
    seen = []
    store.create("a", CreateSpec(path=gguf, system="new"), lambda line: seen.append(Store(store.root).get("a").system))
    assert seen[:-1] == ["old"] * (len(seen) - 1) and seen[-1] == "new"


@pytest.mark.parametrize(
    ("changes", "kind", "line"),
    [
        ({"path": None}, BadRequest, "^neither 'from' or 'files' was specified$"),
        ({"from_name": "also"}, BadRequest, "a model is made from one thing"),
        ({"parameters": {"bogus": 1}}, BadRequest, "^unknown parameter 'bogus'; known are"),
        ({"parameters": {"num_ctx": "many"}}, BadRequest, 'parameter "num_ctx" must be an integer, not'),
        ({"parameters": {"num_ctx": 1.5}}, BadRequest, 'parameter "num_ctx" must be an integer'),
        ({"parameters": {"num_ctx": True}}, BadRequest, 'parameter "num_ctx" must be an integer'),
        ({"parameters": {"temperature": float("nan")}}, BadRequest, 'parameter "temperature" must be a number'),
        ({"parameters": {"stop": [1]}}, BadRequest, 'parameter "stop" must be text or a list of texts'),
        ({"parameters": {"use_mmap": 1}}, BadRequest, 'parameter "use_mmap" must be true or false'),
        ({"messages": [{"role": "robot", "content": ""}]}, BadRequest, r"messages\[0\]: message role must be one of"),
        ({"messages": [{"role": "user"}]}, BadRequest, r"messages\[0\]: content must be text"),
        ({"template": "{% if %}"}, BadRequest, "^template error: "),
        ({"template": "{{ .Prompt }}\n{{ if .System }}{{ .System }}"}, BadRequest, r"^template error: line 2: \{\{if\}\} has no "),
    ],
)  # fmt: skip
def test_what_cannot_be_made(store: Store, gguf: Path, changes: dict[str, Any], kind: type[LocalrunError], line: str) -> None:
    refused(store, CreateSpec(**({"path": gguf} | changes)), kind, line)


def test_files_that_are_no_models(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    for content in (b"", b"GGUF", b"text " * 100, tiny_gguf()[:100]):
        path.write_bytes(content)
        refused(store, CreateSpec(path=path), ModelFileRejected, r"bad\.gguf: ")
    refused(store, CreateSpec(path=tmp_path / "none.gguf"), ModelFileRejected, r"none\.gguf: cannot be opened")
    (tmp_path / "empty").mkdir()
    refused(store, CreateSpec(path=tmp_path / "empty"), BadRequest, "empty: has no config.json: it holds no checkpoint")
    digest = store.blobs.put(b"no model")
    refused(store, CreateSpec(files={"a.gguf": digest}), ModelFileRejected, "magic|GGUF")


def test_malformed_files_of_the_conformance_data_are_refused(store: Store, shared: Path) -> None:
    table = sorted((shared / "malformed").glob("*.gguf"))
    assert table
    for path in table:
        try:
            made(store, "x", CreateSpec(path=path))
        except (ModelFileRejected, Unsupported) as error:
            assert "\n" not in str(error) and path.name in str(error)


def test_a_template_may_be_go(store: Store, gguf: Path) -> None:
    made(store, "a", CreateSpec(path=gguf, template="{{ .System }} {{ .Prompt }}"))
    assert store.get("a").template == "{{ .System }} {{ .Prompt }}"


# ---- Modelfiles ---------------------------------------------------------------------------------------------------------------


def test_from_as_path_name_and_digest(tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "plain").write_bytes(gguf.read_bytes())
    for text in ("tiny.gguf", "./tiny.gguf", str(gguf), '"tiny.gguf"', "../" + tmp_path.name + "/tiny.gguf"):
        found = spec_from_modelfile(f"FROM {text}", tmp_path).path
        assert found is not None and found.samefile(gguf)
    assert spec_from_modelfile("FROM plain", tmp_path).path == tmp_path / "plain"
    assert spec_from_modelfile("FROM smollm2:135m", tmp_path).from_name == "smollm2:135m"
    digest = f"sha256:{'a' * 64}"
    assert spec_from_modelfile(f"FROM @{digest}", tmp_path).files == {"model.gguf": digest}
    assert spec_from_modelfile("FROM tiny.gguf", tmp_path, copy=True).copy


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("FROM ./none.gguf", ModelfileError, "^line 1, column 1: FROM ./none.gguf: there is no file "),
        ("FROM none.gguf", ModelfileError, "^line 1, column 1: FROM none.gguf: there is no file "),
        ("FROM a b", ModelfileError, "^line 1, column 1: FROM: invalid model name"),
        ("FROM a\nFROM b", ModelfileError, "^line 2, column 1: FROM b: a second FROM"),
        ("FROM a\n  PARAMETER num_ctx 4k", ModelfileError, r"^line 2, column 3: invalid int value \[4k\]"),
        ("FROM a\nPARAMETER temperature hot", ModelfileError, r"^line 2, column 1: invalid float value \[hot\]"),
        ("FROM a\nPARAMETER use_mmap maybe", ModelfileError, r"^line 2, column 1: invalid bool value \[maybe\]"),
        ("FROM a\nPARAMETER colour red", ModelfileError, "^line 2, column 1: unknown parameter 'colour'"),
        ("FROM a\nDRAFT d", Unsupported, "^line 2, column 1: DRAFT"),
        ("FROM a\nRENDERER qwen3", Unsupported, "^line 2, column 1: RENDERER"),
        ("FROM a\nPARSER qwen3", Unsupported, "^line 2, column 1: PARSER"),
        ("FROM a\nREQUIRES 0.14.0", Unsupported, "^line 2, column 1: REQUIRES"),
    ],
)  # fmt: skip
def test_modelfiles_that_cannot_be(tmp_path: Path, text: str, kind: type[LocalrunError], line: str) -> None:
    with pytest.raises(kind, match=line) as caught:
        spec_from_modelfile(text, tmp_path)
    assert caught.value.status == 400 and "\n" not in str(caught.value)


def test_paths_of_another_machine_are_not_looked_at(gguf: Path) -> None:
    for text in (str(gguf), "~/x", "../x", "C:\\x", "x.gguf", "/etc/passwd"):
        with pytest.raises(ModelfileError, match="paths are taken from clients on this machine only"):
            spec_from_modelfile(f"FROM {text}", None)
    assert spec_from_modelfile("FROM smollm2", None).from_name == "smollm2"


def test_last_system_wins_and_stops_add_up(tmp_path: Path) -> None:
    text = "FROM a\nSYSTEM one\nSYSTEM two\nPARAMETER stop x\nPARAMETER stop y\nPARAMETER top_k 1\nPARAMETER top_k 2\nLICENSE l\nLICENSE m"
    spec = spec_from_modelfile(text, tmp_path)
    assert spec.system == "two" and spec.parameters == {"stop": ["x", "y"], "top_k": 2} and spec.license == ["l", "m"]


def test_deprecated_parameters_are_said_and_dropped(store: Store, gguf: Path) -> None:
    spec = spec_from_modelfile(f'FROM "{gguf}"\nPARAMETER tfs_z 2\nPARAMETER top_k 3', gguf.parent)
    words = made(store, "a", spec)
    assert words[0] == "warning: parameter tfs_z is deprecated and is left out"
    assert store.get("a").params == {"top_k": 3}


QUOTED = st.sampled_from(['"quoted', '"""', 'def f():\n    """Doc."""\n    pass'])
TEXTS = st.text(max_size=30) | st.text(alphabet='"\n a', max_size=12) | QUOTED


@settings(max_examples=40, deadline=None)
@given(
    system=st.none() | TEXTS,
    messages=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=3),
    licenses=st.lists(TEXTS, max_size=2, unique=True),
    stop=st.lists(TEXTS, max_size=3),
    temperature=st.none() | st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    mmap=st.none() | st.booleans(),
)
def test_show_modelfile_makes_the_same_model_again(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, messages: list[tuple[str, str]], licenses: list[str], stop: list[str],
    temperature: float | None, seed: int | None, mmap: bool | None,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("round")
    gguf = folder / "m.gguf"
    gguf.write_bytes(tiny_gguf())
    store = Store(folder / "models")
    values = {"stop": stop or None, "temperature": temperature, "seed": seed, "use_mmap": mmap}
    spec = CreateSpec(
        path=gguf, system=system, template="{% for m in messages %}\"\"\"\n{{ m.content }}{% endfor %}", license=licenses,
        messages=[{"role": role, "content": content} for role, content in messages],
        parameters={key: value for key, value in values.items() if value is not None},
    )  # fmt: skip
    store.create("first", spec, lambda line: None)
    text = modelfile_for(store.get("first"))
    store.create("second", spec_from_modelfile(text, folder), lambda line: None)
    first, second = store.get("first"), store.get("second")
    assert first.digest == second.digest, text
    assert modelfile_for(second).replace("second:latest", "first:latest") == text


def test_the_example_at_the_root(repository: Path, store: Store, gguf: Path, tmp_path: Path) -> None:
    text = decode((repository / "Modelfile.example").read_bytes())
    spec = spec_from_modelfile(text, repository)
    assert spec.from_name == "qwen2.5-coder:1.5b" and spec.parameters["stop"] == ["<|endoftext|>"]
    made(store, "qwen2.5-coder:1.5b", CreateSpec(path=gguf))
    made(store, "reviewer", spec)
    model = store.get("reviewer")
    assert model.system is not None and model.system.startswith("You review Python code.")
    assert [message["role"] for message in model.messages] == ["user", "assistant"]
    again = spec_from_modelfile(modelfile_for(model), tmp_path)
    made(store, "again", again)
    assert store.get("again").digest == model.digest


# ---- parameters ---------------------------------------------------------------------------------------------------------------


def test_parameters_are_the_options_that_requests_know() -> None:
    words = {"int": "integer", "float": "float", "bool": "boolean", "string": "string", "strings": "array"}
    for name, option in OPTIONS.items():
        if option.use == "honoured":
            assert words[KINDS[name]] == option.kind, name
        else:
            assert name in DEPRECATED | {"embedding_only"} or words[KINDS[name]] == option.kind, name


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_values_survive_their_text(name: str, data: st.DataObject) -> None:
    value = data.draw({
        "int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans(), "strings": st.lists(st.text()), "string": st.text(),
        "float": st.floats(allow_nan=False, allow_infinity=False, max_value=1e307, min_value=-1e307),
    }[KINDS[name]])  # fmt: skip
    texts = to_texts(checked(name, value))
    found = [from_text(name, text) for text in texts]
    assert (found if KINDS[name] == "strings" else found[0]) == value


def test_a_split_file_becomes_one_blob(store: Store, tmp_path: Path) -> None:
    keys: list[Any] = [("general.architecture", "string", "llama"), ("split.no", "uint16", 0), ("split.count", "uint16", 2)]
    keys.append(("split.tensors.count", "int32", 2))
    first = Builder(keys=keys, tensors=[Tensor("a", (1,), 0, b"\0" * 4)]).bytes()
    keys[1] = ("split.no", "uint16", 1)
    second = Builder(keys=keys, tensors=[Tensor("b", (1,), 0, b"\0" * 4)]).bytes()
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    refused(store, CreateSpec(path=tmp_path / "m-00002-of-00002.gguf"), ModelFileRejected, "open the first part instead")
    store.create("joined", CreateSpec(path=tmp_path / "m-00001-of-00002.gguf"), lambda line: None)
    with open_gguf(store.get("joined").model_path) as gguf:
        assert list(gguf.tensors) == ["a", "b"] and "split.count" not in gguf.metadata
