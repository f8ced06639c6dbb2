"""What a person can type in a chat besides messages: /set, /show, /load, /save and the rest. Each changes the session or prints; the
line editor is not known here."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from localrun.cli.answer import Show, load
from localrun.cli.client import Client, CliError, DaemonError, Json
from localrun.cli.models import SECTIONS, print_list, show_section, show_text
from localrun.cli.progress import follow
from localrun.cli.render import printable
from localrun.cli.session import Session, parse_think

HELP = """\
What can be typed besides messages:
  /set ...        change how the model answers, or how answers look
  /show ...       what the model is
  /load MODEL     go on with another model, or with a saved chat
  /save NAME      keep this chat, with everything set and said, as a model
  /clear          forget what was said
  /list           models on this machine
  /bye            leave
  /? [TOPIC]      more about: set, parameter, show, shortcuts

Three quotes (\"\"\") begin and end a message of several lines.
"""
HELP_SET = """\
  /set parameter NAME VALUE   one of the numbers that steer the answer (/? parameter)
  /set system TEXT            the system message
  /set format json            the model answers in JSON
  /set noformat               it answers in text again
  /set think [LEVEL]          it thinks first: low, medium, high, max
  /set nothink                it does not
  /set verbose                times and speeds after each answer
  /set quiet                  none
  /set wordwrap               Markdown is drawn, lines break between words
  /set nowordwrap             the text as the model writes it
  /set history                what is typed here is kept for the next chat
  /set nohistory              it is not
"""
HELP_SHOW = """\
  /show info         kind, size, context, capabilities
  /show parameters   set in this chat, and by the model
  /show system       system message
  /show template     how messages become the model's prompt
  /show modelfile    a Modelfile that makes this model
  /show license      its license
"""
HELP_PARAMETERS = """\
  /set parameter num_predict N         most tokens of an answer; -1: no limit
  /set parameter num_ctx N             most tokens of the conversation
  /set parameter seed N                makes answers repeatable
  /set parameter temperature X         how adventurous; 0 always takes the likeliest token
  /set parameter top_k N               choose among the N likeliest tokens
  /set parameter top_p X               choose among the likeliest that have this share together
  /set parameter min_p X               leave out tokens below this share of the likeliest one's
  /set parameter typical_p X           locally typical sampling
  /set parameter repeat_penalty X      how much a repetition counts against a token
  /set parameter repeat_last_n N       how far back repetitions are looked for
  /set parameter presence_penalty X    counts against a token that occurred at all
  /set parameter frequency_penalty X   counts against it each time
  /set parameter num_thread N          threads to compute with
  /set parameter num_thread_batch N    threads to read prompts with
  /set parameter stop TEXT [TEXT ...]  what ends an answer
"""
HELP_SHORTCUTS = """\
  Ctrl-A, Ctrl-E     to the beginning, to the end of the line
  Alt-B, Alt-F       a word to the left, to the right
  Ctrl-W             delete the word before the cursor
  Ctrl-U, Ctrl-K     delete what is before, what is after the cursor
  Up, Down, Ctrl-R   earlier messages; search them
  Alt-Enter          a new line in the message
  Ctrl-G             write the message in $EDITOR
  Ctrl-L             empty the screen
  Ctrl-C             stop the answer; at the prompt, drop what was typed
  Ctrl-D             leave
"""


@dataclass
class Context:
    """What the commands may change."""

    client: Client
    session: Session
    show: Show
    write_history: Callable[[bool], None] = lambda enabled: None
    load_session: Callable[[str], Session] = field(kw_only=True)
    """A model by name, pulled if it is not here, as a fresh session."""

    def say(self, text: str) -> None:
        self.show.out.write(text if text.endswith("\n") else text + "\n")
        self.show.out.flush()

    def say_messages(self, messages: list[Json]) -> None:
        """Shows what was said before this chat."""
        for message in messages:
            content = printable(str(message.get("content", "")))
            self.say(f">>> {content}" if message.get("role") == "user" else f"{content}\n\n")


def run(line: str, context: Context) -> bool:
    """Obeys one line that begins with a slash; False when it ends the chat. Raises CliError for what cannot be done."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name in ("/bye", "/exit", "/quit"):
        return False
    command = COMMANDS.get(name)
    if command is None:
        context.say(f"Unknown command '{name}'. Type /? for help")
    else:
        command(context, rest)
    return True


def is_command(line: str) -> bool:
    """A path such as /usr/bin is a message, not a mistyped command."""
    word = line.split(maxsplit=1)[0] if line.split() else ""
    return word.startswith("/") and "/" not in word[1:]


def _help(context: Context, topic: str) -> None:
    topics = {"set": HELP_SET, "show": HELP_SHOW, "parameter": HELP_PARAMETERS, "shortcuts": HELP_SHORTCUTS}
    context.say(topics.get(topic.removeprefix("/"), HELP))


def _set(context: Context, rest: str) -> None:
    word, _, value = rest.partition(" ")
    value = value.strip()
    session, show = context.session, context.show
    match word:
        case "parameter":
            _set_parameter(context, value)
        case "system":
            if not value:
                raise CliError("usage: /set system <message>")
            session.system = unquoted(value)
            context.say("Set system message.")
        case "history" | "nohistory":
            context.write_history(word == "history")
        case "wordwrap" | "nowordwrap":
            show.wordwrap = word == "wordwrap"
            context.say(f"Set '{word}' mode.")
        case "verbose" | "quiet":
            show.verbose = word == "verbose"
            context.say(f"Set '{word}' mode.")
        case "format":
            if value != "json":
                raise CliError("the one format there is: /set format json")
            session.format = value
            context.say("Set format to 'json' mode.")
        case "noformat":
            session.format = None
            context.say("Disabled format.")
        case "think":
            session.think = parse_think(value)
            context.say("Set 'think' mode." if session.think is True else f"Set 'think' mode to '{value}'.")
        case "nothink":
            session.think = False
            context.say("Set 'nothink' mode.")
        case "":
            context.say(HELP_SET)
        case _:
            context.say(f"Unknown command '/set {word}'. Type /? for help")


def _set_parameter(context: Context, text: str) -> None:
    try:
        name, *values = shlex.split(text)
    except ValueError as error:
        if text:
            raise CliError(f"/set parameter: {error}") from None
        context.say(HELP_PARAMETERS)
        return
    if not values:
        context.say(HELP_PARAMETERS)
        return
    context.session.set_parameter(name, values)
    context.say(f"Set parameter '{name}' to '{', '.join(values)}'")


def _show(context: Context, rest: str) -> None:
    session = context.session
    if rest not in (*SECTIONS, "info"):
        context.say(f"Unknown command '/show {rest}'. Type /? for help" if rest else HELP_SHOW)
        return
    info = context.client.post("/api/show", {"model": session.model})
    if rest == "info":
        context.say(show_text(info))
    elif rest == "system" and session.system is not None:
        context.say(session.system)
    elif rest == "parameters":
        if session.options:
            lines = (f"{name:<30} {value}" for name, value in session.options.items())
            context.say("Set in this chat:\n" + "\n".join(lines) + "\n")
        context.say("By the model:\n" + (show_section(info, "parameters") or "none"))
    else:
        context.say(show_section(info, rest) or f"This model has no {rest}.")


def _load(context: Context, rest: str) -> None:
    if len(rest.split()) != 1:
        raise CliError("usage: /load <model>")
    context.say(f"Loading model '{rest}'")
    fresh = context.load_session(rest)
    load(context.client, fresh.request([]), context.show)
    context.session.__dict__.update(fresh.__dict__)
    context.say_messages(fresh.info.get("messages") or [])


def _save(context: Context, rest: str) -> None:
    if len(rest.split()) != 1:
        raise CliError("usage: /save <model>")
    try:
        with context.client.stream("/api/create", context.session.saved_as(rest)) as objects:
            follow(objects, quiet=True)
    except DaemonError as error:
        raise CliError(f"could not save the session as '{rest}': {error}") from None
    context.say(f"Created new model '{rest}'")


def _clear(context: Context, rest: str) -> None:
    context.session.messages.clear()
    context.say("Cleared session context")


def _list(context: Context, rest: str) -> None:
    print_list(context.client.get("/api/tags"), rest, context.show.out)


def unquoted(text: str) -> str:
    """A value given in quotes, one or three, without them."""
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)].strip("\n")
    return text


COMMANDS: dict[str, Callable[[Context, str], None]] = {
    "/set": _set,
    "/show": _show,
    "/load": _load,
    "/save": _save,
    "/clear": _clear,
    "/list": _list,
    "/ls": _list,
    "/help": _help,
    "/?": _help,
}
