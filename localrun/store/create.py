"""Makes a model from another one or from a GGUF file, and says how a model could be made again.

Weights are never copied where they can be shared: a model made from a stored one has the same blob, one made from a file is a link to it.
Everything is checked before anything is written. Knows the store and the Modelfile; nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrun.errors import BadRequest, DownloadFailed, LocalrunError, ModelFileRejected, ModelNotFound, Unsupported
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.store import describe, hub, modelfile, parameters, projectors
from localrun.store.adapters import AdapterSource, adapter_sources, is_adapter, take_in
from localrun.store.manifests import LAYER_TYPE, Layer
from localrun.store.merge import merge
from localrun.store.modelfile import Instruction
from localrun.store.names import Name, check_digest
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.quantizing import checked_type, convert, folder_of, quantize
from localrun.text.gosyntax import is_go_template as is_go_template

if TYPE_CHECKING:
    from localrun.store.store import Store, StoredModel

ORDER = ("model", "projector", "adapter", "template", "system", "params", "messages", "license")
"""Of layers in the manifests made here, so that the same model made twice has the same ID."""


@dataclass(frozen=True, kw_only=True)
class CreateSpec:
    """What to make a model of: exactly one of `from_name`, `path` and `files`; the rest replaces or adds to what that brings.

    None and empty lists leave what is there. Parameters are merged by name over those of the model it is made from.
    """

    from_name: str | None = None
    """Name of a stored model, or what `pull` takes; it is pulled when it is not there yet."""
    path: Path | None = None
    """On this machine: a GGUF file, which is linked, or cloned where the file system can; or a folder with a checkpoint of safetensors, as
    Hugging Face lays them out, which is converted."""
    files: dict[str, str] = field(default_factory=dict)
    """Name -> digest of blobs that were put into the store before: one GGUF file, all parts of one, or the files of such a folder."""
    insecure: bool = False
    """With `from_name`, where it is pulled: accept plain HTTP."""
    copy: bool = False
    """With `path`: copy the file."""
    quantize: str = ""
    """Type to make the weights of: "q4_K_M". What they are made from must not be quantized already. Empty: as they are."""
    template: str | None = None
    """Jinja, or Go's language as Ollama writes it."""
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)
    adapters: list[AdapterSource] = field(default_factory=list)
    """LoRA adapters, after those that the model has already."""
    projectors: list[Path | str] = field(default_factory=list)
    """Files, or digests of blobs, with which the model sees images; in place of those that it has already."""


def create(store: Store, name: str, spec: CreateSpec, progress: Progress, cancelled: Cancelled) -> None:
    """Makes the model `name`; what had that name before is replaced in one step, at the end.

    Raises InvalidName, ModelNotFound, BadRequest (which field and why), ModelFileRejected, DiskFull, StorageFailed, RequestCancelled.
    """
    target = Name.parse(name)
    checked = _checked(spec, progress)

    def bring() -> None:
        config, layers = _base(store, checked, progress, cancelled)
        try:
            finish(config, layers)
        except LocalrunError:
            # weights that were made here would lie about until they are found to be needless; those that a client has sent stay
            sent = {check_digest(digest) for digest in checked.files.values()}
            store.drop_unneeded([layer.digest for layer in layers["model"] if layer.digest not in sent])
            raise

    def finish(config: dict[str, Any], layers: dict[str, list[Layer]]) -> None:
        for source in checked.adapters:
            layer = take_in(store, source, layers["model"][0].digest, checked.copy, progress, cancelled)
            layers.setdefault("adapter", []).append(layer)
        if checked.projectors:
            base = layers["model"][0].digest
            layers["projector"] = [projectors.take_in(store.blobs, one, base, checked.copy, progress) for one in checked.projectors]
        if checked.quantize:
            config = _quantized(store, checked.quantize, config, layers, progress, cancelled)
        for kind, layer in _added(store, checked, layers):
            layers[kind] = [*layers.get("license", []), layer] if kind == "license" else [layer]
            progress(PullProgress(f"creating new layer {layer.digest}"))
        ordered = [layer for kind in sorted(layers, key=_rank) for layer in _distinct(layers[kind])]
        progress(PullProgress("writing manifest"))
        store.commit(target, config, ordered)

    store.until_kept(bring)
    progress(PullProgress("success"))


def _rank(kind: str) -> tuple[int, str]:
    return (ORDER.index(kind) if kind in ORDER else len(ORDER), kind)


