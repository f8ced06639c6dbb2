"""More of the real clients against a running daemon, each in a process of its own as its users run it: LangChain, llm, LiteLLM, curl, and
the npm packages. They come with the extra `clients` (and from npm); the tests of one that is not there are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fakes
from tests.conftest import TEST_CACHE
from tests.daemon import serving
from tests.daemon.serving import Daemon

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LONGEST_S = 600
"""Such a client takes seconds to import."""


def reply(prompt: str) -> str:
    """A call where there are tools and no answer of one yet; else what was said last."""
    last = prompt.rpartition("<|")[2].rpartition("<|assistant|>")[0]
    if '"weather"' in prompt and "<|tool|>" not in prompt:
        return CALL
    return f"You said {prompt.rpartition('<|user|>')[2].partition('<|')[0] or last}."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    hook = functools.partial(fakes.load_scripted, reply=reply, template=fakes.TOOLS_TEMPLATE)
    with serving.daemon(tmp_path_factory.mktemp("clients"), hook) as running:
        running.add_model("tooled", serving.tiny_gguf(fakes.TOOLS_TEMPLATE))
        yield running


def run(command: list[str], served: Daemon, folder: Path, **more: str) -> str:
    """stdout of a program that is told where the daemon is."""
    where = {"OLLAMA_HOST": served.url, "OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": "none", "HOME": str(folder)}
    environ = {**os.environ, **where, **more}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def python(module: str, served: Daemon, folder: Path, program: str, **more: str) -> Any:
    """What the program prints last, as JSON."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (it comes with the extra `clients`)")
    return json.loads(run([sys.executable, "-W", "ignore", "-c", program], served, folder, **more).splitlines()[-1])


LANGCHAIN = """
import json, os, sys
from langchain_core.tools import tool
from langchain_core.messages import HumanMessage, ToolMessage
{make}
@tool
def weather(city: str) -> str:
    "The weather in a city."
    return "rain"

said = model.invoke("hi").content
streamed = "".join(piece.content for piece in model.stream("hi"))
question = HumanMessage("How is it in Paris?")
called = model.bind_tools([weather]).invoke([question])
call = called.tool_calls[0]
then = model.bind_tools([weather]).invoke([question, called, ToolMessage("rain", tool_call_id=call["id"])])
usage = called.usage_metadata["total_tokens"]
print(json.dumps([said, streamed, call["name"], call["args"], then.content, usage > 0]))
"""


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("langchain_ollama", "from langchain_ollama import ChatOllama\nmodel = ChatOllama(model='tooled')"),
        ("langchain_openai", "from langchain_openai import ChatOpenAI\nmodel = ChatOpenAI(model='tooled')"),
    ],
)
def test_langchain(served: Daemon, tmp_path: Path, module: str, make: str) -> None:
    said, streamed, name, arguments, then, has_usage = python(module, served, tmp_path, LANGCHAIN.format(make=make))
    assert said == streamed == "You said hi."
    assert (name, arguments, then, has_usage) == ("weather", {"city": "Paris"}, "You said How is it in Paris?.", True)


def test_litellm(served: Daemon, tmp_path: Path) -> None:
    program = """
import json, os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
hi = [{"role": "user", "content": "hi"}]
said = []
for model, base in (("ollama_chat/tooled", os.environ["OLLAMA_HOST"]), ("openai/tooled", os.environ["OPENAI_BASE_URL"])):
    whole = litellm.completion(model=model, messages=hi, api_base=base)
    pieces = litellm.completion(model=model, messages=hi, api_base=base, stream=True)
    said += [whole.choices[0].message.content, "".join(piece.choices[0].delta.content or "" for piece in pieces)]
print(json.dumps(said))
"""
    assert python("litellm", served, tmp_path, program) == ["You said hi."] * 4


def test_llm(served: Daemon, tmp_path: Path) -> None:
    for module in ("llm", "llm_ollama"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (it comes with the extra `clients`)")
    command = [sys.executable, "-W", "ignore", "-m", "llm"]
    assert "ollama/tooled" in run([*command, "models"], served, tmp_path, LLM_USER_PATH=str(tmp_path))
    said = run([*command, "-m", "ollama/tooled", "hi"], served, tmp_path, LLM_USER_PATH=str(tmp_path))
    assert said.strip() == "You said hi."


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(served: Daemon, tmp_path: Path) -> None:
    body = '{"model": "tooled", "messages": [{"role": "user", "content": "hi"}]}'
    lines = run(["curl", "-s", "-N", f"{served.url}/api/chat", "-d", body], served, tmp_path).splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "You said hi." and json.loads(lines[-1])["done"]
    whole = run(["curl", "-s", f"{served.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body], served, tmp_path)
    assert json.loads(whole)["choices"][0]["message"]["content"] == "You said hi."
    head = run(["curl", "-s", "-I", served.url], served, tmp_path)
    assert head.startswith("HTTP/1.1 200") and run(["curl", "-s", served.url], served, tmp_path) == "Ollama is running"


NODE = """
import { Ollama } from "ollama";
import OpenAI from "openai";
const hi = [{ role: "user", content: "hi" }];
const native = new Ollama({ host: process.env.OLLAMA_HOST });
const whole = await native.chat({ model: "tooled", messages: hi });
let pieces = "";
for await (const piece of await native.chat({ model: "tooled", messages: hi, stream: true })) pieces += piece.message.content;
const names = (await native.list()).models.map((model) => model.name);
const client = new OpenAI();
const answer = await client.chat.completions.create({ model: "tooled", messages: hi });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model: "tooled", messages: hi, stream: true }))
  streamed += chunk.choices[0]?.delta?.content ?? "";
let refused = "";
try { await client.chat.completions.create({ model: "none", messages: hi }); } catch (error) { refused = `${error.status} ${error.code}`; }
const said = [whole.message.content, pieces, answer.choices[0].message.content, streamed];
console.log(JSON.stringify([...said, names.includes("tooled:latest"), refused]));
"""


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """With the npm packages, fetched the first time ever."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node")
    folder = TEST_CACHE / "npm"
    if not (folder / "node_modules" / "openai").is_dir() or not (folder / "node_modules" / "ollama").is_dir():
        if os.environ.get("TESTS_OFFLINE"):
            pytest.skip("the npm packages are not cached and TESTS_OFFLINE is set")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), "ollama", "openai"]
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        if fetched.returncode:
            pytest.skip(f"npm has no packages for us: {fetched.stderr.strip().splitlines()[:1]}")
    return folder


def test_npm_packages(served: Daemon, node_folder: Path) -> None:
    program = node_folder / "talk.mjs"
    program.write_text(NODE, encoding="utf-8")
    said = json.loads(run(["node", str(program)], served, node_folder))
    assert said == ["You said hi."] * 4 + [True, "404 model_not_found"]
