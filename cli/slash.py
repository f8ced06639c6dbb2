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
Available Commands:
  /set            Set session variables
  /show           Show model information
  /load <model>   Load a session or model
  /save <model>   Save your current session
  /clear          Clear session context
  /list           List models
  /bye            Exit
  /?, /help       Help for a command
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin a multi-line message.
"""
HELP_SET = """\
Available Commands:
  /set parameter ...     Set a parameter
  /set system <string>   Set system message
  /set history           Enable history
  /set nohistory         Disable history
  /set wordwrap          Draw Markdown, wrapped at words
  /set nowordwrap        Print the text as the model writes it
  /set format json       Enable JSON mode
  /set noformat          Disable formatting
  /set verbose           Show statistics after each answer
  /set quiet             Disable statistics
  /set think [level]     Enable thinking
  /set nothink           Disable thinking
"""
HELP_SHOW = """\
Available Commands:
  /show info         Show details for this model
  /show license      Show model license
  /show modelfile    Show Modelfile for this model
  /show parameters   Show parameters for this model
  /show system       Show system message
  /show template     Show prompt template
"""
HELP_PARAMETERS = """\
Available Parameters:
  /set parameter seed <int>                  Random number seed
  /set parameter num_predict <int>           Max number of tokens to predict
  /set parameter num_ctx <int>               Context size, in tokens
  /set parameter temperature <float>         Level of randomness; 0 takes the likeliest token
  /set parameter top_k <int>                 Pick from the likeliest k tokens
  /set parameter top_p <float>               Pick from the likeliest tokens that have this share together
  /set parameter min_p <float>               Leave out tokens below this share of the likeliest one's
  /set parameter typical_p <float>           Locally typical sampling
  /set parameter repeat_penalty <float>      How strongly repetitions are held against a token
  /set parameter repeat_last_n <int>         How far back repetitions are looked for
  /set parameter presence_penalty <float>    Held against a token that occurred at all
  /set parameter frequency_penalty <float>   Held against a token for each time it occurred
  /set parameter num_thread <int>            Threads to compute with
  /set parameter stop <string> <string> ...  Texts that end an answer
"""
HELP_SHORTCUTS = """\
Available keyboard shortcuts:
  Ctrl + a            Move to the beginning of the line (Home)
  Ctrl + e            Move to the end of the line (End)
   Alt + b            Move back (left) one word
   Alt + f            Move forward (right) one word
  Ctrl + k            Delete the rest of the line
  Ctrl + u            Delete from the beginning of the line
  Ctrl + w            Delete the word before the cursor
  Ctrl + r            Search the history
  Ctrl + l            Clear the screen
  Ctrl + g            Edit the message in $EDITOR
   Alt + Enter        Begin a new line

  Ctrl + c            Stop the answer; at the prompt, empty the line
  Ctrl + d            Exit
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
                raise CliError("invalid or missing format. For 'json' mode use '/set format json'")
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
            context.say("User defined parameters:\n" + "\n".join(lines) + "\n")
        context.say("Model defined parameters:\n" + (show_section(info, "parameters") or "none"))
    else:
        context.say(show_section(info, rest) or f"No {rest} is specified for this model.")


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