def _distinct(layers: list[Layer]) -> list[Layer]:
    return list({layer.digest: layer for layer in layers}.values())


def _checked(spec: CreateSpec, progress: Progress) -> CreateSpec:
    """`spec` with typed parameters. Raises BadRequest for what cannot be made."""
    sources = [source for source in (spec.from_name, spec.path, spec.files) if source]
    if not sources:
        raise BadRequest("neither 'from' or 'files' was specified", param="from")
    if len(sources) > 1:
        raise BadRequest("a model is made from one thing: a name, a file or a blob", param="from")
    if spec.template is not None:
        check_template(spec.template)
    name = checked_type(spec.quantize) if spec.quantize else ""
    values = {}
    for key, value in spec.parameters.items():
        if key in parameters.DEPRECATED:
            progress(PullProgress(f"warning: parameter {key} is deprecated and is left out"))
        else:
            values[key] = parameters.checked(key, value)
    for index, message in enumerate(spec.messages):
        if message.get("role") not in modelfile.ROLES:
            raise BadRequest(f'messages[{index}]: message role must be one of "system", "user", or "assistant"', param="messages")
        if not isinstance(message.get("content"), str):
            raise BadRequest(f"messages[{index}]: content must be text", param="messages")
    return replace(spec, parameters=values, quantize=name)


def _quantized(
    store: Store, name: str, config: dict[str, Any], layers: dict[str, list[Layer]], progress: Progress, cancelled: Cancelled
) -> dict[str, Any]:
    """Puts the weights as type `name` in the place of those in `layers`; returns their config."""
    was = str(config.get("file_type", ""))
    if was == name:
        return config
    digest, size = quantize(store.blobs, layers["model"][0].digest, was, name, progress, cancelled)
    layers["model"] = [Layer(f"{LAYER_TYPE}model", digest, size)]
    return store.config_of(digest)


def check_template(text: str) -> None:
    """Raises BadRequest for a template that is neither Jinja nor Go's language, with what is wrong and where."""
    from localrun.text.gochat import GoChatTemplate
    from localrun.text.template import ChatTemplate, TemplateError

    try:
        if is_go_template(text):
            GoChatTemplate(text)
        else:
            ChatTemplate(text)
    except TemplateError as error:
        raise BadRequest(f"template error: {error}", param="template") from error


def _base(store: Store, spec: CreateSpec, progress: Progress, cancelled: Cancelled) -> tuple[dict[str, Any], dict[str, list[Layer]]]:
    """The config, and the layers by kind, of what the model is made from."""
    if spec.from_name:
        return _from_stored(store, spec, progress, cancelled)
    if spec.path and spec.path.is_dir():
        # a folder may hold a GGUF file, or the parts of one, in place of a checkpoint
        found = sorted(spec.path.glob("*.gguf"))
        if not found or (spec.path / "config.json").exists():
            return _converted(store, spec.path, spec, progress, cancelled)
        if len(found) > 1 and not re.search(r"-00001-of-\d{5}\.gguf$", found[0].name):
            raise BadRequest(f"{spec.path} holds {len(found)} GGUF files; name one of them", param="from")
        spec = replace(spec, path=found[0])
    if len(spec.files) > 1 and not all(name.lower().endswith(".gguf") for name in spec.files):
        with folder_of(store.blobs, spec.files, "files") as folder:
            return _converted(store, folder, spec, progress, cancelled)
    progress(PullProgress("parsing GGUF"))
    if spec.path:
        digest, config = _take_in(store, spec.path, spec.copy, progress, cancelled)
    else:
        digests = [check_digest(spec.files[name]) for name in sorted(spec.files)]
        for digest in digests:
            if not store.blobs.has(digest):
                raise BadRequest(f"blob {digest} is not in the store; send it first", param="files")
        digest, *others = digests
        if others:
            digest, _ = merge(store.blobs, store.blobs.path(digest), progress, cancelled, [store.blobs.path(other) for other in others])
        config = store.config_of(digest)
    store.blobs.unchanged(digest)
    progress(PullProgress(f"using existing layer {digest}"))
    return config, {"model": [Layer(f"{LAYER_TYPE}model", digest, store.blobs.size(digest))]}


def _converted(
    store: Store, folder: Path, spec: CreateSpec, progress: Progress, cancelled: Cancelled
) -> tuple[dict[str, Any], dict[str, list[Layer]]]:
    title = "" if spec.path else "model"
    digest, size = convert(store.blobs, folder, spec.quantize, progress, cancelled, title=title, param="from" if spec.path else "files")
    progress(PullProgress(f"creating new layer {digest}"))
    return store.config_of(digest), {"model": [Layer(f"{LAYER_TYPE}model", digest, size)]}


