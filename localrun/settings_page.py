"""The table of settings as a person reads it: on a terminal, and as docs/settings.md (`python -m localrun.settings_page` prints that one; a
test fails when the file is not what this makes). Knows no setting; all come from settings.py.
"""

from __future__ import annotations

import sys
import textwrap

from localrun.settings import Settings

HEAD = """# Settings

Made by `python -m localrun.settings_page > docs/settings.md` from localrun/settings.py; do not edit.

The daemon is set by environment variables, read once when it starts. Where a row has two names the first one counts; names of Ollama's
work, so that an environment made for it does too. Spaces and quotes around a value are dropped, and an empty value counts as unset. A value
that cannot be used stops the start with a line that names the variable; a variable that looks like a setting and is none is named in the
log. `localrun serve --help` and `python -m localrun.daemon --help` print the same table with this machine's folders.

Durations: `5m`, `1h30m`, `90s`, or a number of seconds. Flags: true, 1, yes, on, and false, 0, no, off. Lists: separated by commas.

"""


def settings_text(width: int = 100) -> str:
    """A paragraph for each setting: its names, its kind, its default here, and what it does."""
    lines: list[str] = []
    for row in Settings.table():
        lines.append(f"  {', '.join(row.variables)}")
        about = f"{row.description} ({row.type}; default: {row.here})"
        lines += textwrap.wrap(about, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def settings_markdown() -> str:
    """docs/settings.md: the same on every machine."""
    rows = ["| variable | also read | kind | default | |", "|---|---|---|---|---|"]
    for row in Settings.table():
        first, *others = row.variables
        kind = row.type.replace(" | ", ", ")
        rows.append(f"| `{first}` | {', '.join(f'`{name}`' for name in others)} | {kind} | {row.default} | {row.description} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(settings_markdown())