def _take_in(store: Store, path: Path, copy: bool, progress: Progress, cancelled: Cancelled) -> tuple[str, dict[str, Any]]:
    """Digest of the blob for the GGUF file at `path`, and the config. Messages name the file as it was given."""
    try:
        with open_gguf(path) as gguf:
            split = gguf.metadata.get("split.count", 1) > 1
            config = describe.config_of(gguf)
            if is_adapter(gguf):
                raise ModelFileRejected(f"{path} is an adapter; name it with ADAPTER, and its model with FROM", param="from")
    except ModelFileError as error:
        raise ModelFileRejected(str(error)) from error
    if path.resolve().parent == store.blobs.folder.resolve():
        # a path that `show --modelfile` printed
        return check_digest(path.name), config
    if split:
        digest, _ = merge(store.blobs, path, progress, cancelled)
        return digest, config
    status = f"reading {path.name}"
    digest, _ = store.blobs.adopt(path, copy=copy, progress=lambda done, size: progress(PullProgress(status, None, size, done)))
    return digest, config


def _from_stored(store: Store, spec: CreateSpec, progress: Progress, cancelled: Cancelled) -> tuple[dict[str, Any], dict[str, list[Layer]]]:
    asked = spec.from_name or ""
    name = hub.name_for(asked).short if hub.is_address(asked) else asked
    try:
        store.get(name)
    except ModelNotFound:
        try:
            store.pull(asked, lambda line: None if line.status == "success" else progress(line), cancelled, insecure=spec.insecure)
        except DownloadFailed as error:
            if not str(error).startswith("pull model manifest"):
                raise
            raise DownloadFailed(f"model '{asked}' is not here, and cannot be had: {error}") from error
    _, manifest = store.read(name)
    config = store.json_blob(manifest.config, dict) if manifest.config.digest else {}
    config.pop("rootfs", None)
    layers: dict[str, list[Layer]] = {}
    for layer in manifest.layers:
        layers.setdefault("template" if layer.kind == "prompt" else layer.kind, []).append(layer)
        progress(PullProgress(f"using existing layer {layer.digest}"))
    return config, layers


def _added(store: Store, spec: CreateSpec, base: dict[str, list[Layer]]) -> list[tuple[str, Layer]]:
    """The layers that the spec itself brings."""
    added = []
    if spec.template is not None:
        added.append(("template", store.text_layer("template", spec.template)))
    if spec.system is not None:
        added.append(("system", store.text_layer("system", spec.system)))
    if spec.parameters:
        old = store.json_blob(base["params"][0], dict) if base.get("params") else {}
        added.append(("params", store.json_layer("params", old | spec.parameters)))
    if spec.messages:
        kept = [{"role": message["role"], "content": message["content"]} for message in spec.messages]
        added.append(("messages", store.json_layer("messages", kept)))
    added += [("license", store.text_layer("license", text)) for text in spec.license]
    return added


# ---- Modelfiles -----------------------------------------------------------------------------------------------------------------

_REFUSED = {
    "draft": "draft models are not supported yet",
    "renderer": "Ollama's built-in renderers do not exist here; the template in the GGUF file, or TEMPLATE, decides",
    "parser": "Ollama's built-in parsers do not exist here; the template in the GGUF file, or TEMPLATE, decides",
    "requires": "it names a version of Ollama, which says nothing about this program; leave it out",
}


def spec_from_modelfile(
    text: str, folder: Path | None, *, copy: bool = False, files: Mapping[str, str] | None = None, adapters: Mapping[str, str] | None = None
) -> CreateSpec:
    """What a Modelfile asks for. FROM is a file when it looks like a path, or is one beside the Modelfile, which lies in `folder`; None:
    the Modelfile comes from another machine, whose paths mean nothing here and are refused without a look. files, adapters: name -> digest
    of blobs, of a folder that lies on the other machine; FROM @files and ADAPTER @adapters mean them.

    Raises ModelfileError (line and column) for the grammar and for values, Unsupported for instructions that are not implemented.
    """
    source: Instruction | None = None
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    licenses: list[str] = []
    added: list[AdapterSource] = []
    seeing: list[Path | str] = []
    for one in modelfile.parse(text):
        if one.name in _REFUSED:
            raise Unsupported(f"line {one.line}, column {one.column}: {one.name.upper()} {one.value[:60]!r}: {_REFUSED[one.name]}")
        if one.name == "from":
            if source is None:
                source = one
            else:
                seeing.append(_projector(one, folder))
        elif one.name == "parameter":
            _add_parameter(values, one)
        elif one.name == "message":
            messages.append({"role": one.key, "content": one.value})
        elif one.name == "license":
            licenses.append(one.value)
        elif one.name == "adapter":
            added += adapter_sources(adapters) if one.value == "@adapters" and adapters else [_adapter(one, folder)]
        else:
            texts[one.name] = one.value
    assert source is not None  # parse saw to it
    return CreateSpec(
        **({"files": dict(files)} if source.value == "@files" and files else _origin(source, folder)), copy=copy,
        template=texts.get("template"), system=texts.get("system"), parameters=values,
        messages=messages, license=licenses, adapters=added, projectors=seeing,
    )  # fmt: skip


def _add_parameter(values: dict[str, Any], one: Instruction) -> None:
    if one.key in parameters.DEPRECATED:
        values[one.key] = one.value
        return
    try:
        value = parameters.from_text(one.key, one.value)
    except BadRequest as error:
        raise one.error(str(error)) from None
    if parameters.KINDS[one.key] == "strings":
        values.setdefault(one.key, []).append(value)
    else:
        values[one.key] = value


def _adapter(one: Instruction, folder: Path | None) -> AdapterSource:
    if _DIGEST.match(one.value):
        return one.value.removeprefix("@")
    path = _path(one, folder)
    if path is None or not path.exists():
        raise one.error(f"ADAPTER {one.value[:60]}: there is no file {path or one.value[:60]}")
    return path


def _projector(one: Instruction, folder: Path | None) -> Path | str:
    """What a second FROM names: the projector of a model that sees images."""
    if _DIGEST.match(one.value):
        return one.value.removeprefix("@")
    path = _path(one, folder)
    if path is None or not path.is_file():
        raise one.error(f"FROM {one.value[:60]}: a second FROM names a projector for images, and there is no file {path or one.value[:60]}")
    return path


def _path(one: Instruction, folder: Path | None) -> Path | None:
    """The path that a value means; None: it is a path of another machine, if it is one."""
    if folder is None:
        if _LOOKS_LIKE_PATH.match(one.value) or one.name == "adapter":
            raise one.error(f"{one.name.upper()}: paths are taken from clients on this machine only; send the file as a blob first")
        return None
    try:
        path = folder / Path(one.value).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):
        raise one.error(f"{one.name.upper()} {one.value[:60]!r} is no path") from None
    return path


_DIGEST = re.compile(r"@?sha256[:-]")
_LOOKS_LIKE_PATH = re.compile(r"[.~]{1,2}[/\\]|[/\\]|[A-Za-z]:[/\\]|.*\.(?:gguf|safetensors|bin)$", re.IGNORECASE)


def _origin(source: Instruction, folder: Path | None) -> dict[str, Any]:
    value = source.value
    if _DIGEST.match(value):
        return {"files": {"model.gguf": value.removeprefix("@")}}
    if hub.is_address(value):
        return {"from_name": value}
    path = _path(source, folder)
    there = path is not None and path.exists()
    if there or _LOOKS_LIKE_PATH.match(value):
        if not there:
            raise source.error(f"FROM {value}: there is no file {path}")
        return {"path": path}
    try:
        Name.parse(value)
    except BadRequest as error:
        raise source.error(f"FROM: {error}") from None
    return {"from_name": value}


_HEADER = ('Modelfile generated by "localrun show"', "To build a new Modelfile based on this, replace FROM with:")


def modelfile_for(model: StoredModel) -> str:
    """A Modelfile that makes this model again, on this machine: the same blobs, byte for byte."""
    instructions = [Instruction("from", str(model.model_path))]
    instructions += [Instruction("adapter", str(path)) for path in model.adapters]
    instructions += [Instruction("from", str(path)) for path in model.projectors]
    if model.template is not None:
        instructions.append(Instruction("template", model.template))
    if model.system is not None:
        instructions.append(Instruction("system", model.system))
    instructions += [Instruction("parameter", text, key) for key, value in model.params.items() for text in parameters.to_texts(value)]
    instructions += [Instruction("license", text) for text in model.license]
    instructions += [Instruction("message", str(one.get("content", "")), str(one.get("role", ""))) for one in model.messages]
    return modelfile.write(instructions, (*_HEADER, f"FROM {model.name}", ""))
